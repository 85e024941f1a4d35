"""`paceline simulate`, described: tables of its three kinds of results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from paceline.bench.report.result import Figure, Lines, Point, Result, Table
from paceline.bench.run.wording import shown, three
from paceline.bench.simulate.arithmetic import Arithmetic
from paceline.bench.simulate.check import TOLERANCE, Compared
from paceline.bench.simulate.run import Simulation


def arithmetic_result(found: Arithmetic) -> Result:
    """What chains of each length would give."""
    best = found.best
    words = (
        f"best: {best.num_speculative_tokens} drafted tokens, {best.speedup:.2f} times as fast"
        if best.num_speculative_tokens
        else "best: plain decoding"
    )
    title = f"acceptance {found.alpha:g}; {words}"
    columns = ("drafted", "tokens per pass", "cost of a step", "speedup", "break-even acceptance")
    rows = [
        (
            str(length.num_speculative_tokens),
            f"{length.tokens_per_pass:.2f}",
            f"{length.cost:.2f}",
            f"{length.speedup:.2f}",
            "never" if length.break_even_alpha is None else f"{length.break_even_alpha:.2f}",
        )
        for length in found.lengths
    ]
    return Result(title, [Table(title, columns, rows)], asdict(found), timed=False)


def simulated_result(name: str, simulation: Simulation) -> Result:
    """What each method gives at each concurrency; times are p50 / p90 / p99."""
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


def check_result(name: str, found: Sequence[Compared]) -> Result:
    """Both throughputs, and how near they are."""
    worst = max(abs(one.ratio - 1) for one in found)
    within = sum(abs(one.ratio - 1) <= TOLERANCE for one in found)
    title = f"{name}: {within} of {len(found)} settings within {TOLERANCE:.0%}, the worst {worst:.0%} off"
    columns = ("at once", "method", "measured tok/s", "simulated tok/s", "ratio", "tokens/pass", "simulated")
    rows = [
        (
            str(one.concurrency),
            one.method,
            f"{one.measured:,.1f}",
            f"{one.simulated:,.1f}",
            f"{one.ratio:.3f}",
            f"{one.measured_length:.2f}",
            f"{one.simulated_length:.2f}",
        )
        for one in found
    ]
    facts = {"model": name, "rows": [asdict(one) | {"ratio": one.ratio} for one in found]}
    return Result(title, [Table(title, columns, rows, text=("method",))], facts)
