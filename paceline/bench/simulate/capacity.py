"""Capacity: the highest arrival rate, or the smallest fleet, at which requests meet their objective."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from paceline.bench.run.figures import Objective
from paceline.bench.run.rows import Row
from paceline.bench.run.speculation import OFF
from paceline.bench.simulate.run import Length, Method, Simulation, World, arrivals, simulate
from paceline.bench.timing import OnTurn

GOOD_SHARE = 0.9  # of all requests must meet the objective
PRECISION = 1.1  # ratio of the rates between which the search ends
RANGE = 64  # the search ends at this multiple, and at this fraction, of where it starts
LOAD_STEPS = (0.25, 0.5, 0.75, 0.9, 1.0, 1.1)  # fractions of saturation
SEARCH_TURNS = 8  # of each method, roughly: for a progress bar


@dataclass(frozen=True)
class Capacity:
    """A method's highest good arrival rate, and what was simulated there."""

    method: str
    requests_per_second: float  # 0: a request alone misses the objective
    row: Row | None


def saturation(simulation: Simulation, answer_tokens: float) -> float:
    """Requests per second of plain decoding at the highest concurrency, when it never waits for arrivals."""
    return max(row.tokens_per_second for row in simulation.rows if row.method == OFF) / answer_tokens


def capacities(
    world: World,
    methods: Sequence[Method],
    lengths: Sequence[Length],
    objective: Objective,
    start: float,
    on_turn: OnTurn = lambda _: None,
) -> list[Capacity]:
    """The capacity of each method; the search starts at `start` requests per second."""
    found = []
    for method in methods:
        rows: dict[float, Row] = {}

        def fits(rate: float, method: Method = method, rows: dict[float, Row] = rows) -> bool:
            simulation = simulate(world, [method], lengths, [arrivals(rate)], on_turn, objective)
            rows[rate] = simulation.rows[-1]
            return (rows[rate].good_share or 0) >= GOOD_SHARE

        rate = highest(fits, start)
        found.append(Capacity(method.label, rate, rows.get(rate)))
    return found


def highest(fits: Callable[[float], bool], start: float) -> float:
    """The highest rate that fits, to within PRECISION; 0 if none in RANGE does."""
    low = high = start
    if fits(start):
        while low < RANGE * start and fits(high := 2 * low):
            low = high
    else:
        while not fits(low := high / 2):
            high = low
            if low < start / RANGE:
                return 0.0
    while high / low > PRECISION:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def smallest(holds: Callable[[int], bool], low: int, high: int) -> int | None:
    """The smallest number of replicas from `low` to `high` that holds, if larger fleets then do; None if
    none does."""
    size = low
    while not holds(size):
        if size == high:
            return None
        low, size = size + 1, min(2 * size, high)
    while low < size:
        middle = (low + size) // 2
        low, size = (low, middle) if holds(middle) else (middle + 1, size)
    return size
