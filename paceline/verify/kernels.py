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

from paceline.compiling import compiled, inlined
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
Span = tuple[float, float]  # the largest and the smallest logit, NaN if there is one: numpy finds them faster
Options = tuple[float, int, float, float]  # temperature (not 0), top_k, top_p, min_p
Scratch = tuple[Float64Array, Int64Array, Int64Array]  # scaled, ids, weights: [vocab] each
Key = tuple[np.uint64, np.uint64]  # seed, position
Known = tuple[Float32Array, Int64Array]  # logits, and the ids they are of; no ids: those of all
Best = tuple[Int64Array, Float64Array]  # [places] ids and their scores, best first

MASS_ONE = 2.0**40  # the mass of the likeliest token; what is 2^-40 of it or less counts as nothing
_MASSLESS = 28.0  # exp(-28) * MASS_ONE is less than 1
_BUCKETS = 2048
_BUCKET_RANGE = 64.0
_ALL = -1  # every id is kept
_UNUSABLE = -2  # the logits hold NaN or +inf, or allow nothing
LANES = 512  # of long sums, so that they vectorize
_BLOCK = 512  # pairs of ids whose noise is made at a time, so that it vectorizes
_TOKENS = np.uint64(STREAM_TOKENS)
_WEYL_0 = np.uint64(WEYL_0)
_WEYL_1 = np.uint64(WEYL_1)
_ATANH_TERMS = len(ATANH)
_TAYLOR_TERMS = len(TAYLOR)


@compiled
def choose_token(logits: Float32Array, span: Span, options: Options, scratch: Scratch, key: Key) -> int:
    """The token of argmax(log p + gumbel) over the kept ids, or -1 if the logits are not usable."""
    scaled, ids, _ = scratch
    count = _keep(logits, span, options, scratch)
    if count == _UNUSABLE:
        return -1
    best = np.empty(1, dtype=np.int64), np.empty(1, dtype=np.float64)
    _race(scaled, ids, count, ids[:0], key, best)
    return int(best[0][0])


@compiled
def target_probabilities(
    logits: Float32Array, span: Span, options: Options, scratch: Scratch, out: Float64Array
) -> bool:
    """Whether the logits are usable; then `out` is the distribution that choose_token draws from.

    It is exactly zero for every id that is not kept.
    """
    scaled, ids, _ = scratch
    count = _keep(logits, span, options, scratch)
    if count == _UNUSABLE:
        return False
    peak = span[0] / options[0]
    if count == _ALL:
        for token in range(len(logits)):
            out[token] = exp(scaled[token] - peak) if scaled[token] > -np.inf else 0.0
    else:
        out[:] = 0.0
        for token in ids[:count]:
            out[token] = exp(scaled[token] - peak)
    lanes = np.zeros(LANES, dtype=np.float64)
    for start in range(0, len(out), LANES):
        for index in range(min(LANES, len(out) - start)):
            lanes[index] += out[start + index]
    out /= lanes.sum()
    return True


@compiled
def best_candidates(
    known: Known, span: Span, options: Options, scratch: Scratch, key: Key, coupled: bool, best: Best
) -> int:
    """How many ids of the largest log p (+ gumbel if coupled) were written to `best`, -1 if unusable.

    Best first, ties to the first, with their log p.
    """
    logits, names = known
    scaled, ids, _ = scratch
    count = _keep(logits, span, options, scratch)
    if count == _UNUSABLE:
        return -1
    scaled = scaled[: len(logits)]
    kept = scaled if count == _ALL else scaled[ids[:count]]
    peak = span[0] / options[0]
    normalizer = peak + log(_sum_exp(kept, peak))
    if coupled:
        found = _race(scaled, ids, count, names, key, best)
    else:
        found = _rank(kept, best)
        if count != _ALL:
            best[0][:found] = ids[best[0][:found]]
    for place in range(found):
        best[1][place] = scaled[best[0][place]] - normalizer
        if len(names) > 0:
            best[0][place] = names[best[0][place]]
    return found


@compiled
def _keep(logits: Float32Array, span: Span, options: Options, scratch: Scratch) -> int:
    """How many ids min_p, top_k and top_p keep: the first of `ids`, ascending; or _ALL, or _UNUSABLE.

    Also writes the logits divided by the temperature to `scaled`. What has a logit of -inf is never
    kept, and under _ALL it is up to the caller to skip it.
    """
    temperature, top_k, top_p, min_p = options
    scaled, ids, weights = scratch
    if not math.isfinite(span[0]):
        return _UNUSABLE
    for token in range(len(logits)):
        scaled[token] = np.float64(logits[token]) / temperature
    peak, low = span[0] / temperature, span[1] / temperature
    if top_k <= 0 and top_p >= 1.0 and min_p <= 0.0:
        return _ALL
    floor = peak + log(min_p) if min_p > 0.0 else -np.inf
    if top_p < 1.0:
        floor = max(floor, peak - _MASSLESS)  # top_p keeps nothing that has no mass
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
def _place(token: int, score: float, best: Best, found: int) -> int:
    """Put a token among the `found` best, the earlier of equals first; how many they are now."""
    tokens, scores = best
    if found == len(tokens) and score <= scores[-1]:
        return found
    place = min(found, len(tokens) - 1)
    while place > 0 and score > scores[place - 1]:
        tokens[place], scores[place] = tokens[place - 1], scores[place - 1]
        place -= 1
    tokens[place], scores[place] = token, score
    return min(found + 1, len(tokens))


@compiled
def _race(scaled: Float64Array, ids: Int64Array, count: int, names: Int64Array, key: Key, best: Best) -> int:
    """Write the kept places with the largest scaled + gumbel to `best`; how many."""
    found, room, every = 0, len(best[0]), count == _ALL
    total = len(scaled) if every else count
    bits, tokens = np.empty(2 * _BLOCK, dtype=np.uint64), np.empty(2 * _BLOCK, dtype=np.uint64)
    values, in_race = np.empty(2 * _BLOCK, dtype=np.float64), np.empty(2 * _BLOCK, dtype=np.bool_)
    for start in range(0, total, 2 * _BLOCK):  # each loop over a block does little, so that it vectorizes
        block = range(min(2 * _BLOCK, total - start))
        for at in block:
            place = start + at if every else ids[start + at]
            values[at] = scaled[place]
            tokens[at] = names[place] if len(names) > 0 else place
        if every and len(names) == 0:
            for pair in range(_BLOCK):
                bits[2 * pair], bits[2 * pair + 1] = pair_bits(np.uint64(start // 2 + pair), key, _TOKENS)
        else:
            for at in block:
                even, odd = pair_bits(tokens[at] >> ONE, key, _TOKENS)
                bits[at] = odd if tokens[at] & ONE else even
        last = best[1][-1] if found == room else -np.inf
        for at in block:
            loses = _cannot_win(last - values[at], uniform_complement(bits[at]))
            in_race[at] = values[at] > -np.inf and not loses
        for at in block:
            if in_race[at]:
                place = start + at if every else ids[start + at]
                found = _place(place, values[at] + gumbel_of_bits(bits[at]), best, found)
    return found


@compiled
def _rank(values: Float64Array, best: Best) -> int:
    """Write the places of the largest values to `best`; how many."""
    found = 0
    for place in range(len(values)):
        if values[place] > -np.inf:
            found = _place(place, values[place], best, found)
    return found


@compiled
def log_normalizer(logits: Float32Array, peak: float) -> float:
    """log(sum(exp(logits))) in double, in lanes as `_sum_exp`. `peak` is the largest logit, a finite one."""
    return peak + log(_sum_exp(logits, peak))


@compiled
def _sum_exp(values: Float32Array | Float64Array, peak: float) -> float:
    """The sum of exp(value - peak) in double: of LANES lanes, then of those. -inf adds as good as nothing."""
    lanes = np.zeros(LANES, dtype=np.float64)
    for start in range(0, len(values), LANES):
        for index in range(min(LANES, len(values) - start)):
            lanes[index] += exp(np.float64(values[start + index]) - peak)
    return float(lanes.sum())


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
def pair_bits(pair: np.uint64, key: Key, lane: np.uint64) -> tuple[np.uint64, np.uint64]:
    """64 random bits each for the token ids 2 * pair and 2 * pair + 1."""
    seed, position = key
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
def gumbel(seed: np.uint64, position: np.uint64, ids: Int64Array) -> Float64Array:
    """The Gumbel noise of each token id at a position: float64 [ids]."""
    noise = np.empty(len(ids), dtype=np.float64)
    for index, token in enumerate(ids):
        even, odd = pair_bits(np.uint64(token) >> ONE, (seed, position), _TOKENS)
        noise[index] = gumbel_of_bits(odd if token & 1 else even)
    return noise


@compiled
def uniforms(seeds: UInt64Array, positions: UInt64Array, lanes: UInt64Array) -> Float64Array:
    """One uniform for each (seed, position, lane), never 0 nor 1: float64 [seeds]. See `noise.lane`."""
    values = np.empty(len(seeds), dtype=np.float64)
    for index in range(len(seeds)):
        bits, _ = pair_bits(np.uint64(0), (seeds[index], positions[index]), lanes[index])
        values[index] = (np.float64(np.int64(bits >> SHIFT_12)) + 0.5) * UNIT
    return values
