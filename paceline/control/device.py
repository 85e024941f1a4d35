"""Planning passes that draft on the device: one drafter and one length for all requests, or plain decoding.

    tokens of a pass      1 + the chances that drafts are right down to each depth, counted lately
    seconds of a pass     by plan, number of requests and context: measured at the start and from then on

The plan with most tokens per second is taken. What drafts from texts would bring beside plain passes is known
from shadow drafts (engine/shadow.py), which cost the device nothing. What else was not taken is tried now
and then, for a share of the time that is fixed beforehand.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from paceline.core.stats import DraftFacts, ShadowFacts, StepStats
from paceline.core.trees import PLAIN, DraftPlan

GUESS_PER_TOKEN = 0.1  # plain passes that a drafted token adds to one, until it was measured
TIME_RATE = 0.05  # how far a pass moves the time of its kind, in the long run
EXPECTED_WEIGHT = 3  # passes that a time measured at the start counts for
MAX_OUTLIER = 2.0  # times the usual: a pass that took longer was held up, and counts as this
MEMORY = 0.99  # of counts, from one draft to the next
LIKE_ABOVE = 1.0  # drafts that the chance one level above counts for
MAX_FADING = 4  # drafts of a pass that let older ones fade: those of one pass are alike
MIN_GAIN = 1.04  # times plain decoding that drafts must promise to begin
MIN_BETTER = 1.02  # times: for less no other plan is taken
HOLD, YOUNG, YOUNG_HOLD = 16, 48, 4  # passes that a choice holds; in the first passes fewer
SETTLE = 2  # passes after a change whose times tell nothing: they overlap with those before it
TRIAL = 6  # passes of a trial, after those that settle
TRIAL_SHARE = 0.01  # of all time, for trials
ATTACH_COST = 4  # plain passes: a head must be attached, behind a pipeline that was drained


@dataclass(frozen=True)
class Arm:
    """A way to draft on the device."""

    plan: DraftPlan
    attaches: bool = False  # a head, which must compute all tokens before it can draft


class DevicePlanner:
    """Chooses among a few arms, plain decoding first."""

    def __init__(self, arms: Sequence[Arm], acceptance: Mapping[str, ChainAcceptance]) -> None:
        """`acceptance` of each drafter begins with what is thought of it."""
        self.arms = {arm.plan: arm for arm in (Arm(PLAIN), *arms)}
        self._acceptance = acceptance
        self._costs = DevicePassCosts()
        texts = [arm.plan for arm in arms if not arm.attaches]
        self.shadow = max(texts, key=lambda plan: plan.levels, default=None)  # what is drafted to learn
        by_guess = {plan: self._tokens(plan) / (1 + GUESS_PER_TOKEN * plan.levels) for plan in self.arms}
        self._plan = PLAIN if self.shadow else max(by_guess, key=by_guess.__getitem__)
        self._pass = self._next_choice = self._changed = 0
        self._load = (1, 0)  # buckets of requests and of context that the plan was chosen for
        self._last_used = dict.fromkeys(self.arms, 0)  # the last pass by each plan
        self._is_trial = False
        self._account = 0.0  # seconds for trials
        self.regret = 0.0  # seconds spent on them
        self.reason, self.gain = "gain", 1.0  # of the last choice

    def expect(self, plan: DraftPlan, seconds: Mapping[int, float]) -> None:
        """Take in what passes by a plan take by the number of their requests, measured at the start."""
        for requests, each in seconds.items():
            self._costs.expect(plan, _bucket(requests), each)

    def choose(self, requests: int, keys: float, settled: bool) -> DraftPlan:
        """The plan of the next pass, over so many requests with so many computed tokens each on average.

        Nothing is changed while some of them are not `settled`: their prompts are still to be computed.
        """
        self._pass += 1
        load = _bucket(requests), _context_bucket(keys)
        if load != self._load:
            self._load, self._changed = load, self._pass
            self._next_choice = min(self._next_choice, self._pass + SETTLE)
        if settled and self._pass >= self._next_choice:
            self._choose()
        return self._plan

    def _choose(self) -> None:
        rates = {plan: self._tokens(plan) / self.seconds(plan) for plan in self._available()}
        best = max(rates, key=lambda plan: rates[plan] * (MIN_GAIN if plan == PLAIN else 1))
        present = rates.get(self._plan, 0.0)
        is_little = rates[best] < MIN_BETTER * present and not self._is_trial
        if best.budget and is_little and present > rates[PLAIN]:
            best = self._plan
        chosen = self._to_try(best)
        self._is_trial = chosen != best
        self.reason = "probe" if self._is_trial else "gain" if best.budget else "no gain"
        self.gain = rates[chosen] / rates[PLAIN]
        if chosen != self._plan:
            self._plan, self._changed = chosen, self._pass
        hold = TRIAL + SETTLE if self._is_trial else YOUNG_HOLD if self._pass <= YOUNG else HOLD
        self._next_choice = self._pass + hold

    def _available(self) -> list[DraftPlan]:
        """The plans that there are buffers for under this load."""
        return [plan for plan in self.arms if self._load[0] <= self._costs.most_requests(plan)]

    def _to_try(self, best: DraftPlan) -> DraftPlan:
        """A plan whose passes were never timed under this load, one that there is time to try, or `best`."""
        arms = self._available()
        for plan in arms:
            if not self._costs.knows(plan, *self._load):
                return plan
        others = [plan for plan in arms if self._teaches(plan, best)]
        if best == PLAIN:  # of each drafter the shortest tells enough
            shortest = {plan.drafter: plan for plan in reversed(others)}
            others = list(shortest.values())
        if not others:
            return best
        oldest = min(others, key=self._last_used.__getitem__)
        token = self.seconds(best) / self._tokens(best)
        lost = TRIAL * max(0.0, self.seconds(oldest) - token)  # if it brings nothing
        if self.arms[oldest].attaches or self.arms[best].attaches:
            lost += ATTACH_COST * self.seconds(PLAIN)
        if self._account < lost:
            return best
        self._account -= lost
        self.regret += lost
        return oldest

    def _teaches(self, plan: DraftPlan, best: DraftPlan) -> bool:
        """Whether passes by a plan would say what those by the best one do not."""
        if plan.drafter == best.drafter:
            return plan.levels > best.levels  # of shorter drafts all is known
        is_shadowed = self.shadow is not None and plan.drafter == self.shadow.drafter and best == PLAIN
        return plan.budget > 0 and not is_shadowed

    def observe(self, plan: DraftPlan, stats: StepStats) -> None:
        """Take in a pass by a plan."""
        if plan not in self.arms:
            return
        if stats.shadow is not None and stats.shadow.drafter in self._acceptance:
            self._acceptance[stats.shadow.drafter].add_shadow(stats.shadow)
        if plan.drafter is not None:
            self._acceptance[plan.drafter].add(stats.drafts, stats.requests, plan.levels)
        self._last_used[plan] = self._pass
        self._account += TRIAL_SHARE * stats.total_time
        is_settled = self._pass - self._changed > SETTLE and plan == self._plan and not stats.prefill_tokens
        if is_settled and _bucket(stats.requests) == self._load[0]:
            self._costs.observe(plan, *self._load, stats.total_time)

    def tokens(self, plan: DraftPlan) -> float:
        """Expected of a pass by this plan, for one request."""
        return self._tokens(plan)

    def seconds(self, plan: DraftPlan) -> float:
        """Of a pass by this plan under the present load."""
        return self._costs.seconds(plan, *self._load)

    def _tokens(self, plan: DraftPlan) -> float:
        return 1.0 if plan.drafter is None else 1.0 + self._acceptance[plan.drafter].accepted(plan.levels)


class ChainAcceptance:
    """How often drafts of one drafter were right at each depth, given that they were right before it, lately.

    Where a draft ends, or there is none, what would follow counts as wrong.
    """

    def __init__(self, longest: int, chances: Sequence[float], weight: float) -> None:
        """At first each token is thought to be right with these chances, given those before it (the last
        holds for deeper ones too); that counts for `weight` drafts."""
        known = np.array([*chances[:longest], *[chances[-1]] * (longest - len(chances))])
        self._tries = weight * np.cumprod([1.0, *known[:-1]])  # [depth]
        self._hits = self._tries * known  # [depth]

    def add(self, drafts: Sequence[DraftFacts], requests: int, length: int) -> None:
        """Count the drafts of a pass in which so many requests could have one of this length."""
        fade = MEMORY ** min(requests, MAX_FADING)
        kept = np.where(self._tries[:length] > 1.0, fade, 1.0)  # what is known does not fade to nothing
        accepted = np.bincount([draft.accepted for draft in drafts], minlength=length + 1)
        reached = accepted[::-1].cumsum()[::-1][: length + 1]  # [depth] drafts that were right down to it
        reached[0] = requests
        # below its last token nothing of a request was tried
        ended = [draft.depth for draft in drafts if draft.accepted == draft.depth < min(draft.nodes, length)]
        untried = np.bincount(ended, minlength=length)[:length]
        self._tries[:length] = kept * self._tries[:length] + reached[:-1] - untried
        self._hits[:length] = kept * self._hits[:length] + reached[1:]

    def add_shadow(self, shadow: ShadowFacts) -> None:
        """Count shadow drafts."""
        length = min(len(self._tries), len(shadow.tries))
        fade = MEMORY ** min(shadow.tries[0], MAX_FADING)
        kept = np.where(self._tries[:length] > 1.0, fade, 1.0)
        self._tries[:length] = kept * self._tries[:length] + shadow.tries[:length]
        self._hits[:length] = kept * self._hits[:length] + shadow.hits[:length]

    def accepted(self, length: int) -> float:
        """Tokens expected of a draft of this length."""
        reached, chance, expected = 1.0, float(self._hits[0] / self._tries[0]), 0.0
        for hits, tries in zip(self._hits[:length].tolist(), self._tries[:length].tolist(), strict=True):
            # deep down little was seen: there drafts go on as they did one level above
            chance = (hits + LIKE_ABOVE * chance) / (tries + LIKE_ABOVE)
            reached *= chance
            expected += reached
        return expected


Kind = tuple[DraftPlan, int, int]  # of a pass: its plan, and the buckets of its requests and their context


class DevicePassCosts:
    """Seconds of passes. What was never seen is thought to be like what was."""

    def __init__(self) -> None:
        self._expected: dict[tuple[DraftPlan, int], float] = {}
        self._seen: dict[Kind, tuple[float, int]] = {}  # seconds, and how many passes that is from

    def knows(self, plan: DraftPlan, requests: int, context: int) -> bool:
        """Whether such a pass was ever timed, or one of so many requests at the start."""
        return (plan, requests) in self._expected or (plan, requests, context) in self._seen

    def most_requests(self, plan: DraftPlan) -> float:
        """That passes by this plan were ready for at the start."""
        return max((count for own, count in self._expected if own == plan), default=math.inf)

    def expect(self, plan: DraftPlan, requests: int, seconds: float) -> None:
        """Take in what was measured when nothing else ran."""
        self._expected[plan, requests] = seconds
        self._seen[plan, requests, 0] = seconds, EXPECTED_WEIGHT

    def observe(self, plan: DraftPlan, requests: int, context: int, seconds: float) -> None:
        """Take in a pass. One that took much longer than usual was held up."""
        usual, count = self._seen.get((plan, requests, context), (seconds, 0))
        rate = max(TIME_RATE, 1 / (1 + count))
        moved = usual + rate * (min(seconds, MAX_OUTLIER * usual) - usual)
        self._seen[plan, requests, context] = moved, count + 1

    def seconds(self, plan: DraftPlan, requests: int, context: int) -> float:
        """Of such a pass: as it was seen, or as the most similar one, with the difference of the start."""
        kind = plan, requests, context
        if kind in self._seen:
            return self._seen[kind][0]
        if not self._seen:
            return 1 + GUESS_PER_TOKEN * plan.levels

        def distance(other: Kind) -> tuple[float, int, int]:
            own, count, keys = other
            return abs(math.log2(count / requests)), abs(keys - context), abs(own.levels - plan.levels)

        nearest = min(self._seen, key=distance)
        own, count, _ = nearest
        known = self._seen[nearest][0]
        here, there = self._expected.get((plan, requests)), self._expected.get((own, count))
        if here is not None and there is not None:
            return max(known + here - there, 0.5 * known)
        return known * (1 + GUESS_PER_TOKEN * plan.levels) / (1 + GUESS_PER_TOKEN * own.levels)


def _bucket(requests: int) -> int:
    """The power of two that holds them: passes are captured by these sizes."""
    return 1 << (requests - 1).bit_length()


def _context_bucket(keys: float) -> int:
    """0 up to 4,096 tokens, and one more for every factor of 4."""
    return max(0, math.ceil(math.log(max(keys, 1.0) / 4096, 4)))


def known_chances(known: Mapping[str, Any], drafter: str) -> list[float]:
    """What is known of a drafter's guesses for greedy requests: each one's chance, given those before it."""
    said = known.get("models", {}).get(f"{drafter} greedy", {}).get("said", [])
    if not said:
        return []
    reached = np.mean(said, axis=0)  # [depth] that a chain is right down to it
    return [min(1.0, float(chance)) for chance in reached / np.array([1.0, *reached[:-1]])]
