"""What a drafter's call costs: a sum of a few terms, because few calls must be enough to know it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from paceline.control.cost import Float64Array, Numbers

if TYPE_CHECKING:
    from paceline.core.stats import DraftCall

TERMS = 5  # of a call's price: the call, each request, each level, each node, each token to catch up with
# How far from what is thought each of them may lie before anything was seen, in plain passes. What could be
# a price of levels is taken for one: if it is not, short drafts are tried once too often, not too seldom.
UNSURE = (0.3, 0.02, 0.5, 0.005, 0.008)
SURER = 0.5  # of the prices of before: what they may be wrong by, for who begins with them
SETTLED = 0.05  # of what is unsure at first: what may be wrong besides
DRIFT = 0.0005  # how far doubt goes back to what it was at first with each call, because prices change
NOISE, HELD_UP = 0.05, 2.0  # of a plain pass: what like calls differ by; times that for who was slow
FAR, OFTEN = 2.0, 3  # deviations that a slow call is believed at most, unless it is one of so many in a row
WARM_UP = 2  # calls of a drafter of which the quickest counts: the first ones fill its caches
LATE = 0.004  # of a plain pass: what a token to catch up with is thought to cost
FADE = 0.998  # what is left of the price of what is not called, after a while


class CallPrices:
    """The terms of one drafter's price, none below 0: a Kalman filter.

    A call moves them towards what would have explained it, those most that are least known; what it says
    nothing of stays as it was. So calls of different lengths soon tell a call's price from a level's.
    """

    def __init__(self, plain: float) -> None:
        """`plain` seconds are those of a pass without drafts."""
        self._plain = plain
        self._first_doubt = np.diag(np.square(plain * np.array(UNSURE)))
        self._first: list[float] = []  # seconds of first calls
        self._forget()

    def _forget(self) -> None:
        # What was never called is thought to cost nothing, so it is tried once; but not behind a long prompt.
        self.prices = [0.0, 0.0, 0.0, 0.0, LATE * self._plain]
        self._doubt = self._first_doubt  # [terms, terms] covariance of what the prices may be wrong by
        self._slow = 0  # calls in a row that were much slower than was thought

    @property
    def is_known(self) -> bool:
        """Whether it was ever called."""
        return bool(self._first)

    def observe(self, sizes: Sequence[float], seconds: float) -> None:
        """Take in a call of these sizes, one for each of the TERMS."""
        own, is_first = np.array(sizes), len(self._first) < WARM_UP
        if is_first:
            is_quickest = seconds < min(self._first, default=math.inf)
            self._first.append(seconds)
            if not is_quickest:
                return
            self._forget()  # what was thought before
        missing = seconds - float(own @ self.prices)
        noise = NOISE * self._plain * (HELD_UP if missing > 0.0 else 1.0)
        most = FAR * math.sqrt(float(own @ self._doubt @ own) + noise * noise)
        self._slow = self._slow + 1 if missing > most and not is_first else 0
        if self._slow == OFTEN:  # it was not held up, it has become slow
            self._doubt = self._first_doubt
        self._move(own, min(missing, most) if 0 < self._slow < OFTEN else missing, noise)

    def _move(self, sizes: Float64Array, missing: float, noise: float) -> None:
        """Take in that a call took so many seconds more than was thought, of which so many may be chance."""
        spread = self._doubt @ sizes
        gain = spread / (float(spread @ sizes) + noise * noise)
        self._doubt = self._doubt - np.outer(gain, spread)
        self._doubt += DRIFT * (self._first_doubt - self._doubt)
        self.prices = np.maximum(self.prices + gain * missing, 0.0).tolist()

    def fade(self) -> None:
        """Let the prices sink a little."""
        self.prices = [FADE * price for price in self.prices]

    def facts(self) -> list[float]:
        """The prices in plain passes, which is how they are told to a machine that may be another."""
        return [price / self._plain for price in self.prices]

    def begin_with(self, facts: Any) -> None:
        """Take in the facts of before. ValueError or TypeError if they make no sense."""
        passes = np.array([float(price) for price in facts])
        if len(passes) != TERMS or not all(0.0 <= price < 100.0 for price in passes):
            raise ValueError(f"a draft does not cost {facts} passes")
        self._forget()
        self._doubt = np.diag(np.square(self._plain * (SURER * passes + SETTLED * np.array(UNSURE))))
        self.prices, self._first = (self._plain * passes).tolist(), [0.0] * WARM_UP


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

    def facts(self) -> dict[str, list[float]]:
        """What others can begin with, as JSON has it: each drafter's that was called."""
        return {name: own.facts() for name, own in self._drafters.items() if own.is_known}

    def begin_with(self, facts: Mapping[str, Any]) -> None:
        """Take in what calls cost before. ValueError or TypeError if that makes no sense."""
        for name in self._drafters.keys() & facts.keys():
            self._drafters[name].begin_with(facts[name])
