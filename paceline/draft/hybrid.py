"""Suffix drafting and another drafter together: the one where it is sure, the other or both elsewhere.

Copies are long and cost nothing to draft, but there are not always any; a drafter that knows the
language always has something to say, but not as far ahead.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from paceline.core.features import Features
from paceline.core.trees import DraftPlan, DraftTrees
from paceline.draft.base import Drafter, DraftSampling, Target, TextDrafts
from paceline.draft.methods import PLAN_KEYS, SHARED_KEYS, load_drafter, parse_speculative_config
from paceline.draft.suffix import SuffixDrafter, SuffixOptions
from paceline.errors import ConfigError
from paceline.options import check_number, refuse_unknown

if TYPE_CHECKING:
    from paceline.core.forward import KeptFeatures
    from paceline.core.request import Request
    from paceline.core.verdict import Verdict
    from paceline.kv.cache import KVCache

COMBINE = ("either", "tree")
Tree = tuple[list[int], list[int], list[float]]  # tokens, parents, chances


@refuse_unknown(ConfigError)
@dataclass(frozen=True)
class HybridOptions(SuffixOptions):
    """The options of suffix drafting, and those of the combination."""

    fallback: Mapping[str, Any] | None = None  # a speculative_config of another method; must be given
    combine: str = "either"  # where suffix is not sure, the other drafts alone, or both in one "tree"
    confidence: float = 2.0  # accepted tokens that a suffix draft must promise to be sure

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.combine not in COMBINE:
            raise ConfigError(f"combine must be one of {', '.join(COMBINE)}, got {self.combine!r}.")
        check_number(ConfigError, "confidence", self.confidence, 0.0, 1e6)
        if not isinstance(self.fallback, Mapping):
            raise ConfigError(
                "hybrid needs fallback, a speculative_config of the method that drafts where past text is of "
                f'no help, such as {{"method": "draft_model", "model": "..."}}; got {self.fallback!r}.'
            )
        shared = [key for key in (*PLAN_KEYS[2:], *SHARED_KEYS) if key in self.fallback]
        if shared:
            raise ConfigError(f"give {' and '.join(shared)} beside method hybrid, not in its fallback.")
        if self.fallback.get("method") in ("hybrid", "suffix"):
            raise ConfigError(
                f"the fallback of hybrid may not be {self.fallback['method']}, which is part of it. Use "
                "draft_model, or ngram."
            )
        ((_, config),) = parse_speculative_config(self.fallback).drafters.items()
        if config.plan.budget == 0:
            raise ConfigError("the fallback of hybrid drafts nothing: its num_speculative_tokens is 0.")


class HybridDrafter(Drafter):
    """Asks the suffix drafter first, and another where that is not sure."""

    name = "hybrid"
    Options = HybridOptions

    def __init__(self, options: HybridOptions, suffix: SuffixDrafter, other: Drafter, most: int) -> None:
        """`most` tokens are drafted by the other in a step."""
        self._options = options
        self._suffix = suffix
        self._other = other
        self._most = most
        self._parts: tuple[Drafter, Drafter] = (suffix, other)
        self.needs = other.needs
        self.follows_prefix = suffix.follows_prefix and other.follows_prefix
        self.device = TextDrafts(other.device.look_up if isinstance(other.device, TextDrafts) else None)

    @classmethod
    def load(cls, options: HybridOptions, target: Target) -> HybridDrafter:
        """The drafter with its two parts loaded."""
        if options.combine == "tree" and target.sampling is DraftSampling.INDEPENDENT:
            raise ConfigError(
                "combine 'tree' puts drafted tokens that were chosen beside some that were drawn at random, "
                "which no rule of verification takes. Use combine 'either', draft_sample_method 'greedy', or "
                "verification 'pathwise'."
            )
        ((name, config),) = parse_speculative_config(options.fallback).drafters.items()
        other = load_drafter(name, config, target)
        return cls(options, SuffixDrafter.load(options, target), other, config.plan.budget)

    def bind(self, kv: KVCache) -> None:
        for part in self._parts:
            part.bind(kv)

    def prepare(self) -> None:
        for part in self._parts:
            part.prepare()

    def propose(self, requests: Sequence[Request], plans: Sequence[DraftPlan]) -> DraftTrees:
        """One tree per request: of the suffix drafter, of the other, or of both."""
        trees = self._suffix.propose(requests, plans)
        least = self._options.confidence
        unsure = [index for index, tokens in enumerate(trees.expected()) if tokens < least]
        if not unsure:
            return trees
        others = self._ask_other([requests[index] for index in unsure], [plans[index] for index in unsure])
        if self._options.combine == "tree":
            assert others.draws is None, "drawn nodes cannot stand beside chosen ones"
            both = [
                union(_tree(others, number), _tree(trees, index), plans[index])
                for number, index in enumerate(unsure)
            ]
            others = DraftTrees.from_lists([tree[:2] for tree in both], [tree[2] for tree in both])
        return DraftTrees.merged(len(requests), [(range(len(requests)), trees), (unsure, others)])

    def _ask_other(self, requests: Sequence[Request], plans: Sequence[DraftPlan]) -> DraftTrees:
        name, most = self._other.name, self._most
        own = [replace(plan, drafter=name, budget=min(plan.budget, most)) for plan in plans]
        return self._other.propose(requests, own)

    def kept(self) -> KeptFeatures | None:
        return self._other.kept()

    def backlog(self, request: Request) -> int:
        return max(part.backlog(request) for part in self._parts)

    def observe(
        self, requests: Sequence[Request], verdicts: Sequence[Verdict], features: Features | None
    ) -> None:
        for part in self._parts:
            part.observe(requests, verdicts, features)

    def forget(self, request: Request) -> None:
        for part in self._parts:
            part.forget(request)

    def close(self) -> None:
        for part in self._parts:
            part.close()


def _tree(trees: DraftTrees, request: int) -> Tree:
    return (*trees.tree_lists(request), trees.chances_of(request))


def union(first: Tree, second: Tree, plan: DraftPlan) -> Tree:
    """The nodes of both trees, equal paths once, as far as the plan has room; the first's come first.

    A path that both have is as likely as the surer says.
    """
    tokens: list[int] = []
    parents: list[int] = []
    chances: list[float] = []
    children: dict[int, dict[int, int]] = {-1: {}}  # node: its children by token
    for tree in (first, second):
        places = {-1: -1}  # of this tree's nodes in the union; those that found no room are missing
        for node, (token, parent, chance) in enumerate(zip(*tree, strict=True)):
            if parent not in places:
                continue
            place = places[parent]
            siblings = children[place]
            if token not in siblings:
                if len(tokens) == plan.budget or len(siblings) == plan.branching:
                    continue
                siblings[token] = len(tokens)
                children[len(tokens)] = {}
                tokens.append(token)
                parents.append(place)
                chances.append(math.nan)
            places[node] = same = siblings[token]
            chances[same] = float(np.fmax(chances[same], chance))  # NaN only if neither has an opinion
    return tokens, parents, chances
