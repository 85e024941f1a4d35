"""Seconds of passes on the device, by plan, number of requests and context length."""

from __future__ import annotations

import math

from paceline.control.config import CONFIG
from paceline.core.trees import DraftPlan

Kind = tuple[DraftPlan, int, int]  # of a pass: its plan, and the buckets of its requests and their context


class DevicePassCosts:
    """A moving mean for each kind of pass. A kind that was never seen is estimated from the nearest one."""

    def __init__(self) -> None:
        self._measured: dict[tuple[DraftPlan, int], float] = {}  # at start-up
        self._seen: dict[Kind, tuple[float, int]] = {}  # mean seconds, and of how many passes

    def knows(self, plan: DraftPlan, requests: int, context: int) -> bool:
        """Whether such a pass was ever timed, or one of this many requests at start-up."""
        return (plan, requests) in self._measured or (plan, requests, context) in self._seen

    def max_requests(self, plan: DraftPlan) -> float:
        """The largest batch for which passes by this plan were prepared at start-up."""
        return max((count for other, count in self._measured if other == plan), default=math.inf)

    def expect(self, plan: DraftPlan, requests: int, seconds: float) -> None:
        """Add a measurement of start-up, when nothing else ran."""
        self._measured[plan, requests] = seconds
        self._seen[plan, requests, 0] = seconds, CONFIG.device_passes.measured_weight

    def observe(self, plan: DraftPlan, requests: int, context: int, seconds: float) -> None:
        """Update from a pass; one that took much longer than usual is clipped."""
        config = CONFIG.device_passes
        usual, count = self._seen.get((plan, requests, context), (seconds, 0))
        rate = max(config.rate, 1 / (1 + count))
        mean = usual + rate * (min(seconds, config.max_outlier * usual) - usual)
        self._seen[plan, requests, context] = mean, count + 1

    def seconds(self, plan: DraftPlan, requests: int, context: int) -> float:
        """Of such a pass: the mean, or that of the nearest kind plus their difference at start-up."""
        kind = plan, requests, context
        if kind in self._seen:
            return self._seen[kind][0]
        per_token = CONFIG.device_passes.guess_per_token
        if not self._seen:
            return 1 + per_token * plan.levels

        def distance(other: Kind) -> tuple[float, int, int]:
            other_plan, count, other_context = other
            levels = abs(other_plan.levels - plan.levels)
            return abs(math.log2(count / requests)), abs(other_context - context), levels

        nearest = min(self._seen, key=distance)
        nearest_plan, count, _ = nearest
        known = self._seen[nearest][0]
        here, there = self._measured.get((plan, requests)), self._measured.get((nearest_plan, count))
        if here is not None and there is not None:
            return max(known + here - there, 0.5 * known)
        return known * (1 + per_token * plan.levels) / (1 + per_token * nearest_plan.levels)


def request_bucket(requests: int) -> int:
    """The next power of two: passes are captured in these sizes."""
    return 1 << (requests - 1).bit_length()


def context_bucket(keys: float) -> int:
    """0 up to 4,096 tokens, and one more for every factor of 4."""
    return max(0, math.ceil(math.log(max(keys, 1.0) / 4096, 4)))
