"""Acceptance of chains that are drafted on the device: counts by depth, because nothing else comes back."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul
from typing import Any

import numpy as np

from paceline.control.acceptance.depth_counts import DepthCounts, NewDrafts
from paceline.control.acceptance.fixed_trees import SiblingAcceptance, count_path, tree_reached
from paceline.control.config import CONFIG
from paceline.core.stats import DraftStats, ShadowStats
from paceline.core.trees import DraftPlan


@dataclass(frozen=True, slots=True)
class Estimate:
    """What is expected of a draft, until more drafts are counted."""

    share: float  # of requests that have a draft
    chances: list[float]  # [depth] of a token, given that all before it are accepted
    reached: list[float]  # [depth] the chance that a draft is accepted down to there
    accepted: list[float]  # [length] mean of the accepted tokens of a draft of this length
    squared: list[float]  # [length] mean of their square


class ChainAcceptance:
    """The chance that a drafted token is accepted at each depth, given that all before it were.

    Counts fade, so recent drafts count most. Where a draft ends early, or there is none, the next token
    counts as rejected. There are two sets of counts: the usual acceptance comes from about 33 passes, and the
    last few passes correct its odds, because texts differ between answers: by one factor for first tokens,
    and by another for all tokens below.
    """

    def __init__(self, longest: int, chances: Sequence[float], weight: float, share: float = 1.0) -> None:
        """The prior: `chances` by depth (the last one holds for deeper tokens too), worth `weight` drafts;
        and the `share` of requests that have a draft."""
        known = [*chances[:longest], *[chances[-1]] * (longest - len(chances))]
        tries = [weight * chance for chance in accumulate([1.0, *known[:-1]], mul)]
        hits = [tried * chance for tried, chance in zip(tries, known, strict=True)]
        self._usual = DepthCounts(tries, hits, weight, weight * share)
        self._recent = DepthCounts([0.0] * longest, [0.0] * longest, 0.0, 0.0)
        self._requests = 1.0  # of a pass, in the last ones
        self._siblings = SiblingAcceptance()  # of trees
        self._new: dict[DraftPlan | int, NewDrafts] = {}  # by length, or of a tree; not counted yet
        self._estimate: Estimate | None = None  # None: drafts were counted since it was made

    def add(
        self, drafts: Sequence[DraftStats], requests: int, length: int, tree: DraftPlan | None = None
    ) -> None:
        """Count the drafts of a pass in which each of `requests` could have a draft of this length, or the
        tree of a plan with as many levels."""
        kind = length if tree is None else tree
        if kind not in self._new:
            self._new[kind] = NewDrafts([0] * length, [0] * length)
        new, self._estimate = self._new[kind], None
        new.requests += requests
        new.passes += 1
        if tree is not None:
            self._siblings.fade(1)
        for draft in drafts:
            new.drafted += draft.count
            # a request that ended within its draft says nothing of the tokens below
            has_ended = draft.accepted == draft.depth < min(draft.nodes, length)
            if tree is not None:
                count_path(tree, draft.path, has_ended, draft.count, (new.tries, new.hits), self._siblings)
                continue
            accepted = min(draft.accepted, length)
            for depth in range(accepted + (accepted < length and not has_ended)):
                new.tries[depth] += draft.count
                new.hits[depth] += draft.count if depth < accepted else 0
        new.tries[0] += requests - sum([draft.count for draft in drafts])  # without a draft: rejected

    def _count_new(self) -> None:
        """Count the drafts of the last passes, together: there is no time for it in every pass."""
        for new in self._new.values():
            self._count(new.tries, new.hits, new.requests, new.drafted, new.passes)
        self._new = {}

    def fade_recent(self, remaining: float) -> None:
        """Note that only this fraction of the requests still run: recent drafts of others say little of the
        answers that follow, and if drafting has stopped, nothing else would ever correct them."""
        self._count_new()
        self._recent.fade(remaining, len(self._recent.tries), least=0.0)
        self._estimate = None

    def add_shadow(self, shadow: ShadowStats) -> None:
        """Count shadow drafts."""
        length = min(len(self._usual.tries), len(shadow.tries))
        self._count(shadow.tries[:length], shadow.hits[:length], 0, 0, 1)

    def _count(
        self, tries: Sequence[float], hits: Sequence[float], requests: int, drafted: int, passes: int
    ) -> None:
        """Fade the counts, and add those of `passes` passes. To the usual counts each pass adds one draft in
        all: sixteen requests at once say no more of later texts than one."""
        if tries[0] <= 0:
            return
        self._estimate = None
        self._requests = max(1.0, tries[0] / passes)
        self._usual.fade(CONFIG.chains.fade**passes, len(tries), least=1.0)  # never to nothing
        self._recent.fade(CONFIG.chains.recent_fade**passes, len(tries), least=0.0)
        self._recent.add(1.0, tries, hits, requests, drafted)
        self._usual.add(passes / tries[0], tries, hits, requests, drafted)

    def estimate(self) -> Estimate:
        """What is expected of the next drafts."""
        if self._estimate is None:
            self._count_new()
            weight, recent = self._usual_weight, self._recent
            usual = self._usual.drafted / self._usual.asked
            chances = self._chances()
            reached = [*accumulate(chances, mul)]
            self._estimate = Estimate(
                share=(recent.drafted + weight * usual) / (recent.asked + weight),
                chances=chances,
                reached=reached,
                accepted=[0.0, *accumulate(reached)],
                squared=[0.0, *accumulate(_squares(reached))],
            )
        return self._estimate

    def moments(self, plan: DraftPlan) -> tuple[float, float]:
        """The mean of the accepted tokens of a draft by this plan, and that of their square."""
        estimate = self.estimate()
        if plan.branching == 1:
            return estimate.accepted[plan.levels], estimate.squared[plan.levels]
        reached = tree_reached(plan, estimate.chances, self._siblings.chances())
        return sum(reached), sum(_squares(reached))

    def reached(self, length: int) -> list[float]:
        """[depth] The chance that a draft of this length is accepted down to there."""
        return self.estimate().reached[:length]

    def _chances(self) -> list[float]:
        """[depth] The chance of a chain's token, given those before it: the usual one, with recent odds.

        The first token has odds of its own: whether something is found, and whether it begins well, says
        little of the tokens below, and a long draft that is accepted says little of either.
        """
        usual, recent = self._usual_chances(), self._recent
        chances: list[float] = []
        for depths in (slice(1), slice(1, None)):  # the first token, and all below
            odds = self._recent_odds(usual[depths], recent.tries[depths], recent.hits[depths])
            chances += [odds * chance / (1.0 - chance + odds * chance) for chance in usual[depths]]
        return chances

    def _recent_odds(self, chances: list[float], tries: list[float], hits: list[float]) -> float:
        """The odds of recent tokens of some depths to be accepted, over those that `chances` give them."""
        if not tries or tries[0] < CONFIG.chains.least_recent:
            return 1.0
        tried, hit = sum(tries), sum(hits)
        expected = sum([count * chance for count, chance in zip(tries, chances, strict=True)])
        # drafts that went as usual, over the recent ones: the tokens of a long draft stand or fall together
        usual = self._usual_weight / tries[0]
        accepted = (hit + usual * expected) / expected
        rejected = (tried - hit + usual * (tried - expected)) / (tried - expected)
        return accepted / rejected

    @property
    def _usual_weight(self) -> float:
        """Drafts that the usual acceptance counts for beside the recent ones. More with many requests: their
        texts are alike, and all of them are at the same place of an answer."""
        return CONFIG.chains.usual_weight * math.sqrt(self._requests)

    def _usual_chances(self) -> list[float]:
        """[depth] The usual acceptance; where there are few counts, mostly that of the depth above."""
        parent, unsure, chances = CONFIG.chains.parent_weight, CONFIG.chains.least_chance, []
        chance = self._usual.hits[0] / self._usual.tries[0]
        for hits, tries in zip(self._usual.hits, self._usual.tries, strict=True):
            chance = (hits + parent * chance) / (tries + parent)
            chances.append(min(max(chance, unsure), 1.0 - unsure))
        return chances

    def facts(self) -> dict[str, Any]:
        """The usual counts as JSON values."""
        self._count_new()
        usual = self._usual
        drafted = [float(usual.asked), float(usual.drafted)]
        return {
            "tries": list(usual.tries),
            "hits": list(usual.hits),
            "drafted": drafted,
            "siblings": self._siblings.facts(),
        }

    def begin_with(self, facts: Mapping[str, Any]) -> None:
        """Start from these facts. KeyError, ValueError or TypeError if they make no sense."""
        tries, hits = ([float(count) for count in facts[name]] for name in ("tries", "hits"))
        pairs = zip(hits, tries, strict=True)
        if len(tries) != len(self._usual.tries) or not all(0.0 <= hit <= tried > 0.0 for hit, tried in pairs):
            raise ValueError("these are not counts of drafts")
        asked, drafted = (float(count) for count in facts["drafted"])
        if not 0.0 <= drafted <= asked or not asked > 0.0:
            raise ValueError("these are not counts of requests")
        if siblings := facts.get("siblings"):  # files of earlier versions have none
            self._siblings.begin_with(siblings)
        self._usual, self._estimate = DepthCounts(tries, hits, asked, drafted), None


def _squares(reached: Sequence[float]) -> list[float]:
    """[depth] What each depth adds to the mean of the square of the accepted tokens."""
    return [(2 * depth + 1) * chance for depth, chance in enumerate(reached)]


def known_chances(known: Mapping[str, Any], drafter: str, greedy: bool) -> list[float]:
    """By depth, the chance of a drafter's tokens for greedy or other requests, given those before, from the
    facts of a memory (DrafterAcceptance.facts); empty if it holds none."""
    section = f"{drafter} greedy" if greedy else drafter
    said = known.get("models", {}).get(section, {}).get("said", [])
    if not said:
        return []
    reached = np.mean(said, axis=0)  # [depth] chance that a chain is accepted down to it
    return [min(1.0, float(chance)) for chance in reached / np.array([1.0, *reached[:-1]])]
