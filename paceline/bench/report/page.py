"""A result as an HTML page that works offline, without external scripts, fonts, images or styles."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from itertools import pairwise

from paceline.bench.report.plots import legend, svg
from paceline.bench.report.result import Figure, Finding, Lines, Result, Table

STYLE = """
:root { color-scheme: light dark; --paper: #ffffff; --ink: #1c2329; --soft: #5b6670; --grid: #e1e6ea;
  --row: #f4f6f8;
  --mark: #b3261e; --c0: #6b7680; --c1: #0b6bcb; --c2: #c25100; --c3: #12805c; --c4: #8a3ffc; --c5: #b0256e;
  --c6: #7a6200; --c7: #00738a; }
@media (prefers-color-scheme: dark) { :root { --paper: #14181c; --ink: #e8ecef; --soft: #a3adb6;
  --grid: #333b43; --row: #1b2127; --mark: #ff8a80; --c0: #9aa5af; --c1: #62b0ff; --c2: #ff9f5a;
  --c3: #4fd1a1; --c4: #bd93ff;
  --c5: #ff80b5; --c6: #e0c34a; --c7: #4fd0e6; } }
body { background: var(--paper); color: var(--ink); font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto;
  max-width: 70rem; padding: 0 1rem; }
h1 { font-size: 1.5rem; margin: 0 0 0.3rem; letter-spacing: -0.01em; }
h2 { font-size: 1.15rem; margin: 2.2rem 0 0.6rem; } h3 { font-size: 1rem; margin: 1.4rem 0 0.3rem; }
p, li { max-width: 46rem; } .soft { color: var(--soft); margin: 0.15rem 0; }
.findings { list-style: none; margin: 1.1rem 0; padding: 0.2rem 0 0.2rem 1rem;
  border-left: 3px solid var(--c3); }
.findings.failed { border-color: var(--mark); } .findings li { margin: 0.2rem 0; }
.findings li::before { content: "✓"; display: inline-block; width: 1.4rem; color: var(--c3);
  font-weight: 600; }
.findings li.bad::before { content: "✗"; color: var(--mark); }
.scroll { overflow-x: auto; } table { border-collapse: collapse; font-size: 13px;
  font-variant-numeric: tabular-nums; }
th, td { padding: 0.2rem 0.5rem; text-align: right; white-space: nowrap;
  border-bottom: 1px solid var(--grid); }
th { color: var(--soft); font-weight: 500; vertical-align: bottom; }
th:first-child, td:first-child { padding-left: 0; } tbody tr:hover td { background: var(--row); }
.words { text-align: left; }
tr.begins td { border-top: 1px solid var(--soft); }
tr.head td { font-weight: 600; padding-top: 0.9rem; text-align: left; }
.bad { color: var(--mark); font-weight: 600; }
.plot { width: 100%; height: auto; display: block; } .scroll .plot { min-width: 44rem; }
.pair { display: flex; flex-wrap: wrap; gap: 1rem; }
.pair .plot { flex: 1 1 22rem; } .legend span { margin-right: 1.2rem; white-space: nowrap; }
.legend { position: sticky; top: 0; z-index: 1; max-width: none; margin: 0; padding: 0.6rem 0;
  background: var(--paper); border-bottom: 1px solid var(--grid); }
@media print { .legend { position: static; } }
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


def html_page(result: Result, machine: Sequence[str] = ()) -> str:
    """The result as one page: findings, charts, tables and notes; light or dark by the browser's setting."""
    colours = {name: place for place, name in enumerate(result.series)}
    body = [
        f"<h1>{escape(result.title)}</h1>",
        *(f'<p class="soft">{escape(line)}</p>' for line in machine),
        *_findings(result.findings),
        legend(colours) if colours else "",
        *(part for figure in result.figures for part in _figure(figure, colours)),
        "<h2>All figures</h2>",
        *(_table(table) for table in result.tables),
    ]
    if result.notes:
        body += [
            "<h2>What they mean</h2><ul>",
            *(f"<li>{escape(note)}</li>" for note in result.notes),
            "</ul>",
        ]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(result.title)}</title><style>{STYLE}</style></head>"
        f"<body>{''.join(body)}</body></html>\n"
    )


def _findings(findings: Sequence[Finding]) -> list[str]:
    if not findings:
        return []
    lines = (
        f"<li>{escape(finding.text)}</li>" if finding.good else f'<li class="bad">{escape(finding.text)}</li>'
        for finding in findings
    )
    failed = "" if all(finding.good for finding in findings) else " failed"
    return [f'<ul class="findings{failed}">', *lines, "</ul>"]


def _figure(figure: Figure, colours: Mapping[str, int]) -> list[str]:
    is_alone = len(figure.charts) == 1
    charts = "".join(svg(chart, colours, is_alone) for chart in figure.charts)
    side_by_side = all(isinstance(chart, Lines) and chart.few for chart in figure.charts)
    heading = f"<h2>{escape(figure.heading)}</h2>"
    return [heading, f'<div class="{"pair" if side_by_side and not is_alone else "scroll"}">{charts}</div>']


def _table(table: Table) -> str:
    headings = "".join(
        f"<th{_side(table, place)}>{escape(heading.replace(chr(10), ' '))}</th>"
        for place, heading in enumerate(table.columns)
    )
    lines = []
    is_grouped = any(row[0] == following[0] for row, following in pairwise(table.rows))
    before: str | None = None  # first cell of the row above, if that is not a heading
    for row in table.rows:
        if len(row) == 1:
            before = None
            lines.append(f'<tr class="head"><td colspan="{len(table.columns)}">{escape(row[0])}</td></tr>')
        else:
            cells = (f"<td{_side(table, place)}>{escape(cell)}</td>" for place, cell in enumerate(row))
            begins = is_grouped and row[0] != before and before is not None
            style = ' class="begins"' if begins else ""
            lines.append(f"<tr{style}>{''.join(cells)}</tr>")
            before = row[0]
    head, body = f"<thead><tr>{headings}</tr></thead>", f"<tbody>{''.join(lines)}</tbody>"
    return f'<h3>{escape(table.title)}</h3><div class="scroll"><table>{head}{body}</table></div>'


def _side(table: Table, place: int) -> str:
    return ' class="words"' if place == 0 or table.columns[place] in table.text else ""
