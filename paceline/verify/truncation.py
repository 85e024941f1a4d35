"""Truncation: which ids min-p, top-k and top-p keep of the vocabulary, compiled.

`tests/verify/reference.py` gives the same ids with a full sort. Here nothing sorts the vocabulary: top-k and
top-p both mean "keep the likeliest ids until their weights add up to `required`" (weights of 1, or
probabilities), and one histogram plus a sort of the single bucket where the sum is reached finds that
threshold. Probabilities are fixed-point integers, so their sums are exact in any order.
"""

from __future__ import annotations

import math

import numpy as np

from paceline.compiling import compiled, inlined
from paceline.core.arrays import Float32Array, Float64Array, Int64Array
from paceline.core.truncation import Truncation
from paceline.verify.kernels import exp, log

Extremes = tuple[float, float]  # largest and smallest logit, which numpy finds faster than compiled code here
Options = tuple[float, Truncation]  # temperature (not 0), and what is kept
Scratch = tuple[Float64Array, Int64Array, Int64Array]  # scaled logits, ids, weights: [vocab] each

FIXED_POINT_ONE = 2.0**40  # the likeliest token's probability; 2^-40 of it or less rounds to 0
UNDERFLOW_NATS = 28.0  # a logit this far below the largest has fixed-point probability 0: exp(-28) * 2^40 < 1
_BUCKETS = 2048  # of the histogram
_BUCKET_RANGE = 64.0  # nats below the largest logit; everything further down is in the last bucket


@compiled
def truncate(logits: Float32Array, extremes: Extremes, options: Options, scratch: Scratch) -> int:
    """The number of ids kept by min_p, top_k and top_p; they are the first of `ids`, in ascending order.

    Never keeps a logit of -inf. Also writes logits / temperature to `scaled`. The largest logit must be
    finite.
    """
    temperature, (top_k, top_p, min_p) = options
    scaled, ids, weights = scratch
    for token in range(len(logits)):
        scaled[token] = np.float64(logits[token]) / temperature
    peak, low = extremes[0] / temperature, extremes[1] / temperature
    floor = peak + log(min_p) if min_p > 0.0 else -np.inf
    if top_p < 1.0:
        floor = max(floor, peak - UNDERFLOW_NATS)  # top-p never keeps an id of fixed-point probability 0
    count = 0
    for token in range(len(logits)):
        ids[count] = token
        count += scaled[token] >= floor and scaled[token] > -np.inf
    if 0 < top_k < count:
        weights[:count] = 1
        count = _keep_likeliest(scaled, ids, weights, count, top_k, peak, low)
    if top_p < 1.0:
        for index in range(count):
            weights[index] = np.int64(exp(scaled[ids[index]] - peak) * FIXED_POINT_ONE)
        total = 0
        for index in range(count):
            total += int(weights[index])
        required = max(1, min(total, math.ceil(top_p * total)))
        count = _drop_light(ids, weights, count, (total - required) // count)
        count = _keep_likeliest(scaled, ids, weights, count, required, peak, low)
    return count


@inlined
def _drop_light(ids: Int64Array, weights: Int64Array, count: int, least: int) -> int:
    """Drop, in place, ids of less than the `least` weight. Returns how many are left.

    `least` is the weight that top-p may discard in total, divided by the number of ids: all lighter ids
    together fit into it. In a real distribution that is nearly the whole vocabulary, so the search for the
    threshold has few ids left. It changes no result.
    """
    left = 0
    for index in range(count):
        weight = weights[index]
        ids[left] = ids[index]
        weights[left] = weight
        left += weight >= least
    return left


@compiled
def _keep_likeliest(
    scaled: Float64Array,
    ids: Int64Array,
    weights: Int64Array,
    count: int,
    required: int,
    peak: float,
    low: float,
) -> int:
    """Keep, in place, the fewest likeliest ids whose weights add up to `required`. Returns how many.

    Likeliest first, ties to the lowest id. The ids stay in ascending order.
    """
    resolution = (_BUCKETS - 1) / max(min(peak - low, _BUCKET_RANGE), 1e-6)
    buckets = np.zeros(_BUCKETS, dtype=np.int64)
    for index in range(count):
        distance = (peak - scaled[ids[index]]) * resolution
        buckets[np.int64(min(distance, _BUCKETS - 1.0))] += weights[index]
    crossing, before = 0, np.int64(0)
    while before + buckets[crossing] < required:
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
    while before + weights[members[order[last]]] < required:
        before += weights[members[order[last]]]
        last += 1
    last_id = ids[members[order[last]]]
    threshold = scaled[last_id]

    kept = 0
    for index in range(count):
        token = ids[index]
        ids[kept] = token
        kept += scaled[token] > threshold or (scaled[token] == threshold and token <= last_id)
    return kept
