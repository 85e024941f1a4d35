"""The compiled classic rules; `tests/verify/reference_rules.py` has them written to be read.

`decide` takes all cases of a step in one call over flat arrays:

    target_probs  [nodes + cases, vocab]  of each case's root, then of its nodes; overwritten
    tokens        [nodes]
    parents       [nodes]          local to the case, -1 for the root's children
    is_open       [nodes]          whether a token may follow: the node's line of target_probs is filled
    offsets       [cases + 1]      nodes of case i are offsets[i]:offsets[i + 1]
    draft_probs   [distributions, vocab]
    draft_rows    [nodes]          the distribution that a node was drawn from, -1: it was chosen
    coins         [nodes]          a uniform for the accept decision of each node
    finals        [cases]          a uniform for the last token of each case

and returns, for each case, the node where the accepted path ends (-1: the root) and the token drawn there
(-1 where none may follow). Uniforms are arguments: no noise is generated here.
"""

from __future__ import annotations

import numpy as np

from paceline.compiling import compiled
from paceline.core.arrays import BoolArray, Float64Array, Int64Array

REJECTION, BLOCK, TRAVERSAL = range(3)
Draft = tuple[Int64Array, Int64Array, Float64Array, Int64Array]  # tokens, parents, draft_probs, draft_rows
_LANES = 64
_NONE_TAKEN = np.empty(0, dtype=np.int64)


@compiled
def decide(
    rule: int,
    target_probs: Float64Array,
    tokens: Int64Array,
    parents: Int64Array,
    is_open: BoolArray,
    offsets: Int64Array,
    draft_probs: Float64Array,
    draft_rows: Int64Array,
    coins: Float64Array,
    finals: Float64Array,
) -> tuple[Int64Array, Int64Array]:
    """Ends and last tokens of all cases by one of the rules."""
    ends, last = np.full(len(finals), -1, dtype=np.int64), np.full(len(finals), -1, dtype=np.int64)
    proposed = np.empty(target_probs.shape[1])
    for case in range(len(finals)):
        nodes = slice(offsets[case], offsets[case + 1])
        target = target_probs[offsets[case] + case :]
        draft = (tokens[nodes], parents[nodes], draft_probs, draft_rows[nodes])
        if rule == REJECTION:
            end = _end_by_rejection(target, draft, coins[nodes], proposed)
        elif rule == BLOCK:
            end = _end_by_block(target, draft, coins[nodes], proposed)
        else:
            end = _end_by_traversal(target, draft, coins[nodes], proposed)
        ends[case] = end
        if end < 0 or is_open[nodes][end]:
            last[case] = draw_at(target[end + 1], _NONE_TAKEN, finals[case])
    return ends, last


@compiled
def _end_by_rejection(target: Float64Array, draft: Draft, coins: Float64Array, proposed: Float64Array) -> int:
    """Where a path ends by (multi-candidate) rejection sampling. `target` becomes residuals on the way."""
    tokens, parents, _, _ = draft
    end = -1
    for node in range(len(tokens)):  # siblings in order, children after parents
        if parents[node] != end:
            continue
        token = tokens[node]
        _write_proposal(node, draft, proposed)
        if coins[node] < target[end + 1][token] / proposed[token]:
            end = node
        else:
            _make_residual(1.0, target[end + 1], proposed)
    return end


@compiled
def _end_by_block(target: Float64Array, draft: Draft, coins: Float64Array, proposed: Float64Array) -> int:
    """Where a chain ends by block verification."""
    tokens, length = draft[0], len(draft[0])
    weight = 1.0  # of the path from the root to `node`
    chances = np.empty(length)
    for node in range(length):
        token = tokens[node]
        _write_proposal(node, draft, proposed)
        at_token = target[node][token]
        # the distribution of the last token, should the path end here
        total = _make_residual(weight, target[node], proposed)
        if node > 0:
            chances[node - 1] = _stop_probability(weight, total)
        weight = min(weight * at_token / proposed[token], 1.0)
    if length:
        chances[length - 1] = weight
    for node in range(length - 1, -1, -1):
        if coins[node] < chances[node]:
            return node
    return -1


@compiled
def _end_by_traversal(target: Float64Array, draft: Draft, coins: Float64Array, proposed: Float64Array) -> int:
    """Where a path ends by traversal verification."""
    tokens, parents, _, _ = draft
    size = len(tokens)
    weights = np.ones(size + 1)  # of the root, then of each node
    deleted = np.zeros(size, dtype=np.bool_)
    end, node = -1, 0
    while node < size:
        if parents[node] == end and not deleted[node]:  # the first child that is left: go down
            token = tokens[node]
            _write_proposal(node, draft, proposed)
            weights[node + 1] = min(weights[end + 1] * target[end + 1][token] / proposed[token], 1.0)
            end = node
        node += 1
        if node == size and end >= 0 and not coins[end] < weights[end + 1]:
            parent = parents[end]  # a rejected leaf: remove it, and continue from its parent
            deleted[end] = True
            _write_proposal(end, draft, proposed)
            total = _make_residual(weights[parent + 1], target[parent + 1], proposed)
            weights[parent + 1] = _stop_probability(weights[parent + 1], total)
            end, node = parent, parent + 1
    return end


@compiled
def _write_proposal(node: int, draft: Draft, out: Float64Array) -> None:
    """Write the distribution that a node's token was drawn from, given the siblings before it."""
    tokens, parents, draft_probs, draft_rows = draft
    if draft_rows[node] < 0:
        out[:] = 0.0
        out[tokens[node]] = 1.0
        return
    out[:] = draft_probs[draft_rows[node]]
    for sibling in range(node):
        if parents[sibling] == parents[node]:
            out[tokens[sibling]] = 0.0
    total = _sum(out)
    for token in range(len(out)):
        out[token] /= total


@compiled
def _make_residual(weight: float, target: Float64Array, proposed: Float64Array) -> float:
    """Make `target` the residual norm([weight * target - proposed]+). Returns its sum before normalization.

    A sum of 0 means that the two are equal to the last bit, so only rounding can have caused a rejection:
    the target then stays as it is.
    """
    lanes = np.zeros(_LANES)
    for start in range(0, len(target), _LANES):
        for index in range(min(_LANES, len(target) - start)):
            token = start + index
            lanes[index] += max(weight * target[token] - proposed[token], 0.0)
    total = float(lanes.sum())
    if total > 0.0:
        for token in range(len(target)):
            target[token] = max(weight * target[token] - proposed[token], 0.0) / total
    return total


@compiled
def _stop_probability(weight: float, total: float) -> float:
    """The probability that a path of this weight ends here, `total` being the sum of its residual."""
    if total > 0.0:
        return total / (total + 1.0 - weight)
    return 1.0 if weight >= 1.0 else 0.0


@compiled
def draw_at(probs: Float64Array, taken: Int64Array, uniform: float) -> int:
    """The token of `probs` without the `taken` ids at this uniform, or -1 if no probability is left."""
    if len(taken):
        probs = probs.copy()
        for token in taken:
            probs[token] = 0.0
    share, reached, likely = uniform * _sum(probs), 0.0, -1
    for token in range(len(probs)):
        if probs[token] > 0.0:
            reached += probs[token]
            likely = token
            if reached > share:
                break
    return likely  # the last one, should rounding keep the sum below the share


@compiled
def _sum(values: Float64Array) -> float:
    """The sum, in _LANES partial sums so that it vectorizes."""
    lanes = np.zeros(_LANES)
    for start in range(0, len(values), _LANES):
        for index in range(min(_LANES, len(values) - start)):
            lanes[index] += values[start + index]
    return float(lanes.sum())
