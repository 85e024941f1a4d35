"""The grid on a GPU: two engines in one process, whose runs alternate.

Engines take tens of seconds to capture their graphs there, and runs only tenths. So there is one engine
without drafters and one with `auto`. The fixed settings are requests to the latter that name a method and a
length, and each cell is the best of several rounds. Off runs twice in each round: what its two figures differ
by is chance, and so is as much of any other difference.

All turns ask the same prompts. So that no turn copies the answers of an earlier one, each has its own
`cache_salt`: past responses are found by requests of the same salt only.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any
from uuid import uuid4

from benchmarks.control.grid import Cell, Grid, GridOptions
from paceline.bench.loading import bench_config, empty_memory
from paceline.bench.run.contest import SpeculationOptions, tasks_of
from paceline.bench.run.engine_runner import EngineRunner, Task
from paceline.bench.run.speculation import OFF
from paceline.bench.timing import OnTurn
from paceline.bench.traffic.profiles import closed
from paceline.bench.traffic.workloads import load_workload
from paceline.build import LoadedModel, build_engine, load_model
from paceline.draft.methods import AUTO

TEMPERATURES = (0.0, 0.8)
HEADS = ("eagle3", "eagle", "mtp", "draft_model")  # methods with weights that draft on the device
HEAD_LENGTHS = (2, 3, 5, 7)
LOOKUP_LENGTHS = {"ngram": (7,), "suffix": (3, 7)}
AGAIN = "off, again"


def run_device_grid(options: GridOptions, on_turn: OnTurn = lambda _: None) -> Grid:
    """All cells: every workload, concurrency and temperature, as many as there is time for."""
    start = time.monotonic()
    with empty_memory():
        model = load_model(_config(options, OFF))
        engines = {name: build_engine(_config(options, name), model).engine for name in (OFF, options.auto)}
        runners = {}
        for name, engine in engines.items():
            engine.prepare()
            runners[name] = EngineRunner(engine, None, whole=True)
        settings = _fixed_settings(list(engines[options.auto].plans))
        cells: list[Cell] = []
        differing = 0
        temperatures = options.temperatures or TEMPERATURES
        for workload, concurrency, temperature in itertools.product(
            options.workloads, options.concurrencies, temperatures
        ):
            if cells and time.monotonic() - start > (options.seconds or math.inf):
                break
            tasks = _tasks(options, workload, concurrency, temperature, model)
            speeds, wrong = _measure(options, runners, tasks, concurrency, settings, on_turn)
            again = speeds.pop(AGAIN)
            spread = abs(again / speeds[OFF] - 1)
            speeds[OFF] = max(again, speeds[OFF])
            cells.append(Cell(load_workload(workload).name, concurrency, speeds, temperature, spread))
            differing += wrong
        for runner in runners.values():
            runner.close()
    return Grid(options, cells, [], differing)


def _config(options: GridOptions, draft: Any) -> Any:
    most = max(options.concurrencies)
    return bench_config(options.model, options.quantization, options.threads, most, draft, options.backend)


def _fixed_settings(methods: Sequence[str]) -> dict[str, Mapping[str, Any]]:
    """What requests ask for, by label: lookups, or prompt lookup and chains of the engine's head."""
    head = next((name for name in HEADS if name in methods), None)
    by_method = LOOKUP_LENGTHS if head is None else {"ngram": LOOKUP_LENGTHS["ngram"], head: HEAD_LENGTHS}
    return {
        f"{method} {length}": {"method": method, "num_speculative_tokens": length}
        for method, lengths in by_method.items()
        for length in lengths
    }


def _tasks(
    options: GridOptions, name: str, concurrency: int, temperature: float, model: LoadedModel
) -> list[Task]:
    workload = load_workload(name, max(options.prompts, concurrency), options.max_tokens)
    how = SpeculationOptions((workload,), {}, temperature=temperature, constrain=False)
    return tasks_of(workload, model, how)


def _measure(
    options: GridOptions,
    runners: Mapping[str, EngineRunner],
    tasks: Sequence[Task],
    concurrency: int,
    settings: Mapping[str, Mapping[str, Any]],
    on_turn: OnTurn,
) -> tuple[dict[str, float], int]:
    """Tokens per second of every method, best of the rounds, and how many tokens differ from those of off."""
    ways = {OFF: (OFF, tasks), AUTO: (options.auto, tasks)}
    for label, asked in settings.items():
        asking = [replace(task, params=replace(task.params, speculative=asked)) for task in tasks]
        ways[label] = options.auto, asking
    ways[AGAIN] = ways[OFF]
    speeds: dict[str, float] = {}
    expected: list[list[int]] = []
    differing = 0
    for _ in range(options.rounds):
        for label, (engine, group) in ways.items():
            salt = uuid4().hex
            salted = [replace(task, cache_salt=salt) for task in group]
            turn = runners[engine].run(salted, closed(concurrency))
            answers = [answer.token_ids for answer in turn.answers]
            expected = expected or answers
            pairs = zip(answers, expected, strict=True)
            differing += sum(_num_differing(own, other) for own, other in pairs)
            speeds[label] = max(speeds.get(label, 0.0), sum(map(len, answers)) / turn.seconds)
            on_turn(label)
    return speeds, differing


def _num_differing(tokens: Sequence[int], expected: Sequence[int]) -> int:
    pairs = zip(tokens, expected, strict=False)
    return sum(own != other for own, other in pairs) + abs(len(tokens) - len(expected))
