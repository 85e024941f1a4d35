"""Repeated measurements, in turns: what disturbs the machine for a while then disturbs all alike."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

Name = TypeVar("Name")
Result = TypeVar("Result")
OnTurn = Callable[[str], None]  # told what has just been measured


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
    """What each job gave in each round: A B C, A B C, ..."""
    results: dict[Name, list[Result]] = {name: [] for name in jobs}
    for number in range(rounds):
        for name, job in jobs.items():
            results[name].append(job())
            on_turn(f"{name}, round {number + 1} of {rounds}")
    return results
