"""Turns in slices: contestants run the same requests at once, each for some steps, then the next.

What disturbs a machine for longer than a slice then disturbs all alike. What disturbs a single step is
found and left out. Each contestant has a clock of its own, which counts nothing but its own work.
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

SLICE_SECONDS = 0.02  # at least: a slice ends with a step
FEW_ROWS = 32  # passes of up to so many are compared with those of just as many
REMEMBERED, FEWEST = 32, 3  # passes of each size: the last ones, and how many tell what is usual
HELD_UP = 1.3  # times as long as usual
CORE_WAITS = "/proc/self/task/{}/schedstat"  # of Linux
TEAM = "paceline-cpu"  # how the names of threads begin that run passes

FloatArray = npt.NDArray[np.float64]


class OwnClock:
    """Seconds of a contestant's own work."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._began = clock()  # of this slice
        self._before = 0.0  # in earlier ones

    def now(self) -> float:
        return self._before + self._clock() - self._began

    @property
    def slice_is_over(self) -> bool:
        return self._clock() - self._began >= SLICE_SECONDS

    def pause(self) -> None:
        """Others have their slices until `go_on`."""
        self._before = self.now()

    def go_on(self) -> None:
        self._began = self._clock()

    def leave_out(self, seconds: float) -> None:
        """So many of the last seconds were not the contestant's own."""
        self._before -= seconds

    def skip_to(self, moment: float) -> None:
        """Nothing happens until then, so nobody has to wait for it."""
        self._before += max(0.0, moment - self.now())


class Disturbances:
    """What steps lose to other programs and other guests of the machine; one for all contestants.

    The system tells how long threads were ready and had no core. For the rest: contestants share one
    backend, so passes over as many rows and as long contexts take about as long whoever makes them, and one
    that takes much longer than the last ones was held up. Whom that hits is chance. The time of drafters
    and of the controller is never touched: there a slow step may well be the contestant's own.
    """

    def __init__(self) -> None:
        self._last: dict[tuple[int, int], deque[float]] = {}  # seconds a row, by rows and context
        current = threading.current_thread()
        team = [thread for thread in threading.enumerate() if thread.name.startswith(TEAM)]
        paths = [Path(CORE_WAITS.format(thread.native_id)) for thread in (current, *team)]
        self._files = [path.open("rb", buffering=0) for path in paths if path.exists()]

    def waited(self) -> FloatArray:
        """Seconds that threads of passes have been ready and had no core, so far; [threads that tell it]."""
        return np.array([_core_wait(file) for file in self._files])

    def in_step(self, stats: StepStats, waits: FloatArray) -> float:
        """How much of a step's time was lost, with what each thread waited for a core in it."""
        # when one of them has no core, the others soon stand at a barrier
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
    """What the system says of a thread; 0 once it has ended."""
    try:
        file.seek(0)
        return 1e-9 * int((file.read(100) or b"").split()[1])
    except OSError:
        return 0.0


def in_slices(courses: Mapping[str, Slices], chance: random.Random) -> Iterator[tuple[str, Turn]]:
    """The turns of all contestants, each with its label when it has ended.

    The order changes by chance from lap to lap, so that nobody always follows the same one: what it leaves
    in the processor's caches may help or hinder.
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
    """A turn of one contestant, by itself."""
    ((_, turn),) = in_slices({"": course}, random.Random(0))
    return turn
