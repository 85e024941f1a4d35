"""Seconds of passes on the device, by plan, number of requests and context length.

The estimate is the time measured at start-up, when nothing else ran and contexts were short, plus two
numbers (`Drift`): what passes of all plans take longer under this load, and how this plan differs from that.
A Kalman filter updates both, the more uncertain one more. So the estimates of plans that are not used follow
the traffic too. Passes are only noted when they end, and counted together when an estimate is asked for.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

from paceline.control.config import CONFIG
from paceline.core.trees import PLAIN, DraftPlan

Load = tuple[int, int]  # the buckets of requests, and of their context
Kind = tuple[DraftPlan, int, int]  # of a pass: its plan, and its load


@dataclass
class Drift:
    """A time, in plain passes, learned from noisy observations: a Kalman filter with one state."""

    value: float = 0.0
    variance: float = 0.0

    def update(self, error: float, total_variance: float) -> None:
        """Correct this number by its share of an error: its variance over that of all sources."""
        gain = self.variance / total_variance
        self.value += gain * error
        self.variance *= 1.0 - gain


class DevicePassCosts:
    """What was measured at start-up and learned since then. Without a measurement, a moving mean for each
    kind of pass; a kind that was never seen is estimated from the nearest one."""

    def __init__(self) -> None:
        self._measured: dict[tuple[DraftPlan, int], float] = {}  # at start-up
        self._max_requests: dict[DraftPlan, int] = {}  # of those measurements
        self._seen: dict[Kind, tuple[float, int]] = {}  # mean seconds, and of how many passes
        self._drifts: dict[Load, Drift] = {}  # of all plans
        self._own_drifts: dict[Load, dict[DraftPlan, Drift]] = {}  # of one plan, added to that of all
        # error of a plan's last passes, in plain passes, if they were outside of the validation gate
        self._rejected: dict[Load, dict[DraftPlan, float]] = {}
        self._guesses: dict[Load, Drift] = {}  # of loads without passes, until the next pass is counted
        self._new: tuple[Kind, list[float]] = ((PLAIN, 1, 0), [])  # seconds of the last passes, not counted
        self._catch_up: float | None = None  # seconds per token, measured at start-up

    def knows(self, plan: DraftPlan, requests: int, context: int) -> bool:
        """Whether such a pass was ever timed, or one of this many requests at start-up."""
        self._count_new()
        return (plan, requests) in self._measured or (plan, requests, context) in self._seen

    def max_requests(self, plan: DraftPlan) -> float:
        """The largest batch for which passes by this plan were prepared at start-up."""
        return self._max_requests.get(plan, math.inf)

    def expect(self, plan: DraftPlan, requests: int, seconds: float) -> None:
        """Add a measurement of start-up, when nothing else ran."""
        self._guesses = {}
        self._measured[plan, requests] = seconds
        self._max_requests[plan] = max(requests, self._max_requests.get(plan, 0))

    def observe(self, plan: DraftPlan, requests: int, context: int, seconds: float) -> None:
        """Note a pass."""
        kind = plan, requests, context
        if self._new[0] != kind or len(self._new[1]) == CONFIG.device_planner.hold:
            self._count_new()
            self._new = kind, []
        self._new[1].append(seconds)

    def _count_new(self) -> None:
        """Update from the median of the last passes, all of one kind: single slow ones do not count."""
        (kind, passes), config = self._new, CONFIG.device_passes
        if not passes:
            return
        self._new, self._guesses = (kind, []), {}
        middle, number = median(passes), len(passes)
        usual, count = self._seen.get(kind, (middle, 0))
        if kind[:2] in self._measured:
            usual = self.seconds(*kind)
        middle = min(middle, config.max_outlier * usual)
        if kind[:2] not in self._measured or self._observe_drift(kind, middle - usual, number):
            rate = max(1.0 - (1.0 - config.rate) ** number, number / (number + count))
            self._seen[kind] = usual + rate * (middle - usual), count + number

    def _observe_drift(self, kind: Kind, seconds: float, number: int) -> bool:
        """Update the shared drift and this plan's own from passes that took `seconds` more than expected.

        False if they are outside of the validation gate, and so do not count: they may have waited for
        another process. The gate widens with every such pass, so that what passes take from now on is learned
        at last. If passes by another plan come next and are inside, the rejected ones did not wait: their
        error becomes uncertainty about their plan alone, and its next passes count.
        """
        config, (plan, requests, context) = CONFIG.device_passes, kind
        load, error = (requests, context), seconds / self._unit(requests)
        shared = self._drifts.setdefault(load, self._shared_drift(requests, context))
        plans, rejected = self._own_drifts.setdefault(load, {}), self._rejected.setdefault(load, {})
        own = plans.setdefault(plan, Drift(self._own_drift(plan, load), config.own_deviation**2))
        shared.variance += number * config.drift**2
        own.variance += number * config.own_drift**2
        total = shared.variance + own.variance + config.noise**2 / number
        if error > config.gate * math.sqrt(total):
            rejected[plan] = error
            return False
        rejected.pop(plan, None)
        for other, unexplained in rejected.items():
            plans[other].variance += unexplained**2
        rejected.clear()
        shared.update(error, total)
        own.update(error, total)
        return True

    def _shared_drift(self, requests: int, context: int) -> Drift:
        """What passes of all plans take longer under this load, learned or guessed."""
        load = requests, context
        if load in self._drifts:
            return self._drifts[load]
        if load not in self._guesses:
            self._guesses[load] = self._nearest_drift(requests, context)
        return self._guesses[load]

    def _own_drift(self, plan: DraftPlan, load: Load) -> float:
        """What passes by a plan take longer than those of all plans do. A drafting plan without passes under
        this load differs as the one nearest to it does: what a draft takes on the host is the same for both.
        """
        plans = self._own_drifts.get(load, {})
        if plan in plans:
            return plans[plan].value
        others = [other for other in plans if other.budget and plan.budget]
        nearest = min(others, key=lambda other: abs(other.budget - plan.budget), default=None)
        return 0.0 if nearest is None else plans[nearest].value

    def _nearest_drift(self, requests: int, context: int) -> Drift:
        """The first guess under a load: what was learned under the nearest one, or by an earlier engine."""
        known: dict[Load, float] = {load: drift.value for load, drift in self._drifts.items()}
        for (plan, count, keys), (seconds, _) in () if known else self._seen.items():
            if (plan, count) in self._measured:
                known[count, keys] = (seconds - self._measured[plan, count]) / self._unit(count)

        def distance(load: Load) -> tuple[float, int]:
            return abs(math.log2(load[0] / requests)), abs(load[1] - context)

        value = known[min(known, key=distance)] if known else 0.0
        return Drift(value, CONFIG.device_passes.deviation**2)

    def _unit(self, requests: int) -> float:
        """Seconds of a plain pass at start-up."""
        return self._measured.get((PLAIN, requests), 1e-3)

    def expect_catch_up(self, seconds: float) -> None:
        """Add the seconds per token of a head's catching up, measured at start-up."""
        self._catch_up = seconds

    def catch_up(self) -> float:
        """Seconds per token of a head's catching up, measured or guessed."""
        if self._catch_up is not None:
            return self._catch_up
        return CONFIG.device_passes.catch_up_guess * self.seconds(PLAIN, 1, 0)

    def facts(self) -> dict[str, Any]:
        """What passes in traffic took, as JSON values; start-up times are measured anew."""
        self._count_new()
        seen = [
            [kind[0].label, *kind[1:], self.seconds(*kind), count] for kind, (_, count) in self._seen.items()
        ]
        return {"passes": seen}

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
        self._seen = seen

    def seconds(self, plan: DraftPlan, requests: int, context: int) -> float:
        """Of such a pass: as measured and learned, or the mean, or that of the nearest kind of pass."""
        self._count_new()
        kind = plan, requests, context
        measured = self._measured.get((plan, requests))
        if measured is not None:
            drift = self._shared_drift(requests, context).value + self._own_drift(plan, (requests, context))
            return max(measured + drift * self._unit(requests), 0.5 * measured) if drift else measured
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
        known, (nearest_plan, _, _) = self._seen[nearest][0], nearest
        return known * (1 + per_token * plan.levels) / (1 + per_token * nearest_plan.levels)


def request_bucket(requests: int) -> int:
    """The next power of two: passes are captured in these sizes."""
    return 1 << (requests - 1).bit_length()


def context_bucket(keys: float) -> int:
    """0 up to 4,096 tokens, and one more for every factor of 4."""
    return max(0, math.ceil(math.log(max(keys, 1.0) / 4096, 4)))
