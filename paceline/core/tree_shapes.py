"""Static draft trees: a shape that is fixed before anything is drafted."""

from __future__ import annotations

import heapq

ROOT = -1
FIRST_CHILD = 0.7  # probability that a drawn child is accepted, given that its elder siblings were rejected


def static_shape(budget: int, branching: int, levels: int) -> dict[int, list[int]]:
    """The children of ROOT and of each node that has any, in a tree of `budget` nodes.

    These are the nodes most likely to be reached if every child is accepted with the same probability once
    its elder siblings were rejected.
    """
    children: dict[int, list[int]] = {}
    waiting = [(-FIRST_CHILD, 1, 0, ROOT)]  # (-chance, depth, order, parent): the next child of each parent
    for number in range(budget):
        if not waiting:
            break
        chance, depth, _, parent = heapq.heappop(waiting)
        children.setdefault(parent, []).append(number)
        if len(children[parent]) < branching:
            heapq.heappush(waiting, (chance * (1.0 - FIRST_CHILD), depth, 2 * number + 1, parent))
        if depth < levels:
            heapq.heappush(waiting, (chance * FIRST_CHILD, depth + 1, 2 * number + 2, number))
    return children
