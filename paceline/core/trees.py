"""DraftTrees: the drafted nodes of a batch. DraftPlan: what a request may draft in a step.

A chain is a tree without branches and an empty tree is plain decoding, so all code downstream handles trees
only.

Compiled functions are imported where they are called: the command line uses DraftPlan and should not wait for
numba.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain, pairwise

import numpy as np

from paceline.core.arrays import BoolArray, Float32Array, Float64Array, Int32Array


@dataclass(frozen=True, slots=True)
class DraftPlan:
    """What a request may draft in this step. Budget 0 is plain decoding."""

    drafter: str | None = None  # one of the engine's drafters, by name
    budget: int = 0  # nodes of the tree, at most
    branching: int = 1  # children of a node, at most; 1 is a chain
    depth: int | None = None  # levels of the tree, at most; None: as many as the budget has nodes
    forced: int = 0  # nodes of the budget that are reserved for tokens that a constraint forces
    prefix: tuple[int, ...] = ()  # forced tokens that come first: the draft starts after them
    least_chance: float = 0.0  # paths with a lower chance are not worth a row; 0: the drafter's own value
    # a cascade: if the draft is expected to give fewer than `enough` tokens, the drafter of `otherwise` is
    # asked too, within the same budget, and the draft with more expected tokens is used
    otherwise: DraftPlan | None = None
    enough: float = 0.0

    @property
    def label(self) -> str:
        """Drafters and nodes, such as "ngram 7 + eagle3 5"; of a tree its branching and depth too."""
        label = f"{self.drafter} {self.budget}" if self.budget else "off"
        label += f" ({self.branching}, {self.levels})" if self.branching > 1 else ""
        return label if self.otherwise is None else f"{label} + {self.otherwise.label}"

    @property
    def levels(self) -> int:
        """The most levels that the tree can have."""
        return self.budget if self.depth is None else min(self.depth, self.budget)

    @property
    def nodes(self) -> int:
        """The most nodes that the tree can have: its budget, or fewer if the levels cannot hold that many."""
        if self.branching == 1:
            return self.levels
        nodes, width = 0, 1
        for _ in range(self.levels):
            width = min(width * self.branching, self.budget)
            nodes += width
        return min(nodes, self.budget)

    def shrunk(self, budget: int) -> DraftPlan:
        """This plan with at most `budget` nodes; the plain plan when none are left."""
        if budget >= self.budget:
            return self
        return replace(self, budget=budget) if budget > 0 else PLAIN

    def as_chain(self) -> DraftPlan:
        """This plan with chains instead of trees, as deep as they are."""
        other = None if self.otherwise is None else self.otherwise.as_chain()
        return replace(self, budget=self.levels, branching=1, otherwise=other)

    def begins(self, other: DraftPlan) -> bool:
        """Whether its drafts are the beginnings of the other's: chains of the same drafter, as long or
        shorter."""
        if self == other:
            return True
        is_chain = self.branching == 1 and self.budget > 0 and self.otherwise is None
        longer = replace(self, budget=other.budget, depth=other.depth) if is_chain and other.budget else PLAIN
        return longer == other and self.levels <= other.levels

    def second(self) -> DraftPlan:
        """The `otherwise` plan within the budget and levels of this one; the plain plan if there is none."""
        other = (self.otherwise or PLAIN).shrunk(self.budget)
        return other if other.levels <= self.levels else replace(other, depth=self.levels)

    def __hash__(self) -> int:  # uses few fields, because every pass looks plans up many times
        return hash((self.drafter, self.budget, self.depth))

    def __post_init__(self) -> None:
        assert (self.budget > 0) == (self.drafter is not None), "a budget belongs to a drafter"


PLAIN = DraftPlan()


@dataclass(frozen=True, slots=True)
class Draws:
    """The distributions that nodes were drawn from."""

    draft_probs: Float64Array  # [distributions, vocab] each sums to 1
    rows: Int32Array  # [nodes] the distribution that a node was drawn from, -1: it was chosen

    def check(self, tokens: Int32Array, vocab_size: int) -> None:
        """ValueError if these tokens cannot have been drawn from these distributions."""
        shape = self.draft_probs.shape
        if len(shape) != 2 or shape[1] != vocab_size or self.draft_probs.dtype != np.float64:
            raise ValueError(f"draft_probs must be float64 [distributions, {vocab_size}], got {shape}")
        if len(self.rows) != len(tokens) or (self.rows >= shape[0]).any():
            raise ValueError(f"rows must name one of {shape[0]} distributions or -1 for each node")
        drawn = np.flatnonzero(self.rows >= 0)
        if not (self.draft_probs[self.rows[drawn], tokens[drawn]] > 0).all():
            raise ValueError("a node's token has probability 0 in the distribution it was drawn from")


@dataclass(frozen=True, slots=True)
class DraftTrees:
    """The drafted nodes of several requests, flat.

    A node's parent is an earlier node of the same request, or -1: the request's last token.

    A node was either chosen (a copy, the likeliest token, shared noise) or drawn at random from a
    distribution of the drafter. Verification rules other than pathwise must know which, and the distribution.
    Siblings from one distribution are drawn without replacement, in order: the tokens of all earlier
    siblings, drawn or chosen, are excluded.

    A drafter may report how likely its nodes are to be accepted, for the controller. It reports nothing for
    drawn nodes: rejection sampling is exact only if no node is dropped because of its probability.
    """

    tokens: Int32Array  # [nodes]
    parents: Int32Array  # [nodes] local to the request, -1 for the root's children
    offsets: Int32Array  # [requests + 1] nodes of request i are offsets[i]:offsets[i + 1]
    draws: Draws | None = None  # None: every node was chosen
    # [nodes] the drafter's probability that the path to a node is accepted; NaN, or None for all: unknown
    chances: Float32Array | None = None
    forced: BoolArray | None = None  # [nodes] whether a constraint forces the token; None: nowhere

    @property
    def num_requests(self) -> int:
        return len(self.offsets) - 1

    @property
    def num_nodes(self) -> int:
        return len(self.tokens)

    def sizes(self) -> list[int]:
        """The number of nodes of each tree."""
        ends = self.offsets.tolist()
        return [end - start for start, end in pairwise(ends)]

    def tree(self, request: int) -> tuple[Int32Array, Int32Array]:
        """Tokens and parents of one request's nodes."""
        start, end = self.offsets[request], self.offsets[request + 1]
        return self.tokens[start:end], self.parents[start:end]

    def tree_lists(self, request: int) -> tuple[list[int], list[int]]:
        """Tokens and parents of one request's nodes, as lists: faster to walk."""
        tokens, parents = self.tree(request)
        return tokens.tolist(), parents.tolist()

    def draws_of(self, request: int) -> Draws | None:
        """The distributions of one request's nodes; None if all of them were chosen."""
        if self.draws is None:
            return None
        rows = self.draws.rows[self.offsets[request] : self.offsets[request + 1]]
        return Draws(self.draws.draft_probs, rows) if (rows >= 0).any() else None

    def chances_of(self, request: int) -> list[float]:
        """The chances of one request's nodes; NaN: unknown."""
        start, end = self.offsets[request], self.offsets[request + 1]
        return [math.nan] * int(end - start) if self.chances is None else self.chances[start:end].tolist()

    def forced_of(self, request: int) -> list[bool]:
        """Which of one request's nodes a constraint forces."""
        start, end = self.offsets[request], self.offsets[request + 1]
        return [False] * int(end - start) if self.forced is None else self.forced[start:end].tolist()

    def expected(self) -> list[float]:
        """The expected number of accepted nodes of each tree; NaN: unknown."""
        chances = [math.nan] * self.num_nodes if self.chances is None else self.chances.tolist()
        return [sum(chances[start:end]) for start, end in pairwise(self.offsets.tolist())]

    @staticmethod
    def from_lists(
        trees: Sequence[tuple[Sequence[int], Sequence[int]]], chances: Sequence[Sequence[float]] | None = None
    ) -> DraftTrees:
        """Trees from one (tokens, parents) pair per request, and their chances. All nodes were chosen."""
        tokens: list[int] = []
        parents: list[int] = []
        offsets = [0]
        for tree_tokens, tree_parents in trees:
            tokens += tree_tokens
            parents += tree_parents
            offsets.append(len(tokens))
        return DraftTrees(
            np.array(tokens, dtype=np.int32),
            np.array(parents, dtype=np.int32),
            np.array(offsets, dtype=np.int32),
            chances=None if chances is None else np.array([*chain.from_iterable(chances)], dtype=np.float32),
        )

    @staticmethod
    def chains(
        chains: Sequence[Sequence[int]], chances: Sequence[Sequence[float]] | None = None
    ) -> DraftTrees:
        """Trees from one chain of tokens per request, and their chances."""
        return DraftTrees.from_lists([(tokens, range(-1, len(tokens) - 1)) for tokens in chains], chances)

    @staticmethod
    def merged(num_requests: int, groups: Sequence[tuple[Sequence[int], DraftTrees]]) -> DraftTrees:
        """The trees of several drafters as one batch; a group has the indices of its requests.

        Where two groups have nodes for a request, the later group's are used.
        """
        from paceline.core.tree_arrays import run_numbers

        if not groups:
            return DraftTrees.chains([()] * num_requests)
        runs = [(0, 0)] * num_requests  # [requests] (first node, number of nodes) among those of all groups
        first = 0
        for requests, trees in groups:
            ends = trees.offsets.tolist()
            for request, start, end in zip(requests, ends[:-1], ends[1:], strict=True):
                if end > start:
                    runs[request] = first + start, end - start
            first += trees.num_nodes
        nodes, offsets = run_numbers(np.array(runs, dtype=np.int32))
        proposed = [trees for _, trees in groups]
        return DraftTrees(
            np.concatenate([trees.tokens for trees in proposed])[nodes],
            np.concatenate([trees.parents for trees in proposed])[nodes],
            offsets,
            _joined_draws(proposed, nodes),
            _joined_chances(proposed, nodes),
            _joined_forced(proposed, nodes),
        )

    def kept(self, keep: BoolArray) -> DraftTrees:
        """The trees with only the nodes that `keep` marks: [nodes]. Ancestors of a kept node must be kept."""
        from paceline.core.tree_arrays import kept_nodes

        nodes, parents, offsets = kept_nodes(keep, self.parents, self.offsets)
        return DraftTrees(
            self.tokens[nodes],
            parents,
            offsets,
            None if self.draws is None else replace(self.draws, rows=self.draws.rows[nodes]),
            None if self.chances is None else self.chances[nodes],
            None if self.forced is None else self.forced[nodes],
        )

    def check(self, plans: Sequence[DraftPlan], vocab_size: int) -> None:
        """ValueError if these are not valid trees within the plans; it names the fault.

        Drafters are plug-ins: a node out of order or a repeated sibling would corrupt the output or waste
        rows, so their trees are checked before they are used.
        """
        if self.tokens.ndim != 1 or self.parents.shape != self.tokens.shape or self.offsets.ndim != 1:
            raise ValueError(f"{self.tokens.shape} tokens, but {self.parents.shape} parents")
        if self.num_requests != len(plans):
            raise ValueError(f"expected trees for {len(plans)} requests, got {self.num_requests}")
        if not self._are_sound(plans, vocab_size):
            self._name_fault(plans, vocab_size)
        if self.draws is not None:
            self.draws.check(self.tokens, vocab_size)

    def _are_sound(self, plans: Sequence[DraftPlan], vocab_size: int) -> bool:
        from paceline.core.tree_arrays import are_sound

        nodes = self.tokens, self.parents, self.offsets
        chances = np.empty(0, dtype=np.float32) if self.chances is None else self.chances
        if not plans or any(array.dtype != np.int32 for array in nodes) or chances.dtype != np.float32:
            return False  # other dtypes are checked in plain Python
        limits = np.array([(plan.budget, plan.branching) for plan in plans], dtype=np.int32)
        return are_sound(*nodes, limits, vocab_size, chances)

    def _name_fault(self, plans: Sequence[DraftPlan], vocab_size: int) -> None:
        """ValueError that names the fault, if there is one."""
        ends = self.offsets.tolist()
        if ends[0] != 0 or ends[-1] != self.num_nodes or ends != sorted(ends):
            raise ValueError(f"offsets must go from 0 up to {self.num_nodes} nodes, got {ends}")
        for request, plan in enumerate(plans):
            tokens, parents = self.tree_lists(request)
            if len(tokens) > plan.budget:
                raise ValueError(f"tree {request} has {len(tokens)} nodes, its budget is {plan.budget}")
            if not all(-1 <= parent < node for node, parent in enumerate(parents)):
                raise ValueError(f"tree {request} is not in topological order: parents {parents}")
            if not all(0 <= token < vocab_size for token in tokens):
                raise ValueError(f"tree {request} has a token outside 0..{vocab_size - 1}: {tokens}")
            if len(set(zip(parents, tokens, strict=True))) != len(tokens):
                raise ValueError(f"tree {request} repeats a token among siblings: {tokens}")
            if plan.branching == 1 and len(set(parents)) != len(parents):
                raise ValueError(f"tree {request} branches, its plan is a chain: parents {parents}")
        if self.chances is not None:
            self._check_chances(self.chances)

    def _check_chances(self, chances: Float32Array) -> None:
        """ValueError if these cannot be the chances of paths."""
        from paceline.core.tree_arrays import ROUNDING

        if chances.shape != self.tokens.shape:
            raise ValueError(f"expected a chance for each of {self.num_nodes} nodes, got {chances.shape}")
        starts = np.repeat(self.offsets[:-1], np.diff(self.offsets))
        above = np.where(self.parents < 0, 1.0, chances[starts + self.parents])
        if (chances < 0.0).any() or (chances > above + ROUNDING).any():  # NaN is neither
            raise ValueError(f"a chance must be between 0 and that of the node above: {chances.tolist()}")


def _joined_draws(groups: Sequence[DraftTrees], nodes: Int32Array) -> Draws | None:
    """The distributions of these nodes of all groups."""
    rows, distributions = [], []
    first = 0
    for trees in groups:
        if trees.draws is None:
            rows.append(np.full(trees.num_nodes, -1, dtype=np.int32))
        else:
            rows.append(np.where(trees.draws.rows < 0, np.int32(-1), trees.draws.rows + np.int32(first)))
            distributions.append(trees.draws.draft_probs)
            first += len(trees.draws.draft_probs)
    return Draws(np.concatenate(distributions), np.concatenate(rows)[nodes]) if distributions else None


def _joined_chances(groups: Sequence[DraftTrees], nodes: Int32Array) -> Float32Array | None:
    """The chances of these nodes of all groups."""
    if all(trees.chances is None for trees in groups):
        return None
    unknown = np.float32(np.nan)
    chances = [
        np.full(trees.num_nodes, unknown) if trees.chances is None else trees.chances for trees in groups
    ]
    return np.concatenate(chances)[nodes]


def _joined_forced(groups: Sequence[DraftTrees], nodes: Int32Array) -> BoolArray | None:
    """Which of these nodes of all groups are forced."""
    if all(trees.forced is None for trees in groups):
        return None
    forced = [np.zeros(trees.num_nodes, bool) if trees.forced is None else trees.forced for trees in groups]
    return np.concatenate(forced)[nodes]


NO_TREE: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())
