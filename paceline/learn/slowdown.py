"""Slowdown: how much a trainer slows the server down, and the share of the time that it may work on a CPU.

A trainer at the lowest priority still takes caches and memory bandwidth. How much that costs depends on the
machine, so it is measured: while requests run, the trainer alternately works and is stopped, and decode steps
of the same size are compared. The time of a step is counted from the end of the previous one, so that the
time between two steps counts too. Means are compared, because on few cores most steps are undisturbed and
some wait for long. The trainer gets the largest share of the time that keeps the loss below a limit. On a GPU
it limits itself (see Activity), and the cost is only shown.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from paceline.core.request import Request
from paceline.core.stats import StepStats
from paceline.engine.output_processor import Delta

MAX_LOSS = 0.02  # of the tokens per second; the targets are 0.03 on a GPU, 0.05 with one client on two cores
MAX_SHARE = 0.9  # of the time with requests: the rest is needed to compare
FIRST_SHARE = 0.25  # until the cost is known
MIN_STEPS = 16  # of one size that are compared
MAX_REQUESTS = 8  # with more the trainer waits anyway
# of one side; what is beyond both lets all steps so far count half, so that the latest decide
WINDOW_SECONDS, WINDOW_STEPS = 60.0, 512
# one period of work and one of rest together: if periods were as long as requests, p95 latency would show the
# requests that fall into a period of work
CYCLE_SECONDS = 0.5
MIN_WORK_SECONDS = 0.05  # of a period of work; shorter than two checks of the load, it would be missed

Size = tuple[int, int]  # of a step: requests, rows


@dataclass
class _Side:
    """Decode steps beside the trainer, or without it: by size, how many and their seconds."""

    steps: dict[Size, list[float]] = field(default_factory=dict)
    count: float = 0.0  # of all sizes
    seconds: float = 0.0

    def add(self, size: Size, seconds: float) -> None:
        sums = self.steps.setdefault(size, [0.0, 0.0])
        sums[0] += 1
        sums[1] += seconds
        self.count += 1
        self.seconds += seconds
        if self.seconds > WINDOW_SECONDS and self.count > WINDOW_STEPS:
            self.count, self.seconds = self.count / 2, self.seconds / 2
            self.steps = {size: [count / 2, total / 2] for size, (count, total) in self.steps.items()}


class Slowdown:
    """An Observer of the engine that compares steps beside a trainer with steps without one."""

    def __init__(
        self,
        max_loss: float = MAX_LOSS,
        device: str = "cpu",
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`max_loss`: the part of the server's tokens per second that a trainer on this device may cost."""
        self._max_loss, self._clock = max_loss, clock
        self._limits_itself = device != "cpu"
        self._lock = threading.Lock()
        self._step_ended: float | None = None  # the last one; None: the engine has been idle since
        self._alone, self._beside = _Side(), _Side()

    def step(self, stats: StepStats, deltas: Sequence[Delta]) -> None:
        now, before = self._clock(), self._step_ended
        # a replica's step does not tell running requests: there its own time counts
        self._step_ended = now if stats.running else None
        if stats.failed or stats.prefill_tokens or not 0 < stats.requests <= MAX_REQUESTS:
            return
        seconds = stats.total_time if before is None else now - before
        with self._lock:
            (self._beside if stats.disturbed else self._alone).add((stats.requests, stats.rows), seconds)

    def aborted(self, requests: Sequence[Request]) -> None:
        return

    def ratio(self) -> float | None:
        """Seconds of a step beside a trainer at work, over those of one without; None if not known yet."""
        alone = beside = 0.0
        with self._lock:
            for size, (count, seconds) in self._alone.steps.items():
                other_count, other_seconds = self._beside.steps.get(size, (0.0, 0.0))
                if (weight := min(count, other_count)) >= MIN_STEPS:
                    alone += weight * seconds / count
                    beside += weight * other_seconds / other_count
        return beside / alone if alone > 0 else None

    def share(self) -> float:
        """The share of the time with running requests in which the trainer may work."""
        ratio = self.ratio()
        if ratio is None:
            return FIRST_SHARE
        return MAX_SHARE if ratio <= 1 else min(MAX_SHARE, self._max_loss / (ratio - 1))

    def may_work(self, now: float) -> bool:
        """Whether this second of the clock belongs to the trainer while requests run."""
        if self._limits_itself:
            return True
        share = self.share()
        cycle = max(CYCLE_SECONDS, MIN_WORK_SECONDS / share)
        return now % cycle < share * cycle
