"""The arms of device passes: the plans to choose from, and the prior acceptance of their drafts."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from paceline.control.acceptance.chains import ChainAcceptance, known_chances
from paceline.control.config import CONFIG
from paceline.core.trees import DraftPlan

NOTHING_FOUND = 0.5  # tokens; a lookup with fewer has found nothing, and the head drafts


@dataclass(frozen=True)
class Arm:
    """A way to draft on the device."""

    plan: DraftPlan
    attaches: bool = False  # with a head: it must compute all tokens of a request before it drafts for it


@dataclass(frozen=True, slots=True)
class ArmEstimate:
    """What a pass by an arm's plan is expected to give under the present load."""

    tokens: float  # per request, see DevicePlanner.tokens
    seconds: float
    catch_up: float  # seconds, until the head can draft for all present requests
    catch_up_per_token: float  # seconds, spread over the tokens that requests get
    is_timed: bool  # such passes were timed, now or at start-up

    @property
    def rate(self) -> float:
        """Tokens per second of one request."""
        return 1 / (self.seconds / self.tokens + self.catch_up_per_token)


@lru_cache(maxsize=64)
def drafting_parts(plan: DraftPlan) -> tuple[DraftPlan, ...]:
    """The plan, and its `otherwise`, which drafts where the plan itself does not; empty if it is plain.

    What is looked up is a chain, also if the head drafts trees.
    """
    own = plan if plan.otherwise is None else replace(plan, budget=plan.levels, branching=1)
    return tuple([part for part in (own, plan.second()) if part.budget])


def device_arms(
    head: str | None, lookup: str | None, longest: Mapping[str, int], trees: bool = False
) -> list[Arm]:
    """Chains of a head, lookups where they find something and the head elsewhere, or lookups alone.

    `lookup` is a drafter that looks up on the device. `longest`: by drafter, the most tokens of its
    chains and of paths of its trees.
    Without a head, each of these drafters has its own arms. `trees`: the head can draft trees, too.
    """
    config = CONFIG.device_planner
    if head is None:
        return [
            Arm(plan) for name, most in longest.items() for plan in _chains(name, config.lookup_lengths, most)
        ]
    by_tree = [
        DraftPlan(head, nodes, branching, depth)
        for nodes, branching, depth in (config.trees if trees else ())
        if depth <= longest[head]
    ]
    if lookup is None:
        chains = _chains(head, config.head_lengths, longest[head])
        return [Arm(plan, attaches=True) for plan in chains + by_tree]
    pairs = [
        (min(found, longest[lookup]), min(length, longest[head], longest[lookup]))
        for found, length in config.cascade_lengths
    ]
    plans = [
        DraftPlan(lookup, found, otherwise=DraftPlan(head, length), enough=NOTHING_FOUND)
        for found, length in dict.fromkeys(pairs)
    ] + [replace(tree, drafter=lookup, otherwise=tree, enough=NOTHING_FOUND) for tree in by_tree]
    return [Arm(plan, attaches=True) for plan in plans]


def _chains(drafter: str, lengths: Sequence[int], most: int) -> list[DraftPlan]:
    return [DraftPlan(drafter, length) for length in sorted({min(length, most) for length in lengths})]


def prior_acceptance(
    longest: Mapping[str, int], heads: Collection[str], known: Mapping[str, Any]
) -> dict[tuple[str, bool], ChainAcceptance]:
    """By drafter and for greedy requests (True) or others, what is expected of its chains at first.

    `known` are the facts of a memory; without them a guess is used.
    """
    config = CONFIG.device_planner
    acceptance = {}
    for name, most in longest.items():
        for greedy, guess in ((True, config.head_chances), (False, config.sampled_chances)):
            if name in heads:
                chances = known_chances(known, name, greedy) or guess
                acceptance[name, greedy] = ChainAcceptance(most, chances, config.head_weight)
            else:
                acceptance[name, greedy] = ChainAcceptance(
                    most, config.lookup_chances, config.lookup_weight, config.lookup_share
                )
    return acceptance
