"""Repeated measurements in turns, so that a disturbance of the machine affects all alike."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

Name = TypeVar("Name")
Result = TypeVar("Result")
OnTurn = Callable[[str], None]  # called with a description of what was just measured


@dataclass(frozen=True)
class Timing:
    """Seconds of each repetition of one job."""

    seconds: tuple[float, ...]

    @property
    def best(self) -> float:
        return min(self.seconds)

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)


def take_turns(
    jobs: Mapping[Name, Callable[[], Result]], rounds: int, on_turn: OnTurn = lambda _: None
) -> dict[Name, list[Result]]:
    """The results of each job in each round: A B C, A B C, ..."""
    results: dict[Name, list[Result]] = {name: [] for name in jobs}
    for number in range(rounds):
        for name, job in jobs.items():
            results[name].append(job())
            on_turn(f"{name}, round {number + 1} of {rounds}")
    return results
