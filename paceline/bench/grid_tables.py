"""The grid on the terminal and as a page."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Any

from rich.table import Table

from paceline.bench.grid import NEAR_BEST, NEVER_SLOWER, Cell, Grid
from paceline.bench.page import page
from paceline.bench.plots import Mark, range_plot
from paceline.bench.speculation import OFF
from paceline.bench.tables import machine_notes
from paceline.draft.methods import AUTO

HEADINGS = ("off\ntok/s", "auto\n/ off", "best fixed", "best\n/ off", "auto\n/ best", "bars")


def show_grid(grid: Grid) -> tuple[list[Table], list[str]]:
    """The tables of cells and of means, and what they say."""
    cells = Table(title=_title(grid), title_justify="left")
    cells.add_column("cell", no_wrap=True)
    for heading in HEADINGS:
        cells.add_column(heading, justify="right", no_wrap=True)
    for cell in grid.cells:
        cells.add_row(cell.label, *_figures(cell))
    means = Table(title="Speedups over all cells", title_justify="left")
    means.add_column("method", no_wrap=True)
    for heading in ("mean", "least", "most"):
        means.add_column(heading, justify="right")
    for method, mean in sorted(grid.means.items(), key=lambda item: -item[1]):
        own = [cell.speedup(method) for cell in grid.cells]
        means.add_row(method, f"{mean:.3f}", f"{min(own):.3f}", f"{max(own):.3f}")
    return [cells, means], _notes(grid)


def _title(grid: Grid) -> str:
    options = grid.options
    return (
        f"{options.model}: at least {options.prompts} prompts a cell, answers of up to {options.max_tokens} "
        f"tokens, {options.rounds} round{'s' * (options.rounds > 1)}"
    )


def _figures(cell: Cell) -> list[str]:
    best = cell.best_fixed
    bars = ("" if cell.speedup(AUTO) >= NEVER_SLOWER else "SLOWER ") + (
        "" if cell.auto_of_best >= NEAR_BEST else "BEHIND"
    )
    return [
        f"{cell.tokens_per_second[OFF]:,.0f}",
        f"{cell.speedup(AUTO):.3f}",
        best,
        f"{cell.speedup(best):.3f}",
        f"{cell.auto_of_best:.3f}",
        bars.strip() or "held",
    ]


def _notes(grid: Grid) -> list[str]:
    began = "what earlier runs had learned" if grid.options.learned else "an empty memory"
    return [
        *(f"{'held' if bar.holds else 'MISSED'}: {bar.says}." for bar in grid.bars()),
        f"auto began with {began}; what it learns in a cell and what that costs is in the figures.",
        "best fixed: the quickest of all others in that cell, off among them. It is chosen afterwards, so "
        "where several are as good, luck makes it look better than it is.",
    ]


def grid_page(grid: Grid, machine: Mapping[str, Any]) -> str:
    """All cells as one page, which needs nothing from elsewhere."""
    sections: dict[str, list[Mark]] = {}
    for cell in grid.cells:
        best = cell.best_fixed
        text = f"auto {cell.speedup(AUTO):.2f}, {best} {cell.speedup(best):.2f}"
        mark = Mark(
            cell.workload, text, 1, cell.speedup(AUTO), 1.0, cell.speedup(best), (cell.speedup(best),)
        )
        sections.setdefault(f"{cell.concurrency} at once", []).append(mark)
    means = [
        Mark(method, f"{mean:.2f}", 1 if method == AUTO else 0, mean, 0, mean)
        for method, mean in sorted(grid.means.items(), key=lambda item: -item[1])
    ]
    bars = "".join(
        f"<li>Held: {escape(bar.says)}.</li>"
        if bar.holds
        else f'<li class="bad">Missed: {escape(bar.says)}.</li>'
        for bar in grid.bars()
    )
    first = grid.contests[0]
    body = [
        f"<h1>{escape(_title(grid))}</h1>",
        *(
            f'<p class="soft">{escape(line)}</p>'
            for line in machine_notes(machine, first.threads, first.quantization)
        ),
        f"<ul>{bars}</ul>",
        "<h2>auto in every cell</h2>",
        range_plot(
            "times as fast as off: auto (dot), from off to the best fixed setting (line)", sections, 1.0
        ),
        "<h2>Mean over all cells</h2>",
        range_plot("times as fast as off", {"": means}, 1.0),
        "<h2>All figures</h2>",
        _html_table(grid),
        *(f'<p class="soft">{escape(note)}</p>' for note in _notes(grid)[len(grid.bars()) :]),
    ]
    return page(_title(grid), body)


def _html_table(grid: Grid) -> str:
    """Every method in every cell."""
    methods = list(grid.means)
    head = "".join(f"<th>{escape(word)}</th>" for word in ("cell", "off, tok/s", *methods[1:]))
    lines = []
    for cell in grid.cells:
        cells = [cell.label, f"{cell.tokens_per_second[OFF]:,.0f}"]
        cells += [f"{cell.speedup(method):.3f}" for method in methods[1:]]
        lines.append("<tr>" + "".join(f"<td>{escape(text)}</td>" for text in cells) + "</tr>")
    return f'<div class="scroll"><table><tr>{head}</tr>{"".join(lines)}</table></div>'
