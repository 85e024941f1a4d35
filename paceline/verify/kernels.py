"""The compiled way from logits to a sampled token. `reference.py` says the same in numpy, slowly.

Nothing sorts the vocabulary. Top-k and top-p are both "keep the likeliest until their weights
reach a need" (weights 1, or probability masses), and that threshold is found with one histogram
and a sort of the single bucket where it lies. Masses are integers, so sums are exact in any order.

All compiled functions of the room are in this file, because numba's disk cache looks only at the
file of the function it loads.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba
import numpy as np
import numpy.typing as npt

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
    UNIT,
    WEYL_0,
    WEYL_1,
)

Float32Array = npt.NDArray[np.float32]
Float64Array = npt.NDArray[np.float64]
Int64Array = npt.NDArray[np.int64]
Function = TypeVar("Function", bound=Callable[..., Any])

MASS_ONE = 2.0**40  # the mass of the likeliest token; what is 2^-40 of it or less counts as nothing
_BUCKETS = 2048
_BUCKET_RANGE = 64.0
_BLOCK = 512  # pairs of ids whose noise is made at a time, so that it vectorizes
_WEYL_0 = np.uint64(WEYL_0)
_WEYL_1 = np.uint64(WEYL_1)
_ATANH_TERMS = len(ATANH)
_TAYLOR_TERMS = len(TAYLOR)


def compiled(function: Function) -> Function:
    """A numba function, kept on disk, that runs without the GIL. No fast-math: bits are promised."""
    return cast(Function, numba.njit(cache=True, nogil=True, error_model="numpy")(function))


def inlined(function: Function) -> Function:
    """A numba function that becomes part of the compiled functions that call it."""
    return cast(Function, numba.njit(inline="always", error_model="numpy")(function))


@compiled
def choose_token(
    logits: Float32Array,
    peak: float,
    low: float,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    seed: np.uint64,
    position: np.uint64,
    scaled: Float64Array,
    ids: Int64Array,
    weights: Int64Array,
) -> int:
    """The token of argmax(log p + gumbel) over the kept ids, or -1 if the logits are not usable.

    `peak` and `low` are the largest and smallest logit, NaN if one is NaN; numpy finds them faster.
    `scaled`, `ids` and `weights` are scratch of the vocabulary's size.
    """
    if not math.isfinite(peak):
        return -1
    for token in range(len(logits)):
        scaled[token] = np.float64(logits[token]) / temperature
    peak, low = peak / temperature, low / temperature
    if top_k <= 0 and top_p >= 1.0 and min_p <= 0.0:
        return _race_all(scaled, len(logits), seed, position)
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
    return _race(scaled, ids, count, seed, position)


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


@compiled
def _race(scaled: Float64Array, ids: Int64Array, count: int, seed: np.uint64, position: np.uint64) -> int:
    """The id among the first `count` with the largest scaled + gumbel, ties to the lowest."""
    best, winner = -np.inf, -1
    for index in range(count):
        token = np.uint64(ids[index])
        even, odd = pair_bits(token >> ONE, position, seed)
        bits = odd if token & ONE else even
        value = scaled[ids[index]]
        if _cannot_win(best - value, uniform_complement(bits)):
            continue
        score = value + gumbel_of_bits(bits)
        if score > best:
            best, winner = score, ids[index]
    return winner


@compiled
def _race_all(scaled: Float64Array, size: int, seed: np.uint64, position: np.uint64) -> int:
    """The id of the whole vocabulary with the largest scaled + gumbel, ties to the lowest."""
    best, winner = -np.inf, -1
    bits = np.empty(2 * _BLOCK, dtype=np.uint64)
    for start in range(0, size, 2 * _BLOCK):
        for pair in range(_BLOCK):
            even, odd = pair_bits(np.uint64(start // 2 + pair), position, seed)
            bits[2 * pair] = even
            bits[2 * pair + 1] = odd
        for token in range(start, min(start + 2 * _BLOCK, size)):
            value = scaled[token]
            if value == -np.inf or _cannot_win(best - value, uniform_complement(bits[token - start])):
                continue
            score = value + gumbel_of_bits(bits[token - start])
            if score > best:
                best, winner = score, token
    return winner


@compiled
def log_normalizer(logits: Float32Array, peak: float) -> float:
    """log(sum(exp(logits))) in double, summed in id order. `peak` is the largest logit, a finite one."""
    total = 0.0
    terms = np.empty(_BLOCK, dtype=np.float64)
    for start in range(0, len(logits), _BLOCK):
        count = min(_BLOCK, len(logits) - start)
        for index in range(count):  # apart from the sum, so that it vectorizes
            terms[index] = exp(np.float64(logits[start + index]) - peak)
        for index in range(count):
            total += terms[index]
    return peak + log(total)


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
def pair_bits(pair: np.uint64, position: np.uint64, seed: np.uint64) -> tuple[np.uint64, np.uint64]:
    """64 random bits each for the token ids 2 * pair and 2 * pair + 1."""
    word_0, word_1 = pair, position & MASK32
    word_2, word_3 = position >> SHIFT_32, np.uint64(0)
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
        even, odd = pair_bits(token >> ONE, position, seed)
        noise[index] = gumbel_of_bits(odd if token & ONE else even)
    return noise
