"""`paceline bench run`: its result as charts of speedup, throughput, latency and acceptance."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby

from paceline.bench.report.result import Figure, Lines, Mark, Point, Ranges
from paceline.bench.run.contest import Contest
from paceline.bench.run.rows import Row
from paceline.bench.run.speculation import OFF
from paceline.bench.run.wording import LATENCIES, speedup_of, three, traffic_of, with_interval


def contest_figures(contest: Contest) -> list[Figure]:
    """All figures for which there is data."""
    return [
        *_speeds(contest.rows, contest.reference),
        *_concurrencies(contest.rows),
        *_latencies(contest.rows),
        *_acceptances(contest.rows),
    ]


def _speeds(rows: Sequence[Row], reference: str) -> list[Figure]:
    def speedup(row: Row) -> Mark | None:
        value, interval = speedup_of(row)
        if value is None or row.method == reference:
            return None
        low, high = interval or (value, value)
        return Mark(row.method, with_interval(row, reference), row.method, value, low, high)

    def speed(row: Row) -> Mark:
        value = row.tokens_per_second
        return Mark(row.method, f"{value:,.0f}", row.method, value, 0, value)

    known = "plain decoding" if reference == OFF else reference
    compared = _ranges("Speedup", f"times as fast as {known}, with 95 % confidence", rows, speedup, 1.0)
    return compared + _ranges("Throughput", "output tokens per second, all requests together", rows, speed)


def _concurrencies(rows: Sequence[Row]) -> list[Figure]:
    """Throughput over concurrency, if there are several."""
    charts: dict[str, dict[str, list[Point]]] = {}
    for row in rows:
        if row.concurrency is not None:
            name = " ".join(dict.fromkeys((row.workload, row.segment, row.cache)))
            points = charts.setdefault(name, {}).setdefault(row.method, [])
            points.append((row.concurrency, row.tokens_per_second))
    drawn = [
        Lines(name, ("requests at once", "tokens per second"), series)
        for name, series in charts.items()
        if any(len(points) > 1 for points in series.values())
    ]
    return [Figure("Throughput by concurrency", drawn)] if drawn else []


def _latencies(rows: Sequence[Row]) -> list[Figure]:
    """From p50 to p99, with a stroke at p90."""
    figures = []
    for name, words in LATENCIES.items():

        def mark(row: Row, name: str = name) -> Mark | None:
            values = row.percentiles[name]
            if values is None:
                return None
            p50, p90, p99 = values.values()
            return Mark(row.method, three(values), row.method, p50, p50, p99, (p90, p99))

        axis = "milliseconds: p50 (dot), p90 and p99 (strokes)"
        figures += _ranges(f"Latency: {words}", axis, rows, mark)
    return figures


def _acceptances(rows: Sequence[Row]) -> list[Figure]:
    charts = []
    for traffic, same in groupby(rows, key=traffic_of):
        series = {
            row.method: [
                (place + 1.0, 100 * share) for place, share in enumerate(row.acceptance_per_position)
            ]
            for row in same
            if row.acceptance_per_position
        }
        if series:
            charts.append(
                Lines(traffic, ("drafted tokens", "% of drafts that kept at least this many"), series)
            )
    return [Figure("Acceptance by position", charts)] if charts else []


def _ranges(
    heading: str,
    axis: str,
    rows: Sequence[Row],
    mark: Callable[[Row], Mark | None],
    reference: float | None = None,
) -> list[Figure]:
    """The marks of all rows that have one, by traffic; empty if none has."""
    sections: dict[str, list[Mark]] = {}
    for row in rows:
        row_mark = mark(row)
        if row_mark is not None:
            sections.setdefault(traffic_of(row), []).append(row_mark)
    return [Figure(heading, [Ranges(axis, sections, reference)])] if sections else []
