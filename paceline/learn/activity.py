"""Activity: a few numbers in shared memory by which a server and its trainer inform each other.

The server writes when a request last ran, so that a trainer on a GPU works in the pauses. The trainer writes
when it computes, so that the server knows which passes it disturbed and for how long it computed. Each number
has one writer at a time, is read and written in less than a microsecond, and needs no lock.
"""

from __future__ import annotations

import math
import mmap
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import NamedTemporaryFile

from paceline.core.request import Request
from paceline.core.stats import StepStats
from paceline.engine.output_processor import Delta

PAUSE_SECONDS = 0.05  # without a running request; a client that sends its next request at once leaves less
SHARED_MEMORY = Path("/dev/shm")  # of Linux; elsewhere the folder for temporary files
NAMES = (
    "ran",  # time at which a request last ran; infinite while one runs
    "began",  # time at which the trainer began to compute, the last time
    "ended",  # time at which it last stopped computing; before `began` while it computes
    "stopped",  # time at which the server has stopped its process; infinite while it may run
    "computed",  # seconds that it has computed so far
)
RAN, BEGAN, ENDED, STOPPED, COMPUTED = range(len(NAMES))
BYTES = 8 * len(NAMES)
Clock = Callable[[], float]  # of the machine: the same in all its processes


class Activity:
    """The numbers in a mapped file. An Observer of the engine at the server."""

    def __init__(self, path: Path, clock: Clock = time.monotonic, readonly: bool = False) -> None:
        """OSError if there is no such file, or a shorter one: see `new_activity`."""
        self.path, self._clock = path, clock
        with path.open("rb" if readonly else "r+b") as file:
            if path.stat().st_size < BYTES:
                raise OSError(f"{path} has fewer than {BYTES} bytes")
            access = mmap.ACCESS_READ if readonly else mmap.ACCESS_WRITE
            self._numbers = memoryview(mmap.mmap(file.fileno(), BYTES, access=access)).cast("d")

    # --- the server ---

    def step(self, stats: StepStats, deltas: Sequence[Delta]) -> None:
        # a replica's step does not tell running requests, but one has just run
        self._numbers[RAN] = math.inf if stats.running else self._clock()

    def aborted(self, requests: Sequence[Request]) -> None:
        return

    def note_arrival(self) -> None:
        """A request has arrived and will run."""
        self._numbers[RAN] = max(self._numbers[RAN], self._clock())

    def note_running(self, running: int) -> None:
        """The number of running requests, also after an abort, which is not a step."""
        if running:
            self._numbers[RAN] = math.inf
        elif math.isinf(self._numbers[RAN]):
            self._numbers[RAN] = self._clock()

    def note_stopped(self, stopped: bool) -> None:
        """The server has stopped the trainer's process, or has let it continue."""
        if stopped != math.isfinite(self._numbers[STOPPED]):
            self._numbers[STOPPED] = self._clock() if stopped else math.inf

    def is_working(self, seconds: float) -> bool:
        """Whether the trainer has computed at any time in the last `seconds`."""
        numbers = self._numbers
        ended = numbers[ENDED] if numbers[ENDED] >= numbers[BEGAN] else math.inf
        return min(ended, numbers[STOPPED]) > self._clock() - seconds

    @property
    def computed(self) -> float:
        """Seconds that trainers have computed since the start; on a CPU this is not known."""
        return self._numbers[COMPUTED]

    # --- the trainer; the server, when it has ended ---

    def begin_work(self) -> None:
        """The trainer computes from now on."""
        self._numbers[BEGAN] = self._clock()

    def end_work(self, computed: float = 0.0) -> None:
        """The trainer has stopped computing, after this many seconds."""
        self._numbers[COMPUTED] += computed
        self._numbers[ENDED] = self._clock()

    def is_pause(self) -> bool:
        """Whether no request has run for PAUSE_SECONDS."""
        return self._clock() - self._numbers[RAN] > PAUSE_SECONDS


@contextmanager
def new_activity(clock: Clock = time.monotonic) -> Iterator[Activity]:
    """A context with an Activity in a new file, which is deleted at the end."""
    folder = SHARED_MEMORY if SHARED_MEMORY.is_dir() else None
    with NamedTemporaryFile(prefix="paceline-activity-", dir=folder) as file:
        file.write(array("d", (-math.inf, -math.inf, -math.inf, math.inf, 0.0)).tobytes())
        file.flush()
        yield Activity(Path(file.name), clock)
