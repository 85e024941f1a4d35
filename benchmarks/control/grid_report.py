"""The result of the grid: every cell, the means, and whether the requirements are met."""

from __future__ import annotations

import statistics

from benchmarks.control.grid import NEAR_BEST, NEVER_SLOWER, Cell, Grid
from paceline.bench.report.result import Figure, Finding, Mark, Ranges, Result, Table
from paceline.bench.run.speculation import OFF
from paceline.draft.methods import AUTO

HEADINGS = (
    "cell",
    "off\ntok/s",
    "off\n/ off",
    "auto\n/ off",
    "best fixed",
    "best\n/ off",
    "auto\n/ best",
    "standard\nerror",
    "auto\n/ tuned",
    "bars",
)
NOISY = 0.02  # spread of off from which on a cell says little
FIXED = "fixed settings"  # all series except auto


def grid_result(grid: Grid) -> Result:
    """Tables of cells, of all methods and of means; a chart of auto in every cell."""
    options = grid.options
    title = (
        f"{options.model}: at least {options.prompts} prompts a cell, answers of up to {options.max_tokens} "
        f"tokens, {options.rounds} round{'s' * (options.rounds > 1)}"
    )
    return Result(
        title,
        [
            Table(title, HEADINGS, [(cell.label, *_cells(cell)) for cell in grid.cells]),
            _all_speedups(grid),
            _means(grid),
        ],
        grid.facts(),
        findings=[
            Finding(f"{'held' if bar.holds else 'MISSED'}: {bar.says}.", bar.holds) for bar in grid.bars()
        ],
        notes=_notes(grid),
        figures=_figures(grid),
        series=(FIXED, AUTO),
    )


def _cells(cell: Cell) -> list[str]:
    best = cell.best_fixed
    bars = ("" if cell.speedup(AUTO) >= NEVER_SLOWER else "SLOWER ") + (
        "" if cell.auto_of_best >= NEAR_BEST else "BEHIND"
    )
    spread = cell.off_spread
    if spread is not None and spread > NOISY:
        bars += " (noisy)"
    return [
        f"{cell.tokens_per_second[OFF]:,.0f}",
        "" if spread is None else f"±{spread:.1%}",
        f"{cell.speedup(AUTO):.3f}",
        best,
        f"{cell.speedup(best):.3f}",
        f"{cell.auto_of_best:.3f}",
        "" if cell.error is None else f"{cell.error:.3f}",
        "" if cell.auto_of_tuned is None else f"{cell.auto_of_tuned:.3f}",
        bars.strip() or "held",
    ]


def _all_speedups(grid: Grid) -> Table:
    known = dict.fromkeys(method for cell in grid.cells for method in cell.tokens_per_second)
    methods = [method for method in known if method != OFF]
    rows = [
        [
            cell.label,
            *(
                f"{cell.speedup(method):.3f}" if method in cell.tokens_per_second else ""
                for method in methods
            ),
        ]
        for cell in grid.cells
    ]
    return Table("Speedup of each method", ("cell", *methods), rows)


def _means(grid: Grid) -> Table:
    rows = []
    for method, mean in _by_mean(grid):
        speedups = [cell.speedup(method) for cell in grid.cells]
        rows.append((method, f"{mean:.3f}", f"{min(speedups):.3f}", f"{max(speedups):.3f}"))
    return Table("Speedups over all cells", ("method", "mean", "least", "most"), rows)


def _by_mean(grid: Grid) -> list[tuple[str, float]]:
    """Methods and their mean speedups, the best first."""
    return sorted(grid.means.items(), key=lambda item: -item[1])


def _notes(grid: Grid) -> list[str]:
    noisy = [cell.label for cell in grid.cells if (cell.off_spread or 0.0) > NOISY]
    began = "what earlier runs had learned" if grid.options.learned else "an empty memory"
    tuned = [cell.auto_of_tuned for cell in grid.cells if cell.auto_of_tuned is not None]
    return [
        f"auto began with {began}; what it learns in a cell and what that costs is in the figures.",
        "best fixed: the quickest of all others in that cell, off among them. It is chosen afterwards, so "
        "where several are as good, luck makes it look better than it is.",
        *(
            [
                f"auto / tuned: each group of prompts beside the setting that is the best for the other "
                f"groups of its cell; {statistics.fmean(tuned):.3f} in the mean. Standard error: of auto / "
                f"best, by the groups."
            ]
            if tuned
            else []
        ),
        *(
            [f"off / off: two runs of off differ by more than {NOISY:.0%} in {', '.join(noisy)}."]
            if noisy
            else []
        ),
    ]


def _figures(grid: Grid) -> list[Figure]:
    sections: dict[str, list[Mark]] = {}
    for cell in grid.cells:
        auto, name = cell.speedup(AUTO), cell.best_fixed
        best = cell.speedup(name)
        mark = Mark(cell.workload, f"auto {auto:.2f}, {name} {best:.2f}", AUTO, auto, 1.0, best, (best,))
        sections.setdefault(f"{cell.concurrency} at once", []).append(mark)
    means = [
        Mark(method, f"{mean:.2f}", AUTO if method == AUTO else FIXED, mean, 0, mean)
        for method, mean in _by_mean(grid)
    ]
    axis = "times as fast as off: auto (dot), from off to the best fixed setting (line)"
    return [
        Figure("auto in every cell", [Ranges(axis, sections, 1.0)]),
        Figure("Mean over all cells", [Ranges("times as fast as off", {"": means}, 1.0)]),
    ]
