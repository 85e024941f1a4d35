"""Turns in slices: a clock counts only its contestant's work, and not what else the machine did."""

from __future__ import annotations

import random
from itertools import pairwise

import numpy as np
import pytest

from paceline.bench.run.engine_runner import EngineRunner, Task
from paceline.bench.run.slices import (
    FEWEST,
    SLICE_SECONDS,
    ContestantClock,
    Disturbances,
    FloatArray,
    alone,
    in_slices,
)
from paceline.bench.traffic.profiles import Profile, closed
from paceline.core.params import SamplingParams
from paceline.core.stats import StepStats
from paceline.engine.engine import Delta, Engine
from tests.toy import toy_engine


class Hands:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.time = 100.0

    def __call__(self) -> float:
        return self.time


class SlowSteps:
    """Engines whose steps take a given time by a clock, and a record of who stepped when."""

    def __init__(self) -> None:
        self.hands = Hands()
        self.order: list[str] = []

    def runner(self, label: str, seconds: float) -> EngineRunner:
        engine = toy_engine(enable_prefix_caching=False)
        step = engine.step

        def slow_step() -> list[Delta]:
            self.order.append(label)
            self.hands.time += seconds
            return step()

        return EngineRunner(with_step(engine, slow_step), clock=self.hands)


def with_step(engine: Engine, step: object) -> Engine:
    engine.step = step  # type: ignore[method-assign, assignment]
    return engine


def tasks(count: int) -> list[Task]:
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    return [Task(str(i), "s", [5 + i, 6], params) for i in range(count)]


def test_a_clock_counts_its_own_slices_without_excluded_time() -> None:
    hands = Hands()
    clock = ContestantClock(hands)
    hands.time += 3.0
    clock.pause()
    hands.time += 50.0
    clock.resume()
    assert clock.now() == 3.0
    hands.time += 2.0
    clock.exclude(0.5)
    assert clock.now() == 4.5
    clock.skip_to(4.0)
    assert clock.now() == 4.5
    clock.skip_to(10.0)
    assert clock.now() == 10.0
    hands.time += 1.0
    assert clock.now() == 11.0


def test_times_in_slices_are_those_of_each_alone() -> None:
    """The others' work is on no method's clock, whatever the profile."""
    for profile in (closed(2), Profile("due", None, (0.0, 0.01, 5.0, 5.01))):
        together = SlowSteps()
        runners = {"quick": together.runner("quick", 0.004), "slow": together.runner("slow", 0.05)}
        courses = {label: runner.slices(tasks(4), profile) for label, runner in runners.items()}
        turns = dict(in_slices(courses, random.Random(0)))
        for label, seconds in (("quick", 0.004), ("slow", 0.05)):
            own = alone(SlowSteps().runner(label, seconds).slices(tasks(4), profile))
            assert turns[label].seconds == pytest.approx(own.seconds)
            for mine, expected in zip(turns[label].answers, own.answers, strict=True):
                assert mine.same_as(expected)
                assert mine.times == pytest.approx(expected.times)
                assert mine.e2e_seconds == pytest.approx(expected.e2e_seconds)


def test_slices_are_whole_steps_in_shuffled_order() -> None:
    world = SlowSteps()
    steps = {"quick": 0.004, "slow": 0.05, "third": 0.004}
    runners = {label: world.runner(label, seconds) for label, seconds in steps.items()}
    courses = {label: runner.slices(tasks(8), closed(1)) for label, runner in runners.items()}
    dict(in_slices(courses, random.Random(0)))
    of_a_slice = {label: -(-SLICE_SECONDS // seconds) for label, seconds in steps.items()}
    assert of_a_slice == {"quick": 5, "slow": 1, "third": 5}
    assert world.order.count("quick") == world.order.count("slow") == 8 * 12
    changes = {(before, after) for before, after in pairwise(world.order[:60]) if before != after}
    assert len(changes) == 6, "each follows each of the others"


def passed(rows: int, seconds: float, context: int = 100) -> StepStats:
    return StepStats(rows=rows, forward_time=seconds, attended=rows * context, draft_time=0.030)


def waits(*seconds: float) -> FloatArray:
    """How long each thread waited for a core in a step."""
    return np.array(seconds)


def test_a_disturbed_pass_counts_as_long_as_usual() -> None:
    disturbances = Disturbances()
    none = waits()
    for _ in range(FEWEST):
        assert disturbances.in_step(passed(4, 0.010), none) == 0.0
    assert disturbances.in_step(passed(4, 0.012), none) == 0.0
    assert disturbances.in_step(passed(4, 0.060), none) == pytest.approx(0.050)
    assert disturbances.in_step(passed(5, 0.060), none) == 0.0, "the time of 5 rows is unknown"
    assert disturbances.in_step(passed(4, 0.060, context=4000), none) == 0.0, "nor so long a context"
    for _ in range(40):  # the machine became slower for all
        disturbances.in_step(passed(4, 0.060), none)
    assert disturbances.in_step(passed(4, 0.060), none) == 0.0


def test_waiting_for_a_core_is_excluded_once() -> None:
    disturbances = Disturbances()
    for _ in range(FEWEST):
        assert disturbances.in_step(passed(4, 0.060), waits(0.0, 0.050)) == pytest.approx(0.050)
    assert disturbances.in_step(passed(4, 0.060), waits(0.0, 0.0)) == pytest.approx(0.050)
    assert disturbances.in_step(passed(4, 0.010), waits(0.020, 0.005)) == 0.020, "some of it while drafting"
    assert disturbances.in_step(passed(4, 0.010), waits(9.0)) == pytest.approx(0.040), (
        "no more than there was"
    )
    assert (disturbances.waited() >= 0.0).all()
