"""The grid on a GPU: three engines in one process, whose runs alternate.

Engines take tens of seconds to capture their graphs there, and runs only tenths. So there is one engine
without drafters, one with `auto`, and one whose requests name a method and a length: the fixed settings. (The
engine of `auto` has no buffers left for these beside its own arms.) Each cell is the best of several rounds.
Off runs twice in each round: what its two figures differ by is chance, and so is as much of any other
difference.

A cell has one or more groups of prompts, each of which is answered at once. What a setting gains depends on
the texts, most of all on the slowest of a group. Two figures of off do not tell how much, groups do.

All turns ask the same prompts. So that no turn copies the answers of an earlier one, each has its own
`cache_salt`: past responses are found by requests of the same salt only.
"""

from __future__ import annotations

import itertools
import json
import math
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any
from uuid import uuid4

from benchmarks.control.grid import Cell, Grid, GridOptions, Group
from paceline.bench.loading import bench_config, empty_memory
from paceline.bench.run.contest import SpeculationOptions, tasks_of
from paceline.bench.run.engine_runner import EngineRunner, Task
from paceline.bench.run.speculation import OFF
from paceline.bench.timing import OnTurn
from paceline.bench.traffic.profiles import closed
from paceline.bench.traffic.workloads import load_workload
from paceline.build import Loaded, build_engine, load_model
from paceline.control.config import CONFIG
from paceline.draft.base import drafts_on_device
from paceline.draft.methods import AUTO
from paceline.engine.executors.device_plans import MAX_TREE_ROWS

TEMPERATURES = (0.0, 0.8)
HEADS = ("eagle3", "eagle", "mtp", "draft_model")  # methods with weights that draft on the device
HEAD_LENGTHS = (2, 3, 5, 7)
LOOKUP_LENGTHS = {"ngram": (7,), "suffix": (3, 7)}
FIXED = "fixed"  # the engine of the fixed settings
AGAIN = "off, again"

Setting = Mapping[str, Any]  # what a request asks for
OnCell = Callable[[Cell], None]


def run_device_grid(
    options: GridOptions, on_turn: OnTurn = lambda _: None, on_cell: OnCell = lambda _: None
) -> Grid:
    """All cells: every workload, concurrency and temperature, as many as there is time for."""
    start = time.monotonic()
    with empty_memory():
        grid = DeviceGrid(options)
        cells: list[Cell] = []
        temperatures = options.temperatures or TEMPERATURES
        order = list(itertools.product(options.workloads, options.concurrencies, temperatures))
        if options.order is not None:
            random.Random(options.order).shuffle(order)
        for which in order:
            if cells and time.monotonic() - start > (options.seconds or math.inf):
                break
            cells.append(grid.measure(*which, on_turn))
            on_cell(cells[-1])
        grid.close()
    return Grid(options, cells, [], grid.num_differing)


class DeviceGrid:
    """The engines of a grid, and how many tokens of their answers differ."""

    def __init__(self, options: GridOptions) -> None:
        self.options = options
        self.num_differing = 0  # tokens that are not those of off
        config = self._config
        self._model = load_model(config(OFF))
        auto = build_engine(config(options.auto), self._model)
        loaded = {
            OFF: build_engine(config(OFF), self._model),
            AUTO: auto,
            FIXED: build_engine(config(_drafters(auto)), self._model),
        }
        self.runners: dict[str, EngineRunner] = {}
        for name, each in loaded.items():
            each.engine.prepare()
            self.runners[name] = EngineRunner(each.engine, None, whole=True)
        self._methods = list(auto.engine.plans)
        self._head = next((name for name in HEADS if name in self._methods), None)
        on_device = drafts_on_device(auto.drafters)
        self._has_trees = self._head in on_device and on_device[self._head].drafts_trees

    def close(self) -> None:
        for runner in self.runners.values():
            runner.close()

    def measure(
        self, workload: str, concurrency: int, temperature: float, on_turn: OnTurn = lambda _: None
    ) -> Cell:
        """One cell."""
        groups = self._groups(workload, concurrency, temperature)
        settings = self._settings(concurrency)
        asked: dict[str, tuple[str, Setting | None]] = {OFF: (OFF, None), AUTO: (AUTO, None)}
        asked.update({label: (FIXED, setting) for label, setting in settings.items()})
        asked[AGAIN] = asked[OFF]
        best: dict[str, list[tuple[int, float]]] = {}  # of the best round: tokens and seconds of each group
        expected: list[list[list[int]]] = []
        for _ in range(self.options.rounds):
            for label, (engine, setting) in asked.items():
                turns = [self._turn(engine, setting, group, concurrency) for group in groups]
                expected = expected or [answers for answers, _ in turns]
                self._compare([answers for answers, _ in turns], expected)
                found = [(sum(map(len, answers)), seconds) for answers, seconds in turns]
                best[label] = max(best.get(label, found), found, key=_speed)
                on_turn(label)
        again, off = _speed(best[AGAIN]), _speed(best[OFF])
        best[OFF] = max(best[OFF], best.pop(AGAIN), key=_speed)
        return Cell(
            load_workload(workload).name,
            concurrency,
            {label: _speed(found) for label, found in best.items()},
            temperature,
            abs(again / off - 1),
            [
                Group(tokens, {label: found[number][1] for label, found in best.items()})
                for number, (tokens, _) in enumerate(best[OFF])
            ],
        )

    def _turn(
        self, engine: str, setting: Setting | None, group: Sequence[Task], concurrency: int
    ) -> tuple[list[list[int]], float]:
        """The answers to a group, and the seconds until all were complete."""
        salt = uuid4().hex
        tasks = [
            replace(task, cache_salt=salt, params=replace(task.params, speculative=setting)) for task in group
        ]
        turn = self.runners[engine].run(tasks, closed(concurrency))
        return [answer.token_ids for answer in turn.answers], turn.seconds

    def _compare(self, groups: Sequence[list[list[int]]], expected: Sequence[list[list[int]]]) -> None:
        for own, other in zip(groups, expected, strict=True):
            pairs = zip(own, other, strict=True)
            self.num_differing += sum(_num_differing(tokens, right) for tokens, right in pairs)

    def _config(self, draft: Any) -> Any:
        options = self.options
        most = max(options.concurrencies)
        return bench_config(
            options.model, options.quantization, options.threads, most, draft, options.backend
        )

    def _settings(self, concurrency: int) -> dict[str, Setting]:
        """What requests ask for, by label: lookups, or prompt lookup and chains and trees of the head."""
        if self.options.methods is not None:
            given = self.options.methods
            named = {label: json.loads(method) for label, method in given.items() if label != OFF}
            return {label: setting for label, setting in named.items() if _fits(setting, concurrency)}
        head = self._head
        by_method = LOOKUP_LENGTHS if head is None else {"ngram": LOOKUP_LENGTHS["ngram"], head: HEAD_LENGTHS}
        settings: dict[str, Setting] = {
            f"{method} {length}": {"method": method, "num_speculative_tokens": length}
            for method, lengths in by_method.items()
            for length in lengths
        }
        for nodes, branching, depth in CONFIG.device_planner.trees if self._has_trees else ():
            asked = {"num_speculative_tokens": nodes, "branching": branching, "depth": depth}
            if _fits(asked, concurrency):
                settings[f"{head} {nodes} ({branching}, {depth})"] = {"method": head, **asked}
        return settings

    def _groups(self, name: str, concurrency: int, temperature: float) -> list[list[Task]]:
        """The prompts, as many in each group as run at once or more; the last prompts make no smaller one."""
        size = max(self.options.prompts, concurrency)
        workload = load_workload(name, self.options.groups * size, self.options.max_tokens)
        how = SpeculationOptions((workload,), {}, temperature=temperature, constrain=False)
        tasks = tasks_of(workload, self._model, how)
        size = min(size, len(tasks))
        starts = range(0, len(tasks) - size + 1, size)
        return [tasks[start : start + size] for start in starts][: self.options.groups]


def _fits(setting: Setting, concurrency: int) -> bool:
    """Whether the device drafts this setting for these requests: larger trees become chains there."""
    is_tree, nodes = setting.get("branching", 1) > 1, setting.get("num_speculative_tokens", 0)
    return not is_tree or concurrency * (1 + nodes) <= MAX_TREE_ROWS


def _drafters(auto: Loaded) -> list[dict[str, Any]]:
    """The drafters of auto with their options, for an engine without a controller."""
    assert auto.speculation is not None
    return [
        {
            "method": name,
            "num_speculative_tokens": drafter.plan.budget,
            **{key: value for key, value in asdict(drafter.options).items() if value is not None},
        }
        for name, drafter in auto.speculation.drafters.items()
    ]


def _speed(groups: Sequence[tuple[int, float]]) -> float:
    """Tokens per second of groups, each with its tokens and seconds."""
    return sum(tokens for tokens, _ in groups) / sum(seconds for _, seconds in groups)


def _num_differing(tokens: Sequence[int], expected: Sequence[int]) -> int:
    pairs = zip(tokens, expected, strict=False)
    return sum(own != other for own, other in pairs) + abs(len(tokens) - len(expected))
