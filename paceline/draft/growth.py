"""Growing draft trees: which children a node gets, chosen or drawn, and which nodes are proposed."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from paceline.backends.head_chains import RIVALS
from paceline.core.arrays import Float32Array, Float64Array
from paceline.core.tree_shapes import ROOT, static_shape
from paceline.core.trees import DraftPlan, DraftTrees, Draws
from paceline.draft.base import DraftSampling
from paceline.draft.growing_tree import NO_GUESS, FinishedTree, GrowingTree, Scoring
from paceline.draft.model.draft_cache import Context
from paceline.errors import BackendError
from paceline.verify.choosing import ALL_IDS
from paceline.verify.draws import draw
from paceline.verify.kernels import gumbel
from paceline.verify.noise import STREAM_DRAFT

LEAST_CONFIDENCE = 1e-9  # lower confidences are raised to this one, so that their logarithm is finite


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


def to_draft_trees(trees: Sequence[GrowingTree | None]) -> DraftTrees:
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
            logits, ids_of_logits = vocabulary.target_logits(row), ALL_IDS
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
        tokens = [self.tokens[node] for node in nodes]
        parents = [numbers[self.parents[node]] for node in nodes]
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
