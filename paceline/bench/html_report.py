"""`--html FILE`: everything that was measured as one page, which needs nothing from elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from html import escape
from itertools import groupby
from typing import Any

from paceline.bench.contest import Contest
from paceline.bench.figures import Objective
from paceline.bench.page import page
from paceline.bench.plots import Mark, Point, legend, line_plot, range_plot
from paceline.bench.speculation import OFF
from paceline.bench.speculation_rows import Row
from paceline.bench.tables import machine_notes
from paceline.bench.wording import (
    LATENCIES,
    notes,
    sameness,
    shown,
    speedup_of,
    three,
    title,
    traffic_of,
    with_interval,
)


def html_report(contest: Contest, machine: Mapping[str, Any]) -> str:
    """The page: what was found in words, plots, all rows, and what they mean."""
    colours = {
        method: place for place, method in enumerate(dict.fromkeys(row.method for row in contest.rows))
    }
    heading = escape(title(contest.options))
    words = machine_notes(machine, contest.threads, contest.quantization)
    body = [
        f"<h1>{heading}</h1>",
        *(f'<p class="soft">{escape(line)}</p>' for line in words),
        f"<p>{_verdict(contest)}</p>",
        legend(colours),
        *_speed_plots(contest, colours),
        *_latency_plots(contest, colours),
        *_acceptance_plots(contest, colours),
        "<h2>All figures</h2>",
        _table(contest),
        "<h2>What they mean</h2><ul>",
        *(f"<li>{escape(note)}</li>" for note in notes(contest)),
        "</ul>",
    ]
    return page(heading, body)


def _verdict(contest: Contest) -> str:
    """Whether outputs were the same, in a sentence."""
    compared = [row for row in contest.rows if row.identical is not None and row.method != OFF]
    if not compared:
        return "Outputs were not compared: there was no <b>off</b> among what was measured."
    prompts = sum(row.prompts for row in compared if row.segment != "all")
    if contest.identical and not any(row.differing_prompts for row in compared):
        return f"Every output was identical to that of plain decoding ({prompts:,} answers compared)."
    bad = "" if contest.identical else ' class="bad"'
    differing = sum(len(row.differing_prompts) for row in compared if row.segment != "all")
    return f"<span{bad}>{differing:,} of {prompts:,} outputs were not those of plain decoding.</span>"


def _speed_plots(contest: Contest, colours: Mapping[str, int]) -> list[str]:
    def speedup(row: Row) -> Mark | None:
        value, interval = speedup_of(row)
        if value is None or row.method == OFF:
            return None
        low, high = interval or (value, value)
        return Mark(row.method, with_interval(row), colours[row.method], value, low, high)

    def speed(row: Row) -> Mark:
        value = row.tokens_per_second
        return Mark(row.method, f"{value:,.0f}", colours[row.method], value, 0, value)

    parts = []
    if compared := _sections(contest.rows, speedup):
        parts.append("<h2>Speedup</h2>")
        parts.append(range_plot("times as fast as plain decoding, with 95 % confidence", compared, 1.0))
    parts.append("<h2>Throughput</h2>")
    speeds = _sections(contest.rows, speed)
    parts.append(range_plot("output tokens per second, all requests together", speeds))
    return [*parts, *_concurrency_plots(contest.rows, colours)]


def _concurrency_plots(rows: Sequence[Row], colours: Mapping[str, int]) -> list[str]:
    """Throughput over concurrency, where there are several."""
    plots: dict[str, dict[str, tuple[int, list[Point]]]] = {}
    for row in rows:
        if row.concurrency is not None:
            name = " ".join(dict.fromkeys((row.workload, row.segment, row.cache)))
            lines = plots.setdefault(name, {})
            points = lines.setdefault(row.method, (colours[row.method], []))[1]
            points.append((row.concurrency, row.tokens_per_second))
    drawn = [
        line_plot(name, ("requests at once", "tokens per second"), lines)
        for name, lines in plots.items()
        if any(len(points) > 1 for _, points in lines.values())
    ]
    return [f'<h2>Throughput by concurrency</h2><div class="pair">{"".join(drawn)}</div>'] if drawn else []


def _latency_plots(contest: Contest, colours: Mapping[str, int]) -> list[str]:
    """From p50 to p99, with a stroke at p90."""
    parts = [_objective(contest.options.objective)]
    for name, words in LATENCIES.items():

        def mark(row: Row, name: str = name) -> Mark | None:
            found = row.percentiles[name]
            if found is None:
                return None
            p50, p90, p99 = found.values()
            return Mark(row.method, three(found), colours[row.method], p50, p50, p99, (p90, p99))

        if sections := _sections(contest.rows, mark):
            parts.append(f"<h2>Latency: {words}</h2>")
            parts.append(range_plot("milliseconds: p50 (dot), p90 and p99 (strokes)", sections))
    return parts


def _objective(objective: Objective | None) -> str:
    if objective is None:
        return ""
    bounds = [f"{name} at most {most:g} ms" for name, most in vars(objective).items() if most is not None]
    return f"<p>A request is good with {', '.join(bounds)}; how many were is in the table below.</p>"


def _acceptance_plots(contest: Contest, colours: Mapping[str, int]) -> list[str]:
    plots = []
    for traffic, same in groupby(contest.rows, key=traffic_of):
        series = {
            row.method: (
                colours[row.method],
                [(place + 1, 100 * share) for place, share in enumerate(row.acceptance_per_position)],
            )
            for row in same
            if row.acceptance_per_position
        }
        if series:
            plots.append(line_plot(traffic, ("drafted tokens", "% of drafts that kept so many"), series))
    return [f'<h2>Acceptance by position</h2><div class="pair">{"".join(plots)}</div>'] if plots else []


def _sections(rows: Sequence[Row], mark: Callable[[Row], Mark | None]) -> dict[str, list[Mark]]:
    """The marks of all rows that have one, by traffic."""
    sections: dict[str, list[Mark]] = {}
    for row in rows:
        found = mark(row)
        if found is not None:
            sections.setdefault(traffic_of(row), []).append(found)
    return sections


def _table(contest: Contest) -> str:
    good = contest.options.objective is not None
    headings = [
        "",
        "requests",
        "tokens",
        "tok/s",
        "speedup (95 %)",
        *(f"{name}, ms" for name in LATENCIES.values()),
    ]
    headings += [*(["good", "good/s"] if good else []), "length", "accepted", "same as off"]
    lines = ["".join(f"<th>{escape(heading)}</th>" for heading in headings)]
    for traffic, same in groupby(contest.rows, key=traffic_of):
        lines.append(f'<td colspan="{len(headings)}">{escape(traffic)}</td>')
        lines += [_cells(row, contest.inexact, good) for row in same]
    classed = (
        f'<tr class="traffic">{line}</tr>' if "colspan" in line else f"<tr>{line}</tr>" for line in lines
    )
    return f'<div class="scroll"><table>{"".join(classed)}</table></div>'


def _cells(row: Row, inexact: frozenset[str], good: bool) -> str:
    drafted = row.method != OFF
    cells = [
        row.method,
        f"{row.prompts}" + (f" ({row.failed} failed)" if row.failed else ""),
        f"{row.output_tokens:,}",
        f"{row.tokens_per_second:,.1f}",
        with_interval(row),
        *(three(row.percentiles[name]) for name in LATENCIES),
        *([shown(row.good_share, ".0%"), shown(row.goodput, ".2f")] if good else []),
        shown(row.mean_acceptance_length, ".2f") if drafted else "",
        shown(row.draft_acceptance_rate, ".0%") if drafted else "",
        "" if row.identical is None or not drafted else sameness(row, inexact),
    ]
    return "".join(f"<td>{escape(cell)}</td>" for cell in cells)
