"""`python -m benchmarks grid`: is `auto` never slower than off, and close to the best fixed setting?

A cell is a workload at a concurrency. Each compares plain decoding, the controller and a sweep of fixed
methods and lengths.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from typing import Any

from paceline.bench.loading import bench_config, empty_memory
from paceline.bench.run.contest import Contest, SpeculationOptions, run_contest
from paceline.bench.run.rows import Row
from paceline.bench.run.speculation import OFF
from paceline.bench.timing import OnTurn
from paceline.bench.traffic.profiles import closed
from paceline.bench.traffic.workloads import load_workload
from paceline.build import LoadedModel, load_model
from paceline.config import DEFAULT_MODEL
from paceline.draft.methods import AUTO
from paceline.errors import ConfigError
from paceline.models.heads.shipped import default_method

NEVER_SLOWER = 0.98  # of off, in every cell
NEAR_BEST = 0.95  # of the best fixed setting, in every cell
LOOKUP_LENGTHS = {"suffix": (3, 7), "ngram": (4,)}  # draft lengths of the sweep
HEAD_LENGTHS = (1, 3, 7)


@dataclass(frozen=True)
class GridOptions:
    """What to measure."""

    workloads: tuple[str, ...]  # names or files
    concurrencies: tuple[int, ...] = (1, 4, 16)
    methods: Mapping[str, Any] | None = None  # None: off, auto and the sweep; on a GPU the fixed settings
    model: str = DEFAULT_MODEL
    prompts: int = 4  # per cell; at least the concurrency, if there are as many
    max_tokens: int = 64
    temperature: float | None = None  # None: each prompt's own
    rounds: int = 1
    groups: int = 1  # of prompts in each cell, on a GPU
    learned: bool = False  # the controller starts with what earlier runs have learned
    backend: str = "cpu"
    threads: int | None = None
    quantization: str = "auto"
    temperatures: tuple[float, ...] = ()  # of the grid on a GPU: each is measured, whatever prompts say
    auto: str = AUTO  # the speculative_config of auto, on a GPU
    seconds: float | None = None  # after which no cell starts, on a GPU; None: all are measured
    order: int | None = None  # on a GPU, the seed of a random order of the cells; None: workload by workload

    def contest(self, concurrency: int, methods: Mapping[str, Any]) -> SpeculationOptions:
        """What is measured at one concurrency."""
        limit = max(self.prompts, concurrency)
        return SpeculationOptions(
            workloads=tuple(load_workload(name, limit, self.max_tokens) for name in self.workloads),
            methods=methods,
            model=self.model,
            rounds=self.rounds,
            profiles=(closed(concurrency),),
            temperature=self.temperature,
            backend=self.backend,
            threads=self.threads,
            quantization=self.quantization,
        )

    def num_turns(self) -> int:
        """Approximate number of turns, for a progress bar."""
        if self.backend == "cuda":
            cells = len(self.workloads) * len(self.concurrencies) * len(self.temperatures or (0, 1))
            return 8 * self.rounds * cells
        contestants = len(self.methods) if self.methods else 2 + len(HEAD_LENGTHS) + 3
        return sum(self.contest(number, {}).num_turns(contestants) for number in self.concurrencies)


@dataclass(frozen=True)
class Group:
    """A group of prompts of a cell."""

    tokens: int  # of all answers
    seconds: Mapping[str, float]  # by method


@dataclass(frozen=True)
class Cell:
    """One workload at one concurrency."""

    workload: str
    concurrency: int
    tokens_per_second: Mapping[str, float]  # by method
    temperature: float | None = None  # None: each prompt's own
    off_spread: float | None = None  # relative difference of two measurements of off; None: only one
    groups: Sequence[Group] = ()

    def speedup(self, method: str) -> float:
        return self.tokens_per_second[method] / self.tokens_per_second[OFF]

    @property
    def best_fixed(self) -> str:
        """The fastest method except auto; off is one of them."""
        return max((name for name in self.tokens_per_second if name != AUTO), key=self.speedup)

    @property
    def auto_of_best(self) -> float:
        return self.speedup(AUTO) / self.speedup(self.best_fixed)

    @property
    def error(self) -> float | None:
        """The standard error of `auto_of_best`, from groups of prompts; None if there are too few."""
        if len(self.groups) < 2:
            return None
        pairs = [(group.seconds[self.best_fixed], group.seconds[AUTO]) for group in self.groups]
        total = sum(auto for _, auto in pairs)
        squares = sum((best - self.auto_of_best * auto) ** 2 for best, auto in pairs)
        return math.sqrt(squares * len(pairs) / (len(pairs) - 1)) / total

    @property
    def auto_of_tuned(self) -> float | None:
        """The speed of auto relative to fixed settings that were chosen for each group by the other groups,
        as one who tunes would choose them; None if there is only one group."""
        if len(self.groups) < 2:
            return None
        methods = [method for method in self.tokens_per_second if method != AUTO]
        tuned = 0.0
        for group in self.groups:
            others = [other for other in self.groups if other is not group]
            chosen = min(methods, key=lambda method: sum(other.seconds[method] for other in others))
            tuned += group.seconds[chosen]
        return tuned / sum(group.seconds[AUTO] for group in self.groups)

    @property
    def label(self) -> str:
        heat = "" if self.temperature is None else f" T={self.temperature:g}"
        return f"{self.workload} x{self.concurrency}{heat}"

    def facts(self) -> dict[str, Any]:
        best = self.best_fixed
        return {
            "workload": self.workload,
            "concurrency": self.concurrency,
            "temperature": self.temperature,
            "off_tokens_per_second": self.tokens_per_second[OFF],
            "off_spread": self.off_spread,
            "speedups_vs_off": {method: self.speedup(method) for method in self.tokens_per_second},
            "best_fixed": best,
            "auto_vs_best_fixed": self.auto_of_best,
            "error": self.error,
            "auto_vs_tuned": self.auto_of_tuned,
            "groups": [asdict(group) for group in self.groups],
        }


@dataclass(frozen=True)
class Bar:
    """One requirement, and whether it is met."""

    says: str
    holds: bool


@dataclass(frozen=True)
class Grid:
    """The complete result."""

    options: GridOptions
    cells: list[Cell]  # by workload
    contests: list[Contest]  # one per concurrency; none on a GPU
    num_differing: int = 0  # tokens that are not those of off, on a GPU

    @property
    def rows(self) -> list[Row]:
        return [row for contest in self.contests for row in contest.rows]

    @property
    def identical(self) -> bool:
        return not self.num_differing and all(contest.identical for contest in self.contests)

    @property
    def means(self) -> dict[str, float]:
        """Mean speedup of each method over the cells, if it was measured in all of them."""
        methods = [
            method
            for method in self.cells[0].tokens_per_second
            if all(method in cell.tokens_per_second for cell in self.cells)
        ]
        return {method: statistics.fmean(cell.speedup(method) for cell in self.cells) for method in methods}

    def bars(self) -> list[Bar]:
        """The requirements, and whether they are met."""
        means = self.means
        others = {method: mean for method, mean in means.items() if method != AUTO}
        best = max(others, key=others.__getitem__)
        mean = f"auto gains {means[AUTO]:.3f} in the mean, the best fixed setting, {best}, {others[best]:.3f}"
        return [
            self._every("off", NEVER_SLOWER, {cell.label: cell.speedup(AUTO) for cell in self.cells}),
            self._every(
                "the best fixed setting", NEAR_BEST, {cell.label: cell.auto_of_best for cell in self.cells}
            ),
            Bar(mean, means[AUTO] > others[best]),
            Bar("every output is that of plain decoding", self.identical),
        ]

    def _every(self, what: str, minimum: float, values: Mapping[str, float]) -> Bar:
        below = [f"{label} {value:.3f}" for label, value in values.items() if value < minimum]
        worst = min(values, key=values.__getitem__)
        detail = (
            f"below in {len(below)}: {', '.join(below)}" if below else f"least {values[worst]:.3f} ({worst})"
        )
        return Bar(
            f"auto is at least {minimum} of {what} in each of {len(values)} cells; {detail}", holds=not below
        )

    def facts(self) -> dict[str, Any]:
        """Everything, for JSON."""
        return {
            **{key: value for key, value in asdict(self.options).items() if key != "methods"},
            **{
                name: getattr(each, name)
                for each in self.contests[:1]
                for name in ("threads", "quantization")
            },
            "identical": self.identical,
            "num_differing": self.num_differing,
            "bars": [asdict(bar) for bar in self.bars()],
            "mean_speedups": self.means,
            "cells": [cell.facts() for cell in self.cells],
            "rows": [asdict(row) for row in self.rows],
        }


def run_grid(options: GridOptions, on_turn: OnTurn = lambda _: None) -> Grid:
    """All cells, by engines in this process."""
    if options.methods is not None and AUTO not in options.methods:
        raise ConfigError("--methods must have auto: the grid is about it. Add it, such as auto,suffix.")
    with nullcontext() if options.learned else empty_memory():
        model = load_model(
            bench_config(options.model, options.quantization, options.threads, 1, backend=options.backend)
        )
        methods = options.methods or sweep(model)
        contests = [
            run_contest(options.contest(concurrency, methods), on_turn, model)
            for concurrency in options.concurrencies
        ]
    cells = [cell for contest in contests for cell in _cells(contest)]
    order = [cell.workload for cell in cells]
    return Grid(options, sorted(cells, key=lambda cell: order.index(cell.workload)), contests)


def _cells(contest: Contest) -> Iterator[Cell]:
    """The workloads of a contest; with several segments, the row over all of them, which is the last."""
    speeds: dict[tuple[str, int], dict[str, float]] = {}
    for row in contest.rows:
        assert row.concurrency is not None
        speeds.setdefault((row.workload, row.concurrency), {})[row.method] = row.tokens_per_second
    return (Cell(*key, by_method) for key, by_method in speeds.items())


def sweep(model: LoadedModel) -> dict[str, Any]:
    """Plain decoding, the controller, and fixed methods and lengths, by label."""
    head = default_method(model.fingerprint)
    lengths: Mapping[str, Sequence[int]] = {
        **LOOKUP_LENGTHS,
        **({} if head is None else {head: HEAD_LENGTHS}),
    }
    fixed = {
        f"{method} {length}": {"method": method, "num_speculative_tokens": length}
        for method, method_lengths in lengths.items()
        for length in method_lengths
    }
    return {OFF: OFF, AUTO: AUTO, **fixed}
