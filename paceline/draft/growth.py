"""Growing draft trees: each pass of the draft model adds one level.

A pass computes the rows of the frontier, whose children come next, and those of their ancestors, because a
row sees its ancestors only within the pass. The ancestors that all of them share, and whose rows earlier
passes have left in place (the stem), are not computed again: so a chain costs one row per level.

        stem            rows of the pass
    0 --- 1 --- 2 -+- 3 --- 5
                   +- 4 --- 6
"""

from __future__ import annotations

import heapq
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np

from paceline.backends.head_chains import EXTEND_FACTOR, RIVALS
from paceline.core.arrays import Float32Array, Float64Array, Int64Array
from paceline.core.sampling import SamplingState
from paceline.core.tree_shapes import ROOT, static_shape
from paceline.core.trees import DraftPlan, DraftTrees, Draws
from paceline.draft.base import DraftSampling
from paceline.draft.model.draft_cache import Context
from paceline.draft.model.draft_pass import Part
from paceline.draft.model.vocabulary import Vocabulary
from paceline.errors import BackendError
from paceline.verify.draws import draw
from paceline.verify.kernels import gumbel
from paceline.verify.noise import STREAM_DRAFT
from paceline.verify.sampling import Sampler

LEAST_CONFIDENCE = 1e-9  # lower confidences are raised to this one, so that their logarithm is finite
_ALL_IDS: Int64Array = np.empty(0, dtype=np.int64)  # the logits are those of all ids


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
                self.grow(np.broadcast_to(row, (len(self.frontier), len(row))))

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


def make_tree(
    context: Context, plan: DraftPlan, scoring: Scoring, sampling: DraftSampling, best_first: bool = False
) -> GrowingTree:
    """A growing tree for a request: drawn or chosen, as the sampling asks. `best_first`: see ChosenTree."""
    if sampling is DraftSampling.INDEPENDENT and not context.request.sampling.greedy:
        return DrawnTree(context, plan, scoring)
    return ChosenTree(context, plan, scoring, sampling is DraftSampling.COUPLED, best_first)


def make_trees(
    contexts: Sequence[Context | None],
    plans: Sequence[DraftPlan],
    scoring: Scoring,
    sampling: DraftSampling,
    best_first: bool = False,
) -> list[GrowingTree | None]:
    """A growing tree for each context, within its plan and room; None where there is no context."""
    return [
        None
        if context is None
        else make_tree(context, plan.shrunk(context.room), scoring, sampling, best_first)
        for context, plan in zip(contexts, plans, strict=True)
    ]


def frontier_rows(trees: Sequence[GrowingTree]) -> list[slice]:
    """The rows of each tree's frontier among the outputs of a pass for all of them."""
    sizes = [len(tree.frontier) for tree in trees]
    return [slice(end - size, end) for size, end in zip(sizes, accumulate(sizes), strict=True)]


def merged(trees: Sequence[GrowingTree | None]) -> DraftTrees:
    """The trees of all requests as one batch, with the distributions of drawn trees."""
    finished = [NO_GUESS if tree is None else tree.finished() for tree in trees]
    proposed = DraftTrees.from_lists(
        [(tree.tokens, tree.parents) for tree in finished], [tree.chances for tree in finished]
    )
    distributions: list[Float64Array] = []
    rows: list[int] = []
    for tree in finished:
        rows += [row + len(distributions) if row >= 0 else -1 for row in tree.rows]
        distributions += tree.distributions
    if not distributions:
        return proposed
    return replace(proposed, draws=Draws(np.stack(distributions), np.array(rows, dtype=np.int32)))


class ChosenTree(GrowingTree):
    """A tree of the likeliest tokens, or with `coupled` of the likeliest under the target's noise.

    A dynamic tree, as in EAGLE-2: the best `branching` nodes of each level get children, and the best
    `budget` of all nodes are proposed. With `best_first`, for drafters whose children cost no pass, as in
    JetSpec: every node that can still be proposed gets children. Scores only fall along a path, so this is
    the tree of the best `budget` nodes of all.
    """

    def __init__(
        self, context: Context, plan: DraftPlan, scoring: Scoring, coupled: bool, best_first: bool = False
    ) -> None:
        super().__init__(context, plan, scoring)
        self._coupled = coupled
        self._width = plan.budget if best_first else plan.branching  # nodes of a level that get children
        self._scores: list[float] = []  # [nodes] log of the chance that the path is accepted
        self._is_scored = True  # False: the scores were not computed
        least_chance = plan.least_chance or (scoring.least_chance if plan.branching == 1 else 0.0)
        self._least_score = math.log(least_chance) if least_chance > 0.0 else -math.inf

    def grow(self, logits: Float32Array, confidences: Float32Array | None = None) -> None:
        level = len(self.tokens)
        try:
            for number, (node, row) in enumerate(zip(self.frontier, logits, strict=True)):
                confidence = None if confidences is None else float(confidences[number])
                for token, score in self._candidates(node, row, confidence):
                    self._add(node, token)
                    self._scores.append(score + (0.0 if node == ROOT else self._scores[node]))
        except BackendError:  # logits that allow no guess
            self.frontier = []
            return
        best = [node for node in self._best() if node >= level and self._may_extend(node)]
        self.frontier = sorted(best[: self._width])

    def _candidates(
        self, node: int, row: Float32Array, confidence: float | None = None
    ) -> list[tuple[int, float]]:
        """The children of a node, each with the log of its chance, from a row of the draft model's logits."""
        depth, request = self._depth(node), self.context.request
        state, vocabulary = self._state(node), self._scoring.vocabulary
        count, sampler = self._plan.branching, self._scoring.sampler
        coupled = self._coupled and not state.greedy
        before = request.num_output + depth
        if state.leaves_logits(before):
            logits, ids_of_logits = vocabulary.known_logits(row)
        else:
            logits, ids_of_logits = vocabulary.target_logits(row), _ALL_IDS
        query = logits, len(request.token_ids) + depth, before
        if (
            count == 1
            and len(ids_of_logits) == 0
            and (self._least_score == -math.inf or confidence is not None)
            and (coupled or state.greedy)
        ):
            # scores are known or not needed: the token of the best candidate, but faster
            self._is_scored = confidence is not None
            return [(sampler.sample(state, *query), _log(confidence) if confidence is not None else 0.0)]
        # The target adds the same noise: its token is probably among the likeliest under that noise.
        num_candidates = count + RIVALS if coupled else count
        ids, chances = sampler.candidates(state, *query, num_candidates, coupled, ids_of_logits)
        if state.greedy:
            chances *= 0.5  # see head_chains.py
        if coupled:
            chances += gumbel(np.uint64(state.seed), np.uint64(query[1]), ids)
            chances -= np.logaddexp.reduce(chances)
        if count == 1 and confidence is not None:
            chances[:1] = _log(confidence)
        return list(zip(ids[:count].tolist(), chances[:count].tolist(), strict=True))

    def _may_extend(self, node: int) -> bool:
        least_score = self._least_score + math.log(self._scoring.extend_factor)
        return self._scores[node] >= least_score and super()._may_extend(node)

    def _best(self) -> list[int]:
        """The nodes to propose, best first; ties go to the shallower node, so ancestors are included."""
        nodes = [node for node, score in enumerate(self._scores) if score >= self._least_score]
        return heapq.nsmallest(
            self._plan.budget, nodes, key=lambda node: (-self._scores[node], self._depths[node], node)
        )

    def finished(self) -> FinishedTree:
        nodes = sorted(self._best())
        numbers = {node: number for number, node in enumerate(nodes)} | {ROOT: ROOT}
        tokens, parents = (
            [self.tokens[node] for node in nodes],
            [numbers[self.parents[node]] for node in nodes],
        )
        chances = [math.exp(self._scores[node]) if self._is_scored else math.nan for node in nodes]
        return FinishedTree(tokens, parents, chances, [-1] * len(nodes), ())


def _log(chance: float) -> float:
    return math.log(max(chance, LEAST_CONFIDENCE))


class DrawnTree(GrowingTree):
    """A tree drawn at random from the draft model's distributions, siblings without replacement.

    The rules that verify such a tree need its shape to be independent of what is drawn: it is static.
    """

    def __init__(
        self, context: Context, plan: DraftPlan, scoring: Scoring, shape: dict[int, list[int]] | None = None
    ) -> None:
        """`shape` has the children of ROOT and of each node that has any; None: `static_shape`."""
        super().__init__(context, plan, scoring)
        self._distributions: list[Float64Array] = []  # each [vocabulary of the target]
        self._rows: list[int] = []  # [nodes] which distribution a node was drawn from
        self._shape = shape or static_shape(plan.budget, plan.branching, plan.levels)
        self._numbers = {ROOT: ROOT}  # node: its number in the shape

    def grow(self, logits: Float32Array, confidences: Float32Array | None = None) -> None:
        level = len(self.tokens)
        try:
            for node, row in zip(self.frontier, logits, strict=True):
                self._draw_children(node, self._scoring.vocabulary.target_logits(row))
        except BackendError:  # logits that allow no guess
            self.frontier = []
            return
        new = range(level, len(self.tokens))
        self.frontier = [
            node for node in new if self._numbers[node] in self._shape and self._may_extend(node)
        ]

    def finished(self) -> FinishedTree:
        chances = [math.nan] * len(self.tokens)  # see DraftTrees
        return FinishedTree(self.tokens, self.parents, chances, self._rows, self._distributions)

    def _draw_children(self, node: int, logits: Float32Array) -> None:
        depth, request = self._depth(node), self.context.request
        state, first = self._state(node), len(request.token_ids)
        probabilities = self._scoring.sampler.probabilities(state, logits, request.num_output + depth)
        self._distributions.append(probabilities)
        taken: list[int] = []
        for number in self._shape[self._numbers[node]]:
            token = draw(probabilities, state.seed, first, STREAM_DRAFT, number, taken)
            if token < 0:  # the distribution has no other token
                return
            taken.append(token)
            self._numbers[self._add(node, token)] = number
            self._rows.append(len(self._distributions) - 1)
