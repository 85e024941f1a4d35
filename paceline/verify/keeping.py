"""What min_p, top_k and top_p keep of the vocabulary, compiled; `reference.py` says it with a full sort.

Nothing sorts the vocabulary. Top-k and top-p are both "keep the likeliest until their weights
reach a need" (weights 1, or probability masses), and that threshold is found with one histogram
and a sort of the single bucket where it lies. Masses are integers, so sums are exact in any order.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from paceline.compiling import compiled, inlined
from paceline.verify.kernels import exp, log

Float32Array = npt.NDArray[np.float32]
Float64Array = npt.NDArray[np.float64]
Int64Array = npt.NDArray[np.int64]
Span = tuple[float, float]  # the largest and the smallest logit: numpy finds them faster
Options = tuple[float, int, float, float]  # temperature (not 0), top_k, top_p, min_p
Scratch = tuple[Float64Array, Int64Array, Int64Array]  # scaled, ids, weights: [vocab] each

MASS_ONE = 2.0**40  # the mass of the likeliest token; what is 2^-40 of it or less counts as nothing
MASSLESS = 28.0  # exp(-28) * MASS_ONE is less than 1
_BUCKETS = 2048
_BUCKET_RANGE = 64.0


@compiled
def keep(logits: Float32Array, span: Span, options: Options, scratch: Scratch) -> int:
    """How many ids min_p, top_k and top_p keep: the first of `ids`, ascending. Never one of -inf.

    Also writes the logits divided by the temperature to `scaled`. The largest logit must be finite.
    """
    temperature, top_k, top_p, min_p = options
    scaled, ids, weights = scratch
    for token in range(len(logits)):
        scaled[token] = np.float64(logits[token]) / temperature
    peak, low = span[0] / temperature, span[1] / temperature
    floor = peak + log(min_p) if min_p > 0.0 else -np.inf
    if top_p < 1.0:
        floor = max(floor, peak - MASSLESS)  # top_p keeps nothing that has no mass
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
