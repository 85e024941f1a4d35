"""`paceline simulate --replicas`: its result as tables and charts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass

from paceline.bench.report.result import Figure, Finding, Lines, Point, Result, Table
from paceline.bench.run.speculation import OFF
from paceline.bench.run.wording import shown, three
from paceline.bench.simulate.capacity import GOOD_SHARE
from paceline.bench.simulate.fleet_check import TOLERANCE, ComparedFleet
from paceline.bench.simulate.view import Assumed


@dataclass(frozen=True)
class FleetRow:
    """One fleet. Field names are those of the JSON."""

    replicas: int
    routing: str
    method: str
    requests: int
    seconds: float  # from the first arrival to the last end
    tokens_per_second: float  # of answers
    percentiles: Mapping[str, Mapping[str, float] | None]  # p50, p95 and p99 of ttft_ms, tpot_ms and e2e_ms
    good_share: float | None  # fraction of requests that met the objective; None: there is none
    utilization: float  # mean fraction of the time that a replica computed
    requests_per_replica: Sequence[int]
    hit_rate: float  # fraction of prompt tokens found in prefix caches
    preemptions: int
    cost_per_million_tokens: float | None  # of answers, their prompts included; None: no price is known
    decisions: Mapping[str, int]  # steps of auto's controllers by reason


@dataclass(frozen=True)
class Found:
    """The smallest fleet of a method and a routing policy; if none holds the objective, the largest."""

    method: str
    routing: str
    row: FleetRow
    holds: bool


def fleet_result(
    name: str,
    assumed: Assumed,
    rows: Sequence[FleetRow],
    found: Sequence[Found],
    objective: str | None,
    seconds: float,
) -> Result:
    """Every fleet that was simulated, and which one is the smallest. `seconds`: of all arrivals."""
    count = rows[0].requests
    rate = f"{count / seconds:.3g} requests/s" if seconds > 0 else "all at once"
    title = f"{name}, simulated: {count:,} requests, {rate}; {assumed}"
    priced = any(row.cost_per_million_tokens is not None for row in rows)
    return Result(
        title,
        [_table(title, rows, objective is not None, priced)],
        {
            "machine": name,
            "simulated": True,
            "assumed": asdict(assumed),
            "objective": objective,
            "rows": [asdict(row) for row in rows],
            "smallest": [
                {
                    "method": item.method,
                    "routing": item.routing,
                    "replicas": item.row.replicas if item.holds else None,
                    "cost_per_million_tokens": item.row.cost_per_million_tokens if item.holds else None,
                }
                for item in found
            ]
            if objective is not None
            else [],
        },
        findings=[] if objective is None else _findings(found, objective),
        notes=[
            "Milliseconds: p50 / p95 / p99. busy: share of the time that a replica computes. hits: share of "
            "prompt tokens found in prefix caches.",
            *(["Cost: of a million output tokens, their prompts included."] if priced else []),
        ],
        figures=_figures(rows, objective is not None),
        series=list(dict.fromkeys(_series(row) for row in rows)),
        timed=False,
    )


def fleet_check_result(name: str, compared: Sequence[ComparedFleet]) -> Result:
    """Both figures, their ratio, and how far several real runs are from their median."""
    within = sum(item.is_within_tolerance for item in compared)
    title = f"{name}: {within} of {len(compared)} figures within {TOLERANCE:.0%}"
    several = any(len(item.runs) > 1 for item in compared)
    rows = [
        (
            item.figure,
            f"{item.measured:,.1f}",
            f"{item.simulated:,.1f}",
            f"{item.ratio:.3f}",
            *([f"{item.spread[0]:.3f} to {item.spread[1]:.3f}"] if several else []),
        )
        for item in compared
    ]
    measured = [{"ratio": item.ratio, "measured": item.measured} for item in compared]
    facts = {
        "fleet": name,
        "rows": [asdict(item) | more for item, more in zip(compared, measured, strict=True)],
    }
    columns = ("figure", "measured", "simulated", "ratio", *(["real runs"] if several else []))
    unsteady = [item.figure for item in compared if not item.is_steady]
    notes = [f"Real runs differ by more than {TOLERANCE:.0%} from their median: {'; '.join(unsteady)}."]
    return Result(title, [Table(title, columns, rows)], facts, notes=notes if unsteady else [], timed=False)


def _table(title: str, rows: Sequence[FleetRow], judged: bool, priced: bool) -> Table:
    columns = ["replicas", "routing", "method", "tok/s", "first token", "per token", "busy", "hits"]
    lines = [
        [
            str(row.replicas),
            row.routing,
            row.method,
            f"{row.tokens_per_second:,.0f}",
            three(row.percentiles["ttft_ms"]),
            three(row.percentiles["tpot_ms"]),
            f"{row.utilization:.0%}",
            f"{row.hit_rate:.1%}",
            *([shown(row.good_share, ".1%")] if judged else []),
            *([shown(row.cost_per_million_tokens, ".3g")] if priced else []),
        ]
        for row in rows
    ]
    headings = [*columns, *(["good"] if judged else []), *(["cost"] if priced else [])]
    return Table(title, headings, lines, text=("routing", "method"))


def _findings(found: Sequence[Found], objective: str) -> list[Finding]:
    """The smallest fleet of each method, with what it saves against plain decoding by the same routing."""
    plain = {item.routing: item.row.replicas for item in found if item.method == OFF and item.holds}
    findings = []
    for item in found:
        row, who = item.row, f"{item.method}, {item.routing} routing"
        if not item.holds:
            text = (
                f"{who}: no fleet holds {objective}; with {row.replicas} replicas {row.good_share:.1%} of "
                f"requests do, and {GOOD_SHARE:.0%} must."
            )
        else:
            cost = row.cost_per_million_tokens
            text = f"{who}: {row.replicas} replica{'s' * (row.replicas > 1)} hold {objective}"
            text += "" if cost is None else f", at {cost:.3g} for a million tokens"
            before = plain.get(item.routing)
            text += f" ({row.replicas - before:+d} to off)." if item.method != OFF and before else "."
        findings.append(Finding(text, item.holds))
    return findings


def _figures(rows: Sequence[FleetRow], judged: bool) -> list[Figure]:
    if len({row.replicas for row in rows}) < 2:
        return []
    charts = [_lines("Time to the first token, p95", "milliseconds", rows, _p95("ttft_ms"))]
    if judged:
        charts.append(_lines("Within the objective", "% of requests", rows, _good_percent))
    else:
        charts.append(_lines("Time per token, p95", "milliseconds", rows, _p95("tpot_ms")))
    return [Figure("By size of the fleet", charts)]


def _lines(title: str, unit: str, rows: Sequence[FleetRow], value: Callable[[FleetRow], float]) -> Lines:
    series: dict[str, list[Point]] = {}
    for row in sorted(rows, key=lambda row: row.replicas):
        series.setdefault(_series(row), []).append((row.replicas, value(row)))
    return Lines(title, ("replicas", unit), series)


def _p95(name: str) -> Callable[[FleetRow], float]:
    return lambda row: (row.percentiles[name] or {}).get("p95", 0.0)


def _good_percent(row: FleetRow) -> float:
    return 100 * (row.good_share or 0.0)


def _series(row: FleetRow) -> str:
    return f"{row.method}, {row.routing}"
