"""The arms of device passes: which plans there are to choose from, and what is expected of their drafts."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
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


@lru_cache(maxsize=64)
def drafting_parts(plan: DraftPlan) -> tuple[DraftPlan, ...]:
    """The plan, and its `otherwise`, which drafts where the plan itself does not; empty if it is plain."""
    return tuple([part for part in (plan, plan.second()) if part.budget])


def device_arms(head: str | None, lookup: str | None, longest: Mapping[str, int]) -> list[Arm]:
    """Chains of a head, lookups where they find something and the head elsewhere, or lookups alone.

    `lookup` is a drafter that looks up on the device. `longest`: by drafter, the most tokens of its chains.
    Without a head, each of these drafters has its own arms.
    """
    config = CONFIG.device_planner
    if head is None:
        return [
            Arm(plan) for name, most in longest.items() for plan in _chains(name, config.lookup_lengths, most)
        ]
    if lookup is None:
        return [Arm(plan, attaches=True) for plan in _chains(head, config.head_lengths, longest[head])]
    pairs = [
        (min(found, longest[lookup]), min(length, longest[head], longest[lookup]))
        for found, length in config.cascade_lengths
    ]
    return [
        Arm(DraftPlan(lookup, found, otherwise=DraftPlan(head, length), enough=NOTHING_FOUND), attaches=True)
        for found, length in dict.fromkeys(pairs)
    ]


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
