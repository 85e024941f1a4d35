"""Latent attention (MLA): the phases before and after attention. transformer/latent.py is the reference.

The layer's first products give [queries or their latent] and [RoPE part of the key | KV latent]. Then

    store_latents     rotate the RoPE part, norm the latent, store both as the key; norm the query latent
    absorb_queries    absorb W_uk: each head's query becomes [rotated part | W_uk^T other part]
    (phases.py)       attention of all heads to one KV head; its values are the latents within the keys
    finish_values     multiply each head's attention output by W_uv

Latents are padded with zeros to whole groups of 32, in queries and in keys, so that the per-head matrices
read and write whole groups.
"""

from __future__ import annotations

import numpy as np

from paceline.backends.cpu.attention.paged_attention import PAGE, write_key
from paceline.backends.cpu.attention.phases import block_address, kv_index, page_of
from paceline.backends.cpu.job import (
    HALF_KV,
    HEAD_ROWS_AT,
    HEAD_ROWS_STRIDE,
    HEAD_WIDTH,
    HEADS,
    LATENT_LINES,
    LATENT_MATRICES,
    LATENT_MATRICES_AT,
    LATENT_NORMS_AT,
    LATENT_PADDED,
    LATENT_RANK,
    NOPE_WIDTH,
    POSITIONS_AT,
    QKV_AT,
    QKV_STRIDE,
    QUANTIZED,
    QUERIES_AT,
    QUERIES_STRIDE,
    QUERY_MATRIX,
    QUERY_RANK,
    RECORDS_AT,
    REQUEST_AT,
    ROPE,
    ROPE_WIDTH,
    ROPES_AT,
    ROW_ADAPTERS_AT,
    TO_LATENTS,
    TO_VALUES,
    VALUE_WIDTH,
    field,
    shape_of,
    take,
)
from paceline.backends.cpu.phases.low_rank import change_heads, expand_rows, shrink_rows
from paceline.backends.cpu.phases.projections import project, project_heads
from paceline.backends.cpu.primitives.compiled import compiled
from paceline.backends.cpu.primitives.rows import normalize, record_stride, rotate, write_row
from paceline.backends.cpu.primitives.simd import load_float, load_int32, load_int64, store_float
from paceline.backends.cpu.team import barrier
from paceline.backends.cpu.tiles.matmul import DESCRIPTOR
from paceline.backends.cpu.tiles.weight_tile import COLUMNS, GROUP, RECORD
from paceline.models.config import LATENT_NORM_EPS

_EPSILON = np.float32(LATENT_NORM_EPS)
_HEADS_AT_ONCE = 4  # heads of a task, because one head is little work


@compiled
def _whole_groups(width):  # type: ignore[no-untyped-def]
    return (width + GROUP - 1) // GROUP * GROUP


@compiled
def _copy_padded(values, out, width, padded):  # type: ignore[no-untyped-def]
    """out = values, then zeros up to `padded`. They may overlap if `out` does not start after `values`."""
    for d in range(width):
        store_float(out + 4 * d, load_float(values + 4 * d))
    for d in range(width, padded):
        store_float(out + 4 * d, np.float32(0))


@compiled
def _rotate_at(job, layer, row, values):  # type: ignore[no-untyped-def]
    """Rotate the RoPE part of a query or key in place, by a row's position."""
    rope = field(job, ROPES_AT) + ROPE * layer
    pairs = load_int64(rope + 16)
    place = 4 * pairs * load_int32(field(job, POSITIONS_AT) + 4 * row)
    rotate(values, load_int64(rope) + place, load_int64(rope + 8) + place, pairs)


@compiled
def _scale_query(job, layer, row, query, width):  # type: ignore[no-untyped-def]
    """Scale a head's query by the factor of its row's position, if the model has such factors."""
    factors = load_int64(field(job, ROPES_AT) + ROPE * layer + 24)
    if factors == 0:
        return
    factor = load_float(factors + 4 * load_int32(field(job, POSITIONS_AT) + 4 * row))
    for d in range(width):
        store_float(query + 4 * d, load_float(query + 4 * d) * factor)


@compiled
def _store_key(job, layer, row, key, scratch):  # type: ignore[no-untyped-def]
    """Store a row's key in its page: the rotated RoPE part, then the normed latent."""
    rope, rank, padded = field(job, ROPE_WIDTH), field(job, LATENT_RANK), field(job, LATENT_PADDED)
    norm = load_int64(field(job, LATENT_NORMS_AT) + 16 * layer + 8)
    _copy_padded(key, scratch, rope + rank, rope + padded)
    _rotate_at(job, layer, row, scratch)
    latent = scratch + 4 * rope
    normalize(latent, norm, latent, rank, padded, _EPSILON)
    request = load_int32(field(job, REQUEST_AT) + 4 * row)
    index = kv_index(job, request, row)
    block = block_address(job, layer, page_of(job, request, index), 0)
    write_key(scratch, index % PAGE, block, shape_of(job, layer, HEAD_WIDTH), field(job, HALF_KV))


@compiled
def store_latents(tasks, job, counter, rows, layer, key_column, scratch):  # type: ignore[no-untyped-def]
    """Store keys in their pages, and write records of the normed query latents, if the model has them."""
    rank, records, quantized = field(job, QUERY_RANK), field(job, RECORDS_AT), field(job, QUANTIZED)
    norm, padded = load_int64(field(job, LATENT_NORMS_AT) + 16 * layer), _whole_groups(rank)
    groups = padded // GROUP
    while True:
        task, _ = take(tasks, counter, rows * 2, 1)
        if task >= rows * 2:
            return
        row = task // 2
        projected = field(job, QKV_AT) + row * field(job, QKV_STRIDE)
        if task % 2 == 0:
            _store_key(job, layer, row, projected + 4 * key_column, scratch)
        elif rank > 0:
            normalize(projected, norm, scratch, rank, padded, _EPSILON)
            write_row(scratch, groups, records, row, rows, groups, quantized)


@compiled
def _split_queries(tasks, job, counter, rows, layer, queries, stride, scratch):  # type: ignore[no-untyped-def]
    """Write the rotated part of every head's query to its final place, and records of the other part."""
    heads, rope, nope = field(job, HEADS), field(job, ROPE_WIDTH), field(job, NOPE_WIDTH)
    padded, quantized = _whole_groups(nope), field(job, QUANTIZED)
    groups, size = padded // GROUP, RECORD if quantized else 4 * GROUP
    while True:
        first, last = take(tasks, counter, rows * heads, _HEADS_AT_ONCE)
        if first >= rows * heads:
            return
        for task in range(first, last):
            row, head = task // heads, task % heads
            query = queries + row * stride + 4 * head * (rope + nope)
            _scale_query(job, layer, row, query, rope + nope)
            out = (
                field(job, QUERIES_AT)
                + row * field(job, QUERIES_STRIDE)
                + 4 * head * shape_of(job, layer, HEAD_WIDTH)
            )
            _copy_padded(query, out, rope, rope)
            _rotate_at(job, layer, row, out)
            _copy_padded(query + 4 * rope, scratch, nope, padded)
            records = field(job, RECORDS_AT) + head * groups * record_stride(rows) * size
            write_row(scratch, groups, records, row, rows, heads * groups, quantized)


@compiled
def _matrix(job, layer, index):  # type: ignore[no-untyped-def]
    return field(job, LATENT_MATRICES_AT) + DESCRIPTOR * (LATENT_MATRICES * layer + index)


@compiled
def absorb_queries(control, tasks, job, counter, rows, layer, scratch):  # type: ignore[no-untyped-def]
    """Write the queries of all heads with W_uk absorbed: [rotated part | W_uk^T other part]."""
    threads, line, records = tasks[1], 64 * tasks[1], field(job, RECORDS_AT)
    queries, stride = field(job, QKV_AT), field(job, QKV_STRIDE)
    has_adapters = field(job, ROW_ADAPTERS_AT) != 0
    if field(job, QUERY_RANK) > 0:
        queries, stride = field(job, HEAD_ROWS_AT), field(job, HEAD_ROWS_STRIDE)
        matrix = _matrix(job, layer, QUERY_MATRIX)
        groups, columns = load_int64(matrix + 16), COLUMNS * load_int64(matrix + 24)
        line_number = LATENT_LINES + QUERY_MATRIX
        if has_adapters:
            shrink_rows(tasks, job, layer, line_number, line_number + 1, records, rows, groups, scratch)
        project(tasks, job, counter, matrix, records, rows, queries, stride, 0, 0, scratch)
        barrier(control, threads)
        if has_adapters:
            expand_rows(tasks, job, layer, line_number, 0, rows, queries, stride, columns)
            barrier(control, threads)
    _split_queries(tasks, job, counter + line, rows, layer, queries, stride, scratch)
    barrier(control, threads)
    heads, matrix = field(job, HEADS), _matrix(job, layer, TO_LATENTS)
    out, out_stride = field(job, QUERIES_AT) + 4 * field(job, ROPE_WIDTH), field(job, QUERIES_STRIDE)
    project_heads(
        tasks, job, counter + 2 * line, matrix, heads, records, rows, out, out_stride,
        4 * shape_of(job, layer, HEAD_WIDTH), 0, 0, scratch,
    )  # fmt: skip
    barrier(control, threads)
    if has_adapters:
        groups, columns = load_int64(matrix + 16), COLUMNS * load_int64(matrix + 24) // heads
        change_heads(
            tasks, job, layer, LATENT_LINES + TO_LATENTS, heads, groups, records, rows, out, out_stride,
            4 * shape_of(job, layer, HEAD_WIDTH), columns, scratch,
        )  # fmt: skip
        barrier(control, threads)


@compiled
def _join_values(tasks, job, counter, rows):  # type: ignore[no-untyped-def]
    """Write records of the values of all heads side by side, without the padding of each head."""
    heads, width, quantized = field(job, HEADS), field(job, VALUE_WIDTH), field(job, QUANTIZED)
    padded = _whole_groups(heads * width)
    while True:
        row, _ = take(tasks, counter, rows, 1)
        if row >= rows:
            return
        values = field(job, HEAD_ROWS_AT) + row * field(job, HEAD_ROWS_STRIDE)
        if width % GROUP:
            for head in range(1, heads):
                source = values + 4 * head * _whole_groups(width)
                _copy_padded(source, values + 4 * head * width, width, width)
            _copy_padded(values, values, heads * width, padded)
        write_row(values, padded // GROUP, field(job, RECORDS_AT), row, rows, padded // GROUP, quantized)


@compiled
def finish_values(control, tasks, job, counter, rows, layer, scratch):  # type: ignore[no-untyped-def]
    """Write records of W_uv times each head's attention output, which is given as records."""
    heads, threads = field(job, HEADS), tasks[1]
    out, stride, head_stride = (
        field(job, HEAD_ROWS_AT),
        field(job, HEAD_ROWS_STRIDE),
        4 * _whole_groups(field(job, VALUE_WIDTH)),
    )
    matrix, records = _matrix(job, layer, TO_VALUES), field(job, RECORDS_AT)
    project_heads(tasks, job, counter, matrix, heads, records, rows, out, stride, head_stride, 0, 0, scratch)
    barrier(control, threads)
    if field(job, ROW_ADAPTERS_AT) != 0:
        groups, columns = load_int64(matrix + 16), COLUMNS * load_int64(matrix + 24) // heads
        change_heads(
            tasks, job, layer, LATENT_LINES + TO_VALUES, heads, groups, records, rows, out, stride,
            head_stride, columns, scratch,
        )  # fmt: skip
        barrier(control, threads)
    _join_values(tasks, job, counter + 64 * threads, rows)
    barrier(control, threads)
