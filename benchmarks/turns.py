"""Measurements in turns, so that a disturbance of the machine affects all alike."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

from paceline.bench.timing import OnTurn

Name = TypeVar("Name")
Result = TypeVar("Result")


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
