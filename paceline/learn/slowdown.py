"""Slowdown: how much a trainer slows the server's steps down, and the share of the time that it may work.

A trainer at the lowest priority still takes caches and memory bandwidth. How much that costs depends on the
machine, so it is measured: while requests run, the trainer works and is stopped in turns, and steps of the
same size are compared. Their means are: on few cores most steps are not disturbed, and some wait for long.
The trainer works for as large a share of the time as keeps the loss below MAX_LOSS.
"""

from __future__ import annotations

import statistics
import threading
from collections import deque
from collections.abc import Mapping, Sequence

from paceline.core.request import Request
from paceline.core.stats import StepStats
from paceline.engine.output_processor import Delta

MAX_LOSS = 0.02  # of the server's speed; the targets are 0.03 on a GPU, 0.05 with one client on two cores
MAX_SHARE = 0.9  # of the time with requests: the rest is needed to compare
FIRST_SHARE = 0.5  # until the cost is known
MIN_STEPS, MAX_STEPS = 16, 512  # of one size that are compared, the latest ones
MAX_REQUESTS = 8  # with more the trainer waits anyway
FRESH_STEPS = 32  # new steps until the ratio is computed again: that takes milliseconds
CYCLE_SECONDS = 2.0  # one period of work and one of being stopped, together

Kind = tuple[bool, int, int]  # of a step: whether the trainer works, requests, rows


class Slowdown:
    """An Observer of the engine that compares steps beside a trainer with steps without one."""

    def __init__(self) -> None:
        self.working = False  # the trainer, now
        self._lock = threading.Lock()
        self._ratio: float | None = None
        self._fresh = 0  # steps since the ratio was computed
        self._seconds: dict[Kind, deque[float]] = {}  # of steps

    def step(self, stats: StepStats, deltas: Sequence[Delta]) -> None:
        if stats.failed or stats.prefill_tokens or not 0 < stats.requests <= MAX_REQUESTS:
            return
        with self._lock:
            kind = (self.working, stats.requests, stats.rows)
            self._seconds.setdefault(kind, deque(maxlen=MAX_STEPS)).append(stats.total_time)
            self._fresh += 1

    def aborted(self, requests: Sequence[Request]) -> None:
        return

    def ratio(self) -> float | None:
        """Seconds of a step beside a trainer at work, over those of one without; None if not known yet."""
        if self._fresh >= FRESH_STEPS:
            with self._lock:
                self._fresh = 0
                steps = {kind: list(seconds) for kind, seconds in self._seconds.items()}
            self._ratio = self._compare(steps)
        return self._ratio

    def _compare(self, steps: Mapping[Kind, Sequence[float]]) -> float | None:
        total = weight = 0.0
        for requests, rows in {kind[1:] for kind in steps}:
            alone, beside = (steps.get((working, requests, rows), []) for working in (False, True))
            number = min(len(alone), len(beside))
            if number >= MIN_STEPS and (mean := statistics.fmean(alone)) > 0:
                total += number * statistics.fmean(beside) / mean
                weight += number
        return total / weight if weight else None

    def share(self) -> float:
        """The share of the time with running requests in which the trainer may work."""
        ratio = self.ratio()
        if ratio is None:
            return FIRST_SHARE
        return MAX_SHARE if ratio <= 1 else min(MAX_SHARE, MAX_LOSS / (ratio - 1))

    def may_work(self, now: float) -> bool:
        """Whether this second of the clock belongs to the trainer while requests run."""
        return now % CYCLE_SECONDS < self.share() * CYCLE_SECONDS
