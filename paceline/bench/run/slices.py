"""Turns in slices: contestants process the same requests concurrently, some steps each, in turn.

A disturbance of the machine that is longer than a slice then affects all contestants alike. Shorter ones,
within a step, are detected and excluded. Each contestant has a clock that counts only its own work.
"""

from __future__ import annotations

import random
import statistics
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from io import RawIOBase
from pathlib import Path

import numpy as np
import numpy.typing as npt

from paceline.bench.run.turns import Slices, Turn
from paceline.core.stats import StepStats

SLICE_SECONDS = 0.02  # minimum: a slice ends with a step
FEW_ROWS = 32  # passes up to this size are compared only with passes of exactly as many rows
REMEMBERED, FEWEST = 32, 3  # passes per size: how many are remembered, and how many define the usual time
HELD_UP = 1.3  # factor over the usual time from which a pass counts as disturbed
CORE_WAITS = "/proc/self/task/{}/schedstat"  # Linux: time that a thread waited for a core
TEAM = "paceline-cpu"  # prefix of the names of threads that run passes

FloatArray = npt.NDArray[np.float64]


class ContestantClock:
    """Seconds of a contestant's own work."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._began = clock()  # start of this slice
        self._before = 0.0  # in earlier slices

    def now(self) -> float:
        return self._before + self._clock() - self._began

    @property
    def slice_is_over(self) -> bool:
        return self._clock() - self._began >= SLICE_SECONDS

    def pause(self) -> None:
        """Stop until `resume`, while other contestants run."""
        self._before = self.now()

    def resume(self) -> None:
        self._began = self._clock()

    def exclude(self, seconds: float) -> None:
        """Exclude `seconds` of the last ones, which were lost to other programs."""
        self._before -= seconds

    def skip_to(self, moment: float) -> None:
        """Advance to `moment`: nothing happens until then, so there is no wait."""
        self._before += max(0.0, moment - self.now())


class Disturbances:
    """Time that steps lose to other programs and virtual machines; one object for all contestants.

    The system reports how long threads were runnable without a core. Beyond that: contestants share one
    backend, so passes with the same rows and contexts take about the same time, and one that takes much
    longer than the last ones was disturbed, whichever contestant ran it. The time of drafters and of the
    controller is never excluded: a slow step there may well be the contestant's own.
    """

    def __init__(self) -> None:
        self._last: dict[tuple[int, int], deque[float]] = {}  # seconds per row, by rows and context
        current = threading.current_thread()
        team = [thread for thread in threading.enumerate() if thread.name.startswith(TEAM)]
        paths = [Path(CORE_WAITS.format(thread.native_id)) for thread in (current, *team)]
        self._files = [path.open("rb", buffering=0) for path in paths if path.exists()]

    def waited(self) -> FloatArray:
        """Seconds that the pass threads were runnable without a core so far; [threads that report it]."""
        return np.array([_core_wait(file) for file in self._files])

    def in_step(self, stats: StepStats, waits: FloatArray) -> float:
        """Lost seconds of a step; `waits` is how long each thread waited for a core in it."""
        # when one of them has no core, the others soon wait at a barrier
        waited = min(float(np.max(waits, initial=0.0)), stats.total_time)
        if not stats.rows or waited > stats.forward_time:
            return waited
        rows, seconds = stats.rows, stats.forward_time - waited
        size = rows if rows <= FEW_ROWS else -rows.bit_length()
        last = self._last.setdefault((size, (stats.attended // rows).bit_length()), deque(maxlen=REMEMBERED))
        usual = rows * statistics.median(last) if len(last) >= FEWEST else seconds
        last.append(seconds / rows)
        return waited + (seconds - usual if seconds > HELD_UP * usual else 0.0)


def _core_wait(file: RawIOBase) -> float:
    """A thread's wait time by the system; 0 once it has ended."""
    try:
        file.seek(0)
        return 1e-9 * int((file.read(100) or b"").split()[1])
    except OSError:
        return 0.0


def in_slices(courses: Mapping[str, Slices], chance: random.Random) -> Iterator[tuple[str, Turn]]:
    """The turns of all contestants, each with its label when it has ended.

    The order is shuffled in each lap, so that no contestant always follows the same one, whose leftovers in
    the CPU caches may help or hinder.
    """
    going = list(courses)
    while going:
        chance.shuffle(going)
        for label in list(going):
            try:
                next(courses[label])
            except StopIteration as end:
                going.remove(label)
                yield label, end.value


def alone(course: Slices) -> Turn:
    """A turn of one contestant, without others."""
    ((_, turn),) = in_slices({"": course}, random.Random(0))
    return turn
