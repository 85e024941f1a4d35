"""The compiled side of DraftTrees: what is done to every draft of every step.

tests/core/test_trees.py compares it with the plain Python that trees.py has of the same.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from paceline.compiling import compiled
from paceline.core.trees import ROUNDING

BoolArray = npt.NDArray[np.bool_]
Int32Array = npt.NDArray[np.int32]
Float32Array = npt.NDArray[np.float32]


@compiled
def are_sound(
    tokens: Int32Array,
    parents: Int32Array,
    offsets: Int32Array,
    limits: Int32Array,
    vocab_size: int,
    chances: Float32Array,
) -> bool:
    """Whether these are trees within their limits, [requests, 2]: most nodes, and most children of a node.

    `chances` is empty where there are none.
    """
    count = len(tokens)
    if len(parents) != count or offsets[0] != 0 or offsets[-1] != count:
        return False
    if len(chances) not in (0, count):
        return False
    for request in range(len(offsets) - 1):
        first, end = offsets[request], offsets[request + 1]
        if not first <= end <= count or end - first > limits[request, 0]:
            return False
        for node in range(first, end):
            parent = parents[node]
            if not (-1 <= parent < node - first and 0 <= tokens[node] < vocab_size):
                return False
            for elder in range(first + parent + 1, node):  # a sibling comes behind the parent
                if parents[elder] == parent and (limits[request, 1] == 1 or tokens[elder] == tokens[node]):
                    return False
            if len(chances):
                above = 1.0 if parent < 0 else chances[first + parent]
                if chances[node] < 0.0 or chances[node] > above + ROUNDING:  # NaN is neither
                    return False
    return True


@compiled
def kept_nodes(keep: BoolArray, parents: Int32Array, offsets: Int32Array) -> tuple[Int32Array, ...]:
    """Of the nodes that are kept: which they are, their parents, and the offsets of their requests."""
    places = np.empty(len(keep), np.int32)  # of a node among those of its request that are kept
    nodes, moved = np.empty(len(keep), np.int32), np.empty(len(keep), np.int32)
    ends = np.zeros(len(offsets), np.int32)
    count = 0
    for request in range(len(offsets) - 1):
        first = offsets[request]
        for node in range(first, offsets[request + 1]):
            if keep[node]:
                places[node] = count - ends[request]
                nodes[count] = node
                moved[count] = -1 if parents[node] < 0 else places[first + parents[node]]
                count += 1
        ends[request + 1] = count
    return nodes[:count], moved[:count], ends


@compiled
def run_numbers(runs: Int32Array) -> tuple[Int32Array, Int32Array]:
    """The numbers of several runs, [runs, 2]: first number and length; and where each run begins in them."""
    offsets = np.zeros(len(runs) + 1, np.int32)
    for run in range(len(runs)):
        offsets[run + 1] = offsets[run] + runs[run, 1]
    numbers = np.empty(offsets[-1], np.int32)
    for run in range(len(runs)):
        for place in range(runs[run, 1]):
            numbers[offsets[run] + place] = runs[run, 0] + place
    return numbers, offsets
