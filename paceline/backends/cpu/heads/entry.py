"""The first phases of a draft head's pass: join states with the embeddings of tokens.

    features of the target -> norms -> reduce -> state      rows after the target's tokens
    a state that the head returned            -> state      rows after drafted tokens

    [norm(embedding), norm(state)] -> queries, keys, values; the state is the residual     EAGLE-3
    [embedding, state] -> mix -> the residual, and the layer's input                       EAGLE-1 and 2
    [norm(embedding), norm(state)] -> mix -> the residual                                  MTP

    features of the target -> norms -> reduce -> norm -> keys and values of every layer    DFlash and DSpark

    [the target's embedding, its state or a projected one] -> reduce -> the residual       assistants

The address of a norm or matrix that a head lacks is 0.
"""

from __future__ import annotations

from paceline.backends.cpu.job import (
    CONTEXT_NORM_AT,
    EMBEDDING_SCALE,
    EPSILON_AT,
    FEATURE_NORMS_AT,
    FEATURE_PADDED,
    FEATURE_WIDTH,
    FEATURES,
    FROM_TARGET,
    HIDDEN,
    HIDDEN_PADDED,
    INPUT_EPSILON_AT,
    INPUT_NORM_AT,
    INPUTS_AT,
    JOIN_NORMS_AT,
    NORMED_RESIDUAL,
    QUANTIZED,
    RECORDS_AT,
    REDUCE_AT,
    STATE_AT,
    TARGET_EMBEDDING_AT,
    TOKENS_AT,
    field,
    scale_of,
    take,
)
from paceline.backends.cpu.phases.residual import read_embedding
from paceline.backends.cpu.primitives.compiled import compiled
from paceline.backends.cpu.primitives.rows import copy_row, normalize, record_stride, scale_row, write_row
from paceline.backends.cpu.primitives.simd import load_float, load_int32
from paceline.backends.cpu.tiles.weight_tile import GROUP, RECORD


@compiled
def enter_rows(tasks, job, counter, rows, scratch):  # type: ignore[no-untyped-def]
    """Norm the target's features into records for `fc`; without `fc`, into the state."""
    count, width, part = field(job, FEATURES), field(job, FEATURE_WIDTH), field(job, FEATURE_PADDED)
    padded, epsilon = count * part, load_float(field(job, INPUT_EPSILON_AT))
    norms, norm = field(job, FEATURE_NORMS_AT), field(job, INPUT_NORM_AT)
    records, groups = field(job, RECORDS_AT), padded // GROUP
    while True:
        row, _ = take(tasks, counter, rows, 1)
        if row >= rows:
            return
        values = field(job, INPUTS_AT) + 4 * padded * row
        if norms != 0:
            for at in range(0, 4 * padded, 4 * part):
                normalize(values + at, norms + at, scratch + at, width, part, epsilon)
            values = scratch
        if norm != 0:
            normalize(values, norm, scratch, count * width, padded, epsilon)
            values = scratch
        if field(job, REDUCE_AT) != 0:
            write_row(values, groups, records, row, rows, groups, field(job, QUANTIZED))
        else:
            copy_row(values, field(job, STATE_AT) + 4 * padded * row, padded)


@compiled
def join_target(tasks, job, counter, rows, scratch):  # type: ignore[no-untyped-def]
    """Write records of the target's scaled embedding of a row's token, followed by the given state."""
    padded, records = field(job, FEATURE_PADDED), field(job, RECORDS_AT)
    groups = 2 * padded // GROUP
    while True:
        row, _ = take(tasks, counter, rows, 1)
        if row >= rows:
            return
        token = load_int32(field(job, TOKENS_AT) + 4 * row)
        read_embedding(field(job, TARGET_EMBEDDING_AT), token, scratch)
        scale_row(scratch, scale_of(job, EMBEDDING_SCALE), padded)
        copy_row(field(job, INPUTS_AT) + 4 * padded * row, scratch + 4 * padded, padded)
        write_row(scratch, groups, records, row, rows, groups, field(job, QUANTIZED))


@compiled
def norm_context(tasks, job, counter, rows, scratch):  # type: ignore[no-untyped-def]
    """Write records of the normed state, which all layers of a parallel head read."""
    padded, norm = field(job, HIDDEN_PADDED), field(job, CONTEXT_NORM_AT)
    records, groups = field(job, RECORDS_AT), padded // GROUP
    while True:
        row, _ = take(tasks, counter, rows, 1)
        if row >= rows:
            return
        state = field(job, STATE_AT) + 4 * padded * row
        normalize(state, norm, scratch, field(job, HIDDEN), padded, load_float(field(job, EPSILON_AT)))
        write_row(scratch, groups, records, row, rows, groups, field(job, QUANTIZED))


@compiled
def join_rows(tasks, job, counter, rows, embedding, scratch):  # type: ignore[no-untyped-def]
    """Write records of [normed embedding, normed state]; the state becomes the residual stream."""
    width, padded, quantized = field(job, HIDDEN), field(job, HIDDEN_PADDED), field(job, QUANTIZED)
    norms, epsilon = field(job, JOIN_NORMS_AT), load_float(field(job, EPSILON_AT))
    groups, stride = padded // GROUP, record_stride(rows)
    records = field(job, RECORDS_AT)
    behind = records + groups * stride * (RECORD if quantized else 4 * GROUP)
    while True:
        row, _ = take(tasks, counter, rows, 1)
        if row >= rows:
            return
        read_embedding(embedding, load_int32(field(job, TOKENS_AT) + 4 * row), scratch)
        if norms != 0:
            normalize(scratch, norms, scratch, width, padded, epsilon)
        write_row(scratch, groups, records, row, rows, 2 * groups, quantized)
        residual = field(job, STATE_AT) + 4 * padded * row
        if field(job, FROM_TARGET) == 0:
            copy_row(field(job, INPUTS_AT) + 4 * padded * row, residual, padded)
        normed = residual
        if norms != 0:
            normed = residual if field(job, NORMED_RESIDUAL) else scratch
            normalize(residual, norms + 4 * padded, normed, width, padded, epsilon)
        write_row(normed, groups, behind, row, rows, 2 * groups, quantized)
