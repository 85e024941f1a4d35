"""Drafting methods on a workload, in turns with plain decoding.

Every contestant has its own runner (an engine around the one loaded model), so that no drafter sees the
answers of another contestant, which it could copy. Engines are new in every round, so that none remembers
an answer of an earlier round.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, TypeVar

from paceline.bench.run.slices import in_slices
from paceline.bench.run.turns import Runner, Turn, WorkloadRequest
from paceline.bench.timing import OnTurn
from paceline.bench.traffic.profiles import Profile
from paceline.draft.speculative_config import parse_speculative_config
from paceline.errors import ConfigError

OFF = "off"
COLD, WARM = "cold", "warm"
ONE_BY_ONE = Profile("x1", 1)
JSON = ("{", "[")  # the first character of JSON
WAVES = 4  # of concurrent requests per turn

Key = tuple[str, str]  # cold or warm, and the method
Task = TypeVar("Task", bound=WorkloadRequest)


@dataclass(frozen=True)
class Runs:
    """All turns of a workload."""

    groups: Sequence[Sequence[WorkloadRequest]]
    profile: Profile
    turns: dict[Key, list[list[Turn]]]  # [round][group]


def parse_methods(given: Sequence[str]) -> dict[str, Any]:
    """Contestants by label, as speculative_config: plain decoding first, then what each value names.

    A value is a list of short forms, such as ngram,suffix, or a JSON object, or a JSON list of methods
    that are loaded together.
    """
    contestants: dict[str, Any] = {OFF: OFF}
    for value in given:
        for config in [value] if value.lstrip().startswith(JSON) else value.split(","):
            label = config.strip()
            if label == OFF:
                continue
            parse_speculative_config(label)  # report a mistake before a model is loaded
            if "suffix_cache_path" in label:
                raise ConfigError("a cache in a file is never cold: leave out suffix_cache_path.")
            contestants[_label(label)] = label
    if len(contestants) == 1:
        raise ConfigError("--methods names nothing to compare with off: give for example ngram,suffix.")
    return contestants


def _label(config: str) -> str:
    """A short name: the methods, and the options that differ from their defaults."""
    if not config.startswith(JSON):
        return config
    entries = json.loads(config)
    return " + ".join(_entry_label(entry) for entry in (entries if isinstance(entries, list) else [entries]))


def _entry_label(entry: Any) -> str:
    if isinstance(entry, str):
        return entry
    method = entry.get("method", "draft_model")
    return " ".join([method, *(f"{key}={value}" for key, value in entry.items() if key != "method")])


def measure_workload(
    makers: Mapping[str, Callable[[], Runner[Task]]],
    tasks: Sequence[Task],
    *,
    rounds: int,
    profile: Profile = ONE_BY_ONE,
    passes: Sequence[str] = (COLD,),
    warm_up: bool = True,
    on_turn: OnTurn = lambda _: None,
) -> Runs:
    """All contestants' turns on a workload.

    A turn is one prompt, or some waves of concurrent ones, or, in an open profile, all prompts. All
    contestants take their turn on a group at the same time, in slices, before the next group. A round is
    `passes` over the workload by the same new runners. Separate runners warm up first, unless all code is
    already compiled (`warm_up` False).
    """
    groups = list(_groups(tasks, profile))
    chance = random.Random(0)
    if warm_up:
        _warm_up(makers, groups[0], profile)
    turns: dict[Key, list[list[Turn]]] = {(name, label): [] for name in passes for label in makers}
    for number in range(rounds):
        runners = {label: make() for label, make in makers.items()}
        for name in passes:
            for label in runners:
                turns[name, label].append([])
            for group in groups:
                courses = {label: runner.slices(group, profile) for label, runner in runners.items()}
                for label, turn in in_slices(courses, chance):
                    turns[name, label][number].append(turn)
                    on_turn(f"{name}, round {number + 1} of {rounds}: {label}")
        for runner in runners.values():
            runner.close()
    return Runs(groups, profile, turns)


def group_size(profile: Profile, num_tasks: int) -> int:
    """Maximum number of requests per turn: one, some waves or, in an open profile, all."""
    if profile.concurrency is None:
        return num_tasks
    return 1 if profile.concurrency == 1 else WAVES * profile.concurrency


def _groups(tasks: Sequence[Task], profile: Profile) -> Iterator[Sequence[Task]]:
    """The tasks in order, in groups of one segment; in an open profile, one group."""
    if profile.concurrency is None:
        yield tasks
        return
    size = group_size(profile, len(tasks))
    for _, same in groupby(tasks, key=lambda task: task.segment):
        segment = list(same)
        for start in range(0, len(segment), size):
            yield segment[start : start + size]


def _warm_up(
    makers: Mapping[str, Callable[[], Runner[Task]]], group: Sequence[Task], profile: Profile
) -> None:
    """Run every contestant once, to compile its code. These runners are not used again."""
    for make in makers.values():
        runner = make()
        runner.warm_up(group, profile)
        runner.close()
