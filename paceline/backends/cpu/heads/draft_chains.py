"""Drafts chains with a head: each pass takes the best token of the pass before, without the host.

head_chains.py defines which token is best, which tokens join a chain and which chains are extended. A pass
has one row for each chain that is extended.
"""

from __future__ import annotations

import math

import numpy as np
from numba import carray, types

from paceline.backends.cpu.job import (
    CANDIDATE_IDS_AT,
    CHAIN_AT,
    CHANCES_AT,
    CHOSEN_AT,
    CHOSEN_CHANCES_AT,
    CONTEXT_AT,
    COUNTERS_AT,
    DRAFT_VOCABULARY,
    DRAFTS_AT,
    DRAFTS_WANTED_AT,
    FROM_TARGET,
    HIDDEN_PADDED,
    INPUTS_AT,
    LEAST_CHANCES_AT,
    LOGIT_ROWS_AT,
    LOGITS_AT,
    LOGITS_STRIDE,
    MAX_DRAFTS,
    MORE_DRAFTS,
    NEXT_ROWS_AT,
    NEXT_ROWS_STRIDE,
    NUM_CANDIDATE_IDS,
    NUM_COUNTERS,
    NUM_DRAFTS_AT,
    OUTPUTS,
    PARENTS_AT,
    POSITIONS_AT,
    REQUEST_AT,
    ROW_START_AT,
    ROWS,
    RUN_COUPLED,
    SEEDS_AT,
    STATES_AT,
    TARGET_IDS_AT,
    TEMPERATURES_AT,
    TOKENS_AT,
    field,
)
from paceline.backends.cpu.phases.sampling import first_index_of, largest_of, sixteen
from paceline.backends.cpu.primitives.compiled import compiled, kernel
from paceline.backends.cpu.primitives.rows import copy_row
from paceline.backends.cpu.primitives.simd import (
    add,
    caller,
    exponential,
    load_float,
    load_int32,
    load_int64,
    spread,
    store_float,
    store_int32,
    store_int64,
    sum_lanes,
)
from paceline.backends.head_chains import RIVALS
from paceline.verify.kernels import gumbel_top_k

_call_coupled = caller(*[types.int64] * 9)

# The int32 arrays that describe the passes after the first, each NEXT_ROWS_STRIDE bytes long
NEXT_TOKENS, NEXT_POSITIONS, NEXT_PARENTS, NEXT_LOGIT_ROWS, NEXT_STARTS, NEXT_CONTEXTS, NEXT_ARRAYS = range(7)


@compiled
def likeliest(logits, count):  # type: ignore[no-untyped-def]
    """The argmax of `count` logits (ties to the lowest index), and the square root of its probability.

    (0, NaN) if the largest logit is not finite.
    """
    top = largest_of(logits, count)
    if not math.isfinite(top):
        return 0, np.float32(np.nan)
    total = spread(np.float32(0))
    for start in range(0, count, 16):
        total = add(total, exponential(add(sixteen(logits, start, count), spread(-top))))
    return first_index_of(logits, top), np.float32(math.sqrt(np.float32(1) / sum_lanes(total)))


@kernel(
    types.CPointer(types.float32),
    types.int64,
    types.CPointer(types.int64),
    types.int64,
    types.CPointer(types.float64),
    types.CPointer(types.uint64),
    types.int64,
    types.CPointer(types.int32),
    types.CPointer(types.float32),
)
def run_coupled(logits, count, ids, num_ids, temperature, seed, position, best, chance):  # type: ignore[no-untyped-def]
    """Write the index of the best logit with the target's noise, and its chance: `coupled_choice`."""
    places, scores = np.empty(1 + RIVALS, dtype=np.int64), np.empty(1 + RIVALS, dtype=np.float64)
    known = carray(logits, count), carray(ids, num_ids)
    found = gumbel_top_k(known, temperature[0], (seed[0], np.uint64(position)), (places, scores))
    total = 0.0
    for place in range(found):
        total += math.exp(scores[place] - scores[0])
    best[0], chance[0] = places[0], 1.0 / total


@compiled
def choose_drafts(index, threads, job):  # type: ignore[no-untyped-def]
    """Choose the token of each row with logits, and its chance. Rows are distributed over the threads."""
    count, contexts = (
        field(job, DRAFT_VOCABULARY),
        field(job, NEXT_ROWS_AT) + NEXT_CONTEXTS * field(job, NEXT_ROWS_STRIDE),
    )
    for row in range(index, field(job, OUTPUTS), threads):
        logits = field(job, LOGITS_AT) + field(job, LOGITS_STRIDE) * row
        best, chance = field(job, CHOSEN_AT) + 4 * row, field(job, CHOSEN_CHANCES_AT) + 4 * row
        request = _request_of(job, row)
        temperature = field(job, TEMPERATURES_AT) + 8 * request
        if load_int64(temperature) == 0 or not math.isfinite(largest_of(logits, count)):  # the bits of 0.0
            place, share = likeliest(logits, count)
            store_int32(best, place)
            store_float(chance, share)
            continue
        is_first = load_int32(field(job, NUM_DRAFTS_AT) + 4 * request) == 0
        position = load_int32(contexts + 4 * request) + (0 if is_first else 1)
        ids, seed = field(job, CANDIDATE_IDS_AT), field(job, SEEDS_AT) + 8 * request
        num_ids, run = field(job, NUM_CANDIDATE_IDS), field(job, RUN_COUPLED)
        _call_coupled(run, logits, count, ids, num_ids, temperature, seed, position, best, chance)


@compiled
def _request_of(job, row):  # type: ignore[no-untyped-def]
    """The request of a row with logits."""
    return load_int32(field(job, REQUEST_AT) + 4 * load_int32(field(job, LOGIT_ROWS_AT) + 4 * row))


@compiled
def _append(job, row, request):  # type: ignore[no-untyped-def]
    """Append a row's token to its request's chain if it is likely enough. Returns whether to extend it."""
    count = load_int32(field(job, NUM_DRAFTS_AT) + 4 * request)
    place = 4 * (request * field(job, MAX_DRAFTS) + count)
    chance = load_float(field(job, CHOSEN_CHANCES_AT) + 4 * row)
    if count > 0:
        chance *= load_float(field(job, CHANCES_AT) + place - 4)
    if not chance >= load_float(field(job, LEAST_CHANCES_AT)):  # also if it is NaN
        return False
    token = load_int32(field(job, CHOSEN_AT) + 4 * row)
    if field(job, TARGET_IDS_AT) != 0:
        token = load_int32(field(job, TARGET_IDS_AT) + 4 * token)
    store_int32(field(job, DRAFTS_AT) + place, token)
    store_float(field(job, CHANCES_AT) + place, chance)
    store_int32(field(job, NUM_DRAFTS_AT) + 4 * request, count + 1)
    sure = chance >= load_float(field(job, LEAST_CHANCES_AT) + 4)
    return sure and count + 1 < load_int32(field(job, DRAFTS_WANTED_AT) + 4 * request)


@compiled
def extend_chains(job):  # type: ignore[no-untyped-def]
    """Append the chosen tokens to their chains, and set up the job for the next pass.

    Requests keep their index in per-request arrays; each row of the next pass names its request.
    """
    arrays, stride = field(job, NEXT_ROWS_AT), field(job, NEXT_ROWS_STRIDE)
    contexts, starts = arrays + NEXT_CONTEXTS * stride, arrays + NEXT_STARTS * stride
    states, padded = field(job, STATES_AT), field(job, HIDDEN_PADDED)
    going = 0
    for row in range(field(job, OUTPUTS)):
        request = _request_of(job, row)
        if not _append(job, row, request):
            continue
        count = load_int32(field(job, NUM_DRAFTS_AT) + 4 * request)
        place = 4 * (request * field(job, MAX_DRAFTS) + count - 1)
        context = load_int32(contexts + 4 * request) + (1 if count > 1 else 0)
        store_int32(contexts + 4 * request, context)
        store_int32(starts + 4 * request, going)
        store_int32(arrays + NEXT_TOKENS * stride + 4 * going, load_int32(field(job, DRAFTS_AT) + place))
        store_int32(arrays + NEXT_POSITIONS * stride + 4 * going, context - 1)
        store_int32(field(job, REQUEST_AT) + 4 * going, request)
        store_int32(field(job, CHAIN_AT) + 4 * request, 1)
        if going < row:
            copy_row(states + 4 * padded * row, states + 4 * padded * going, padded)
        going += 1
    store_int64(job + 8 * ROWS, going)
    store_int64(job + 8 * OUTPUTS, going)
    store_int64(job + 8 * MORE_DRAFTS, going)
    store_int64(job + 8 * INPUTS_AT, states)
    store_int64(job + 8 * FROM_TARGET, 0)
    store_int64(job + 8 * TOKENS_AT, arrays + NEXT_TOKENS * stride)
    store_int64(job + 8 * POSITIONS_AT, arrays + NEXT_POSITIONS * stride)
    store_int64(job + 8 * PARENTS_AT, arrays + NEXT_PARENTS * stride)
    store_int64(job + 8 * LOGIT_ROWS_AT, arrays + NEXT_LOGIT_ROWS * stride)
    store_int64(job + 8 * ROW_START_AT, starts)
    store_int64(job + 8 * CONTEXT_AT, contexts)
    for counter in range(field(job, NUM_COUNTERS)):
        store_int64(field(job, COUNTERS_AT) + 8 * counter, 0)
