"""Acceptance of a head's static trees: of first children, which a chain has too, and of their siblings.

If a first child is rejected, its siblings have chances of their own, by rank. What a pass tells of both
follows from the accepted path: the elder siblings of an accepted node were rejected, and so were all
children where the path ends.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache

from paceline.control.config import CONFIG
from paceline.core.tree_shapes import ROOT, static_shape
from paceline.core.trees import DraftPlan

Children = Mapping[int, Sequence[int]]  # of ROOT and of each node that has any


@lru_cache(maxsize=16)
def _children(plan: DraftPlan) -> Children:
    return static_shape(plan.budget, plan.branching, plan.levels)


@lru_cache(maxsize=16)
def _nodes(plan: DraftPlan) -> list[tuple[int, int, int]]:
    """(parent, rank among siblings, depth) of each node of the plan's tree, parents first."""
    places = {
        node: (parent, rank)
        for parent, children in _children(plan).items()
        for rank, node in enumerate(children)
    }
    depths = {ROOT: -1}
    for node in sorted(places):
        depths[node] = depths[places[node][0]] + 1
    return [(*places[node], depths[node]) for node in sorted(places)]


class SiblingAcceptance:
    """The chance that a sibling is accepted by its rank, given that its elder siblings were rejected.

    Recent trees count most, beside a prior.
    """

    def __init__(self) -> None:
        self._tries = [0.0] * len(CONFIG.chains.sibling_chances)  # [rank - 1]; the last one has all further
        self._hits = [0.0] * len(self._tries)

    def chances(self) -> list[float]:
        """[rank - 1] The last one holds for further siblings too."""
        config = CONFIG.chains
        return [
            (hits + config.sibling_weight * prior) / (tries + config.sibling_weight)
            for prior, tries, hits in zip(config.sibling_chances, self._tries, self._hits, strict=True)
        ]

    def fade(self, passes: int) -> None:
        """Let earlier trees count less, by these many passes."""
        factor = CONFIG.chains.sibling_fade**passes
        self._tries = [factor * tries for tries in self._tries]
        self._hits = [factor * hits for hits in self._hits]

    def add(self, rank: int, children: int, count: int) -> None:
        """Count `count` nodes with this number of `children`, of which the one of this rank was accepted;
        `rank` is `children` if none was."""
        last = len(self._tries) - 1
        for tried in range(1, min(rank, children - 1) + 1):
            self._tries[min(tried - 1, last)] += count
        if 0 < rank < children:
            self._hits[min(rank - 1, last)] += count

    def facts(self) -> list[list[float]]:
        """The counts as JSON values."""
        return [list(self._tries), list(self._hits)]

    def begin_with(self, facts: Sequence[Sequence[float]]) -> None:
        """Start from these counts. ValueError or TypeError if they make no sense."""
        tries, hits = ([float(count) for count in counts] for counts in facts)
        if len(tries) != len(self._tries) or not all(
            0.0 <= hit <= tried for hit, tried in zip(hits, tries, strict=True)
        ):
            raise ValueError("these are not counts of siblings")
        self._tries, self._hits = tries, hits


def tree_reached(plan: DraftPlan, chances: Sequence[float], siblings: Sequence[float]) -> list[float]:
    """[depth] The chance that a path of the plan's tree is accepted down to this depth.

    `chances` [depth]: of a chain's token, given that all before it are accepted. `siblings` [rank - 1]: of a
    sibling, given that its elder ones are rejected; the last one holds for further siblings too.
    """
    by_rank, left = [], 1.0  # given that the first child is rejected
    for rank in range(1, plan.branching):
        chance = siblings[min(rank, len(siblings)) - 1]
        by_rank.append(left * chance)
        left *= 1.0 - chance
    reached = {ROOT: 1.0}
    levels = [0.0] * plan.levels
    for node, (parent, rank, depth) in enumerate(_nodes(plan)):
        chance = chances[depth] if rank == 0 else (1.0 - chances[depth]) * by_rank[rank - 1]
        reached[node] = reached[parent] * chance
        levels[depth] += reached[node]
    return levels


def count_path(
    plan: DraftPlan,
    path: Sequence[int],
    has_ended: bool,
    count: int,
    first: tuple[list[int], list[int]],
    siblings: SiblingAcceptance,
) -> None:
    """Count `count` trees of a plan with this accepted path.

    `first`: tried and accepted first children [depth], added to. `has_ended`: with the path the request
    ended, which says nothing of the children of its last node.
    """
    tries, hits = first
    children = _children(plan)
    for depth, node in enumerate((ROOT, *path)):
        tried = children.get(node)
        if tried is None or (has_ended and depth == len(path)):
            return
        rank = tried.index(path[depth]) if depth < len(path) else len(tried)
        tries[depth] += count
        hits[depth] += count if rank == 0 else 0
        siblings.add(rank, len(tried), count)
