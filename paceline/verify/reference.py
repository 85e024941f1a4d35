"""The readable reference of `truncation.py` and `kernels.py`: the same tokens, from numpy and a full sort."""

from __future__ import annotations

import math

import numpy as np

from paceline.core.arrays import Float32Array, Float64Array, Int64Array
from paceline.core.truncation import Truncation
from paceline.verify.floats import exp_reference, log_reference
from paceline.verify.kernels import LANES
from paceline.verify.noise import gumbel_reference
from paceline.verify.truncation import FIXED_POINT_ONE


def truncate_reference(scaled: Float64Array, truncation: Truncation) -> Int64Array:
    """The ids that min_p, top_k and top_p keep, in that order; ascending."""
    top_k, top_p, min_p = truncation
    peak = scaled.max()
    likeliest_first = np.argsort(-scaled, kind="stable")
    kept = likeliest_first[scaled[likeliest_first] > -np.inf]
    if min_p > 0:
        kept = kept[scaled[kept] >= peak + log_reference(np.array(min_p))]
    if top_k > 0:
        kept = kept[:top_k]
    if top_p < 1:
        distance = scaled[kept] - peak
        probabilities = np.floor(exp_reference(distance) * FIXED_POINT_ONE).astype(np.int64)
        reached = np.cumsum(probabilities)
        required = max(1, min(int(reached[-1]), math.ceil(top_p * float(reached[-1]))))
        kept = kept[: int(np.argmax(reached >= required)) + 1]
    return np.sort(kept)


def choose_token_reference(
    logits: Float32Array,
    temperature: float,
    truncation: Truncation,
    seed: int,
    position: int,
) -> int:
    """The token of argmax(log p + gumbel) over the kept ids, or -1 if the logits are not usable."""
    scaled = logits.astype(np.float64) / temperature
    if not np.isfinite(scaled.max()):
        return -1
    kept = truncate_reference(scaled, truncation)
    scores = scaled[kept] + gumbel_reference(seed, position, kept)
    return int(kept[np.argmax(scores)])


def probabilities_reference(logits: Float32Array, temperature: float, truncation: Truncation) -> Float64Array:
    """The distribution of a token under the options, of usable logits: float64 [vocab]."""
    scaled = logits.astype(np.float64) / temperature
    kept = truncate_reference(scaled, truncation)
    probs = np.zeros(len(logits))
    probs[kept] = exp_reference(scaled[kept] - scaled.max())
    probs /= _sum_in_lanes(probs)
    return probs


def log_normalizer_reference(logits: Float32Array) -> float:
    """log(sum(exp(logits))) in double, in LANES partial sums and then over them."""
    values = logits.astype(np.float64)
    total = _sum_in_lanes(exp_reference(values - values.max()))
    return float(values.max() + log_reference(total))


def _sum_in_lanes(terms: Float64Array) -> Float64Array:
    """The sum in the kernels' order: LANES partial sums, then those one by one, not pairwise as numpy.sum."""
    lanes = np.zeros(LANES)
    for start in range(0, len(terms), LANES):
        block = terms[start : start + LANES]
        lanes[: len(block)] += block
    return np.array(np.add.accumulate(lanes)[-1])
