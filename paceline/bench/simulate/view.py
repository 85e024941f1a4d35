"""`paceline simulate`: its three kinds of results as tables."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import takewhile

from paceline.bench.report.result import Figure, Finding, Lines, Point, Result, Table
from paceline.bench.run.rows import Row
from paceline.bench.run.speculation import OFF
from paceline.bench.run.wording import ends, shown
from paceline.bench.simulate.arithmetic import Arithmetic
from paceline.bench.simulate.capacity import GOOD_SHARE, Capacity
from paceline.bench.simulate.check import TOLERANCE, Compared
from paceline.bench.simulate.run import Simulation
from paceline.control.guard import PAIR, STOPPED
from paceline.control.planner.step import GAIN, NO_GAIN, PROBE

PAYS = 1.05  # times plain decoding: less is not worth a drafter
# the controller's reasons, in words
REASONS = {
    GAIN: "drafted, because that is expected to be faster",
    NO_GAIN: "plain, because no draft is expected to be faster",
    PROBE: "drafted to learn what it gives",
    PAIR: "plain, to be compared with the drafted steps before it",
    STOPPED: "plain, because drafting was measured to be slower under this load",
}


@dataclass(frozen=True)
class Assumed:
    """What a simulation rests on besides its machine."""

    input_tokens: float  # of a prompt, mean
    output_tokens: float  # of an answer, mean
    acceptance: str  # where it comes from, in words

    def __str__(self) -> str:
        return (
            f"prompts of {self.input_tokens:,.0f} tokens, answers of {self.output_tokens:,.0f}; "
            f"{self.acceptance}"
        )


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
    note = (
        f"Costs, in passes over one row: {computed.draft_cost:g} to draft a token (--draft-cost), "
        f"{computed.row_cost:g} to verify it (--row-cost)."
    )
    return Result(title, [Table(title, columns, rows)], asdict(computed), notes=[note], timed=False)


def simulated_result(
    name: str,
    assumed: Assumed,
    simulation: Simulation,
    found: Sequence[Capacity] = (),
    hourly: float | None = None,
    objective: str | None = None,
) -> Result:
    """Each method at each concurrency and arrival rate, its capacity, and whether drafting pays.

    `hourly` is the price of the machine for one hour, `objective` the bound of the capacities.
    """
    rows = simulation.rows
    fixed = [row for row in rows if row.concurrency is not None]
    opened = [row for row in rows if row.concurrency is None]
    title = f"{name}, simulated: {assumed}"
    tables = [_concurrency_table(title, fixed, hourly)]
    if opened:
        tables.append(_rate_table(opened))
    if found:
        tables.append(_capacity_table(found, objective or "", hourly))
    tables += _decision_table(simulation)
    methods = list(dict.fromkeys(row.method for row in rows))
    return Result(
        title,
        tables,
        {
            "machine": name,
            "simulated": True,
            "assumed": asdict(assumed),
            "price_per_hour": hourly,
            "rows": [
                facts | {"cost_per_million_tokens": _cost(row, hourly)}
                for facts, row in zip(simulation.facts(), rows, strict=True)
            ],
            "capacity": [asdict(capacity) for capacity in found],
            "pays_up_to": _pays_up_to(fixed),
        },
        findings=[Finding(sentence) for sentence in _verdict(fixed)],
        notes=[
            "Milliseconds: p50 / p99. tokens/pass: of one request. drafted: tokens per drafted pass.",
            *_reason_notes(simulation),
            *(["Cost: of a million output tokens, their prompts included."] if hourly is not None else []),
        ],
        figures=[
            Figure(
                "By concurrency",
                [
                    _lines("Throughput", "tokens per second", fixed, lambda row: row.tokens_per_second),
                    _lines("Speedup", "times plain decoding", fixed, lambda row: row.speedup_vs_off or 0),
                ],
            )
        ],
        series=methods,
        timed=False,
    )


def _concurrency_table(title: str, rows: Sequence[Row], hourly: float | None) -> Table:
    columns = ["at once", "method", "tok/s", "speedup", "first token", "per token", "tokens/pass", "drafted"]
    lines = [
        [
            str(row.concurrency),
            row.method,
            f"{row.tokens_per_second:,.0f}",
            shown(row.speedup_vs_off, ".2f"),
            ends(row.percentiles["ttft_ms"]),
            ends(row.percentiles["tpot_ms"]),
            shown(row.tokens_per_pass, ".2f"),
            shown(row.drafted_share and row.draft_tokens_per_step, ".1f"),
            *_cost_cell(row, hourly),
        ]
        for row in rows
    ]
    return Table(title, [*columns, *_cost_heading(hourly)], lines, text=("method",))


def _rate_table(rows: Sequence[Row]) -> Table:
    columns = ["arrivals", "method", "tok/s", "latency\ngain", "first token", "per token", "whole answer"]
    good = any(row.good_share is not None for row in rows)
    lines = [
        [
            row.profile,
            row.method,
            f"{row.tokens_per_second:,.0f}",
            shown(row.latency_speedup_vs_off, ".2f"),
            *(ends(row.percentiles[name]) for name in ("ttft_ms", "tpot_ms", "e2e_ms")),
            *([shown(row.good_share, ".0%")] if good else []),
        ]
        for row in rows
    ]
    return Table("By arrival rate", [*columns, *(["good"] if good else [])], lines, text=("method",))


def _capacity_table(found: Sequence[Capacity], objective: str, hourly: float | None) -> Table:
    """Requests per second of each method, and relative to plain decoding."""
    plain = next((item.requests_per_second for item in found if item.method == OFF), 0.0)
    lines = []
    for item in found:
        row = item.row
        lines.append(
            [
                item.method,
                f"{item.requests_per_second:.3g}",
                f"{item.requests_per_second / plain:.2f}" if plain else "-",
                "-" if row is None else f"{row.tokens_per_second:,.0f}",
                *(["-"] if row is None and hourly is not None else []),
                *(_cost_cell(row, hourly) if row is not None else []),
            ]
        )
    title = f"Capacity: {GOOD_SHARE:.0%} of requests within {objective}"
    columns = ["method", "requests/s", "vs off", "tok/s", *_cost_heading(hourly)]
    return Table(title, columns, lines)


def _decision_table(simulation: Simulation) -> list[Table]:
    """Why the controller of auto drafted, or did not."""
    lines = [
        [row.profile, ", ".join(f"{count:,} {reason}" for reason, count in reasons.items())]
        for row, reasons in zip(simulation.rows, simulation.decisions, strict=True)
        if reasons
    ]
    columns = ("load", "steps by reason")
    return [Table("Decisions of auto", columns, lines, text=columns[1:])] if lines else []


def _reason_notes(simulation: Simulation) -> list[str]:
    """What the reasons in the table of decisions mean."""
    found = {reason for reasons in simulation.decisions for reason in reasons}
    return [f"{reason}: {words}." for reason, words in REASONS.items() if reason in found]


def _lines(title: str, unit: str, rows: Sequence[Row], value: Callable[[Row], float]) -> Lines:
    series: dict[str, list[Point]] = {}
    for row in rows:
        series.setdefault(row.method, []).append((row.concurrency or 0, value(row)))
    return Lines(title, ("requests at once", unit), series)


def _cost(row: Row, hourly: float | None) -> float | None:
    """The cost of a million output tokens."""
    return None if hourly is None else hourly / 3600 / row.tokens_per_second * 1e6


def _cost_cell(row: Row, hourly: float | None) -> list[str]:
    return [] if hourly is None else [shown(_cost(row, hourly), ".3g")]


def _cost_heading(hourly: float | None) -> list[str]:
    return [] if hourly is None else ["cost"]


def _best(rows: Sequence[Row]) -> dict[int, Row]:
    """The method with the highest speedup at each concurrency, ascending."""
    best: dict[int, Row] = {}
    for row in rows:
        at_once = row.concurrency or 0
        gain = row.speedup_vs_off
        if row.method != OFF and gain is not None:
            before = best.get(at_once)
            if before is None or gain > (before.speedup_vs_off or 0):
                best[at_once] = row
    return dict(sorted(best.items()))


def _pays_up_to(rows: Sequence[Row]) -> int | None:
    """The highest concurrency up to which some method gains; None: it does not even at the lowest."""
    gains = [(at_once, row.speedup_vs_off or 0) for at_once, row in _best(rows).items()]
    paying = takewhile(lambda pair: pair[1] >= PAYS, gains)
    return max((at_once for at_once, _ in paying), default=None)


def _verdict(rows: Sequence[Row]) -> list[str]:
    """Up to which concurrency drafting pays, and what the next one gave; in sentences."""
    best = _best(rows)
    if not best:
        return ["Name a drafting method in --methods to see up to which concurrency drafting pays."]

    def said(at_once: int) -> str:
        return f"{best[at_once].method}: {best[at_once].speedup_vs_off:.2f} times plain decoding"

    limit = _pays_up_to(rows)
    if limit is None:
        first = next(iter(best))
        return [f"Drafting does not pay, not even at {first} at once ({said(first)})."]
    beyond = next((at_once for at_once in best if at_once > limit), None)
    pays = f"Drafting pays up to {limit} requests at once"
    if beyond is None:
        return [f"{pays} and maybe beyond ({said(limit)})."]
    return [f"{pays} ({said(limit)}).", f"It does not at {beyond}, the next load tried ({said(beyond)})."]


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
