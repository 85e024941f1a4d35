"""Sampling by the threads of the pass, right after the LM head: see Choices in core/forward.py."""

from __future__ import annotations

import math

import numpy as np
from numba import carray, types

from paceline.backends.cpu.job import (
    CHOSEN_TOKENS_AT,
    LOGIT_ROWS_AT,
    LOGITS_AT,
    LOGITS_STRIDE,
    NUM_CHOSEN,
    OUTPUTS,
    POSITIONS_AT,
    RUN_GUMBEL_ARGMAX,
    SEEDS_AT,
    TEMPERATURES_AT,
    VOCABULARY,
    field,
    take,
)
from paceline.backends.cpu.primitives.compiled import compiled, kernel
from paceline.backends.cpu.primitives.simd import (
    caller,
    keep_lanes,
    larger,
    largest_lane,
    load,
    load_float,
    load_int32,
    load_int64,
    spread,
    store_int32,
)
from paceline.verify.kernels import gumbel_top_k

_call_gumbel_argmax = caller(*[types.int64] * 6)


@kernel(
    types.CPointer(types.float32),
    types.int64,
    types.CPointer(types.float64),
    types.CPointer(types.uint64),
    types.int64,
    types.CPointer(types.int32),
)
def run_gumbel_argmax(logits, count, temperature, seed, position, token):  # type: ignore[no-untyped-def]
    """Write the token of argmax(logits / temperature + gumbel). The largest logit must be finite."""
    best = np.empty(1, dtype=np.int64), np.empty(1, dtype=np.float64)
    every = np.empty(0, dtype=np.int64)
    gumbel_top_k((carray(logits, count), every), temperature[0], (seed[0], np.uint64(position)), best)
    token[0] = best[0][0]


@compiled
def sixteen(logits, start, count):  # type: ignore[no-untyped-def]
    """16 logits from `start` on; -inf beyond the last of `count`."""
    values = load(logits + 4 * start)
    return values if start + 16 <= count else keep_lanes(values, 0, count - start - 1)


@compiled
def largest_of(logits, count):  # type: ignore[no-untyped-def]
    """The largest of `count` logits; NaN if one is."""
    largest = spread(np.float32(-np.inf))
    for start in range(0, count, 16):
        largest = larger(largest, sixteen(logits, start, count))
    return largest_lane(largest)


@compiled
def first_index_of(logits, value):  # type: ignore[no-untyped-def]
    """The first index of a value that occurs in the logits."""
    place = 0
    while load_float(logits + 4 * place) != value:
        place += 1
    return place


@compiled
def sample_tokens(tasks, job, counter):  # type: ignore[no-untyped-def]
    """Sample the tokens of the last outputs."""
    count, vocabulary = field(job, NUM_CHOSEN), field(job, VOCABULARY)
    first = field(job, OUTPUTS) - count
    while True:
        choice, _ = take(tasks, counter, count, 1)
        if choice >= count:
            return
        logits = field(job, LOGITS_AT) + field(job, LOGITS_STRIDE) * (first + choice)
        temperature, token = (
            field(job, TEMPERATURES_AT) + 8 * choice,
            field(job, CHOSEN_TOKENS_AT) + 4 * choice,
        )
        largest = largest_of(logits, vocabulary)
        if not math.isfinite(largest):
            store_int32(token, -1)
        elif load_int64(temperature) == 0:  # the bits of 0.0
            store_int32(token, first_index_of(logits, largest))
        else:
            row = load_int32(field(job, LOGIT_ROWS_AT) + 4 * (first + choice))
            position = load_int32(field(job, POSITIONS_AT) + 4 * row) + 1
            seed = field(job, SEEDS_AT) + 8 * choice
            _call_gumbel_argmax(
                field(job, RUN_GUMBEL_ARGMAX), logits, vocabulary, temperature, seed, position, token
            )
