"""Cost model of drafter calls: seconds as a sum of five terms, learned from few calls."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from paceline.compiling import compiled
from paceline.control.config import CONFIG
from paceline.control.cost.passes import Float64Array

if TYPE_CHECKING:
    from paceline.core.stats import DraftCall

TERMS = 5  # the call, each request, each level, each node, each token to catch up with


class CallCosts:
    """The costs of one drafter's terms, none below 0: a Kalman filter.

    An observation mostly updates the least certain costs, and not those that it says nothing about. So calls
    of different lengths soon separate the cost per call from the cost per level.
    """

    def __init__(self, plain: float) -> None:
        """`plain`: seconds of a pass without drafts."""
        self._plain = plain
        self._prior = np.diag(np.square(plain * np.array(CONFIG.draft_calls.prior_deviation)))
        self._first: list[float] = []  # seconds of the warm-up calls
        # A drafter that was never called has cost 0, so that it is tried once, but not for a long prompt.
        self._prior_terms = [0.0, 0.0, 0.0, 0.0, CONFIG.draft_calls.catch_up_cost * plain]
        self.terms = self._prior_terms
        self._covariance = self._prior  # [terms, terms] of the error of the costs
        self._slow = 0  # consecutive calls that were much slower than expected

    def _reset(self) -> None:
        """Go back to the prior."""
        self.terms, self._covariance, self._slow = self._prior_terms, self._prior, 0

    @property
    def is_known(self) -> bool:
        """Whether it was ever called."""
        return bool(self._first)

    def observe(self, sizes: Sequence[float], seconds: float) -> None:
        """Update from a call of these sizes, one for each of the TERMS."""
        config = CONFIG.draft_calls
        call_sizes, is_warm_up = np.array(sizes, np.float64), len(self._first) < config.warm_up_calls
        if is_warm_up:
            is_fastest = seconds < min(self._first, default=math.inf)
            self._first.append(seconds)
            if not is_fastest:
                return
            self._reset()
        error = seconds - sum([size * cost for size, cost in zip(sizes, self.terms, strict=True)])
        noise = config.noise * self._plain * (config.slow_noise if error > 0.0 else 1.0)
        variance = _variance(self._covariance, call_sizes) + noise * noise
        max_error = config.max_deviations * math.sqrt(variance)
        self._slow = self._slow + 1 if error > max_error and not is_warm_up else 0
        if self._slow == config.slow_calls:  # it was not preempted, it has become slower
            self._covariance = self._prior
        if 0 < self._slow < config.slow_calls:
            error = min(error, max_error)
        filtered = np.array(self.terms), self._covariance
        costs, self._covariance = _update(*filtered, self._prior, call_sizes, error, noise, config.drift)
        self.terms = costs.tolist()

    def fade(self) -> None:
        """Lower the costs a little."""
        self.terms = [CONFIG.draft_calls.idle_fade * cost for cost in self.terms]

    def facts(self) -> list[float]:
        """The costs in units of plain passes, which hold on another machine too."""
        return [cost / self._plain for cost in self.terms]

    def begin_with(self, facts: Any) -> None:
        """Start from these facts. ValueError or TypeError if they make no sense."""
        config = CONFIG.draft_calls
        passes = np.array([float(cost) for cost in facts])
        if len(passes) != TERMS or not all(0.0 <= cost < 100.0 for cost in passes):
            raise ValueError(f"a draft does not cost {facts} passes")
        self._reset()
        min_deviation = config.min_deviation * np.array(config.prior_deviation)
        deviation = config.restored_deviation * passes + min_deviation
        self._covariance = np.diag(np.square(self._plain * deviation))
        self.terms, self._first = (self._plain * passes).tolist(), [0.0] * config.warm_up_calls


class DraftCosts:
    """The costs of several drafters."""

    def __init__(self, drafters: Iterable[str], plain: float) -> None:
        """`plain`: seconds of a pass without drafts."""
        self._drafters = {name: CallCosts(plain) for name in drafters}

    def knows(self, drafter: str) -> bool:
        """Whether it is one of these drafters."""
        return drafter in self._drafters

    def seconds(self, drafter: str, requests: int, levels: int, nodes: int) -> float:
        """Seconds of a call of these sizes with nothing to catch up with; 0 for no request."""
        call, request, level, node, _ = self.terms(drafter)
        return (call if requests else 0.0) + request * requests + level * levels + node * nodes

    def terms(self, drafter: str) -> list[float]:
        """Seconds of each of the TERMS."""
        return self._drafters[drafter].terms

    def observe(self, call: DraftCall, catch_up: int) -> None:
        """Update from a call that had this many tokens to catch up with."""
        sizes = (1.0, call.requests, call.levels, call.nodes, catch_up)
        self._drafters[call.drafter].observe(sizes, call.seconds)

    def fade(self, drafters: Iterable[str]) -> None:
        """Lower the costs of unused drafters, so that none stays too expensive to be tried."""
        for name in drafters:
            self._drafters[name].fade()

    def facts(self) -> dict[str, list[float]]:
        """The costs of drafters that were called, as JSON values."""
        return {name: costs.facts() for name, costs in self._drafters.items() if costs.is_known}

    def begin_with(self, facts: Mapping[str, Any]) -> None:
        """Start from these facts. ValueError or TypeError if they make no sense."""
        for name in self._drafters.keys() & facts.keys():
            self._drafters[name].begin_with(facts[name])


@compiled
def _variance(covariance: Float64Array, sizes: Float64Array) -> float:
    """The variance of the sum of costs with this covariance, in calls of these sizes."""
    variance = 0.0
    for row, size in enumerate(sizes):
        for column, other in enumerate(sizes):
            variance += size * covariance[row, column] * other
    return variance


@compiled
def _update(
    costs: Float64Array,
    covariance: Float64Array,
    prior: Float64Array,
    sizes: Float64Array,
    error: float,
    noise: float,
    drift: float,
) -> tuple[Float64Array, Float64Array]:
    """The Kalman update of the costs and of their covariance, which drifts back to the `prior`: a call took
    `error` seconds more than expected, `noise` of it by chance."""
    terms = len(costs)
    variance = _variance(covariance, sizes) + noise * noise
    spread, costs, covariance = np.zeros(terms), costs.copy(), covariance.copy()
    for row in range(terms):
        for column in range(terms):
            spread[row] += covariance[row, column] * sizes[column]
    for row in range(terms):
        costs[row] = max(costs[row] + spread[row] / variance * error, 0.0)
        for column in range(terms):
            covariance[row, column] -= spread[row] * spread[column] / variance
            covariance[row, column] += drift * (prior[row, column] - covariance[row, column])
    return costs, covariance
