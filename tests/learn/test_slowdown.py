"""What a trainer costs the server beside it, and how much it may work therefore."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from paceline.core.stats import StepStats
from paceline.learn.slowdown import FIRST_SHARE, MAX_LOSS, MAX_SHARE, Slowdown


@dataclass
class Server:
    """A clock, and an engine that steps."""

    now: float = 0.0

    def __post_init__(self) -> None:
        self.slowdown = Slowdown(clock=lambda: self.now)

    def steps(self, working: bool, seconds: float, gap: float = 0.0, rows: int = 4, number: int = 40) -> None:
        """Steps of one request, with a gap before each."""
        for _ in range(number):
            self.now += gap + seconds
            stats = StepStats(requests=1, running=1, rows=rows, forward_time=seconds, disturbed=working)
            self.slowdown.step(stats, ())


def test_a_trainer_works_as_much_as_keeps_tokens_per_second() -> None:
    server = Server()
    slowdown = server.slowdown
    assert slowdown.ratio() is None
    assert slowdown.share() == FIRST_SHARE
    server.steps(False, 0.10)
    server.steps(True, 0.10, gap=0.01)  # the steps themselves are not slower, but their starts are late
    server.steps(True, 5.0, rows=9)  # of a size that never ran without the trainer
    assert slowdown.ratio() == pytest.approx(1.1)
    assert slowdown.share() * (slowdown.ratio() - 1) == pytest.approx(MAX_LOSS)
    worked = [slowdown.may_work(1000 + tick / 100) for tick in range(1000)]
    assert sum(worked) / len(worked) == pytest.approx(0.2, abs=0.02)
    server.steps(True, 0.10, number=20_000)  # the latest count
    assert slowdown.ratio() < 1.001
    assert slowdown.share() == MAX_SHARE


def test_the_cost_of_a_trainer_is_that_of_mean_steps_and_leaves_out_what_is_no_step() -> None:
    server = Server()
    server.steps(False, 0.10)
    server.steps(True, 0.10, number=35)
    server.steps(True, 1.1, number=5)  # one step in eight waits: the others are as they were
    assert server.slowdown.ratio() == pytest.approx(1 + 5 / 40 * 10)
    step = StepStats(requests=1, rows=4, forward_time=0.1, disturbed=True)
    server.slowdown.step(replace(step, running=0), ())  # the last request
    server.now += 1000  # no request runs
    server.slowdown.step(replace(step, running=1), ())
    assert server.slowdown.ratio() < 1 + 5 / 40 * 10


def test_a_costly_trainer_still_works_long_enough_to_be_measured() -> None:
    server = Server()
    server.steps(False, 0.1)
    server.steps(True, 1.1)  # ten times as slow, so that its share is 0.2 %
    worked = [server.slowdown.may_work(tick / 40) for tick in range(40_000)]
    assert sum(worked) / len(worked) == pytest.approx(MAX_LOSS / 10, rel=0.1)
    first = worked.index(True)
    assert worked[first : first + 2] == [True, True]
