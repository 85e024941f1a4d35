"""What a replay shows: in how many cells `auto` misses its bars, and by how much."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import fmean

from benchmarks.control.grid import NEAR_BEST, NEVER_SLOWER
from benchmarks.control.replay.recording import Recording
from benchmarks.control.replay.replay import CONCURRENCIES, ROUNDS, CellPlan, ReplayGrid
from paceline.bench.report.result import Result, Table
from paceline.bench.run.speculation import OFF
from paceline.bench.timing import OnTurn


@dataclass(frozen=True)
class ReplayedCell:
    """A cell in one order."""

    cell: CellPlan
    order: int
    seconds: list[float]  # of `auto`, by round
    fixed: dict[str, float]  # seconds by fixed setting

    @property
    def of_off(self) -> list[float]:
        """[rounds] The speed of `auto` relative to off."""
        return [self.fixed[OFF] / own for own in self.seconds]

    @property
    def of_best(self) -> list[float]:
        """[rounds] The speed of `auto` relative to the best fixed setting."""
        return [min(self.fixed.values()) / own for own in self.seconds]

    def row(self) -> tuple[str, ...]:
        cell, best = self.cell, min(self.fixed, key=self.fixed.__getitem__)
        label = f"{cell.workload} x{cell.concurrency} T={cell.temperature:g}"
        gain = self.fixed[OFF] / self.fixed[best]
        return (
            label,
            str(self.order),
            f"{max(self.of_off):.3f}",
            best,
            f"{gain:.3f}",
            f"{max(self.of_best):.3f}",
        )


def replay_result(recording: Recording, orders: int, on_turn: OnTurn) -> Result:
    """Replays all cells of a recording, once in each of `orders` random orders."""
    grid = ReplayGrid(recording)
    cells = [
        ReplayedCell(
            cell,
            order,
            [sum(groups) for groups in rounds],
            {label: sum(groups) for label, groups in grid.fixed(cell).items()},
        )
        for order in range(orders)
        for cell, rounds in grid.run(order, on_turn)
    ]
    loads = [
        (f"{count} at once", [one for one in cells if one.cell.concurrency == count])
        for count in CONCURRENCIES
    ]
    summary = [_summary(name, chosen) for name, chosen in (*loads, ("all", cells))]
    missed = sorted(
        (one for one in cells if max(one.of_off) < NEVER_SLOWER or max(one.of_best) < NEAR_BEST),
        key=lambda one: max(one.of_best),
    )
    columns = (
        "",
        "cells",
        f"below {NEVER_SLOWER}\nof off",
        f"below {NEAR_BEST}\nof the best",
        "auto / best,\nbest round",
        "auto / best,\nall rounds",
        "auto / off",
    )
    tables = [
        Table("auto, replayed", columns, summary),
        Table(
            "cells that miss",
            ("cell", "order", "auto / off", "best fixed", "best / off", "auto / best"),
            [one.row() for one in missed],
            text=("best fixed",),
        ),
    ]
    facts = {"rounds": ROUNDS, "cells": [asdict(one) for one in cells]}
    return Result("auto, replayed", tables, facts, timed=False)


def _summary(name: str, cells: Sequence[ReplayedCell]) -> tuple[str, ...]:
    return (
        name,
        str(len(cells)),
        str(sum(max(cell.of_off) < NEVER_SLOWER for cell in cells)),
        str(sum(max(cell.of_best) < NEAR_BEST for cell in cells)),
        f"{fmean(max(cell.of_best) for cell in cells):.3f}",
        f"{fmean(fmean(cell.of_best) for cell in cells):.3f}",
        f"{fmean(max(cell.of_off) for cell in cells):.3f}",
    )
