"""A growing draft tree: each pass of the draft model adds one level.

A pass computes the rows of the frontier, whose children come next, and those of their ancestors, because a
row sees its ancestors only within the pass. The ancestors that all of them share, and whose rows earlier
passes have left in place (the stem), are not computed again: so a chain costs one row per level.

        stem            rows of the pass
    0 --- 1 --- 2 -+- 3 --- 5
                   +- 4 --- 6
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from numpy.lib.stride_tricks import as_strided

from paceline.backends.head_chains import EXTEND_FACTOR
from paceline.core.arrays import Float32Array, Float64Array
from paceline.core.sampling import SamplingState
from paceline.core.tree_shapes import ROOT
from paceline.core.trees import DraftPlan
from paceline.draft.model.draft_cache import Context
from paceline.draft.model.draft_pass import Part
from paceline.draft.model.vocabulary import Vocabulary
from paceline.verify.sampling import Sampler


@dataclass(frozen=True)
class Scoring:
    """What all trees of a drafter use to score guesses."""

    vocabulary: Vocabulary
    sampler: Sampler
    least_chance: float = 0.0  # a chain ends where its chance is lower; trees use their whole budget
    extend_factor: float = EXTEND_FACTOR  # times that: a less likely chain is not extended


@dataclass(frozen=True)
class FinishedTree:
    """The proposed tree of one request, as in DraftTrees."""

    tokens: Sequence[int]
    parents: Sequence[int]
    chances: Sequence[float]  # [nodes] NaN: unknown
    rows: Sequence[int]  # [nodes] the distribution that a node was drawn from, -1: it was chosen
    distributions: Sequence[Float64Array]  # each [vocabulary of the target]


NO_GUESS = FinishedTree((), (), (), (), ())


class GrowingTree(ABC):
    """One request's tree. `frontier` is empty when it is complete."""

    def __init__(self, context: Context, plan: DraftPlan, scoring: Scoring) -> None:
        self.context = context
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self.frontier = [ROOT]  # ascending
        self._plan = plan
        self._scoring = scoring
        self._depths: list[int] = []
        self._states: dict[int, SamplingState] = {ROOT: context.request.sampling}
        self._written: list[int] = []  # nodes whose rows are in the pool after the context, in this order

    def part(self) -> Part:
        """The rows of the next pass; its logits are those of the frontier."""
        needed: set[int] = set()
        for node in self.frontier:
            while node != ROOT and node not in needed:
                needed.add(node)
                node = self.parents[node]
        nodes = sorted(needed)
        stem = self._stem(nodes)
        rows = {node: row for row, node in enumerate(nodes[stem:])}
        self._written = nodes
        return Part(
            self.context,
            len(self.context.tokens) + stem,
            [self._scoring.vocabulary.draft_id(self.tokens[node]) for node in rows],
            [rows.get(self.parents[node], -1) for node in rows],
            [rows[node] for node in self.frontier],
            list(rows),
        )

    def _stem(self, nodes: Sequence[int]) -> int:
        """The number of leading nodes that are ancestors of all others and whose rows are in place."""
        parents = [self.parents[node] for node in nodes]
        end = ROOT
        for index, node in enumerate(nodes):
            in_place = index < len(self._written) and self._written[index] == node
            if not in_place or node in self.frontier or parents.count(end) > 1:
                return index
            end = node
        return len(nodes)

    @abstractmethod
    def grow(self, logits: Float32Array, confidences: Float32Array | None = None) -> None:
        """Add the children of the frontier, given its logits: [frontier, vocabulary of the draft].

        `confidences` [frontier]: chances that the best child is accepted, as a head estimates them itself.
        """

    def grow_levels(self, levels: Float32Array) -> None:
        """Add levels with the same guesses below every node, given their logits: [levels, vocabulary]."""
        for row in levels:
            if self.frontier:
                # a view that can be written, as other logits: samplers are compiled anew for read-only ones
                self.grow(as_strided(row, (len(self.frontier), len(row)), (0, *row.strides)))

    @abstractmethod
    def finished(self) -> FinishedTree:
        """The tree as it is proposed."""

    def chain_in_place(self) -> list[int]:
        """The draft model's ids of the written nodes that form a chain right after the context."""
        chain: list[int] = []
        end = ROOT
        for node in self._written:
            if self.parents[node] != end:
                break
            chain.append(self._scoring.vocabulary.draft_id(self.tokens[node]))
            end = node
        return chain

    def _depth(self, node: int) -> int:
        return 0 if node == ROOT else self._depths[node]

    def _add(self, parent: int, token: int) -> int:
        """The number of a new node."""
        self.tokens.append(token)
        self.parents.append(parent)
        self._depths.append(self._depth(parent) + 1)
        return len(self.tokens) - 1

    def _may_extend(self, node: int) -> bool:
        """Whether a node may have children: not on the last level, and its token does not end the request."""
        depth, request = self._depths[node], self.context.request
        return depth < self._plan.levels and not request.ends_by(
            self.tokens[node], request.num_output + depth - 1
        )

    def _state(self, node: int) -> SamplingState:
        """The sampling state after a node's path."""
        if node not in self._states:
            self._states[node] = self._state(self.parents[node]).branch([self.tokens[node]])
        return self._states[node]


def frontier_rows(trees: Sequence[GrowingTree]) -> list[slice]:
    """The rows of each tree's frontier among the outputs of a pass for all of them."""
    sizes = [len(tree.frontier) for tree in trees]
    return [slice(end - size, end) for size, end in zip(sizes, accumulate(sizes), strict=True)]
