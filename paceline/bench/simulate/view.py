"""`paceline simulate`: its three kinds of results as tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from paceline.bench.report.result import Figure, Lines, Point, Result, Table
from paceline.bench.run.wording import shown, three
from paceline.bench.simulate.arithmetic import Arithmetic
from paceline.bench.simulate.check import TOLERANCE, Compared
from paceline.bench.simulate.run import Simulation


def arithmetic_result(computed: Arithmetic) -> Result:
    """The gain of chains of each length."""
    best = computed.best
    words = (
        f"best: {best.num_speculative_tokens} drafted tokens, {best.speedup:.2f} times as fast"
        if best.num_speculative_tokens
        else "best: plain decoding"
    )
    title = f"acceptance {computed.alpha:g}; {words}"
    columns = ("drafted", "tokens per pass", "cost of a step", "speedup", "break-even acceptance")
    rows = [
        (
            str(length.num_speculative_tokens),
            f"{length.tokens_per_pass:.2f}",
            f"{length.cost:.2f}",
            f"{length.speedup:.2f}",
            "never" if length.break_even_alpha is None else f"{length.break_even_alpha:.2f}",
        )
        for length in computed.lengths
    ]
    return Result(title, [Table(title, columns, rows)], asdict(computed), timed=False)


def simulated_result(name: str, simulation: Simulation) -> Result:
    """The result of each method at each concurrency; times are p50 / p90 / p99."""
    title = f"{name}, simulated; milliseconds: p50 / p90 / p99"
    columns = ["at once", "method", "tok/s", "speedup", "first token", "per token", "whole answer"]
    columns += ["tokens/pass", "drafted", "steps by reason"]
    rows = [
        (
            str(row.concurrency),
            row.method,
            f"{row.tokens_per_second:,.0f}",
            shown(row.speedup_vs_off, ".2f"),
            three(row.percentiles["ttft_ms"]),
            three(row.percentiles["tpot_ms"]),
            three(row.percentiles["e2e_ms"]),
            shown(row.tokens_per_pass, ".2f"),
            shown(row.drafted_share and row.draft_tokens_per_step, ".1f"),
            ", ".join(f"{count} {reason}" for reason, count in reasons.items()),
        )
        for row, reasons in zip(simulation.rows, simulation.decisions, strict=True)
    ]
    facts = {"machine": name, "simulated": True, "rows": simulation.facts()}
    table = Table(title, columns, rows, text=("method", "steps by reason"))
    series: dict[str, list[Point]] = {}
    for row in simulation.rows:
        series.setdefault(row.method, []).append((row.concurrency or 0, row.tokens_per_second))
    chart = Lines("Throughput", ("requests at once", "tokens per second"), series)
    figures = [Figure("Throughput by concurrency", [chart])]
    return Result(title, [table], facts, figures=figures, series=list(series), timed=False)


def check_result(name: str, results: Sequence[Compared]) -> Result:
    """Both throughputs, and their relative difference."""
    worst = max(abs(result.ratio - 1) for result in results)
    within = sum(abs(result.ratio - 1) <= TOLERANCE for result in results)
    title = f"{name}: {within} of {len(results)} settings within {TOLERANCE:.0%}, the worst {worst:.0%} off"
    columns = ("at once", "method", "measured tok/s", "simulated tok/s", "ratio", "tokens/pass", "simulated")
    rows = [
        (
            str(result.concurrency),
            result.method,
            f"{result.measured:,.1f}",
            f"{result.simulated:,.1f}",
            f"{result.ratio:.3f}",
            f"{result.measured_length:.2f}",
            f"{result.simulated_length:.2f}",
        )
        for result in results
    ]
    facts = {"model": name, "rows": [asdict(result) | {"ratio": result.ratio} for result in results]}
    return Result(title, [Table(title, columns, rows, text=("method",))], facts)
