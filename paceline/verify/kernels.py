"""The compiled way from logits to a sampled token. `reference.py` says the same in numpy, slowly.

Nothing sorts the vocabulary. Top-k and top-p are both "keep the likeliest until their weights
reach a need" (weights 1, or probability masses), and that threshold is found with one histogram
and a sort of the single bucket where it lies. Masses are integers, so sums are exact in any order.

What calls each other is in this one file, because numba's disk cache looks only at the file of the
function it loads.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from paceline.verify.compiling import compiled, inlined
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
from paceline.verify.noise import (
    MASK32,
    MULTIPLIER_0,
    MULTIPLIER_1,
    ONE,
    SHIFT_12,
    SHIFT_32,
    STREAM_TOKENS,
    UNIT,
    WEYL_0,
    WEYL_1,
)

Float32Array = npt.NDArray[np.float32]
Float64Array = npt.NDArray[np.float64]
Int64Array = npt.NDArray[np.int64]
UInt64Array = npt.NDArray[np.uint64]
Options = tuple[float, int, float, float]  # temperature (not 0), top_k, top_p, min_p
Scratch = tuple[Float64Array, Int64Array, Int64Array]  # scaled, ids, weights: [vocab] each

MASS_ONE = 2.0**40  # the mass of the likeliest token; what is 2^-40 of it or less counts as nothing
_BUCKETS = 2048
_BUCKET_RANGE = 64.0
_ALL = -1  # every id is kept
_UNUSABLE = -2  # the logits hold NaN or +inf, or allow nothing
_BLOCK = 512  # pairs of ids whose noise is made at a time, so that it vectorizes
_TOKENS = np.uint64(STREAM_TOKENS)
_WEYL_0 = np.uint64(WEYL_0)
_WEYL_1 = np.uint64(WEYL_1)
_ATANH_TERMS = len(ATANH)
_TAYLOR_TERMS = len(TAYLOR)


@compiled
def choose_token(
    logits: Float32Array,
    peak: float,
    low: float,
    options: Options,
    scratch: Scratch,
    seed: np.uint64,
    position: np.uint64,
) -> int:
    """The token of argmax(log p + gumbel) over the kept ids, or -1 if the logits are not usable.

    `peak` and `low` are the largest and smallest logit, NaN if one is NaN; numpy finds them faster.
    """
    scaled, ids, _ = scratch
    count = _keep(logits, peak, low, options, scratch)
    if count == _UNUSABLE:
        return -1
    best, scores = np.empty(1, dtype=np.int64), np.empty(1, dtype=np.float64)
    if count == _ALL:
        _race_all(scaled, len(logits), seed, position, best, scores)
    else:
        _race(scaled, ids, count, seed, position, best, scores)
    return int(best[0])


@compiled
def target_probabilities(
    logits: Float32Array, peak: float, low: float, options: Options, scratch: Scratch, out: Float64Array
) -> bool:
    """Whether the logits are usable; then `out` is the distribution that choose_token draws from.

    It is exactly zero for every id that is not kept.
    """
    scaled, ids, _ = scratch
    count = _keep(logits, peak, low, options, scratch)
    if count == _UNUSABLE:
        return False
    peak = peak / options[0]
    if count == _ALL:
        for token in range(len(logits)):
            out[token] = exp(scaled[token] - peak) if scaled[token] > -np.inf else 0.0
    else:
        out[:] = 0.0
        for index in range(count):
            out[ids[index]] = exp(scaled[ids[index]] - peak)
    total = 0.0
    for token in range(len(logits)):
        total += out[token]
    for token in range(len(logits)):
        out[token] /= total
    return True


@compiled
def best_candidates(
    logits: Float32Array,
    peak: float,
    low: float,
    options: Options,
    scratch: Scratch,
    coupled: bool,
    seed: np.uint64,
    position: np.uint64,
    best: Int64Array,
    log_probs: Float64Array,
) -> int:
    """How many ids of the largest log p (+ gumbel if coupled) were written to `best`, -1 if unusable.

    Best first, ties to the lowest id, with their log p in `log_probs`.
    """
    scaled, ids, _ = scratch
    count = _keep(logits, peak, low, options, scratch)
    if count == _UNUSABLE:
        return -1
    peak = peak / options[0]
    scores = np.empty(len(best), dtype=np.float64)
    if count == _ALL:
        total = _sum_exp(scaled, len(logits), peak)
    else:
        total = _sum_exp(scaled[ids[:count]], count, peak)
    if not coupled:
        found = _rank(scaled, ids, count, best, scores)
    elif count == _ALL:
        found = _race_all(scaled, len(logits), seed, position, best, scores)
    else:
        found = _race(scaled, ids, count, seed, position, best, scores)
    for place in range(found):
        log_probs[place] = (scaled[best[place]] - peak) - log(total)
    return found


@compiled
def _keep(logits: Float32Array, peak: float, low: float, options: Options, scratch: Scratch) -> int:
    """How many ids min_p, top_k and top_p keep: the first of `ids`, ascending; or _ALL, or _UNUSABLE.

    Also writes the logits divided by the temperature to `scaled`. What has a logit of -inf is never
    kept, and under _ALL it is up to the caller to skip it.
    """
    temperature, top_k, top_p, min_p = options
    scaled, ids, weights = scratch
    if not math.isfinite(peak):
        return _UNUSABLE
    for token in range(len(logits)):
        scaled[token] = np.float64(logits[token]) / temperature
    peak, low = peak / temperature, low / temperature
    if top_k <= 0 and top_p >= 1.0 and min_p <= 0.0:
        return _ALL
    floor = peak + log(min_p) if min_p > 0.0 else -np.inf
    count = 0
    for token in range(len(logits)):
        ids[count] = token
        count += scaled[token] >= floor and scaled[token] > -np.inf
    if 0 < top_k < count:
        weights[:count] = 1
        count = _keep_prefix(scaled, ids, weights, count, top_k, peak, low)
    if top_p < 1.0:
        for index in range(count):
            weights[index] = np.int64(exp(scaled[ids[index]] - peak) * MASS_ONE)
        total = 0
        for index in range(count):
            total += int(weights[index])
        need = max(1, min(total, math.ceil(top_p * total)))
        count = _drop_light(ids, weights, count, (total - need) // count)
        count = _keep_prefix(scaled, ids, weights, count, need, peak, low)
    return count


@inlined
def _drop_light(ids: Int64Array, weights: Int64Array, count: int, least: int) -> int:
    """Drop, in place, ids of less than the `least` weight; how many are left.

    Those that top-p can spare together, shared out evenly, are this light: in a real distribution
    nearly all. It only makes the search for the threshold shorter.
    """
    left = 0
    for index in range(count):
        weight = weights[index]
        ids[left] = ids[index]
        weights[left] = weight
        left += weight >= least
    return left


@compiled
def _keep_prefix(
    scaled: Float64Array,
    ids: Int64Array,
    weights: Int64Array,
    count: int,
    need: int,
    peak: float,
    low: float,
) -> int:
    """Keep, in place, the fewest likeliest ids whose weights reach `need`; how many they are.

    Likeliest first, ties to the lowest id. The ids stay in ascending order.
    """
    resolution = (_BUCKETS - 1) / max(min(peak - low, _BUCKET_RANGE), 1e-6)
    buckets = np.zeros(_BUCKETS, dtype=np.int64)
    for index in range(count):
        distance = (peak - scaled[ids[index]]) * resolution
        buckets[np.int64(min(distance, _BUCKETS - 1.0))] += weights[index]
    crossing, before = 0, np.int64(0)
    while before + buckets[crossing] < need:
        before += buckets[crossing]
        crossing += 1

    members = np.empty(count, dtype=np.int64)
    found = 0
    for index in range(count):
        distance = (peak - scaled[ids[index]]) * resolution
        members[found] = index
        found += np.int64(min(distance, _BUCKETS - 1.0)) == crossing
    members = members[:found]
    order = np.argsort(-scaled[ids[members]], kind="mergesort")  # stable: equal values stay in id order
    last = 0
    while before + weights[members[order[last]]] < need:
        before += weights[members[order[last]]]
        last += 1
    cut_id = ids[members[order[last]]]
    cut = scaled[cut_id]

    kept = 0
    for index in range(count):
        token = ids[index]
        ids[kept] = token
        kept += scaled[token] > cut or (scaled[token] == cut and token <= cut_id)
    return kept


@inlined
def _cannot_win(behind: float, complement: float) -> bool:
    """Whether a token this far behind the best score loses for certain with this uniform complement.

    With v = 1 - u, gumbel <= -log(v), so it must have v < exp(-behind) < 1 / (the series of
    exp(behind) cut short). This spares two logarithms for nearly every token.
    """
    series = 1.0 + behind * (1.0 + behind * (0.5 + behind * (1.0 / 6.0 + behind * (1.0 / 24.0))))
    return behind > 0.0 and complement * series > 1.000001


@inlined
def _place(token: int, score: float, best: Int64Array, scores: Float64Array, found: int) -> int:
    """Put a token among the best, which stay sorted, the earlier of equals first; how many they are now."""
    if found == len(best) and score <= scores[-1]:
        return found
    place = min(found, len(best) - 1)
    while place > 0 and score > scores[place - 1]:
        best[place], scores[place] = best[place - 1], scores[place - 1]
        place -= 1
    best[place], scores[place] = token, score
    return min(found + 1, len(best))


@compiled
def _race(
    scaled: Float64Array,
    ids: Int64Array,
    count: int,
    seed: np.uint64,
    position: np.uint64,
    best: Int64Array,
    scores: Float64Array,
) -> int:
    """Write the ids among the first `count` with the largest scaled + gumbel to `best`; how many."""
    found = 0
    for index in range(count):
        token, value = ids[index], scaled[ids[index]]
        even, odd = pair_bits(np.uint64(token) >> ONE, position, seed, _TOKENS)
        bits = odd if token & 1 else even
        if found < len(best) or not _cannot_win(scores[-1] - value, uniform_complement(bits)):
            found = _place(token, value + gumbel_of_bits(bits), best, scores, found)
    return found


@compiled
def _race_all(
    scaled: Float64Array,
    size: int,
    seed: np.uint64,
    position: np.uint64,
    best: Int64Array,
    scores: Float64Array,
) -> int:
    """Write the ids of the whole vocabulary with the largest scaled + gumbel to `best`; how many."""
    found = 0
    bits = np.empty(2 * _BLOCK, dtype=np.uint64)
    for start in range(0, size, 2 * _BLOCK):
        for pair in range(_BLOCK):
            even, odd = pair_bits(np.uint64(start // 2 + pair), position, seed, _TOKENS)
            bits[2 * pair] = even
            bits[2 * pair + 1] = odd
        for token in range(start, min(start + 2 * _BLOCK, size)):
            value, noise = scaled[token], bits[token - start]
            if value == -np.inf:
                continue
            if found < len(best) or not _cannot_win(scores[-1] - value, uniform_complement(noise)):
                found = _place(token, value + gumbel_of_bits(noise), best, scores, found)
    return found


@compiled
def _rank(scaled: Float64Array, ids: Int64Array, count: int, best: Int64Array, scores: Float64Array) -> int:
    """Write the kept ids with the largest scaled to `best`; how many. `count` may be _ALL."""
    found = 0
    for index in range(len(scaled) if count == _ALL else count):
        token = index if count == _ALL else ids[index]
        if scaled[token] > -np.inf:
            found = _place(token, scaled[token], best, scores, found)
    return found


@compiled
def log_normalizer(logits: Float32Array, peak: float) -> float:
    """log(sum(exp(logits))) in double, summed in id order. `peak` is the largest logit, a finite one."""
    return peak + log(_sum_exp(logits, len(logits), peak))


@compiled
def _sum_exp(values: Float32Array | Float64Array, size: int, peak: float) -> float:
    """The sum of exp(value - peak) in double, in order. What is -inf adds as good as nothing."""
    total = 0.0
    terms = np.empty(_BLOCK, dtype=np.float64)
    for start in range(0, size, _BLOCK):
        count = min(_BLOCK, size - start)
        for index in range(count):  # apart from the sum, so that it vectorizes
            terms[index] = exp(np.float64(values[start + index]) - peak)
        for index in range(count):
            total += terms[index]
    return total


@inlined
def log(x: float) -> float:
    """The natural logarithm of a positive double."""
    mantissa, exponent = math.frexp(x)
    if mantissa < SQRT_HALF:
        mantissa = mantissa * 2.0
        exponent -= 1
    power = np.float64(exponent)
    fraction = mantissa - 1.0
    ratio = fraction / (2.0 + fraction)
    square = ratio * ratio
    series = np.float64(ATANH[_ATANH_TERMS - 1])
    for term in range(_ATANH_TERMS - 2, -1, -1):
        series = series * square + ATANH[term]
    return power * LN2_HIGH + (power * LN2_LOW + 2.0 * ratio * series)


@inlined
def exp(x: float) -> float:
    """The exponential of a double that is not positive."""
    x = max(x, EXP_LOWEST)
    power = (x * LOG2_E + ROUNDER) - ROUNDER
    rest = (x - power * LN2_HIGH) - power * LN2_LOW
    series = np.float64(TAYLOR[_TAYLOR_TERMS - 1])
    for term in range(_TAYLOR_TERMS - 2, -1, -1):
        series = series * rest + TAYLOR[term]
    return series * np.float64(POWERS[np.int64(-power)])


@inlined
def pair_bits(
    pair: np.uint64, position: np.uint64, seed: np.uint64, lane: np.uint64
) -> tuple[np.uint64, np.uint64]:
    """64 random bits each for the token ids 2 * pair and 2 * pair + 1."""
    word_0, word_1 = pair, position & MASK32
    word_2, word_3 = position >> SHIFT_32, lane
    key_0, key_1 = seed & MASK32, seed >> SHIFT_32
    for _ in range(10):
        product_0 = MULTIPLIER_0 * word_0
        product_1 = MULTIPLIER_1 * word_2
        word_0 = (product_1 >> SHIFT_32) ^ word_1 ^ key_0
        word_2 = (product_0 >> SHIFT_32) ^ word_3 ^ key_1
        word_1 = product_1 & MASK32
        word_3 = product_0 & MASK32
        key_0 = (key_0 + _WEYL_0) & MASK32
        key_1 = (key_1 + _WEYL_1) & MASK32
    return word_0 | (word_1 << SHIFT_32), word_2 | (word_3 << SHIFT_32)


@inlined
def uniform_complement(bits: np.uint64) -> float:
    """One minus the uniform of these bits, exactly. Small values mean large Gumbel noise."""
    return (np.float64(np.int64(4503599627370496) - np.int64(bits >> SHIFT_12)) - 0.5) * UNIT


@inlined
def gumbel_of_bits(bits: np.uint64) -> float:
    """The Gumbel noise made of 64 random bits."""
    uniform = (np.float64(np.int64(bits >> SHIFT_12)) + 0.5) * UNIT
    return -log(-log(uniform))


@compiled
def gumbel(seed: np.uint64, position: np.uint64, ids: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """The Gumbel noise of each token id at a position, compiled: float64 [ids]."""
    noise = np.empty(len(ids), dtype=np.float64)
    for index in range(len(ids)):
        token = np.uint64(ids[index])
        even, odd = pair_bits(token >> ONE, position, seed, _TOKENS)
        noise[index] = gumbel_of_bits(odd if token & ONE else even)
    return noise


@compiled
def uniforms(seeds: UInt64Array, positions: UInt64Array, lanes: UInt64Array) -> Float64Array:
    """One uniform for each (seed, position, lane), never 0 nor 1: float64 [seeds]. See `noise.lane`."""
    values = np.empty(len(seeds), dtype=np.float64)
    for index in range(len(seeds)):
        bits, _ = pair_bits(np.uint64(0), positions[index], seeds[index], lanes[index])
        values[index] = (np.float64(np.int64(bits >> SHIFT_12)) + 0.5) * UNIT
    return values
