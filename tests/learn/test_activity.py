"""A trainer on the server's GPU: it works in the pauses between requests, and little while they run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from paceline.core.stats import StepStats
from paceline.learn.activity import PAUSE_SECONDS, Activity, new_activity
from paceline.learn.training.yielding import Yielding

SHARE, BUSY_SHARE, STEP = 0.1, 0.01, 0.01


@dataclass
class Machine:
    """A clock, a server whose requests run at times, and a trainer whose steps take STEP seconds."""

    now: float = 1000.0
    runs: Callable[[float], bool] = lambda now: False  # whether a request runs at this time
    steps: list[float] = field(default_factory=list)  # when they began

    def sleep(self, seconds: float) -> None:
        """Time passes in milliseconds, and the server says what it does."""
        until = self.now + seconds
        while self.now < until:
            self.now = min(until, self.now + 0.001)
            self.activity.note_running(int(self.runs(self.now)))

    def train(self, seconds: float, share: float = SHARE) -> float:
        """The share of the time in which the trainer computed."""
        yielding = Yielding(share, BUSY_SHARE, self.activity, clock=lambda: self.now, sleep=self.sleep)
        yielding.begin_step()  # loads kernels
        began, self.steps = self.now, []
        while self.now < began + seconds and yielding.begin_step():
            self.steps.append(self.now)
            self.sleep(STEP)
        return len(self.steps) * STEP / (self.now - began)


@pytest.fixture
def machine() -> Iterator[Machine]:
    made = Machine()
    with new_activity(lambda: made.now) as made.activity:
        yield made


def test_without_requests_it_takes_its_share(machine: Machine) -> None:
    assert machine.train(30) == pytest.approx(SHARE, rel=0.02)


def test_a_client_that_sends_its_next_request_at_once_leaves_it_a_hundredth(machine: Machine) -> None:
    machine.runs = lambda now: now % 0.064 > 0.004  # 4 ms between two of them
    assert machine.train(60) == pytest.approx(BUSY_SHARE, rel=0.05)


def test_a_trainer_that_may_take_all_of_an_idle_gpu_gives_way_to_requests_too(machine: Machine) -> None:
    assert machine.train(10, share=1.0) == pytest.approx(1.0, rel=0.02)
    machine.runs = lambda now: True
    assert machine.train(60, share=1.0) == pytest.approx(BUSY_SHARE, rel=0.05)


def test_three_requests_a_second_leave_it_most_of_its_share_and_hardly_meet_its_steps(
    machine: Machine,
) -> None:
    machine.runs = lambda now: now % 0.333 < 0.064
    assert 0.6 * SHARE < machine.train(60) <= SHARE
    beside = sum(machine.runs(began) for began in machine.steps)
    assert beside / len(machine.steps) < 0.02  # by chance it would be a fifth
    requests = {(began + STEP) // 0.333 for began in machine.steps if machine.runs(began + STEP)}
    assert len(requests) / (60 / 0.333) < 0.15  # came during a step, and waited for its rest


def test_it_continues_within_one_check_after_the_last_request(machine: Machine) -> None:
    machine.runs = lambda now: now < 1029.5
    machine.train(31)
    first = next(began for began in machine.steps if began >= 1029.5)
    assert first < 1029.5 + PAUSE_SECONDS + 0.02


def test_each_side_reads_what_the_other_one_writes(tmp_path: Path) -> None:
    now = 100.0
    with new_activity(lambda: now) as server:
        trainer = Activity(server.path, lambda: now)
        replica = Activity(server.path, lambda: now, readonly=True)
        assert trainer.is_pause()
        assert not replica.is_working(1000)
        server.note_arrival()
        assert not trainer.is_pause()
        server.step(StepStats(running=1), ())
        now += 10
        assert not trainer.is_pause()
        server.note_running(0)  # the request was aborted: there was no other step
        now += 2 * PAUSE_SECONDS
        assert trainer.is_pause()
        trainer.begin_work()
        now += 1
        assert replica.is_working(0.1)
        server.note_stopped(True)  # in the middle of a step
        now += 1
        assert not replica.is_working(0.5)
        assert replica.is_working(1.5)
        server.note_stopped(True)  # said again at each look
        assert not replica.is_working(0.5)
        server.note_stopped(False)
        assert replica.is_working(0.1)
        trainer.end_work(0.25)
        now += 1
        assert not replica.is_working(0.5)
        assert server.computed == 0.25
        with pytest.raises(TypeError):
            replica.begin_work()
    assert not server.path.exists()
    with pytest.raises(FileNotFoundError):
        Activity(server.path)
    for size in (0, 24):  # another file of this name, on a replica's machine
        (tmp_path / "short").write_bytes(bytes(size))
        with pytest.raises(OSError, match="fewer than 40 bytes"):
            Activity(tmp_path / "short", readonly=True)
