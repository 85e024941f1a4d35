"""Trees of a calibrated shape (Medusa): which ranks at each level were accepted most often.

A path names a node by ranks: (0, 2) is the third best guess after the best one. Paths are sorted by how often
they were right, each after its own prefix, so the first n paths are the best tree of n nodes.
"""

from __future__ import annotations

from collections.abc import Sequence

from paceline.core.arrays import Float32Array
from paceline.core.tree_shapes import ROOT
from paceline.core.trees import DraftPlan
from paceline.draft.base import DraftSampling
from paceline.draft.growing_tree import GrowingTree, Scoring
from paceline.draft.growth import ChosenTree, DrawnTree
from paceline.draft.model.draft_cache import Context

Path = tuple[int, ...]


def make_ranked_tree(
    context: Context, plan: DraftPlan, scoring: Scoring, sampling: DraftSampling, paths: Sequence[Path]
) -> GrowingTree:
    """A growing tree in the shape of the paths: drawn or chosen, as the sampling asks."""
    allowed = [path for path in paths if len(path) <= plan.levels and max(path) < plan.branching]
    allowed = allowed[: plan.budget]
    if sampling is DraftSampling.INDEPENDENT and not context.request.sampling.greedy:
        return DrawnTree(context, plan, scoring, shape_of(allowed))
    return RankedTree(context, plan, scoring, sampling is DraftSampling.COUPLED, allowed)


def shape_of(paths: Sequence[Path]) -> dict[int, list[int]]:
    """The children of ROOT and of each path that has any; paths are numbered in their order."""
    numbers: dict[Path, int] = {(): ROOT} | {path: number for number, path in enumerate(paths)}
    children: dict[int, list[int]] = {}
    for path in paths:
        children.setdefault(numbers[path[:-1]], []).append(numbers[path])
    return children


class RankedTree(ChosenTree):
    """A tree that keeps, of each node's guesses, the ranks that the paths name."""

    def __init__(
        self, context: Context, plan: DraftPlan, scoring: Scoring, coupled: bool, paths: Sequence[Path]
    ) -> None:
        super().__init__(context, plan, scoring, coupled, best_first=True)
        self._allowed = frozenset(paths)
        self._inner = {path[:-1] for path in paths}  # paths with children
        self._paths: dict[int, Path] = {ROOT: ()}

    def _candidates(
        self, node: int, row: Float32Array, confidence: float | None = None
    ) -> list[tuple[int, float]]:
        ranked = enumerate(super()._candidates(node, row, confidence))
        paths = {(*self._paths[node], rank): candidate for rank, candidate in ranked}
        allowed = {path: candidate for path, candidate in paths.items() if path in self._allowed}
        self._paths.update(enumerate(allowed, len(self.tokens)))  # they become the next nodes
        return list(allowed.values())

    def _may_extend(self, node: int) -> bool:
        return self._paths[node] in self._inner and super()._may_extend(node)
