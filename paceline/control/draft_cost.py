"""What a drafter's call costs: a sum of a few terms, because few calls must be enough to know it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from paceline.control.cost import Float64Array, Numbers

if TYPE_CHECKING:
    from paceline.engine.stats import DraftCall

TERMS = 5  # of a call's price: the call, each request, each level, each node, each token to catch up with
# What is thought possible of each, in times of a drafter's first call. What could be a price of levels is
# taken for one: if it is not, short drafts are tried once too often, and not once too seldom.
THINKABLE = np.array((0.3, 0.1, 0.5, 0.05, 0.02))
DRIFT = 0.01  # of that: how far prices may move from one call to the next
SPREAD = 0.15  # of a call's seconds are not explained. So a quick call is believed more than a slow one.
SURPRISE = (
    0.1  # of a plain pass: a call is believed to take so much more than was thought, the next twice that
)
WARM_UP = 2  # calls of a drafter of which the quickest counts: the first ones fill its caches
NEW, SKIPPED = 25, 4  # calls each of which teaches; later one of so many
FADE = 0.998  # what is left of the price of what is not called, after a while


class CallPrices:
    """The terms of one drafter's price, none below 0: a Kalman filter.

    What calls do not tell apart is left as it was thought to be.
    """

    def __init__(self, plain: float) -> None:
        """`plain` seconds are those of a pass without drafts."""
        self.prices = [0.0] * TERMS  # what was never called is thought to cost nothing, so it is tried once
        self._plain = plain
        self._believed = SURPRISE * plain  # seconds by which the next call may be slower than was thought
        self._doubt = np.zeros((TERMS, TERMS))  # covariance of what the prices may be
        self._drift = np.zeros((TERMS, TERMS))  # what a call adds to it
        self._quickest = math.inf  # of the first calls
        self._calls = 0

    def observe(self, sizes: Sequence[float], seconds: float) -> None:
        """Take in a call of these sizes, one for each of the TERMS."""
        self._calls += 1
        if self._calls > NEW and self._calls % SKIPPED:
            return
        if self._calls <= WARM_UP and seconds < self._quickest:
            self._begin(seconds)
        shared = self._doubt @ sizes
        gain = shared / (float(shared @ sizes) + (SPREAD * seconds) ** 2 + 1e-12)
        surprise = seconds - float(np.dot(sizes, self.prices))
        believed = surprise if self._calls <= WARM_UP else min(surprise, self._believed)
        self.prices = np.maximum(self.prices + gain * believed, 0.0).tolist()
        self._doubt = self._doubt - np.outer(gain, shared) + self._drift
        if believed < surprise:  # held up, or quite different from what was thought possible
            self._believed *= 2.0
            self._doubt += np.diag((self._believed * THINKABLE) ** 2)
        else:
            self._believed = SURPRISE * self._plain

    def _begin(self, seconds: float) -> None:
        """Forget what was thought: a call took only so long."""
        self._quickest = seconds
        self.prices = [0.0] * TERMS
        self._doubt = np.diag((seconds * THINKABLE) ** 2)
        self._drift = DRIFT**2 * self._doubt

    def fade(self) -> None:
        """Let the prices sink a little."""
        self.prices = [FADE * price for price in self.prices]

    def facts(self) -> list[list[float]]:
        """What others can begin with, as JSON has it: nothing if there were no calls."""
        return [*self._doubt.tolist(), self.prices] if self._calls else []

    def begin_with(self, facts: Any) -> None:
        """Take in what was learned before. ValueError or TypeError if that makes no sense."""
        known = np.array(facts, dtype=np.float64)
        if known.shape != (TERMS + 1, TERMS) or not np.isfinite(known).all():
            raise ValueError("these are not prices of calls")
        prices: list[float] = known[-1].tolist()
        if not 0.0 <= min(prices) <= max(prices) < 100 * self._plain:
            raise ValueError(f"a draft is not thought to cost {prices} seconds")
        self.prices, self._doubt, self._calls = prices, known[:-1], WARM_UP
        self._drift = np.diag((sum(prices[:4]) * DRIFT * THINKABLE) ** 2)


class DraftCosts:
    """The prices of several drafters."""

    def __init__(self, drafters: Iterable[str], plain: float) -> None:
        """`plain` seconds are those of a pass without drafts."""
        self._drafters = {name: CallPrices(plain) for name in drafters}

    def seconds(self, drafter: str, requests: Numbers, levels: Numbers, nodes: Numbers) -> Float64Array:
        """[...] seconds of calls of these sizes that find all up to date; 0 for those of no request."""
        call, request, level, node, _ = self.prices(drafter)
        count = np.asarray(requests)
        return np.where(count > 0, call, 0.0) + request * count + level * levels + node * nodes

    def prices(self, drafter: str) -> list[float]:
        """Seconds of each of the TERMS."""
        return self._drafters[drafter].prices

    def observe(self, call: DraftCall, late: int) -> None:
        """Take in a call that had so many tokens to catch up with."""
        sizes = (1.0, call.requests, call.levels, call.nodes, late)
        self._drafters[call.drafter].observe(sizes, call.seconds)

    def fade(self, drafters: Iterable[str]) -> None:
        """Let prices of drafters that are not called sink, so that none is too dear to be tried for ever."""
        for name in drafters:
            self._drafters[name].fade()

    def facts(self) -> dict[str, list[list[float]]]:
        """For each drafter that was called what others can begin with, as JSON has it."""
        return {name: facts for name, own in self._drafters.items() if (facts := own.facts())}

    def begin_with(self, facts: Mapping[str, Any]) -> None:
        """Take in what calls cost before. ValueError or TypeError if that makes no sense."""
        for name in self._drafters.keys() & facts.keys():
            self._drafters[name].begin_with(facts[name])
