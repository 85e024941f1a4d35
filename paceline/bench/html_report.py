"""`--html FILE`: everything that was measured as one page, which needs nothing from elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from html import escape
from itertools import groupby
from typing import Any

from paceline.bench.contest import Contest
from paceline.bench.figures import Objective
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

STYLE = """
:root { color-scheme: light dark; --paper: #ffffff; --ink: #1c2329; --soft: #5b6670; --grid: #d9dfe4;
  --mark: #b3261e; --c0: #6b7680; --c1: #0b6bcb; --c2: #c25100; --c3: #12805c; --c4: #8a3ffc; --c5: #b0256e;
  --c6: #7a6200; --c7: #00738a; }
@media (prefers-color-scheme: dark) { :root { --paper: #14181c; --ink: #e8ecef; --soft: #a3adb6;
  --grid: #333b43; --mark: #ff8a80; --c0: #9aa5af; --c1: #62b0ff; --c2: #ff9f5a; --c3: #4fd1a1; --c4: #bd93ff;
  --c5: #ff80b5; --c6: #e0c34a; --c7: #4fd0e6; } }
body { background: var(--paper); color: var(--ink); font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto;
  max-width: 70rem; padding: 0 1rem; }
h1 { font-size: 1.5rem; margin-bottom: 0.2rem; } h2 { font-size: 1.15rem; margin-top: 2.2rem; }
p, li { max-width: 46rem; } .soft { color: var(--soft); }
.scroll { overflow-x: auto; } table { border-collapse: collapse; font-size: 13px;
  font-variant-numeric: tabular-nums; }
th, td { padding: 0.2rem 0.5rem; text-align: right; white-space: nowrap;
  border-bottom: 1px solid var(--grid); }
th { color: var(--soft); font-weight: 500; vertical-align: bottom; }
td:first-child, th:first-child { text-align: left; }
tr.traffic td { font-weight: 600; padding-top: 0.9rem; } .bad { color: var(--mark); font-weight: 600; }
.plot { width: 100%; height: auto; display: block; } .pair { display: flex; flex-wrap: wrap; gap: 1rem; }
.pair .plot { flex: 1 1 22rem; } .legend span { margin-right: 1.2rem; white-space: nowrap; }
svg text { fill: var(--ink); font: 12px system-ui, sans-serif; }
svg .heading { font-weight: 600; font-size: 13px; paint-order: stroke; stroke: var(--paper);
  stroke-width: 4px; }
svg .middle { text-anchor: middle; } svg .end { text-anchor: end; } svg .axis { fill: var(--soft); }
svg .grid { stroke: var(--grid); } svg .reference { stroke: var(--ink); stroke-dasharray: 4 3; }
svg .range { stroke: currentColor; stroke-width: 3; } svg .tick { stroke: currentColor; stroke-width: 1.5; }
svg circle { fill: currentColor; } svg polyline { fill: none; stroke: currentColor; stroke-width: 2; }
.c0 { color: var(--c0); } .c1 { color: var(--c1); } .c2 { color: var(--c2); } .c3 { color: var(--c3); }
.c4 { color: var(--c4); } .c5 { color: var(--c5); } .c6 { color: var(--c6); } .c7 { color: var(--c7); }
.legend svg { vertical-align: -1px; }
"""


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
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{heading}</title><style>{STYLE}</style></head><body>{''.join(body)}</body></html>\n"
    )


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
