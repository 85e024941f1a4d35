"""Acceptance of chains that are drafted on the device: counts by depth, because nothing else comes back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from paceline.control.config import CONFIG
from paceline.control.cost import Float64Array
from paceline.core.stats import DraftFacts, ShadowFacts


class Counts:
    """Tried and accepted tokens by depth, and requests with and without a draft. New drafts fade them."""

    def __init__(self, tries: Float64Array, hits: Float64Array, asked: float, drafted: float) -> None:
        self.tries, self.hits = tries, hits  # [depth]
        self.asked, self.drafted = asked, drafted  # requests, and those of them with a draft

    def fade(self, factor: float, length: int, least: float) -> None:
        """Multiply the counts of the first `length` depths; those up to `least` stay."""
        factors = np.where(self.tries[:length] > least, factor, 1.0)
        self.tries[:length] *= factors
        self.hits[:length] *= factors
        if self.asked > least:
            self.asked, self.drafted = factor * self.asked, factor * self.drafted

    def add(self, tries: Float64Array, hits: Float64Array, asked: float, drafted: float) -> None:
        """Add the counts of the first depths, and of requests."""
        self.tries[: len(tries)] += tries
        self.hits[: len(hits)] += hits
        self.asked += asked
        self.drafted += drafted


@dataclass
class NewDrafts:
    """The drafts of a few passes, each of which could have the same length."""

    accepted: list[int]  # [length + 1] drafts by the number of their accepted tokens
    untried: list[int]  # [length] drafts whose request ended there
    requests: int = 0
    drafted: int = 0  # those of them with a draft
    passes: int = 0


class ChainAcceptance:
    """The chance that a drafted token is accepted at each depth, given that all before it were.

    Counts fade, so recent drafts count most. Where a draft ends early, or there is none, the next token
    counts as rejected. There are two sets of counts: the usual acceptance comes from about 33 passes, and the
    last few passes correct its odds by one factor for all depths, because texts differ between answers.
    """

    def __init__(self, longest: int, chances: Sequence[float], weight: float, share: float = 1.0) -> None:
        """The prior: `chances` by depth (the last one holds for deeper tokens too), worth `weight` drafts;
        and the `share` of requests that have a draft."""
        known = np.array([*chances[:longest], *[chances[-1]] * (longest - len(chances))])
        tries = weight * np.cumprod([1.0, *known[:-1]])
        self._usual = Counts(tries, tries * known, weight, weight * share)
        self._recent = Counts(np.zeros(longest), np.zeros(longest), 0.0, 0.0)
        self._new: dict[int, NewDrafts] = {}  # by length, not counted yet
        self._reached: list[float] = []  # by depth, until the next drafts are counted

    def add(self, drafts: Sequence[DraftFacts], requests: int, length: int) -> None:
        """Count the drafts of a pass in which each of `requests` could have a draft of this length."""
        if length not in self._new:
            self._new[length] = NewDrafts([0] * (length + 1), [0] * length)
        new, self._reached = self._new[length], []
        new.requests += requests
        new.passes += 1
        for draft in drafts:
            new.drafted += draft.count
            new.accepted[min(draft.accepted, length)] += draft.count
            if draft.accepted == draft.depth < min(draft.nodes, length):
                # a request that ended within its draft says nothing of the tokens below
                new.untried[draft.depth] += draft.count

    def _count_new(self) -> None:
        """Count the drafts of the last passes, together: there is no time for it in every pass."""
        for new in self._new.values():
            reached = np.cumsum(new.accepted[::-1])[::-1].astype(np.float64)  # [depth] accepted down to it
            reached[0] = new.requests
            self._count(reached[:-1] - new.untried, reached[1:], new.requests, new.drafted, new.passes)
        self._new = {}

    def fade_recent(self, remaining: float) -> None:
        """Note that only this fraction of the requests still run: recent drafts of others say little of the
        answers that follow, and if drafting has stopped, nothing else would ever correct them."""
        self._count_new()
        self._recent.fade(remaining, len(self._recent.tries), least=0.0)
        self._reached = []

    def add_shadow(self, shadow: ShadowFacts) -> None:
        """Count shadow drafts."""
        length = min(len(self._usual.tries), len(shadow.tries))
        self._count(np.array(shadow.tries[:length]), np.array(shadow.hits[:length]), 0, 0, 1)

    def _count(
        self, tries: Float64Array, hits: Float64Array, requests: int, drafted: int, passes: int
    ) -> None:
        """Fade the counts, and add those of `passes` passes. To the usual counts each pass adds one draft in
        all: sixteen requests at once say no more of later texts than one."""
        if tries[0] <= 0:
            return
        self._reached = []
        self._usual.fade(CONFIG.chains.fade**passes, len(tries), least=1.0)  # never to nothing
        self._recent.fade(CONFIG.chains.recent_fade**passes, len(tries), least=0.0)
        self._recent.add(tries, hits, requests, drafted)
        share = passes / tries[0]
        self._usual.add(share * tries, share * hits, share * requests, share * drafted)

    @property
    def share(self) -> float:
        """The fraction of requests that have a draft."""
        self._count_new()
        weight, recent = CONFIG.chains.usual_weight, self._recent
        usual = self._usual.drafted / self._usual.asked
        return float((recent.drafted + weight * usual) / (recent.asked + weight))

    def reached(self, length: int) -> list[float]:
        """[depth] The chance that a draft of this length is accepted down to there."""
        if not self._reached:
            self._count_new()
            chances = self._usual_chances()
            odds = self._recent_odds(chances)
            self._reached = (odds * chances / (1.0 - chances + odds * chances)).cumprod().tolist()
        return self._reached[:length]

    def _recent_odds(self, chances: Float64Array) -> float:
        """The odds of recent tokens to be accepted, over those that `chances` [depth] give them."""
        recent = self._recent
        tries, hits, expected = recent.tries.sum(), recent.hits.sum(), recent.tries @ chances
        if not tries:
            return 1.0
        usual = CONFIG.chains.usual_weight / tries  # tokens that went as usual, over the recent ones
        accepted = (hits + usual * expected) / expected
        rejected = (tries - hits + usual * (tries - expected)) / (tries - expected)
        return float(accepted / rejected)

    def _usual_chances(self) -> Float64Array:
        """[depth] The usual acceptance; where there are few counts, mostly that of the depth above."""
        parent, chances = CONFIG.chains.parent_weight, []
        chance = float(self._usual.hits[0] / self._usual.tries[0])
        for hits, tries in zip(self._usual.hits.tolist(), self._usual.tries.tolist(), strict=True):
            chance = (hits + parent * chance) / (tries + parent)
            chances.append(chance)
        unsure = CONFIG.chains.least_chance
        return np.array(chances).clip(unsure, 1.0 - unsure)

    def facts(self) -> dict[str, list[float]]:
        """The usual counts as JSON values."""
        self._count_new()
        usual = self._usual
        drafted = [float(usual.asked), float(usual.drafted)]
        return {"tries": usual.tries.tolist(), "hits": usual.hits.tolist(), "drafted": drafted}

    def begin_with(self, facts: Mapping[str, Any]) -> None:
        """Start from these facts. KeyError, ValueError or TypeError if they make no sense."""
        tries, hits = (np.array(facts[name], dtype=np.float64) for name in ("tries", "hits"))
        is_sound = tries.shape == hits.shape == self._usual.tries.shape
        if not is_sound or not (hits >= 0.0).all() or not (hits <= tries).all() or not (tries > 0.0).all():
            raise ValueError("these are not counts of drafts")
        asked, drafted = (float(count) for count in facts["drafted"])
        if not 0.0 <= drafted <= asked or not asked > 0.0:
            raise ValueError("these are not counts of requests")
        self._usual, self._reached = Counts(tries, hits, asked, drafted), []


def known_chances(known: Mapping[str, Any], drafter: str, greedy: bool) -> list[float]:
    """By depth, the chance of a drafter's tokens for greedy or other requests, given those before, from the
    facts of a memory (DrafterAcceptance.facts); empty if it holds none."""
    section = f"{drafter} greedy" if greedy else drafter
    said = known.get("models", {}).get(section, {}).get("said", [])
    if not said:
        return []
    reached = np.mean(said, axis=0)  # [depth] chance that a chain is accepted down to it
    return [min(1.0, float(chance)) for chance in reached / np.array([1.0, *reached[:-1]])]
