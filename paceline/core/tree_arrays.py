"""The compiled side of DraftTrees: what runs on every draft of every step.

tests/core/test_trees.py compares it with the plain Python of trees.py.
"""

from __future__ import annotations

import numpy as np

from paceline.compiling import compiled
from paceline.core.arrays import BoolArray, Float32Array, Int32Array

ROUNDING = 1e-6  # a node's chance may exceed its parent's by this much


@compiled
def are_sound(
    tokens: Int32Array,
    parents: Int32Array,
    offsets: Int32Array,
    limits: Int32Array,
    vocab_size: int,
    chances: Float32Array,
) -> bool:
    """Whether these are valid trees within `limits`, [requests, 2]: budget and branching.

    `chances` is empty if the drafter gave none.
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
            for elder in range(first + parent + 1, node):  # siblings come after their parent
                if parents[elder] == parent and (limits[request, 1] == 1 or tokens[elder] == tokens[node]):
                    return False
            if len(chances):
                above = 1.0 if parent < 0 else chances[first + parent]
                if chances[node] < 0.0 or chances[node] > above + ROUNDING:  # NaN is neither
                    return False
    return True


@compiled
def kept_nodes(keep: BoolArray, parents: Int32Array, offsets: Int32Array) -> tuple[Int32Array, ...]:
    """The kept nodes, their parents among the kept ones, and the offsets of the requests."""
    new_numbers = np.empty(len(keep), np.int32)  # [nodes] its number among the kept nodes of its request
    nodes, new_parents = np.empty(len(keep), np.int32), np.empty(len(keep), np.int32)
    ends = np.zeros(len(offsets), np.int32)
    count = 0
    for request in range(len(offsets) - 1):
        first = offsets[request]
        for node in range(first, offsets[request + 1]):
            if keep[node]:
                new_numbers[node] = count - ends[request]
                nodes[count] = node
                new_parents[count] = -1 if parents[node] < 0 else new_numbers[first + parents[node]]
                count += 1
        ends[request + 1] = count
    return nodes[:count], new_parents[:count], ends


@compiled
def run_numbers(runs: Int32Array) -> tuple[Int32Array, Int32Array]:
    """The numbers of several runs, [runs, 2]: first number and length; and the offset of each run."""
    offsets = np.zeros(len(runs) + 1, np.int32)
    for run in range(len(runs)):
        offsets[run + 1] = offsets[run] + runs[run, 1]
    numbers = np.empty(offsets[-1], np.int32)
    for run in range(len(runs)):
        for step in range(runs[run, 1]):
            numbers[offsets[run] + step] = runs[run, 0] + step
    return numbers, offsets
