"""Trees whose shape was found beforehand: which of the guesses at each level were right most often.

A path names a node by ranks: (0, 2) is the third best guess behind the best one. Paths are in the order of
how often they are right, each behind its own beginning, so that the first n of them are the best tree of n.
"""

from __future__ import annotations

from collections.abc import Sequence

from paceline.core.tree_shapes import ROOT
from paceline.core.trees import DraftPlan
from paceline.draft.base import DraftSampling
from paceline.draft.draft_cache import Context
from paceline.draft.growth import ChosenTree, DrawnTree, Float32Array, GrowingTree, Scales
from paceline.errors import BackendError

Path = tuple[int, ...]


def make_ranked_tree(
    context: Context, plan: DraftPlan, scales: Scales, sampling: DraftSampling, paths: Sequence[Path]
) -> GrowingTree:
    """The kind of tree that suits a request and the way of sampling, in the shape of the paths."""
    allowed = [path for path in paths if len(path) <= plan.levels and max(path) < plan.branching]
    allowed = allowed[: plan.budget]
    if sampling is DraftSampling.INDEPENDENT and not context.request.sampler.greedy:
        return DrawnTree(context, plan, scales, shape_of(allowed))
    return RankedTree(context, plan, scales, sampling is DraftSampling.COUPLED, allowed)


def shape_of(paths: Sequence[Path]) -> dict[int, list[int]]:
    """The children of each path that has any, and of the ROOT: paths are numbered in their order."""
    numbers: dict[Path, int] = {(): ROOT} | {path: number for number, path in enumerate(paths)}
    children: dict[int, list[int]] = {}
    for path in paths:
        children.setdefault(numbers[path[:-1]], []).append(numbers[path])
    return children


class RankedTree(ChosenTree):
    """Of each node's guesses those of the ranks that the paths name."""

    def __init__(
        self, context: Context, plan: DraftPlan, scales: Scales, coupled: bool, paths: Sequence[Path]
    ) -> None:
        super().__init__(context, plan, scales, coupled)
        self._allowed = frozenset(paths)
        self._inner = {path[:-1] for path in paths}  # those with children
        self._paths: dict[int, Path] = {ROOT: ()}

    def grow(self, logits: Float32Array) -> None:
        level = len(self.tokens)
        try:
            for node, row in zip(self.frontier, logits, strict=True):
                for rank, (token, score) in enumerate(self._candidates(node, row)):
                    path = (*self._paths[node], rank)
                    if path in self._allowed:
                        self._paths[self._add(node, token)] = path
                        self._scores.append(score + (0.0 if node == ROOT else self._scores[node]))
        except BackendError:  # logits that allow no guess
            self.frontier = []
            return
        new = range(level, len(self.tokens))
        self.frontier = [node for node in new if self._paths[node] in self._inner and self._goes_on(node)]
