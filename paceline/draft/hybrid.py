"""hybrid: suffix decoding where it is confident, and a fallback drafter (or both) elsewhere.

Copies are long and cheap to draft, but exist only where the text repeats. A learned drafter always has a
guess, but a shorter one.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from paceline.core.features import Features
from paceline.core.trees import DraftPlan, DraftTrees
from paceline.draft.base import Drafter, DraftSampling, Target, UnboundDrafter
from paceline.draft.device import TextDrafts
from paceline.draft.lookup.suffix import SuffixDrafter, SuffixOptions
from paceline.draft.methods import load_drafter
from paceline.draft.speculative_config import PLAN_KEYS, SHARED_KEYS, parse_speculative_config
from paceline.errors import ConfigError
from paceline.options import check_number, refuse_unknown

if TYPE_CHECKING:
    from paceline.core.request import Request
    from paceline.core.verdict import Verdict
    from paceline.kv.cache import KVCache

COMBINE = ("either", "tree")
Tree = tuple[list[int], list[int], list[float]]  # tokens, parents, chances


@refuse_unknown(ConfigError)
@dataclass(frozen=True)
class HybridOptions(SuffixOptions):
    """The options of suffix decoding, and those of the combination."""

    fallback: Mapping[str, Any] | None = None  # a speculative_config of another method; required
    combine: str = "either"  # where suffix is not confident, the fallback drafts alone, or both in one "tree"
    confidence: float = 2.0  # expected accepted tokens from which on a suffix draft is used alone

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
    """Asks the suffix drafter first, and the fallback where its draft is not confident."""

    name = "hybrid"
    Options = HybridOptions

    def __init__(
        self, options: HybridOptions, suffix: SuffixDrafter, fallback: Drafter, fallback_budget: int
    ) -> None:
        """`fallback_budget` is the number of tokens that the fallback drafts in a step, at most."""
        self._options = options
        self._suffix = suffix
        self._fallback = fallback
        self._fallback_budget = fallback_budget
        self._parts: tuple[Drafter, Drafter] = (suffix, fallback)
        self.needs, self.kv, self.head = fallback.needs, fallback.kv, fallback.head
        self._memories = [part.memory for part in self._parts if part.memory is not None]
        self.memory = self
        self.follows_prefix = suffix.follows_prefix and fallback.follows_prefix
        self.device = TextDrafts(fallback.device.look_up if isinstance(fallback.device, TextDrafts) else None)

    @classmethod
    def load(cls, options: HybridOptions, target: Target) -> UnboundDrafter:
        """The drafter with its two parts loaded."""
        if options.combine == "tree" and target.sampling is DraftSampling.INDEPENDENT:
            raise ConfigError(
                "combine 'tree' puts drafted tokens that were chosen beside some that were drawn at random, "
                "which no rule of verification takes. Use combine 'either', draft_sample_method 'greedy', or "
                "verification 'pathwise'."
            )
        ((name, config),) = parse_speculative_config(options.fallback).drafters.items()
        suffix, fallback = SuffixDrafter.load(options, target), load_drafter(name, config, target)

        def bind(kv: KVCache) -> HybridDrafter:
            return cls(options, suffix, fallback.bind(kv), config.plan.budget)

        return UnboundDrafter(cls.name, bind, fallback.bytes_per_page)

    def propose(self, requests: Sequence[Request], plans: Sequence[DraftPlan]) -> DraftTrees:
        """One tree per request: of the suffix drafter, of the fallback, or of both."""
        trees = self._suffix.propose(requests, plans)
        confidence = self._options.confidence
        unsure = [index for index, tokens in enumerate(trees.expected()) if tokens < confidence]
        if not unsure:
            return trees
        fallback_trees = self._propose_fallback(
            [requests[index] for index in unsure], [plans[index] for index in unsure]
        )
        if self._options.combine == "tree":
            assert fallback_trees.draws is None, "drawn nodes cannot stand beside chosen ones"
            both = [
                union(_tree(fallback_trees, number), _tree(trees, index), plans[index])
                for number, index in enumerate(unsure)
            ]
            fallback_trees = DraftTrees.from_lists([tree[:2] for tree in both], [tree[2] for tree in both])
        return DraftTrees.merged(len(requests), [(range(len(requests)), trees), (unsure, fallback_trees)])

    def _propose_fallback(self, requests: Sequence[Request], plans: Sequence[DraftPlan]) -> DraftTrees:
        name, budget = self._fallback.name, self._fallback_budget
        limited = [replace(plan, drafter=name, budget=min(plan.budget, budget)) for plan in plans]
        return self._fallback.propose(requests, limited)

    def observe(
        self, requests: Sequence[Request], verdicts: Sequence[Verdict], features: Features | None
    ) -> None:
        for part in self._parts:
            part.observe(requests, verdicts, features)

    def forget(self, request: Request) -> None:
        for part in self._parts:
            part.forget(request)

    def remember(self, prompt: Sequence[int], output: Sequence[int]) -> None:
        for memory in self._memories:
            memory.remember(prompt, output)

    def save(self) -> None:
        for memory in self._memories:
            memory.save()


def _tree(trees: DraftTrees, request: int) -> Tree:
    return (*trees.tree_lists(request), trees.chances_of(request))


def union(first: Tree, second: Tree, plan: DraftPlan) -> Tree:
    """The likeliest nodes of both trees within the plan, equal paths once.

    A path that both trees have gets the higher of its two chances. A node without a chance counts as likely
    as the one above it; ties go to the first tree.
    """
    tokens, parents, chances = _joined(first, second)
    ranks: list[float] = []  # chances, and those assumed where there is none
    for parent, chance in zip(parents, chances, strict=True):
        above = ranks[parent] if parent >= 0 else 1.0
        ranks.append(above if math.isnan(chance) else min(chance, above))
    new_number = {-1: -1}
    num_children: Counter[int] = Counter()
    chosen: list[int] = []
    for node in sorted(range(len(tokens)), key=lambda node: -ranks[node]):  # stable: parents come first
        parent = parents[node]
        if len(chosen) < plan.budget and parent in new_number and num_children[parent] < plan.branching:
            num_children[parent] += 1
            new_number[node] = len(chosen)
            chosen.append(node)
    return (
        [tokens[node] for node in chosen],
        [new_number[parents[node]] for node in chosen],
        [chances[node] for node in chosen],
    )


def _joined(first: Tree, second: Tree) -> Tree:
    """All nodes of both trees, equal paths once; those of the first come first."""
    tokens: list[int] = []
    parents: list[int] = []
    chances: list[float] = []
    numbers: dict[tuple[int, int], int] = {}  # (parent, token): the node
    for tree in (first, second):
        joined = {-1: -1}  # this tree's node: its number
        for node, (token, parent, chance) in enumerate(zip(*tree, strict=True)):
            above = joined[parent]
            same = numbers.setdefault((above, token), len(tokens))
            if same == len(tokens):
                tokens.append(token)
                parents.append(above)
                chances.append(math.nan)
            joined[node] = same
            chances[same] = float(np.fmax(chances[same], chance))  # NaN only if both are
    return tokens, parents, chances
