"""PlanSearch: assigns drafters to requests for the most tokens per second.

A second is worth the tokens per second of the best choice so far. So the value of a step is its tokens minus
that rate times its seconds, and the nodes of all requests compete for rows in the order of their chances
(row_costs.py).

The chances of a draft are unknown before it is made, so they are sampled from recent drafts: each of a few
scenarios is evaluated as a step (evaluate.py), and a candidate's expectation is the mean.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from paceline.control.config import CONFIG
from paceline.control.cost import Float64Array, StepCosts
from paceline.control.cost.draft_calls import TERMS, DraftCosts
from paceline.control.planner.evaluate import (
    best_rate,
    count_nodes,
    evaluate,
    evaluate_lengths,
    likely_nodes,
    play_cascade,
    worth_above,
)
from paceline.control.planner.forecast import Forecast
from paceline.control.planner.row_costs import Batch, RowCosts

Int64Array = npt.NDArray[np.int64]
Names = tuple[str, ...]  # drafters in the order in which they are asked: the second if the first has little

DRAFT_LENGTHS = (1, 2, 3, 5, 8, 16, 32)  # that are tried where levels are expensive, beside the longest
EXPENSIVE_LEVEL = 0.01  # tokens per request: a level that costs more is expensive


@dataclass(frozen=True, slots=True)
class Candidate:
    """An assignment of drafters to requests."""

    names: tuple[Names, ...]  # [requests] none: plain decoding
    length: int  # most nodes of a draft, of the drafter that is asked last
    enough: tuple[float, ...]  # [requests] tokens that the first must promise for the second not to be asked

    @property
    def drafters(self) -> frozenset[str]:
        return frozenset([name for names in self.names for name in names])


@dataclass(frozen=True, slots=True)
class Choice:
    """A candidate, and what is expected of the step."""

    candidate: Candidate | None  # None: plain decoding
    tokens: float
    seconds: float
    rows: float = 0.0  # verified rows beyond those of plain decoding

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds


class PlanSearch:
    """The search for one batch at present costs."""

    def __init__(
        self,
        batch: Batch,
        count: int,
        nodes: int,
        passes: StepCosts,
        drafts: DraftCosts,
        is_drafting: bool = False,
    ) -> None:
        """Drafts for `count` of the requests, of at most `nodes` nodes each. `is_drafting`: drafts are made
        now."""
        config = CONFIG.planner
        self.batch = batch
        self._margin = config.stay_margin if is_drafting else config.start_margin
        self.count = count
        self.row_costs = RowCosts(batch, passes, count * nodes)
        self.plain = Choice(None, batch.tokens, self.row_costs.listed[0] + batch.per_token * batch.tokens)
        self.forecasts: Mapping[str, Forecast] = {}  # by drafter
        self._drafts = drafts
        self._rate = self.plain.rate  # tokens per second of the best so far: what a second is worth

    def best(self, forecasts: Mapping[str, Forecast]) -> Choice:
        """The choice with most tokens per second, plain decoding among them."""
        self.forecasts = forecasts
        alone = {name: self.alone(name) for name in forecasts}
        best = self._best_of(alone.values())
        if best.candidate is None:
            return best
        for first, second in self._cascades():
            found = alone[second].candidate
            assert found is not None
            best = self._best_of((best, self.cascade(first, second, found.length, best)))
        return self._best_of((best, self._each_its_own(best))) if self.count > 1 else best

    def expected(self, name: str, line: int) -> float:
        """Tokens that a fully verified draft of this drafter brings the request at index `line`."""
        return float(self.forecasts[name].chances[:, line].sum(axis=1).mean())

    def headroom(self) -> float:
        """What very good drafts for all requests would gain if they cost nothing; 1: twice as fast."""
        most = best_rate(
            self.row_costs.seconds,
            self.count,
            CONFIG.planner.good_chance,
            self.plain.tokens,
            self.batch.per_token,
        )
        return most / self.plain.rate - 1.0

    def alone(self, name: str) -> Choice:
        """One drafter for all requests, with the best length."""
        forecast, lengths = self.forecasts[name], self._lengths(name)
        outcomes = evaluate_lengths(
            self._drafted(name, lengths[-1]),
            np.array(lengths),
            forecast.levels,
            np.array([self._drafts.terms(name)]),
            forecast.catch_up[None],
            self.row_costs.seconds,
            self._rate,
        )
        names = ((name,),) * self.count
        choices = [
            self._choice(Candidate(names, length, ()), *outcome)
            for length, outcome in zip(lengths, outcomes.tolist(), strict=True)
        ]
        least = CONFIG.planner.longer_draft * max(choice.rate for choice in choices)
        return [choice for choice in choices if choice.rate >= least][-1]

    def min_chance(self, name: str, choice: Choice) -> float:
        """The chance at which a node of this drafter pays for its row and level, at a choice's costs."""
        level = self._drafts.terms(name)[2]  # drafting a node means computing one more level
        return choice.rate * (self.row_costs.cheapest(choice.rows) + level / self.count)

    def _drafted(self, name: str, length: int) -> Float64Array:
        """[scenarios, requests, nodes] chances of the nodes that are likely enough to be drafted."""
        least = self.min_chance(name, self.plain)
        likely: Float64Array = likely_nodes(self.forecasts[name].chances, least, length)
        return likely

    def _lengths(self, name: str) -> list[int]:
        """The draft lengths to evaluate: the longest, and shorter ones where levels are expensive."""
        most = self.forecasts[name].chances.shape[2]
        level = self._drafts.terms(name)[2]
        is_expensive = level * self.plain.rate > EXPENSIVE_LEVEL * self.count
        shorter = DRAFT_LENGTHS if is_expensive else ()
        return [length for length in shorter if length < most] + [most]

    def _cascades(self) -> list[tuple[str, str]]:
        """Pairs of a cheap drafter and an expensive one that is asked where the cheap one has little."""
        pairs = itertools.permutations(self.forecasts, 2)
        return [(first, second) for first, second in pairs if self.is_cheaper(first, second)]

    def is_cheaper(self, first: str, second: str) -> bool:
        """Whether the first drafter is cheap enough to be asked before the second."""
        return CONFIG.planner.cheaper * self._drafts.seconds(first, 1, 1, 1) < self._drafts.seconds(
            second, 1, 1, 1
        )

    def goes_before(self, drafter: str, others: Sequence[str]) -> bool:
        """Whether asking a drafter before the others costs next to nothing."""
        return len(others) == 1 and self.is_cheaper(drafter, others[0])

    def cascade(self, first: str, second: str, length: int, best: Choice) -> Choice:
        """The first drafter for all requests, and the second where the first has too little."""
        one, other = self.forecasts[first].chances, self._drafted(second, length)
        row = best.rate * self.row_costs.row(best.rows)
        worth, sizes = worth_above(other, row)
        size = float(sizes.sum()) / self.count
        call, request, level, node, _ = self._drafts.terms(second)
        cost = (call + level * (size + 1)) / self.count + request + node * size
        worth -= best.rate * (cost + self.forecasts[second].catch_up)
        enough = np.maximum(worth, 0.0) * CONFIG.planner.cascade_margin  # [requests]
        chances, sizes = play_cascade(one, other, row, enough)
        candidate = Candidate(((first, second),) * self.count, length, tuple(enough.tolist()))
        return self._expected(candidate, chances, {first: one.shape[2], second: length}, sizes)

    def _each_its_own(self, best: Choice) -> Choice:
        """For each request the drafter whose drafts are worth most at the present cost of a row, or none.

        Levels are free here: the other requests of the drafter's call pay for them.
        """
        row = best.rate * self.row_costs.row(best.rows)
        length = best.candidate.length if best.candidate is not None else 1
        drafted = {name: self._drafted(name, length) for name in self.forecasts}
        worth = [np.zeros(self.count)]
        for name, forecast in self.forecasts.items():
            _, request, _, node, _ = self._drafts.terms(name)
            kept, nodes = worth_above(drafted[name], row)
            worth.append(kept - best.rate * (request + node * nodes + forecast.catch_up))
        names = ["", *self.forecasts]
        chosen = [names[place] for place in np.argmax(worth, axis=0).tolist()]
        counts = {name: count_nodes(drafted[name]) for name in self.forecasts if name in chosen}
        scenarios = len(next(iter(drafted.values())))
        chances = np.zeros((scenarios, self.count, length))
        sizes = np.full((len(counts), scenarios, self.count), -1)
        for line, name in enumerate(chosen):
            if name:
                chances[:, line, : drafted[name].shape[2]] = drafted[name][:, line]
                sizes[[*counts].index(name), :, line] = counts[name][0, :, line]
        candidate = Candidate(tuple((name,) if name else () for name in chosen), length, ())
        return self._expected(candidate, chances, dict.fromkeys(counts, length), sizes)

    def _expected(
        self, candidate: Candidate, chances: Float64Array, lengths: Mapping[str, int], sizes: Int64Array
    ) -> Choice:
        """The choice of a candidate that drafts these nodes: chances [scenarios, requests, nodes].

        `lengths`: of its drafters, the most nodes of a draft. `sizes` [drafters, scenarios, requests]: the
        nodes that each drafts; -1: it is not asked.
        """
        outcome = evaluate(
            chances,
            sizes,
            np.array(
                [min(length, self.forecasts[name].levels) for name, length in lengths.items()], np.int64
            ),
            np.array([self._drafts.terms(name) for name in lengths]).reshape(-1, TERMS),
            np.array([self.forecasts[name].catch_up for name in lengths]).reshape(-1, self.count),
            self.row_costs.seconds,
            self._rate,
        )
        return self._choice(candidate, *outcome)

    def _choice(self, candidate: Candidate, accepted: float, seconds: float, rows: float) -> Choice:
        """The choice of a candidate with this outcome."""
        tokens = self.batch.tokens + accepted
        return Choice(candidate, tokens, seconds + self.batch.per_token * tokens, rows)

    def _best_of(self, choices: Iterable[Choice]) -> Choice:
        best = max(choices, key=lambda choice: choice.rate)
        if best.rate < self._margin * self.plain.rate:
            best = self.plain
        self._rate = best.rate
        return best
