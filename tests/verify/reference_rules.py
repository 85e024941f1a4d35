"""The classic rules, written to be read: the reference of `rule_kernels.py`.

A rule here draws no random numbers. It calls `accept(node, probability)` for every decision, and returns
the node where the accepted path ends and the distribution of the last token. So the same lines run on
uniforms, where they must agree with the compiled rules, and on all outcomes with their probabilities,
where they must give exactly the target's distribution.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from paceline.core.arrays import Float64Array

Accept = Callable[[int, float], bool]  # (node, acceptance probability) -> whether the node is accepted
ReferenceRule = Callable[["Drafted", Accept], tuple[int, Float64Array]]


@dataclass(frozen=True)
class Drafted:
    """One request's draft and the target's distributions along it."""

    target_probs: Float64Array  # [1 + nodes, vocab] of the root, then of each node
    tokens: Sequence[int]  # [nodes]
    parents: Sequence[int]  # [nodes] -1 for the root's children
    draft_probs: Float64Array  # [distributions, vocab]
    draft_rows: Sequence[int]  # [nodes] the distribution a node was drawn from, -1: it was chosen

    def children(self, node: int) -> list[int]:
        """The children of a node, in order."""
        return [child for child, parent in enumerate(self.parents) if parent == node]

    def proposed(self, node: int) -> Float64Array:
        """The distribution that a node's token was drawn from, given the siblings before it.

        For a chosen token it is one-hot, whatever probability the drafter gave it.
        """
        if self.draft_rows[node] < 0:
            one_hot = np.zeros(self.target_probs.shape[1])
            one_hot[self.tokens[node]] = 1.0
            return one_hot
        probs = self.draft_probs[self.draft_rows[node]].copy()
        for sibling in self.children(self.parents[node]):
            if sibling < node:
                probs[self.tokens[sibling]] = 0.0
        return np.asarray(probs / probs.sum())


def rejection(draft: Drafted, accept: Accept) -> tuple[int, Float64Array]:
    """Try the children of a node in turn; each rejection leaves the residual distribution for the next."""
    end = -1
    while True:
        target = draft.target_probs[end + 1]
        for child in draft.children(end):
            token, proposed = draft.tokens[child], draft.proposed(child)
            if accept(child, target[token] / proposed[token]):
                end = child
                break
            target, _ = residual(1.0, target, proposed)
        else:
            return end, target


def block(draft: Drafted, accept: Accept) -> tuple[int, Float64Array]:
    """Accept or reject prefixes of a chain instead of single tokens, the longest first."""
    length = len(draft.tokens)
    weights = [1.0]
    for node, token in enumerate(draft.tokens):
        ratio = weights[node] * draft.target_probs[node][token] / draft.proposed(node)[token]
        weights.append(min(ratio, 1.0))
    if length == 0 or accept(length - 1, weights[length]):
        return length - 1, draft.target_probs[length]
    for end in range(length - 2, -2, -1):
        weight = weights[end + 1]
        target, total = residual(weight, draft.target_probs[end + 1], draft.proposed(end + 1))
        if end == -1 or accept(end, stop_probability(weight, total)):
            return end, target
    raise AssertionError("the root is always accepted")


def traversal(draft: Drafted, accept: Accept) -> tuple[int, Float64Array]:
    """Accept or reject whole paths of a tree, the first leaf first; a rejected leaf is removed."""
    targets = list(draft.target_probs)
    weights = [1.0] * len(targets)  # as `targets`: of the root, then of each node
    left = {node: draft.children(node) for node in range(-1, len(draft.tokens))}
    end = -1
    while True:
        while left[end]:
            child = left[end][0]
            token, proposed = draft.tokens[child], draft.proposed(child)
            weights[child + 1] = min(weights[end + 1] * targets[end + 1][token] / proposed[token], 1.0)
            end = child
        if end == -1 or accept(end, weights[end + 1]):
            return end, targets[end + 1]
        parent = draft.parents[end]
        left[parent].pop(0)
        weight = weights[parent + 1]
        targets[parent + 1], total = residual(weight, targets[parent + 1], draft.proposed(end))
        weights[parent + 1] = stop_probability(weight, total)
        end = parent


def residual(weight: float, target: Float64Array, proposed: Float64Array) -> tuple[Float64Array, float]:
    """The residual distribution norm([weight * target - proposed]+), and its sum before normalization.

    A sum of 0 means that the two are equal to the last bit, so only rounding can have caused a rejection:
    the target then stays as it is.
    """
    left = np.maximum(weight * target - proposed, 0.0)
    total = float(left.sum())
    return (left / total if total > 0 else target), total


def stop_probability(weight: float, total: float) -> float:
    """The probability that a path of this weight ends here, `total` being the sum of its residual."""
    if total > 0:
        return total / (total + 1.0 - weight)
    return 1.0 if weight >= 1 else 0.0
