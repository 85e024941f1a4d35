"""Chains of guesses: what a draft head finds likeliest, fed back to it, pass after pass.

head_chains.py says which guesses join a chain and which are followed by another. Those are the rows of
the next pass; rows of chains that end are left out of it.
"""

from __future__ import annotations

import math

import numpy as np

from paceline.backends.cpu.choosing import first_place_of, largest_of, sixteen
from paceline.backends.cpu.compiled import compiled
from paceline.backends.cpu.job import (
    CHAIN_AT,
    CHANCES_AT,
    CHOSEN_AT,
    CHOSEN_CHANCES_AT,
    CONTEXT_AT,
    COUNTERS_AT,
    FROM_TARGET,
    GUESSED_IDS,
    GUESSES_AT,
    GUESSES_WANTED_AT,
    HIDDEN_PADDED,
    INPUTS_AT,
    LEAST_CHANCES_AT,
    LOGIT_ROWS_AT,
    LOGITS_AT,
    LOGITS_STRIDE,
    MORE_GUESSES,
    MOST_GUESSES,
    NEXT_ROWS_AT,
    NEXT_ROWS_STRIDE,
    NUM_COUNTERS,
    NUM_GUESSES_AT,
    OUTPUTS,
    PARENTS_AT,
    POSITIONS_AT,
    REQUEST_AT,
    ROW_START_AT,
    ROWS,
    STATES_AT,
    TARGET_IDS_AT,
    TOKENS_AT,
    field,
)
from paceline.backends.cpu.rows import copy_row
from paceline.backends.cpu.simd import (
    add,
    exponential,
    load_float,
    load_int32,
    spread,
    store_float,
    store_int32,
    store_int64,
    sum_lanes,
)

# The int32 arrays that describe the passes behind the first, each NEXT_ROWS_STRIDE bytes long
NEXT_TOKENS, NEXT_POSITIONS, NEXT_PARENTS, NEXT_LOGIT_ROWS, NEXT_STARTS, NEXT_CONTEXTS, NEXT_ARRAYS = range(7)


@compiled
def _likeliest(logits, count):  # type: ignore[no-untyped-def]
    """The first of the largest of `count` logits, and the root of its share of the softmax; NaN if one is."""
    top = largest_of(logits, count)
    if not math.isfinite(top):
        return 0, np.float32(np.nan)
    total = spread(np.float32(0))
    for start in range(0, count, 16):
        total = add(total, exponential(add(sixteen(logits, start, count), spread(-top))))
    return first_place_of(logits, top), np.float32(math.sqrt(np.float32(1) / sum_lanes(total)))


@compiled
def choose_guesses(index, threads, job):  # type: ignore[no-untyped-def]
    """The likeliest guess of each row that has logits, and its chance. A thread takes every so many rows."""
    for row in range(index, field(job, OUTPUTS), threads):
        logits = field(job, LOGITS_AT) + field(job, LOGITS_STRIDE) * row
        best, chance = _likeliest(logits, field(job, GUESSED_IDS))
        store_int32(field(job, CHOSEN_AT) + 4 * row, best)
        store_float(field(job, CHOSEN_CHANCES_AT) + 4 * row, chance)


@compiled
def _append(job, row, request):  # type: ignore[no-untyped-def]
    """Take the guess of a row into the chain of its request, if it may join; whether the chain goes on."""
    count = load_int32(field(job, NUM_GUESSES_AT) + 4 * request)
    place = 4 * (request * field(job, MOST_GUESSES) + count)
    chance = load_float(field(job, CHOSEN_CHANCES_AT) + 4 * row)
    if count > 0:
        chance *= load_float(field(job, CHANCES_AT) + place - 4)
    if not chance >= load_float(field(job, LEAST_CHANCES_AT)):  # also if it is NaN
        return False
    token = load_int32(field(job, CHOSEN_AT) + 4 * row)
    if field(job, TARGET_IDS_AT) != 0:
        token = load_int32(field(job, TARGET_IDS_AT) + 4 * token)
    store_int32(field(job, GUESSES_AT) + place, token)
    store_float(field(job, CHANCES_AT) + place, chance)
    store_int32(field(job, NUM_GUESSES_AT) + 4 * request, count + 1)
    sure = chance >= load_float(field(job, LEAST_CHANCES_AT) + 4)
    return sure and count + 1 < load_int32(field(job, GUESSES_WANTED_AT) + 4 * request)


@compiled
def follow_guesses(job):  # type: ignore[no-untyped-def]
    """Take the chosen guesses into their chains, and make the job that of the pass over those that go on.

    What is told of requests keeps its place: the rows of the next pass name theirs.
    """
    arrays, stride = field(job, NEXT_ROWS_AT), field(job, NEXT_ROWS_STRIDE)
    contexts, starts = arrays + NEXT_CONTEXTS * stride, arrays + NEXT_STARTS * stride
    states, padded = field(job, STATES_AT), field(job, HIDDEN_PADDED)
    going = 0
    for row in range(field(job, OUTPUTS)):
        request = load_int32(field(job, REQUEST_AT) + 4 * load_int32(field(job, LOGIT_ROWS_AT) + 4 * row))
        if not _append(job, row, request):
            continue
        count = load_int32(field(job, NUM_GUESSES_AT) + 4 * request)
        place = 4 * (request * field(job, MOST_GUESSES) + count - 1)
        context = load_int32(contexts + 4 * request) + (1 if count > 1 else 0)
        store_int32(contexts + 4 * request, context)
        store_int32(starts + 4 * request, going)
        store_int32(arrays + NEXT_TOKENS * stride + 4 * going, load_int32(field(job, GUESSES_AT) + place))
        store_int32(arrays + NEXT_POSITIONS * stride + 4 * going, context - 1)
        store_int32(field(job, REQUEST_AT) + 4 * going, request)
        store_int32(field(job, CHAIN_AT) + 4 * request, 1)
        if going < row:
            copy_row(states + 4 * padded * row, states + 4 * padded * going, padded)
        going += 1
    store_int64(job + 8 * ROWS, going)
    store_int64(job + 8 * OUTPUTS, going)
    store_int64(job + 8 * MORE_GUESSES, going)
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
