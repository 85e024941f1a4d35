"""Expert routing: the top-k experts of each row and their routing weights (`shares`)."""

from __future__ import annotations

import math

import numpy as np

from paceline.backends.cpu.job import (
    CHOICES_AT,
    CHOSEN_GROUPS,
    CORRECTIONS_AT,
    EXPERT_GROUPS,
    EXPERT_SCALES_AT,
    EXPERTS,
    EXPERTS_PER_TOKEN,
    GROUP_EXPERTS,
    HIDDEN_PADDED,
    NORMALIZE_SHARES,
    ROUTER_BIASES_AT,
    ROUTER_NORM,
    ROUTERS_AT,
    SHARE_SCALE,
    SHARED_GATES_AT,
    SHARED_SHARES_AT,
    SHARES_AT,
    SIGMOID_SCORES,
    STATE_AT,
    field,
    own_norm,
    scale_of,
    take,
)
from paceline.backends.cpu.phases.residual import norm_row, norm_weight
from paceline.backends.cpu.primitives.compiled import compiled
from paceline.backends.cpu.primitives.simd import (
    exponential,
    fma,
    load,
    load_float,
    load_int64,
    spread,
    store,
    store_float,
    store_int64,
    sum_lanes,
)

PAIR = 16  # bytes of a pair in CHOICES: expert, index


@compiled
def route_rows(tasks, job, counter, rows, layer, scratch):  # type: ignore[no-untyped-def]
    """Choose each row's experts and their weights, by softmax or sigmoid of the router's scores."""
    padded, experts = field(job, HIDDEN_PADDED), field(job, EXPERTS)
    weight = own_norm(job, layer, ROUTER_NORM)
    if weight == 0:
        weight = norm_weight(job, 2 * layer + 1)
    router = field(job, ROUTERS_AT) + 4 * padded * experts * layer
    biases, shared_gates = field(job, ROUTER_BIASES_AT), field(job, SHARED_GATES_AT)
    scores = scratch + 4 * padded
    while True:
        row, _ = take(tasks, counter, rows, 1)
        if row >= rows:
            return
        state = field(job, STATE_AT) + 4 * padded * row
        normed = norm_row(job, state, weight, scratch)
        top = np.float32(-np.inf)
        for expert in range(experts):
            total = spread(np.float32(0))
            for k in range(0, padded, 16):
                total = fma(load(normed + 4 * k), load(router + 4 * (padded * expert + k)), total)
            score = sum_lanes(total)
            if biases != 0:
                score += load_float(biases + 4 * (experts * layer + expert))
            store_float(scores + 4 * expert, score)
            top = max(top, score)
        if shared_gates != 0:
            total = spread(np.float32(0))
            for k in range(0, padded, 16):
                total = fma(load(normed + 4 * k), load(shared_gates + 4 * (padded * layer + k)), total)
            grown = _exponential(-sum_lanes(total), scores + 4 * experts)
            store_float(field(job, SHARED_SHARES_AT) + 4 * row, np.float32(1) / (np.float32(1) + grown))
        is_sigmoid = field(job, SIGMOID_SCORES)
        divisor = _sigmoids(scores, experts) if is_sigmoid else _softmax(scores, experts, top)
        _choose(job, row, layer, scores, divisor)


@compiled
def _exponential(value, spare):  # type: ignore[no-untyped-def]
    """exp(value); `spare` is the address of 16 floats."""
    store(spare, exponential(spread(value)))
    return load_float(spare)


@compiled
def _softmax(scores, experts, top):  # type: ignore[no-untyped-def]
    """Replace scores by exp(score - largest); returns their sum, the divisor."""
    total = np.float32(0)
    for expert in range(experts):
        value = _exponential(load_float(scores + 4 * expert) - top, scores + 4 * experts)
        store_float(scores + 4 * expert, value)
        total += value
    return total


@compiled
def _sigmoids(scores, experts):  # type: ignore[no-untyped-def]
    """Replace scores by their sigmoids; returns the divisor 1."""
    one = np.float32(1)
    for expert in range(experts):
        grown = _exponential(-load_float(scores + 4 * expert), scores + 4 * experts)
        store_float(scores + 4 * expert, one / (one + grown))
    return one


@compiled
def _choose(job, row, layer, scores, divisor):  # type: ignore[no-untyped-def]
    """Write the top-k experts, best first, ties to the lower index, and their weights.

    A weight is score / `divisor`, or normalized so that a row's weights sum to one."""
    experts, chosen = field(job, EXPERTS), field(job, EXPERTS_PER_TOKEN)
    pairs, shares = field(job, CHOICES_AT) + PAIR * chosen * row, field(job, SHARES_AT) + 4 * chosen * row
    preferences = scores + 4 * (experts + 16)
    _prefer(job, layer, scores, divisor, preferences)
    sum_of_chosen = np.float32(0)
    for rank in range(chosen):
        best, _ = _best_of(preferences, experts)
        store_float(preferences + 4 * best, np.float32(-np.inf))  # not again
        share = load_float(scores + 4 * best)
        store_int64(pairs + PAIR * rank, best)
        store_float(shares + 4 * rank, share)
        sum_of_chosen += share
    total = sum_of_chosen if field(job, NORMALIZE_SHARES) else divisor
    scales = field(job, EXPERT_SCALES_AT)
    for rank in range(chosen):
        share = load_float(shares + 4 * rank) / total * scale_of(job, SHARE_SCALE)
        if scales != 0:
            expert = load_int64(pairs + PAIR * rank)
            share *= load_float(scales + 4 * (experts * layer + expert))
        store_float(shares + 4 * rank, share)


@compiled
def _best_of(values, count):  # type: ignore[no-untyped-def]
    """The argmax of some floats, ties to the lowest index, and the maximum."""
    best, largest = 0, np.float32(-np.inf)
    for index in range(count):
        value = load_float(values + 4 * index)
        if value > largest:
            best, largest = index, value
    return best, largest


@compiled
def _correct(job, layer, scores, divisor, preferences):  # type: ignore[no-untyped-def]
    """Write score / `divisor` plus the score-correction bias, if there is one, of all experts."""
    experts, corrections = field(job, EXPERTS), field(job, CORRECTIONS_AT)
    for expert in range(experts):
        value = load_float(scores + 4 * expert)
        if corrections != 0:
            value = value / divisor + load_float(corrections + 4 * (experts * layer + expert))
        store_float(preferences + 4 * expert, value)


@compiled
def _prefer(job, layer, scores, divisor, preferences):  # type: ignore[no-untyped-def]
    """Write what experts are chosen by: corrected scores, -inf outside of the best groups.

    A group's merit is the sum of its best experts' scores. The merits follow the preferences in memory.
    """
    experts, groups = field(job, EXPERTS), field(job, EXPERT_GROUPS)
    _correct(job, layer, scores, divisor, preferences)
    if groups <= 1:
        return
    size, merits = experts // groups, preferences + 4 * experts
    for group in range(groups):
        own, merit = preferences + 4 * size * group, np.float32(0)
        for _ in range(field(job, GROUP_EXPERTS)):
            best, value = _best_of(own, size)
            store_float(own + 4 * best, np.float32(-np.inf))
            merit += value
        store_float(merits + 4 * group, merit)
    _correct(job, layer, scores, divisor, preferences)
    for _ in range(field(job, CHOSEN_GROUPS)):
        best, _ = _best_of(merits, groups)
        store_float(merits + 4 * best, np.float32(np.nan))  # chosen: NaN is never the largest
    for group in range(groups):
        if not math.isnan(load_float(merits + 4 * group)):
            for expert in range(size * group, size * (group + 1)):
                store_float(preferences + 4 * expert, np.float32(-np.inf))
