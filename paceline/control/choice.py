"""Who drafts for whom, and which drafted nodes are verified, so that most tokens come in a second.

Both are bought with time, and a second is worth the tokens that one gives now. So a step is worth its tokens
less what its seconds are worth; nodes of all requests compete, in the order of their chances, and of all
places to stop the one with most worth is taken, the first of which is to verify nothing. A row that
fills a tile is taken where one that begins another is not, and more requests leave less room for each.

Before a draft is made, its chances are not known. What drafters said lately stands for them: each of a few
scenes is decided as the step would be, and what they give on average is what the offer is worth.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from paceline.control.cost import Float64Array, StepCosts
from paceline.control.draft_cost import TERMS, DraftCosts
from paceline.control.outcome import outcome

BoolArray = npt.NDArray[np.bool_]
Int64Array = npt.NDArray[np.int64]
Names = tuple[str, ...]  # drafters in the order in which they are asked: the second if the first has little

VERY_GOOD = 0.9  # the chance of each token of a draft that is better than most, given those before
MARGIN = 1.05  # times plain decoding, to begin: of several guesses the best is likely to be too high
STAYS = 1.0  # the same for who drafts already: a few bad drafts in a row mean little
CROWD = 1.05  # times these for several requests: there is less to gain, and more to be wrong about
LONGER = 0.98  # times the best: a longer draft may give less by so much, since it ends by itself
ALIKE = 2.0  # times: so much more than a dear draft a cheap one must promise: where it does, so would that
CHEAPER = 3.0  # times: a drafter that is so much cheaper than another may be asked before it


@dataclass(frozen=True, slots=True)
class Batch:
    """A step before anything is drafted, without prompts: those must be computed anyway, and if their seconds
    counted, tokens would be worth more in a step with a prompt than in the next one."""

    tokens: float  # that it gives
    rows: int  # that it has
    keys: float  # that a row reads, on average
    per_token: float = 0.0  # seconds that a new token takes, drafted or not


class PassPrices:
    """Seconds of passes of a batch with so many rows more, at present prices."""

    def __init__(self, batch: Batch, steps: StepCosts, most: int) -> None:
        """For up to `most` more."""
        self.seconds = steps.seconds(batch.rows + np.arange(most + 1.0), batch.keys)  # [more rows]
        self.listed: list[float] = self.seconds.tolist()  # the same

    def row(self, rows: float) -> float:
        """Of one row more, on average over the next four."""
        first = min(int(rows), len(self.listed) - 1)
        last = min(first + 4, len(self.listed) - 1)
        return (self.listed[last] - self.listed[first]) / max(1, last - first)


def worth_verifying(chances: Sequence[float], prices: PassPrices, rate: float) -> int:
    """How many of the nodes are verified, given descending chances and what a second is worth."""
    best, best_worth, worth, before = 0, 0.0, 0.0, prices.listed[0]
    for count, (chance, seconds) in enumerate(zip(chances, prices.listed[1:], strict=False), start=1):
        worth += chance - rate * (seconds - before)
        before = seconds
        if worth > best_worth:
            best, best_worth = count, worth
    return best


@dataclass(frozen=True, slots=True)
class Prospect:
    """What one drafter can do for the requests of a batch."""

    chances: Float64Array  # [scenes, requests, nodes] descending; 0: there is no such node
    levels: int  # most that its drafts can have
    late: Float64Array  # [requests] seconds that a draft takes more because the drafter has to catch up


@dataclass(frozen=True, slots=True)
class Offer:
    """A way to draft for a batch."""

    names: tuple[Names, ...]  # [requests] who is asked; () for nobody
    length: int  # most nodes of a draft of the last who is asked
    enough: tuple[float, ...]  # [requests] expected tokens of the first draft with which no other is asked


@dataclass(frozen=True, slots=True)
class Choice:
    """An offer, and what is expected of the step."""

    offer: Offer | None  # None: plain decoding
    tokens: float
    seconds: float
    rows: float = 0.0  # that are verified more than without drafts

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds


@dataclass(frozen=True, slots=True)
class Part:
    """What one drafter does in an offer."""

    sizes: Int64Array  # [scenes, requests] nodes that it drafts; -1: it is not asked
    most: int  # that it may draft


class Market:
    """A batch, the drafters that may draft for it, and prices: all that a choice depends on."""

    def __init__(
        self,
        batch: Batch,
        count: int,
        nodes: int,
        steps: StepCosts,
        drafts: DraftCosts,
        is_drafting: bool = False,
    ) -> None:
        """`count` requests may be drafted for, with at most so many nodes each, and are now or are not."""
        self.batch = batch
        self._margin = (STAYS if is_drafting else MARGIN) * (CROWD if count > 1 else 1.0)
        self.count = count
        self.prices = PassPrices(batch, steps, count * nodes)
        self.plain = Choice(None, batch.tokens, self.prices.listed[0] + batch.per_token * batch.tokens)
        self.prospects: Mapping[str, Prospect] = {}
        self._drafts = drafts
        self._rate = self.plain.rate  # the best so far: what a second is worth

    def best(self, prospects: Mapping[str, Prospect]) -> Choice:
        """The choice with most tokens per second that was found, plain decoding among them."""
        self.prospects = prospects
        alone = {name: self.alone(name) for name in prospects}
        best = self._best_of(alone.values())
        if best.offer is None:
            return best
        for first, second in self._cascades():
            found = alone[second].offer
            assert found is not None
            best = self._best_of((best, self.cascade(first, second, found.length, best)))
        return self._best_of((best, self._each_its_own(best))) if self.count > 1 else best

    def expected(self, name: str, line: int) -> float:
        """Tokens that a draft of this drafter brings the request of this line, if all of it is verified."""
        return float(self.prospects[name].chances[:, line].sum(axis=1).mean())

    def reach(self) -> float:
        """How much very good drafts for all requests would gain if they cost nothing; 1: twice as much."""
        depths = 1 + np.arange(len(self.prices.seconds) - 1) // self.count
        tokens = self.plain.tokens + np.concatenate(([0.0], np.cumsum(VERY_GOOD**depths)))
        rates = tokens / (self.prices.seconds + self.batch.per_token * tokens)
        return float(rates.max()) / self.plain.rate - 1.0

    def alone(self, name: str) -> Choice:
        """One drafter for all requests, with the best length."""
        chances = self._drafted(name)
        lengths = self._lengths(name)
        sizes = np.count_nonzero(chances, axis=2)
        names = ((name,),) * self.count
        choices = [
            self._expected(
                Offer(names, length, ()),
                chances[:, :, :length],
                {name: Part(np.minimum(sizes, length), length)},
            )
            for length in lengths
        ]
        least = LONGER * max(choice.rate for choice in choices)
        return [choice for choice in choices if choice.rate >= least][-1]

    def least(self, name: str, beside: Choice) -> float:
        """The chance that a node must have to be drafted by this drafter, at what rows cost in a choice."""
        level = self._drafts.prices(name)[2]  # behind a node another one is looked at
        rows = max(1, min(round(beside.rows), len(self.prices.listed) - 1))
        row = (self.prices.listed[rows] - self.prices.listed[0]) / rows
        return beside.rate * (row + level / self.count)

    def _drafted(self, name: str) -> Float64Array:
        """[scenes, requests, nodes] chances of the nodes that are likely enough to be drafted."""
        chances = self.prospects[name].chances
        return chances * (chances >= self.least(name, self.plain))

    def _lengths(self, name: str) -> list[int]:
        """Of drafts that are looked at: the longest, and shorter ones where levels cost much."""
        most = self.prospects[name].chances.shape[2]
        level = self._drafts.prices(name)[2]
        shorter = (1, 2, 3, 5, 8, 16, 32) if level * self.plain.rate > 0.01 * self.count else ()
        return [length for length in shorter if length < most] + [most]

    def _cascades(self) -> list[tuple[str, str]]:
        """Pairs of drafters of which the second is asked where the first has little: the cheap one first."""
        pairs = itertools.permutations(self.prospects, 2)
        return [(first, second) for first, second in pairs if self.is_cheaper(first, second)]

    def is_cheaper(self, first: str, second: str) -> bool:
        """Whether a call of the first costs so little that it may be asked before the second."""
        one, other = (float(self._drafts.seconds(name, 1, 1, 1)) for name in (first, second))
        return CHEAPER * one < other

    def goes_before(self, drafter: str, others: Sequence[str]) -> bool:
        """Whether a drafter can be asked before others for next to nothing."""
        return len(others) == 1 and self.is_cheaper(drafter, others[0])

    def cascade(self, first: str, second: str, length: int, best: Choice) -> Choice:
        """One drafter for all requests, and another where the first has too little."""
        one, other = self.prospects[first].chances, self._drafted(second)[:, :, :length]
        sizes = np.count_nonzero(other, axis=2)
        call, request, level, node, _ = self._drafts.prices(second)
        price = (call + level * (sizes.mean() + 1)) / self.count + request + node * sizes.mean()
        row = best.rate * self.prices.row(best.rows)
        enough = self._kept(other, row) - best.rate * (price + self.prospects[second].late)  # [requests]
        enough = np.maximum(enough, 0.0) * ALIKE
        asked = np.maximum(one - row, 0.0).sum(axis=2) < enough
        chances = np.zeros((*asked.shape, max(one.shape[2], length)))
        chances[:, :, : one.shape[2]] = one * ~asked[:, :, None]
        chances[:, :, : other.shape[2]] += other * asked[:, :, None]
        parts = {
            first: Part(np.count_nonzero(one, axis=2), one.shape[2]),
            second: Part(np.where(asked, sizes, -1), length),
        }
        offer = Offer(((first, second),) * self.count, length, tuple(enough.tolist()))
        return self._expected(offer, chances, parts)

    def _each_its_own(self, best: Choice) -> Choice:
        """For each request the drafter whose drafts are worth most at what a row costs now, or none.

        Levels are free: they are paid by whoever else drafts.
        """
        row = best.rate * self.prices.row(best.rows)
        length = best.offer.length if best.offer is not None else 1
        worth = [np.zeros(self.count)]
        for name, prospect in self.prospects.items():
            _, request, _, node, _ = self._drafts.prices(name)
            drafted = self._drafted(name)[:, :, :length]
            sizes = np.count_nonzero(drafted, axis=2).mean(axis=0)
            worth.append(self._kept(drafted, row) - best.rate * (request + node * sizes + prospect.late))
        names = ["", *self.prospects]
        chosen = [names[place] for place in np.argmax(worth, axis=0)]
        scenes = len(next(iter(self.prospects.values())).chances)
        chances = np.zeros((scenes, self.count, length))
        parts: dict[str, Part] = {}
        for name in set(chosen) - {""}:
            own = np.array([drafter == name for drafter in chosen])
            drafted = self._drafted(name)[:, :, :length] * own[:, None]
            chances[:, :, : drafted.shape[2]] += drafted
            parts[name] = Part(np.where(own, np.count_nonzero(drafted, axis=2), -1), length)
        offer = Offer(tuple((name,) if name else () for name in chosen), length, ())
        return self._expected(offer, chances, parts)

    @staticmethod
    def _kept(chances: Float64Array, row: float) -> Float64Array:
        """[requests] what drafts are worth after their rows are paid."""
        return np.asarray(np.maximum(chances - row, 0.0).sum(axis=2).mean(axis=0))

    def _expected(self, offer: Offer, chances: Float64Array, parts: Mapping[str, Part]) -> Choice:
        """An offer by which these nodes are drafted: chances [scenes, requests, nodes]."""
        brought, seconds, rows = outcome(
            np.ascontiguousarray(chances),
            np.array([part.sizes for part in parts.values()]).reshape(-1, len(chances), self.count),
            np.array([min(part.most, self.prospects[name].levels) for name, part in parts.items()]),
            np.array([self._drafts.prices(name) for name in parts]).reshape(-1, TERMS),
            np.array([self.prospects[name].late for name in parts]).reshape(-1, self.count),
            self.prices.seconds,
            self._rate,
        )
        tokens = self.batch.tokens + brought
        return Choice(offer, tokens, seconds + self.batch.per_token * tokens, rows)

    def _best_of(self, choices: Iterable[Choice]) -> Choice:
        best = max(choices, key=lambda choice: choice.rate)
        if best.rate < self._margin * self.plain.rate:
            best = self.plain
        self._rate = best.rate
        return best
