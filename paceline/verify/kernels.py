"""The compiled arithmetic behind a sampled token: its noise, the race with it, sums of exponentials.

`reference.py` says the same in numpy, slowly. What calls each other is in this one file, because numba's
disk cache looks only at the file of the function it loads.
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
Key = tuple[np.uint64, np.uint64]  # seed, position
Known = tuple[Float32Array, Int64Array]  # logits, and the ids they are of; no ids: those of all, in order
Best = tuple[Int64Array, Float64Array]  # [places] places among the logits and their scores, best first

LANES = 512  # of long sums, so that they vectorize
_BLOCK = 128  # logits whose noise is made at a time, so that it vectorizes
_BLOCKS = 16  # blocks between looks at what there is to beat
_HALF, _QUARTER, _EIGHTH = _BLOCK // 2, _BLOCK // 4, _BLOCK // 8
_SLACK = 1.000001 * 2.0**32  # of a bound on half of the bits, for what rounding may do
_ROUNDING = 1e-15  # of a sum, as a part of what is summed
_TOKENS = np.uint64(STREAM_TOKENS)
_WEYL_0 = np.uint64(WEYL_0)
_WEYL_1 = np.uint64(WEYL_1)
_ATANH_TERMS = len(ATANH)
_TAYLOR_TERMS = len(TAYLOR)


@compiled
def race(known: Known, temperature: float, key: Key, best: Best) -> int:
    """Write the largest of logit / temperature + gumbel to `best`; how many. The earlier of equals first.

    Noise is dear, and most tokens are too far behind for any that is likely. So only the upper half of a
    token's bits is looked at first, and if with it not even the largest logit of its block could win, that
    is all. What there is to beat is found in the block with the largest logit, which comes twice.
    """
    logits, names = known
    peaks = _peaks(logits)
    halves, needs = np.empty((3, _BLOCK), dtype=np.uint64), np.zeros(_BLOCKS, dtype=np.uint64)
    highest = _BLOCK * int(np.argmax(peaks))
    _write_halves(names, highest, len(logits), key, needs[0], halves)
    found = _race_block(known, temperature, key, highest, needs[0], -np.inf, halves[0], best, 0)
    bound = best[1][-1] if found == len(best[0]) else -np.inf
    found = 0
    for first in range(0, len(peaks), _BLOCKS):
        _write_needs(peaks[first : first + _BLOCKS], temperature, bound, needs)
        for block in range(first, min(first + _BLOCKS, len(peaks))):
            start, needed = _BLOCK * block, needs[block - first]
            if _write_halves(names, start, len(logits), key, needed, halves) > 0:
                found = _race_block(known, temperature, key, start, needed, bound, halves[0], best, found)
        if found == len(best[0]):
            bound = max(bound, best[1][-1])
    return found


@compiled
def _write_needs(peaks: Float32Array, temperature: float, bound: float, needs: UInt64Array) -> None:
    """Write what the upper half of a token's bits must be at least to beat a score: [blocks].

    With v = 1 - uniform, gumbel < -log(v). So who lacks x must have v < exp(-x).
    """
    for block in range(len(peaks)):
        peak = np.float64(peaks[block]) / temperature
        lead = peak - bound + _ROUNDING * (abs(peak) + abs(bound)) if peak > -np.inf else peak
        needs[block] = np.uint64(max(4294967295 - int(exp(min(lead, 0.0)) * _SLACK), 0))


@compiled
def _peaks(logits: Float32Array) -> Float32Array:
    """The largest logit of each block: [blocks]. Halves are held against halves, so that it vectorizes."""
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
def _write_halves(
    names: Int64Array, start: int, end: int, key: Key, needed: np.uint64, halves: UInt64Array
) -> int:
    """How many upper halves of the bits of the block from `start` on are as large as needed.

    If there are any, they are written to the first line of `halves`; the others are for the work.
    """
    enough = 0
    if len(names) > 0:
        for place in range(start, min(start + _BLOCK, end)):
            half = _token_bits(names[place], key) >> SHIFT_32
            halves[0, place - start] = half
            enough += int(half >= needed)
        return enough
    for pair in range(_HALF):
        even, odd = pair_bits(np.uint64(start // 2 + pair), key, _TOKENS)
        halves[1, pair], halves[2, pair] = even >> SHIFT_32, odd >> SHIFT_32
        enough += int(halves[1, pair] >= needed)
        enough += int(halves[2, pair] >= needed)
    if enough > 0:
        for pair in range(_HALF):
            halves[0, 2 * pair], halves[0, 2 * pair + 1] = halves[1, pair], halves[2, pair]
    return enough


@compiled
def _race_block(
    known: Known,
    temperature: float,
    key: Key,
    start: int,
    needed: np.uint64,
    bound: float,
    halves: UInt64Array,
    best: Best,
    found: int,
) -> int:
    """Let those of a block race whose upper halves of bits are as large as needed; how many are found."""
    logits, names = known
    for place in range(start, min(start + _BLOCK, len(logits))):
        half = halves[place - start]
        if half < needed or logits[place] == -np.inf:
            continue
        value = np.float64(logits[place]) / temperature
        if found == len(best[0]):
            bound = max(bound, best[1][-1])
        if not _cannot_win(bound - value - _ROUNDING * (abs(bound) + abs(value)), half):
            bits = _token_bits(names[place] if len(names) > 0 else place, key)
            found = _place(place, value + gumbel_of_bits(bits), best, found)
    return found


@inlined
def _cannot_win(behind: float, half: np.uint64) -> bool:
    """Whether a token this far behind loses for certain with this upper half of its bits.

    As of a block, with a series of exp(behind) that is cut short: it spares two logarithms.
    """
    series = 1.0 + behind * (1.0 + behind * (0.5 + behind * (1.0 / 6.0 + behind * (1.0 / 24.0))))
    return behind > 0.0 and float(4294967295 - np.int64(half)) * series > _SLACK


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
def rank(logits: Float32Array, best: Best) -> int:
    """Write the largest logits to `best`; how many. The earlier of equals first."""
    found = 0
    for place in range(len(logits)):
        if logits[place] > -np.inf:
            found = _place(place, np.float64(logits[place]), best, found)
    return found


@compiled
def log_normalizer(logits: Float32Array, peak: float, temperature: float = 1.0) -> float:
    """log(sum(exp(logits / temperature))) in double. `peak` is the largest logit, a finite one.

    In LANES lanes, then over those. -inf adds as good as nothing.
    """
    lanes = np.zeros(LANES, dtype=np.float64)
    peak /= temperature
    for start in range(0, len(logits), LANES):
        for index in range(min(LANES, len(logits) - start)):
            lanes[index] += exp(np.float64(logits[start + index]) / temperature - peak)
    return peak + log(float(lanes.sum()))


@compiled
def write_probabilities(known: Known, peak: float, temperature: float, out: Float64Array) -> None:
    """Make `out` the softmax of logits / temperature by ids, exactly zero for an id that is not known."""
    logits, names = known
    peak /= temperature
    if len(names) > 0:
        out[:] = 0.0
    for place in range(len(logits)):
        value = np.float64(logits[place]) / temperature
        share = exp(value - peak) if value > -np.inf else 0.0
        out[names[place] if len(names) > 0 else place] = share
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
