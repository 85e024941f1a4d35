"""Draws from a distribution with fresh noise: for drafters that sample their tokens, and the classic rules.

All noise of a step is keyed by (seed, position of the step's first new token, stream, node). Under block
and traversal verification, whether a prefix is accepted depends on the tokens drafted after it, so accepted
tokens are correlated with the noise of rejected nodes: that noise must never be used again. The first new
position grows with every step, so no key repeats.

The plain stream (the target's own choice at a position) is used only by steps without a draft.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from paceline.core.arrays import Float64Array
from paceline.verify.kernels import uniforms
from paceline.verify.noise import lane
from paceline.verify.rule_kernels import draw_at


def draw(
    probs: Float64Array, seed: int, position: int, stream: int, node: int, taken: Sequence[int] = ()
) -> int:
    """A token drawn from `probs` without the `taken` ids, or -1 if nothing is left to draw.

    `position` is that of the step's first new token, whatever the depth of the node. A drafter uses
    STREAM_DRAFT and a distinct `node` number for each token that it draws in the step.
    `probs` need not sum to 1, and an id of probability 0 is never drawn.
    """
    return draw_at(probs, np.array(taken, dtype=np.int64), uniform(seed, position, stream, node))


def uniform(seed: int, position: int, stream: int, node: int) -> float:
    """The uniform of one node of a stream, never 0 nor 1."""
    values = uniforms(
        np.array([seed], dtype=np.uint64),
        np.array([position], dtype=np.uint64),
        np.array([lane(stream, node)], dtype=np.uint64),
    )
    return float(values[0])
