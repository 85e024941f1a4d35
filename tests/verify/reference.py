"""The readable references of verify's compiled arithmetic, in numpy: the same bits, and the same tokens.

floats    a logarithm and an exponential by series
noise     Philox4x32-10 and the Gumbel noise made of it, as `paceline/verify/noise.py` describes them
tokens    min_p, top_k and top_p by a full sort; argmax(log p + gumbel) over what they keep
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from paceline.core.arrays import Float32Array, Float64Array, Int64Array, UInt64Array
from paceline.core.truncation import Truncation
from paceline.verify.floats import (
    ATANH,
    EXP_LOWEST,
    LN2_HIGH,
    LN2_LOW,
    LOG2_E,
    POWERS,
    ROUNDER,
    SQRT_HALF,
    TAYLOR,
)
from paceline.verify.kernels import LANES
from paceline.verify.noise import (
    MASK32,
    MASK64,
    MULTIPLIER_0,
    MULTIPLIER_1,
    ONE,
    SHIFT_12,
    SHIFT_32,
    STREAM_TOKENS,
    UNIT,
    WEYL_0,
    WEYL_1,
    lane,
)
from paceline.verify.truncation import FIXED_POINT_ONE


def log_reference(x: Float64Array) -> Float64Array:
    """Natural logarithms of positive doubles, the bits of `kernels.log`."""
    mantissa, exponent = np.frexp(np.asarray(x, dtype=np.float64))
    low = mantissa < SQRT_HALF
    mantissa = np.where(low, mantissa * 2.0, mantissa)
    power = np.where(low, exponent - 1, exponent).astype(np.float64)
    fraction = mantissa - 1.0
    ratio = fraction / (2.0 + fraction)
    square = ratio * ratio
    series = np.full_like(ratio, ATANH[-1])
    for coefficient in ATANH[-2::-1]:
        series = series * square + coefficient
    return np.asarray(power * LN2_HIGH + (power * LN2_LOW + 2.0 * ratio * series))


def exp_reference(x: Float64Array) -> Float64Array:
    """Exponentials of doubles that are not positive, the bits of `kernels.exp`."""
    x = np.maximum(np.asarray(x, dtype=np.float64), EXP_LOWEST)
    power = (x * LOG2_E + ROUNDER) - ROUNDER
    rest = (x - power * LN2_HIGH) - power * LN2_LOW
    series = np.full_like(rest, TAYLOR[-1])
    for coefficient in TAYLOR[-2::-1]:
        series = series * rest + coefficient
    return np.asarray(series * POWERS[(-power).astype(np.int64)])


def philox_reference(
    counter: tuple[UInt64Array, UInt64Array, UInt64Array, UInt64Array], key: tuple[int, int]
) -> tuple[UInt64Array, UInt64Array, UInt64Array, UInt64Array]:
    """The four 32-bit output words of Philox4x32-10 for arrays of counter words (each held in a uint64)."""
    word_0, word_1, word_2, word_3 = counter
    key_0, key_1 = key
    for _ in range(10):
        product_0 = MULTIPLIER_0 * word_0
        product_1 = MULTIPLIER_1 * word_2
        word_0, word_2 = (
            (product_1 >> SHIFT_32) ^ word_1 ^ np.uint64(key_0),
            (product_0 >> SHIFT_32) ^ word_3 ^ np.uint64(key_1),
        )
        word_1, word_3 = product_1 & MASK32, product_0 & MASK32
        key_0 = (key_0 + WEYL_0) & 0xFFFFFFFF
        key_1 = (key_1 + WEYL_1) & 0xFFFFFFFF
    return word_0, word_1, word_2, word_3


def noise_bits_reference(seed: int, position: int, ids: Int64Array, lane: int = STREAM_TOKENS) -> UInt64Array:
    """64 random bits for each token id: uint64 [ids]."""
    seed &= MASK64
    words = np.asarray(ids).astype(np.uint64)
    counter = (
        words >> ONE,
        np.full_like(words, position & 0xFFFFFFFF),
        np.full_like(words, position >> 32),
        np.full_like(words, lane),
    )
    out = philox_reference(counter, (seed & 0xFFFFFFFF, seed >> 32))
    odd = (words & ONE).astype(bool)
    bits: UInt64Array = np.where(odd, out[2] | (out[3] << SHIFT_32), out[0] | (out[1] << SHIFT_32))
    return bits


def gumbel_reference(seed: int, position: int, ids: Int64Array) -> Float64Array:
    """The Gumbel noise of each token id at a position: float64 [ids]."""
    bits = noise_bits_reference(seed, position, ids)
    uniform = ((bits >> SHIFT_12).astype(np.float64) + 0.5) * UNIT
    return -log_reference(-log_reference(uniform))


def uniform_reference(seed: int, position: int, stream: int, node: int) -> float:
    """The uniform of one node of a stream, never 0 nor 1."""
    bits = noise_bits_reference(seed, position, np.zeros(1, dtype=np.int64), lane(stream, node))
    return (float(bits[0] >> SHIFT_12) + 0.5) * UNIT


def draw_reference(probs: Float64Array, taken: Sequence[int], uniform: float) -> int:
    """The readable reference of `draw`: the first id where the cumulative sum exceeds its share."""
    left = np.array(probs, dtype=np.float64)
    left[list(taken)] = 0.0
    reached = np.add.accumulate(left)
    return int(np.argmax(reached > uniform * reached[-1])) if reached[-1] > 0 else -1


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
