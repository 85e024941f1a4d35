"""StepTurns: runs the steps of several engines in one process one at a time.

So each step has all cores, or the whole GPU. Two passes at once would slow each other, and threads that spin
at barriers would wait for threads that have no core. Busy engines get equal time, however long their steps
take, by start-time fair queueing (Goyal, Vin and Cheng, 1996). A step's start tag is the virtual time at
which its engine's last step ended, or the current virtual time if the engine was idle. The lowest start tag
goes first.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


class StepTurns:
    """Lets one engine step at a time."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._changed = threading.Condition()
        self._waiting: list[Turn] = []
        self._running: Turn | None = None
        self._virtual_time = 0.0  # start tag of the last step that began

    def join(self) -> Turn:
        """The turn of one more engine: a context for each of its steps."""
        return Turn(self)

    def acquire(self, turn: Turn) -> None:
        """Wait until no other engine steps and it is this one's turn."""
        with self._changed:
            turn.start = max(turn.end, self._virtual_time)
            self._waiting.append(turn)
            while self._running is not None or turn is not min(self._waiting, key=lambda each: each.start):
                self._changed.wait()
            self._waiting.remove(turn)
            self._running = turn
            self._virtual_time = turn.start
            turn.began = self._clock()

    def release(self, turn: Turn) -> None:
        """End the step."""
        with self._changed:
            turn.end = turn.start + self._clock() - turn.began
            self._running = None
            self._changed.notify_all()


class Turn:
    """One engine's turn. Enter it for a step; other engines wait until it is left."""

    def __init__(self, turns: StepTurns) -> None:
        self._turns = turns
        self.start = 0.0  # seconds of virtual time at which its step may start
        self.end = 0.0  # and at which its last step ended
        self.began = 0.0  # time at which its step began

    def __enter__(self) -> None:
        self._turns.acquire(self)

    def __exit__(self, *_: object) -> None:
        self._turns.release(self)
