"""Expected acceptance of a head's static trees, from the acceptance of its chains.

A first child is the token that a chain would have there. If it is rejected, its siblings have fixed chances,
by rank (docs/lab/2026-11-18-auto-on-gpu.md#siblings).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from paceline.control.config import CONFIG
from paceline.core.tree_shapes import ROOT, static_shape
from paceline.core.trees import DraftPlan


@lru_cache(maxsize=16)
def _nodes(plan: DraftPlan) -> list[tuple[int, int, int]]:
    """(parent, rank among siblings, depth) of each node of the plan's tree, parents first."""
    places = {
        node: (parent, rank)
        for parent, children in static_shape(plan.budget, plan.branching, plan.levels).items()
        for rank, node in enumerate(children)
    }
    depths = {ROOT: -1}
    for node in sorted(places):
        depths[node] = depths[places[node][0]] + 1
    return [(*places[node], depths[node]) for node in sorted(places)]


@lru_cache(maxsize=16)
def _sibling_chances(branching: int) -> list[float]:
    """[rank - 1] The acceptance chance of each further sibling, given that the first child is rejected."""
    found, left = [], 1.0
    given = CONFIG.chains.sibling_chances
    for rank in range(1, branching):
        chance = given[min(rank, len(given)) - 1]
        found.append(left * chance)
        left *= 1.0 - chance
    return found


def tree_reached(plan: DraftPlan, chances: Sequence[float]) -> list[float]:
    """[depth] The chance that a path of the plan's tree is accepted down to this depth.

    `chances` [depth]: of a chain's token, given that all before it are accepted.
    """
    siblings = _sibling_chances(plan.branching)
    reached = {ROOT: 1.0}
    levels = [0.0] * plan.levels
    for node, (parent, rank, depth) in enumerate(_nodes(plan)):
        chance = chances[depth] if rank == 0 else (1.0 - chances[depth]) * siblings[rank - 1]
        reached[node] = reached[parent] * chance
        levels[depth] += reached[node]
    return levels


def chain_hits(
    plan: DraftPlan, chances: Sequence[float], tries: Sequence[float], reached: Sequence[float]
) -> list[float]:
    """[depth] The estimated number of accepted tokens of trees that were first children, as in a chain.

    `reached` [depth]: trees accepted down to this depth; `tries` [depth]: trees with a node there, which
    bounds the result.
    """
    expected = [1.0, *tree_reached(plan, chances)]
    first = [chances[depth] * expected[depth] / expected[depth + 1] for depth in range(plan.levels)]
    return [min(tried, hit * share) for tried, hit, share in zip(tries, reached, first, strict=True)]
