"""The phases that read and write the residual stream: embedding, norms, addition of branches, logits.

Attention and MLP add their output directly to the stream if nothing comes between. In models with output
norms, with a residual scale, or with attention and MLP in parallel, they write it to a buffer, the branch,
which is added afterwards.
"""

from __future__ import annotations

import numpy as np

from paceline.backends.cpu.job import (
    ATTENTION_AT,
    ATTENTION_PADDED,
    BRANCH_AT,
    CENTERED,
    EMBEDDING_SCALE,
    EPSILON_AT,
    HIDDEN,
    HIDDEN_PADDED,
    LOGIT_ROWS_AT,
    LOGITS_AT,
    LOGITS_CAP,
    LOGITS_SCALE,
    LOGITS_STRIDE,
    MASK_EMBEDDING_AT,
    MASK_TOKEN,
    NORMED_STATES,
    NORMS_AT,
    QKV_AT,
    QKV_STRIDE,
    QUANTIZED,
    RECORDS_AT,
    RESIDUAL_SCALE,
    STATE_AT,
    STATES_AT,
    TOKENS_AT,
    field,
    scale_of,
    take,
)
from paceline.backends.cpu.primitives.compiled import compiled
from paceline.backends.cpu.primitives.rows import (
    add_scaled_row,
    center,
    copy_row,
    gate_by_sigmoid,
    normalize,
    read_matrix_row,
    scale_row,
    soft_cap,
    write_row,
)
from paceline.backends.cpu.primitives.simd import load_float, load_int32, load_int64, store_float
from paceline.backends.cpu.tiles.weight_tile import GROUP

LOGIT_COLUMNS = 4096  # logits of a task


@compiled
def read_embedding(embedding, token, out):  # type: ignore[no-untyped-def]
    """Write the embedding of a token to `out`; `embedding` is the descriptor of the embedding matrix."""
    groups, size = load_int64(embedding + 16), load_int64(embedding + 32)
    read_matrix_row(load_int64(embedding), load_int64(embedding + 8), groups, size, token, out)


@compiled
def embed_rows(tasks, job, counter, rows, embedding):  # type: ignore[no-untyped-def]
    """Write the embedding of each row's token to the residual stream."""
    padded, factor = field(job, HIDDEN_PADDED), scale_of(job, EMBEDDING_SCALE)
    while True:
        row, _ = take(tasks, counter, rows, 1)
        if row >= rows:
            return
        out, token = field(job, STATE_AT) + 4 * padded * row, load_int32(field(job, TOKENS_AT) + 4 * row)
        if field(job, MASK_EMBEDDING_AT) != 0 and token == field(job, MASK_TOKEN):
            copy_row(field(job, MASK_EMBEDDING_AT), out, padded)
        else:
            read_embedding(embedding, token, out)
        if factor != 1:
            scale_row(out, factor, padded)


@compiled
def norm_row(job, values, weight, out):  # type: ignore[no-untyped-def]
    """The address of a row's norm: `out`, or the row itself if the model lacks this norm (weight 0)."""
    width, padded = field(job, HIDDEN), field(job, HIDDEN_PADDED)
    if weight == 0:
        return values
    if field(job, CENTERED):
        center(values, out, width, padded)
        values = out
    normalize(values, weight, out, width, padded, load_float(field(job, EPSILON_AT)))
    return out


@compiled
def norm_weight(job, norm):  # type: ignore[no-untyped-def]
    """The address of the weights of norm number `norm`: two per layer, then the one before the LM head."""
    return load_int64(field(job, NORMS_AT) + 8 * norm)


@compiled
def normalize_rows(tasks, job, counter, rows, weight, gathered, scratch):  # type: ignore[no-untyped-def]
    """Write records of the norm of the residual stream; with `gathered`, only of rows that want logits.

    A draft head returns the states of the gathered rows.
    """
    padded, state, records = field(job, HIDDEN_PADDED), field(job, STATE_AT), field(job, RECORDS_AT)
    states = field(job, STATES_AT) if gathered else 0
    while True:
        row, _ = take(tasks, counter, rows, 1)
        if row >= rows:
            return
        source = load_int32(field(job, LOGIT_ROWS_AT) + 4 * row) if gathered else row
        before = state + 4 * padded * source
        after = norm_row(job, before, weight, scratch)
        groups = padded // GROUP
        write_row(after, groups, records, row, rows, groups, field(job, QUANTIZED))
        if states != 0:
            told = after if field(job, NORMED_STATES) else before
            copy_row(told, states + 4 * padded * row, padded)


@compiled
def quantize_rows(tasks, job, counter, rows, width, gate_column):  # type: ignore[no-untyped-def]
    """Write records of the attention output, `width` floats, gated if `gate_column` is not 0."""
    stride, groups = 4 * field(job, ATTENTION_PADDED), (width + GROUP - 1) // GROUP
    padded = groups * GROUP
    while True:
        row, _ = take(tasks, counter, rows, 1)
        if row >= rows:
            return
        source = field(job, ATTENTION_AT) + stride * row
        for column in range(width, padded):  # left by a layer with wider heads
            store_float(source + 4 * column, np.float32(0))
        if gate_column != 0:
            gates = field(job, QKV_AT) + row * field(job, QKV_STRIDE) + 4 * gate_column
            gate_by_sigmoid(source, gates, padded)
        write_row(source, groups, field(job, RECORDS_AT), row, rows, groups, field(job, QUANTIZED))


@compiled
def add_branch(tasks, job, counter, rows, weight, scale, scratch):  # type: ignore[no-untyped-def]
    """Add the branch of each row, normed and scaled, to the residual stream.

    `weight` is the address of the output norm's weights, `scale` that of a factor of the sum; 0: none.
    """
    padded, factor = field(job, HIDDEN_PADDED), scale_of(job, RESIDUAL_SCALE)
    while True:
        row, _ = take(tasks, counter, rows, 1)
        if row >= rows:
            return
        added = norm_row(job, field(job, BRANCH_AT) + 4 * padded * row, weight, scratch)
        state = field(job, STATE_AT) + 4 * padded * row
        add_scaled_row(state, added, factor, padded)
        if scale != 0:
            scale_row(state, load_float(scale), padded)


@compiled
def norm_branch(tasks, job, counter, rows, weight):  # type: ignore[no-untyped-def]
    """Norm the branch of each row in place."""
    while True:
        row, _ = take(tasks, counter, rows, 1)
        if row >= rows:
            return
        values = field(job, BRANCH_AT) + 4 * field(job, HIDDEN_PADDED) * row
        norm_row(job, values, weight, values)


@compiled
def has_raw_logits(job):  # type: ignore[no-untyped-def]
    """Whether the LM head's outputs still have to be scaled or soft-capped."""
    return scale_of(job, LOGITS_SCALE) != np.float32(1) or scale_of(job, LOGITS_CAP) > 0


@compiled
def finish_logits(tasks, job, counter, rows, columns):  # type: ignore[no-untyped-def]
    """Scale and soft-cap logits [rows, columns]; a task is some columns."""
    factor, cap = scale_of(job, LOGITS_SCALE), scale_of(job, LOGITS_CAP)
    parts = (columns + LOGIT_COLUMNS - 1) // LOGIT_COLUMNS
    while True:
        task, _ = take(tasks, counter, rows * parts, 1)
        if task >= rows * parts:
            return
        first = task % parts * LOGIT_COLUMNS
        values = field(job, LOGITS_AT) + field(job, LOGITS_STRIDE) * (task // parts) + 4 * first
        count = min(LOGIT_COLUMNS, columns - first)
        scale_row(values, factor, count)
        if cap > 0:
            soft_cap(values, cap, count)
