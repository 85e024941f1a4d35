"""The compiled arithmetic of sampling: Philox noise, Gumbel-top-k, sums of exponentials.

`tests/verify/reference.py` computes the same in numpy, slowly. Functions that call each other are in this
one file, because numba's disk cache looks only at the file of the function that it loads.
"""

from __future__ import annotations

import math

import numpy as np

from paceline.compiling import compiled, inlined
from paceline.core.arrays import Float32Array, Float64Array, Int64Array, UInt64Array
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

Key = tuple[np.uint64, np.uint64]  # seed, position
IdLogits = tuple[Float32Array, Int64Array]  # logits and their token ids; no ids: the vocabulary, in order
Top = tuple[Int64Array, Float64Array]  # [k] indices into the logits and their scores, best first

LANES = 512  # partial sums of a long sum, so that it vectorizes
_BLOCK = 128  # logits whose noise is computed at a time, so that it vectorizes
_BLOCKS = 16  # blocks between updates of the score to beat
_HALF, _QUARTER, _EIGHTH = _BLOCK // 2, _BLOCK // 4, _BLOCK // 8
_SLACK = 1.000001 * 2.0**32  # 2^32, widened for the rounding of a bound that uses the high 32 bits alone
_ROUNDING = 1e-15  # rounding error of a sum, relative to its terms
_TOKENS = np.uint64(STREAM_TOKENS)
_WEYL_0 = np.uint64(WEYL_0)
_WEYL_1 = np.uint64(WEYL_1)
_ATANH_TERMS = len(ATANH)
_TAYLOR_TERMS = len(TAYLOR)


@compiled
def gumbel_top_k(candidates: IdLogits, temperature: float, key: Key, top: Top) -> int:
    """Write the k largest of logit / temperature + gumbel to `top`. Returns how many; ties to the first.

    Noise is expensive: bound it from its high 32 bits, and skip tokens that could not win even with the
    largest logit of their block. The score to beat comes from the block with the largest logit, which is
    therefore scored twice.
    """
    logits, ids = candidates
    peaks = _peaks(logits)
    high_words, required = np.empty((3, _BLOCK), dtype=np.uint64), np.zeros(_BLOCKS, dtype=np.uint64)
    highest = _BLOCK * int(np.argmax(peaks))
    _write_high_words(ids, highest, len(logits), key, required[0], high_words)
    found = _score_block(candidates, temperature, key, highest, required[0], -np.inf, high_words[0], top, 0)
    bound = top[1][-1] if found == len(top[0]) else -np.inf
    found = 0
    for first in range(0, len(peaks), _BLOCKS):
        _write_required(peaks[first : first + _BLOCKS], temperature, bound, required)
        for block in range(first, min(first + _BLOCKS, len(peaks))):
            start, required_high = _BLOCK * block, required[block - first]
            if _write_high_words(ids, start, len(logits), key, required_high, high_words) > 0:
                found = _score_block(
                    candidates, temperature, key, start, required_high, bound, high_words[0], top, found
                )
        if found == len(top[0]):
            bound = max(bound, top[1][-1])
    return found


@compiled
def _write_required(peaks: Float32Array, temperature: float, bound: float, required: UInt64Array) -> None:
    """Write, for each block, the least high word of a token's noise with which it can beat `bound`: [blocks].

    With v = 1 - uniform, gumbel < -log(v). So a token that lacks x to the bound must have v < exp(-x).
    """
    for block in range(len(peaks)):
        peak = np.float64(peaks[block]) / temperature
        lead = peak - bound + _ROUNDING * (abs(peak) + abs(bound)) if peak > -np.inf else peak
        required[block] = np.uint64(max(4294967295 - int(exp(min(lead, 0.0)) * _SLACK), 0))


@compiled
def _peaks(logits: Float32Array) -> Float32Array:
    """The largest logit of each block: [blocks]. Halves are compared with halves, so that it vectorizes."""
    whole = len(logits) // _BLOCK
    peaks = np.empty((len(logits) + _BLOCK - 1) // _BLOCK, dtype=np.float32)
    larger = np.empty(_HALF, dtype=np.float32)
    for block in range(whole):
        left, right = _BLOCK * block, _BLOCK * block + _HALF
        for at in range(_HALF):
            larger[at] = logits[left + at] if logits[left + at] > logits[right + at] else logits[right + at]
        for at in range(_QUARTER):
            larger[at] = larger[at] if larger[at] > larger[_QUARTER + at] else larger[_QUARTER + at]
        for at in range(_EIGHTH):
            larger[at] = larger[at] if larger[at] > larger[_EIGHTH + at] else larger[_EIGHTH + at]
        peak = larger[0]
        for at in range(1, _EIGHTH):
            peak = peak if peak > larger[at] else larger[at]
        peaks[block] = peak
    if whole < len(peaks):
        peaks[whole] = logits[_BLOCK * whole :].max()
    return peaks


@inlined
def _write_high_words(
    ids: Int64Array, start: int, end: int, key: Key, required_high: np.uint64, high_words: UInt64Array
) -> int:
    """The number of tokens of the block at `start` whose high word of noise reaches `required_high`.

    If there are any, the high words of the block are in `high_words[0]`; the other two lines are scratch.
    """
    winners = 0
    if len(ids) > 0:
        for index in range(start, min(start + _BLOCK, end)):
            high = _token_bits(ids[index], key) >> SHIFT_32
            high_words[0, index - start] = high
            winners += int(high >= required_high)
        return winners
    for pair in range(_HALF):
        even, odd = pair_bits(np.uint64(start // 2 + pair), key, _TOKENS)
        high_words[1, pair], high_words[2, pair] = even >> SHIFT_32, odd >> SHIFT_32
        winners += int(high_words[1, pair] >= required_high)
        winners += int(high_words[2, pair] >= required_high)
    if winners > 0:
        for pair in range(_HALF):
            high_words[0, 2 * pair], high_words[0, 2 * pair + 1] = high_words[1, pair], high_words[2, pair]
    return winners


@compiled
def _score_block(
    candidates: IdLogits,
    temperature: float,
    key: Key,
    start: int,
    required_high: np.uint64,
    bound: float,
    high_words: UInt64Array,
    top: Top,
    found: int,
) -> int:
    """Score tokens of a block whose high words reach `required_high`. Returns how many `top` holds now."""
    logits, ids = candidates
    for index in range(start, min(start + _BLOCK, len(logits))):
        high = high_words[index - start]
        if high < required_high or logits[index] == -np.inf:
            continue
        value = np.float64(logits[index]) / temperature
        if found == len(top[0]):
            bound = max(bound, top[1][-1])
        if not _cannot_win(bound - value - _ROUNDING * (abs(bound) + abs(value)), high):
            bits = _token_bits(ids[index] if len(ids) > 0 else index, key)
            found = _insert(index, value + gumbel_of_bits(bits), top, found)
    return found


@inlined
def _cannot_win(deficit: float, high: np.uint64) -> bool:
    """Whether a token that lacks `deficit` loses for certain with this high word of noise.

    The bound of `_write_required` for one token, with a truncated series of exp(deficit): it is a lower
    bound, and saves two logarithms.
    """
    series = 1.0 + deficit * (1.0 + deficit * (0.5 + deficit * (1.0 / 6.0 + deficit * (1.0 / 24.0))))
    return deficit > 0.0 and float(4294967295 - np.int64(high)) * series > _SLACK


@inlined
def _insert(token: int, score: float, top: Top, found: int) -> int:
    """Insert a token into the `found` best, ties to the earlier. Returns how many they are now."""
    tokens, scores = top
    if found == len(tokens) and score <= scores[-1]:
        return found
    index = min(found, len(tokens) - 1)
    while index > 0 and score > scores[index - 1]:
        tokens[index], scores[index] = tokens[index - 1], scores[index - 1]
        index -= 1
    tokens[index], scores[index] = token, score
    return min(found + 1, len(tokens))


@compiled
def logit_top_k(logits: Float32Array, top: Top) -> int:
    """Write the k largest logits to `top`. Returns how many; ties to the first."""
    found = 0
    for index in range(len(logits)):
        if logits[index] > -np.inf:
            found = _insert(index, np.float64(logits[index]), top, found)
    return found


@compiled
def log_normalizer(logits: Float32Array, peak: float, temperature: float = 1.0) -> float:
    """log(sum(exp(logits / temperature))) in double. `peak` is the largest logit, a finite one.

    Summed in LANES partial sums, then over those. -inf adds as good as nothing.
    """
    lanes = np.zeros(LANES, dtype=np.float64)
    peak /= temperature
    for start in range(0, len(logits), LANES):
        for index in range(min(LANES, len(logits) - start)):
            lanes[index] += exp(np.float64(logits[start + index]) / temperature - peak)
    return peak + log(float(lanes.sum()))


@compiled
def write_probabilities(candidates: IdLogits, peak: float, temperature: float, out: Float64Array) -> None:
    """Make `out` the softmax of logits / temperature by id, exactly zero for ids that are no candidates."""
    logits, ids = candidates
    peak /= temperature
    if len(ids) > 0:
        out[:] = 0.0
    for index in range(len(logits)):
        value = np.float64(logits[index]) / temperature
        share = exp(value - peak) if value > -np.inf else 0.0
        out[ids[index] if len(ids) > 0 else index] = share
    lanes = np.zeros(LANES, dtype=np.float64)
    for start in range(0, len(out), LANES):
        for index in range(min(LANES, len(out) - start)):
            lanes[index] += out[start + index]
    out /= lanes.sum()


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
def _token_bits(token: int, key: Key) -> np.uint64:
    """64 random bits for a token id."""
    even, odd = pair_bits(np.uint64(token) >> ONE, key, _TOKENS)
    return odd if token & 1 else even


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
        noise[index] = gumbel_of_bits(_token_bits(token, (seed, position)))
    return noise


@compiled
def uniforms(seeds: UInt64Array, positions: UInt64Array, lanes: UInt64Array) -> Float64Array:
    """One uniform for each (seed, position, lane), never 0 nor 1: float64 [seeds]. See `noise.lane`."""
    values = np.empty(len(seeds), dtype=np.float64)
    for index in range(len(seeds)):
        bits, _ = pair_bits(np.uint64(0), (seeds[index], positions[index]), lanes[index])
        values[index] = (np.float64(np.int64(bits >> SHIFT_12)) + 0.5) * UNIT
    return values
