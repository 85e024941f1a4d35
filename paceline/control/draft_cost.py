"""What a drafter's call costs: a sum of a few terms, because few calls must be enough to know it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from operator import mul
from typing import TYPE_CHECKING, Any

import numpy as np

from paceline.control.cost import Float64Array, Numbers

if TYPE_CHECKING:
    from paceline.engine.stats import DraftCall

TERMS = 5  # of a call's price: the call, each request, each level, each node, each token to catch up with
# How readily each of them is changed. What could be a price of levels is taken for one: if it is not, short
# drafts are tried once too often, and not once too seldom.
READY = (0.09, 0.01, 0.25, 0.0025, 0.001)
FASTER, SLOWER = 0.5, 0.2  # of what a call took less or more than thought: who is slow may have been held up
SURPRISE, HELD_UP = 0.1, 0.5  # of a plain pass, and of what was thought: so much more is believed of a call
WARM_UP = 2  # calls of a drafter of which the quickest counts: the first ones fill its caches
LATE = 0.004  # of a plain pass: what a token to catch up with is thought to cost
FADE = 0.998  # what is left of the price of what is not called, after a while


class CallPrices:
    """The terms of one drafter's price, none below 0.

    A call moves them towards what would have explained it, and what it says nothing of stays as it was.
    """

    def __init__(self, plain: float) -> None:
        """`plain` seconds are those of a pass without drafts."""
        # What was never called is thought to cost nothing, so it is tried once; but not behind a long prompt.
        self._unknown = [0.0, 0.0, 0.0, 0.0, LATE * plain]
        self.prices = self._unknown
        self._plain = plain
        self._believed = SURPRISE * plain  # seconds by which the next call may be slower than was thought
        self._first: list[float] = []  # seconds of first calls

    @property
    def is_known(self) -> bool:
        """Whether it was ever called."""
        return bool(self._first)

    def observe(self, sizes: Sequence[float], seconds: float) -> None:
        """Take in a call of these sizes, one for each of the TERMS."""
        thought = sum(map(mul, self.prices, sizes))
        missing, most = seconds - thought, self._believed + HELD_UP * thought
        if len(self._first) < WARM_UP:
            if seconds < min(self._first, default=math.inf):
                self.prices = self._unknown  # what was thought before is forgotten
                self._move(sizes, seconds - sum(map(mul, self.prices, sizes)))
            self._first.append(seconds)
        elif missing > most:
            self._move(sizes, SLOWER * most)
            self._believed *= 2.0
        else:
            self._move(sizes, missing * (SLOWER if missing > 0.0 else FASTER))
            self._believed = SURPRISE * self._plain

    def _move(self, sizes: Sequence[float], seconds: float) -> None:
        """Change what a call of these sizes costs by so many seconds."""
        shares = list(map(mul, READY, sizes))
        whole = sum(map(mul, shares, sizes))
        self.prices = [
            max(0.0, price + seconds * share / whole)
            for price, share in zip(self.prices, shares, strict=True)
        ]

    def fade(self) -> None:
        """Let the prices sink a little."""
        self.prices = [FADE * price for price in self.prices]

    def begin_with(self, facts: Any) -> None:
        """Take in the prices of before. ValueError or TypeError if they make no sense."""
        prices = [float(price) for price in facts]
        if len(prices) != TERMS or not all(0.0 <= price < 100 * self._plain for price in prices):
            raise ValueError(f"a draft does not cost {prices} seconds")
        self.prices, self._first = prices, [0.0] * WARM_UP


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
        """What others can begin with, as JSON has it: the prices of each drafter that was called."""
        return {name: own.prices for name, own in self._drafters.items() if own.is_known}

    def begin_with(self, facts: Mapping[str, Any]) -> None:
        """Take in what calls cost before. ValueError or TypeError if that makes no sense."""
        for name in self._drafters.keys() & facts.keys():
            self._drafters[name].begin_with(facts[name])
