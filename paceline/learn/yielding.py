"""Yielding: a trainer that waits while the server is busy, and takes a stated share of a GPU."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

LOOK_SECONDS = 0.2  # between two looks at the pause file


class Yielding:
    """Asked before every step: waits while it must, and says whether to go on."""

    def __init__(
        self,
        pause: Path | None = None,
        share: float = 1.0,
        end_with_parent: bool = False,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """While the file `pause` exists, no step begins. `share`: of the time that is spent in steps.

        `end_with_parent`: end when the process that started this one has ended.
        """
        self._pause, self._share = pause, share
        self._clock, self._sleep = clock, sleep
        self._parent = os.getppid() if end_with_parent else None
        self._waited = 0.0  # seconds
        self._step_began: float | None = None
        self._stop = threading.Event()

    def now(self) -> float:
        """A clock that stands still while this process waits."""
        return self._clock() - self._waited

    def stop(self) -> None:
        """Take no further step."""
        self._stop.set()

    @property
    def stopped(self) -> bool:
        """Whether no further step is taken."""
        orphaned = self._parent is not None and os.getppid() != self._parent
        return self._stop.is_set() or orphaned

    def may_step(self) -> bool:
        """Wait for the next step; False: there is none."""
        if self._step_began is not None and self._share < 1.0:
            step = self.now() - self._step_began
            self._wait(step * (1 - self._share) / self._share)
        while self._pause is not None and self._pause.exists() and not self.stopped:
            self._wait(LOOK_SECONDS)
        self._step_began = self.now()
        return not self.stopped

    def _wait(self, seconds: float) -> None:
        began = self._clock()
        self._sleep(seconds)
        self._waited += self._clock() - began


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
