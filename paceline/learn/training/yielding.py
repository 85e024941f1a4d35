"""Yielding: makes a trainer yield to the server, use a given share of a GPU, and end with its parent.

A server that is busy stops its trainer by SIGSTOP, in the middle of a step, and lets it continue by SIGCONT.
So the trainer need not check the load; it only must not count the time during which it was stopped. On a GPU
it also waits after each step, for longer while requests run: see Activity.
"""

from __future__ import annotations

import ctypes
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from paceline.learn.activity import Activity

TICK_SECONDS = 0.1  # between two ticks of StoppedTime
LOOK_SECONDS = 0.01  # between two checks of whether requests run, while it waits
LATE_SECONDS = 0.5  # after which a tick that has not come means that the process was stopped
SLACK_SECONDS = 1e-3  # by which a wait may end early
LOWEST = 19  # priority, which gives way to every other process
PR_SET_PDEATHSIG = 1  # of prctl


class StoppedTime:
    """The seconds during which this process was stopped or got no core, measured by late ticks."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._ticked, self._stopped = clock(), 0.0

    def tick(self) -> None:
        """Called every TICK_SECONDS while the process runs."""
        now = self._clock()
        self._ticked, self._stopped = now, self._stopped + self._late(now)

    def seconds(self) -> float:
        """The seconds so far, also if no tick has come since the process continued."""
        return self._stopped + self._late(self._clock())

    def watch(self) -> None:
        """Tick from now on, in a separate thread, as long as the process lives."""

        def run() -> None:
            while True:
                self.tick()
                time.sleep(TICK_SECONDS)

        threading.Thread(target=run, name="paceline-learn-ticks", daemon=True).start()

    def _late(self, now: float) -> float:
        # it was stopped between two ticks, on average in the middle
        late = now - self._ticked - TICK_SECONDS / 2
        return late if late > LATE_SECONDS else 0.0


class Yielding:
    """Called before every step: waits while it must, and returns whether to continue."""

    def __init__(
        self,
        share: float = 1.0,
        busy_share: float | None = None,
        activity: Activity | None = None,
        end_with_parent: bool = False,
        stopped_seconds: Callable[[], float] = lambda: 0.0,
        finish: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """`share`: of the time that is spent in steps. `finish` waits for a device to be done with a step.

        `busy_share`: the share while `activity` says that requests run; None: the same.

        `stopped_seconds`: how long the process was stopped so far, see StoppedTime.

        `end_with_parent`: end when the process that started this one has ended.
        """
        self._share, self._finish = share, finish
        self._busy_share, self._activity = busy_share or share, activity
        if activity is not None:
            activity.end_work()  # it loads, which is not work of the device
        self._clock, self._sleep = clock, sleep
        self._stopped_seconds = stopped_seconds
        self._parent = os.getppid() if end_with_parent else None
        if end_with_parent:
            _end_with_parent()
            with suppress(OSError):  # it leads a session, and so a group, already
                os.setpgid(0, 0)  # signals to it reach what it starts, and nothing of its parent
        self._waited = 0.0  # seconds
        self._step_began = 0.0
        self._steps = 0  # steps that begin_step has allowed
        self._stop = threading.Event()

    def now(self) -> float:
        """A clock that stands still while this process waits or is stopped."""
        return self._clock() - self._waited - self._stopped_seconds()

    def stop(self) -> None:
        """Take no further step."""
        self._stop.set()

    @property
    def stopped(self) -> bool:
        """Whether no further step is taken."""
        orphaned = self._parent is not None and os.getppid() != self._parent
        return self._stop.is_set() or orphaned

    def begin_step(self) -> bool:
        """Wait for the next step; False if there is none. The first one loads kernels and does not count."""
        if self._steps > 1 and min(self._share, self._busy_share) < 1.0:
            self._finish()
            ended = self.now()
            self._rest(ended, ended - self._step_began)
            self._waited += self.now() - ended
        if self._activity is not None:
            self._activity.begin_work()
        self._step_began = self.now()
        self._steps += 1
        return not self.stopped

    def _rest(self, ended: float, busy: float) -> None:
        """Wait after a step that took `busy` seconds, until the share of the time is not exceeded.

        The share is of the time during which it is not stopped, so that stopping it lowers its use.
        """
        activity, most = self._activity, LOOK_SECONDS
        if activity is None:
            most = math.inf
        else:
            activity.end_work(busy)
        while not self.stopped:
            share = self._share if activity is None or activity.is_pause() else self._busy_share
            left = ended + busy * (1 - share) / share - self.now()
            if left <= SLACK_SECONDS:
                break
            self._sleep(min(left, most))


def lower_priority(nice: int = LOWEST) -> None:
    """Let other processes on this machine go first; at the lowest priority, use only idle time."""
    os.nice(nice)
    if nice >= LOWEST and sys.platform == "linux":
        with suppress(OSError):  # not allowed here: then by its priority alone
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))


@contextmanager
def stopped_by_signals(yielding: Yielding) -> Iterator[None]:
    """A context in which SIGTERM and SIGINT stop the training after the present step."""
    numbers = (signal.SIGTERM, signal.SIGINT)
    before = [signal.signal(number, lambda *_: yielding.stop()) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def _end_with_parent() -> None:
    """Let the kernel kill this process when its parent ends, even while it is stopped. On Linux only."""
    if sys.platform == "linux":
        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
