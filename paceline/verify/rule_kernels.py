"""The compiled classic rules. `reference_rules.py` says the same, to be read.

They take uniforms as arguments and make no noise of their own.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from paceline.verify.compiling import compiled

Float64Array = npt.NDArray[np.float64]
Int64Array = npt.NDArray[np.int64]


@compiled
def draw_at(probs: Float64Array, taken: Int64Array, uniform: float) -> int:
    """The token of `probs` without the `taken` ids at this uniform, or -1 if no mass is left."""
    if len(taken):
        probs = probs.copy()
        for token in taken:
            probs[token] = 0.0
    total = 0.0
    for token in range(len(probs)):
        total += probs[token]
    share, reached = uniform * total, 0.0
    for token in range(len(probs)):
        reached += probs[token]
        if reached > share:
            return token
    return -1
