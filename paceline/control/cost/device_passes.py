"""Seconds of passes on the device, by plan, number of requests and context length."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from paceline.control.config import CONFIG
from paceline.core.trees import PLAIN, DraftPlan

Kind = tuple[DraftPlan, int, int]  # of a pass: its plan, and the buckets of its requests and their context


class DevicePassCosts:
    """A moving mean for each kind of pass. A kind that was never seen is estimated from the nearest one."""

    def __init__(self) -> None:
        self._measured: dict[tuple[DraftPlan, int], float] = {}  # at start-up
        self._max_requests: dict[DraftPlan, int] = {}  # of those measurements
        self._seen: dict[Kind, tuple[float, int]] = {}  # mean seconds, and of how many passes
        self._catch_up_on_device: float | None = None  # seconds per token, measured at start-up
        self._catch_up_on_host: float | None = None  # seconds per token, moving mean

    def knows(self, plan: DraftPlan, requests: int, context: int) -> bool:
        """Whether such a pass was ever timed, or one of this many requests at start-up."""
        return (plan, requests) in self._measured or (plan, requests, context) in self._seen

    def has_seen(self, plan: DraftPlan, requests: int, context: int) -> bool:
        """Whether such a pass was timed among others, not only at start-up."""
        return (plan, requests, context) in self._seen

    def max_requests(self, plan: DraftPlan) -> float:
        """The largest batch for which passes by this plan were prepared at start-up."""
        return self._max_requests.get(plan, math.inf)

    def expect(self, plan: DraftPlan, requests: int, seconds: float) -> None:
        """Add a measurement of start-up, when nothing else ran."""
        self._measured[plan, requests] = seconds
        self._max_requests[plan] = max(requests, self._max_requests.get(plan, 0))

    def observe(self, plan: DraftPlan, requests: int, context: int, seconds: float) -> None:
        """Update from a pass; one that took much longer than usual is clipped."""
        config, usual, count = CONFIG.device_passes, seconds, 0
        if (plan, requests, context) in self._seen:
            usual, count = self._seen[plan, requests, context]
        elif (plan, requests) in self._measured:
            usual, count = self.seconds(plan, requests, context), config.measured_weight
        rate = max(config.rate, 1 / (1 + count))
        mean = usual + rate * (min(seconds, config.max_outlier * usual) - usual)
        self._seen[plan, requests, context] = mean, count + 1

    def expect_catch_up(self, seconds: float) -> None:
        """Add the seconds per token of a head's catching up on the device, measured at start-up."""
        self._catch_up_on_device = seconds

    def observe_catch_up(self, tokens: int, seconds: float) -> None:
        """Update from the seconds in which the host has launched a head's passes over these tokens.

        A pass over few tokens takes the host as long as one over many, and the first may compile: neither
        says what a token costs in a large pass.
        """
        config, known = CONFIG.device_passes, self._catch_up_on_host
        each = seconds / max(tokens, config.catch_up_tokens)
        each = min(each, config.max_catch_up * self._device_catch_up())
        self._catch_up_on_host = each if known is None else known + config.catch_up_rate * (each - known)

    def _device_catch_up(self) -> float:
        """Seconds per token of a head's catching up on the device, measured or guessed."""
        if self._catch_up_on_device is not None:
            return self._catch_up_on_device
        return CONFIG.device_passes.catch_up_guess * self.seconds(PLAIN, 1, 0)

    def catch_up(self) -> float:
        """Seconds per token of a head's catching up: of the device, and of the host, which then launches
        nothing else."""
        device, host = self._device_catch_up(), self._catch_up_on_host
        return device + (device if host is None else host)

    def facts(self) -> dict[str, Any]:
        """What passes in traffic took, as JSON values; start-up times are measured anew."""
        seen = [
            [plan.label, requests, context, seconds, count]
            for (plan, requests, context), (seconds, count) in self._seen.items()
        ]
        return {"passes": seen, "catch_up": self._catch_up_on_host}

    def begin_with(self, facts: Mapping[str, Any], plans: Iterable[DraftPlan]) -> None:
        """Start from these facts, as far as they are about `plans`. KeyError, ValueError or TypeError if they
        make no sense."""
        seen: dict[Kind, tuple[float, int]] = {}
        by_label = {plan.label: plan for plan in plans}
        for label, requests, context, seconds, count in facts["passes"]:
            if not 0.0 < float(seconds) < 1e3 or int(requests) < 1:
                raise ValueError("these are not costs of passes")
            # old times count for little: the machine or the other programs on it may have changed
            weight = min(int(count), CONFIG.device_passes.measured_weight)
            if label in by_label:
                seen[by_label[label], int(requests), int(context)] = float(seconds), weight
        host = facts["catch_up"]
        self._catch_up_on_host = None if host is None else float(host)
        self._seen = seen

    def seconds(self, plan: DraftPlan, requests: int, context: int) -> float:
        """Of such a pass: the mean, or that of the nearest kind plus their difference at start-up.

        At start-up nothing else ran, and contexts were empty. So the time by which the nearest
        kind is slower now is added here too; else each unused plan would look better than those in use.
        """
        kind = plan, requests, context
        if kind in self._seen:
            return self._seen[kind][0]
        per_token = CONFIG.device_passes.guess_per_token
        known_here = self._measured.get((plan, requests))
        if not self._seen:
            return 1 + per_token * plan.levels if known_here is None else known_here

        def distance(other: Kind) -> tuple[float, int, int]:
            other_plan, count, other_context = other
            levels = abs(other_plan.levels - plan.levels)
            return abs(math.log2(count / requests)), abs(other_context - context), levels

        nearest = min(self._seen, key=distance)
        nearest_plan, count, _ = nearest
        known = self._seen[nearest][0]
        known_there = self._measured.get((nearest_plan, count))
        if known_here is not None and known_there is not None:
            return max(known_here + known - known_there, 0.5 * known_here)
        return known * (1 + per_token * plan.levels) / (1 + per_token * nearest_plan.levels)


def request_bucket(requests: int) -> int:
    """The next power of two: passes are captured in these sizes."""
    return 1 << (requests - 1).bit_length()


def context_bucket(keys: float) -> int:
    """0 up to 4,096 tokens, and one more for every factor of 4."""
    return max(0, math.ceil(math.log(max(keys, 1.0) / 4096, 4)))
