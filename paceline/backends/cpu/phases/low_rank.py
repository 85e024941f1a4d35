"""LoRA adapters, several in one batch, in float32: W x becomes W x + up (down x) for rows with an adapter.

    shrink    low = down x of each row, before the product
    expand    up low, added to the product's results

For the products of each head in latent attention and for the down projections of experts, a task does both.

Each row is computed alone, in a fixed order. So its bits do not depend on other rows, and rows without an
adapter have the bits of the model without adapters.

An adapter is a table with a line for each matrix of each layer, in the order of job.py: the address of down
[rank, padded inputs], that of up [rank, padded outputs], the rank (0: not adapted) and, of a product for each
head, the bytes from a head's down to the next one's, and likewise of up.
"""

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import types

from paceline.backends.cpu.job import (
    EXPERT_HIDDEN,
    EXPERT_LINES,
    EXPERT_RECORDS_AT,
    EXPERT_WIDE_RECORDS_AT,
    EXPERT_WIDTH,
    EXPERTS_PER_TOKEN,
    INPUTS,
    LAYER_LINES,
    LOW_AT,
    LOW_RANK,
    PAIR_ADAPTERS_AT,
    PAIR_OUTPUTS_AT,
    QUANTIZED,
    ROW_ADAPTERS_AT,
    SPANS_AT,
    field,
)
from paceline.backends.cpu.primitives.compiled import compiled
from paceline.backends.cpu.primitives.emit import I8, I32
from paceline.backends.cpu.primitives.rows import ROW_BLOCK, record_block, record_stride
from paceline.backends.cpu.primitives.simd import (
    LANES,
    floats,
    fma,
    load,
    load_float,
    load_int64,
    multiply,
    operation,
    read_at,
    spread,
    store,
    store_float,
    sum_lanes,
)
from paceline.backends.cpu.tiles.weight_tile import GROUP, RECORD

LINE = 40  # bytes of a line of an adapter's table
LOW_SLOTS = INPUTS  # the most products that read the same records
EXPANDED_COLUMNS = 256  # columns of an expand task


@operation(floats, types.int64)
def _load_bytes(builder, address):  # type: ignore[no-untyped-def]
    """16 signed bytes at an address, as floats."""
    numbers = builder.sext(read_at(builder, address, ir.VectorType(I8, LANES), 1), ir.VectorType(I32, LANES))
    return builder.sitofp(numbers, ir.VectorType(ir.FloatType(), LANES))


@compiled
def _read_records(job, record, stride, groups, out):  # type: ignore[no-untyped-def]
    """Dequantize a row, whose records are `stride` bytes apart, to `out`."""
    quantized = field(job, QUANTIZED)
    for group in range(groups):
        first, second = out + 4 * GROUP * group, out + 4 * GROUP * group + 64
        if quantized:
            scale = spread(load_float(record + GROUP))
            store(first, multiply(_load_bytes(record), scale))
            store(second, multiply(_load_bytes(record + 16), scale))
        else:
            store(first, load(record))
            store(second, load(record + 64))
        record += stride


@compiled
def _row_record(job, records, row, rows, groups):  # type: ignore[no-untyped-def]
    """The address of a row's first record, and the bytes to its next one."""
    quantized = field(job, QUANTIZED)
    size = RECORD if quantized else 4 * GROUP
    record = record_block(records, row, rows, groups, quantized) + row % ROW_BLOCK * size
    return record, record_stride(rows) * size


@compiled
def _dot(values, others, count):  # type: ignore[no-untyped-def]
    """The sum of products of `count` floats, a multiple of 16."""
    total = spread(np.float32(0))
    for k in range(0, 4 * count, 64):
        total = fma(load(values + k), load(others + k), total)
    return sum_lanes(total)


@compiled
def _line(job, tables, layer, matrix, row):  # type: ignore[no-untyped-def]
    """The address of the adapter line of a row, for a matrix of a layer; 0: the row has no adapter."""
    table = load_int64(tables + 8 * row)
    return table + LINE * (field(job, LAYER_LINES) * layer + matrix) if table != 0 else 0


@compiled
def _low(job, slot, row):  # type: ignore[no-untyped-def]
    """The address of a row's low = down x, for one of LOW_SLOTS products."""
    return field(job, LOW_AT) + 4 * field(job, LOW_RANK) * (LOW_SLOTS * row + slot)


@compiled
def _shrink(values, down, low, rank, first, step, count):  # type: ignore[no-untyped-def]
    """The ranks first, first + step and so on of down x."""
    for at in range(first, rank, step):
        store_float(low + 4 * at, _dot(values, down + 4 * count * at, count))


@compiled
def _expand(values, up, low, rank, first, last, columns):  # type: ignore[no-untyped-def]
    """Add up times `low` to columns first..last of `columns`, those of the row at `values`."""
    for column in range(4 * first, 4 * last, 64):
        total = load(values + column)
        for at in range(rank):
            total = fma(spread(load_float(low + 4 * at)), load(up + 4 * columns * at + column), total)
        store(values + column, total)


@compiled
def shrink_rows(tasks, job, layer, first, last, records, rows, groups, scratch):  # type: ignore[no-untyped-def]
    """Compute down x of all rows for the matrices first..last of a layer, which read the same records.

    With few rows, threads split the ranks of each row.
    """
    thread, threads = tasks
    parts = threads if rows < 2 * threads else 1
    for task in range(thread, rows * parts, threads):
        row, part = task // parts, task % parts
        line, read = _line(job, field(job, ROW_ADAPTERS_AT), layer, first, row), False
        for matrix in range(first, last if line != 0 else first):
            down, rank = load_int64(line), load_int64(line + 16)
            if rank > 0 and not read:
                record, stride = _row_record(job, records, row, rows, groups)
                _read_records(job, record, stride, groups, scratch)
                read = True
            _shrink(scratch, down, _low(job, matrix - first, row), rank, part, parts, GROUP * groups)
            line += LINE


@compiled
def add_low_rank(job, tables, layer, matrix, slot, row, values, first, last, columns):  # type: ignore[no-untyped-def]
    """Add up low to columns first..last, of `columns`, of a row's product; `values` is the row's address."""
    line = _line(job, tables, layer, matrix, row)
    rank = load_int64(line + 16) if line != 0 else 0
    if rank > 0:
        _expand(values, load_int64(line + 8), _low(job, slot, row), rank, first, last, columns)


@compiled
def expand_rows(tasks, job, layer, matrix, slot, rows, out, stride, columns):  # type: ignore[no-untyped-def]
    """Add up low to the results of a layer's matrix, whose rows are `stride` bytes apart."""
    thread, threads = tasks
    tables = field(job, ROW_ADAPTERS_AT)
    parts = (columns + EXPANDED_COLUMNS - 1) // EXPANDED_COLUMNS
    for task in range(thread, rows * parts, threads):
        row, first = task // parts, task % parts * EXPANDED_COLUMNS
        last = min(first + EXPANDED_COLUMNS, columns)
        add_low_rank(job, tables, layer, matrix, slot, row, out + row * stride, first, last, columns)


@compiled
def change_heads(  # type: ignore[no-untyped-def]
    tasks, job, layer, matrix, heads, groups, records, rows, out, out_stride, head_stride, columns, scratch
):
    """Add what adapters add to a product for each head, which reads `groups` of the row's records."""
    thread, threads = tasks
    low = scratch + 4 * GROUP * groups
    for task in range(thread, rows * heads, threads):
        row, head = task // heads, task % heads
        line = _line(job, field(job, ROW_ADAPTERS_AT), layer, matrix, row)
        rank = load_int64(line + 16) if line != 0 else 0
        if rank > 0:
            record, stride = _row_record(job, records, row, rows, heads * groups)
            _read_records(job, record + head * groups * stride, stride, groups, scratch)
            down = load_int64(line) + head * load_int64(line + 24)
            _shrink(scratch, down, low, rank, 0, 1, GROUP * groups)
            up = load_int64(line + 8) + head * load_int64(line + 32)
            values = out + row * out_stride + head * head_stride
            _expand(values, up, low, rank, 0, columns, columns)


@compiled
def _expert_of(job, place):  # type: ignore[no-untyped-def]
    """The expert that has this place in the order of experts."""
    expert, span = 0, field(job, SPANS_AT)
    while load_int64(span + 16 * expert) + load_int64(span + 16 * expert + 8) <= place:
        expert += 1
    return expert


@compiled
def _pair_record(job, blocks, groups, first, count, index):  # type: ignore[no-untyped-def]
    """The address of the first record of an expert's row, and the bytes to its next one."""
    size = RECORD if field(job, QUANTIZED) else 4 * GROUP
    return blocks + (first * groups + index) * size, count * size


@compiled
def shrink_pairs(tasks, job, layer, rows, scratch):  # type: ignore[no-untyped-def]
    """down x of all rows of experts, for gate and up."""
    thread, threads = tasks
    tables, groups = field(job, PAIR_ADAPTERS_AT), field(job, EXPERT_HIDDEN) // GROUP
    for place in range(thread, rows * field(job, EXPERTS_PER_TOKEN), threads):
        if load_int64(tables + 8 * place) == 0:
            continue
        expert = _expert_of(job, place)
        span = field(job, SPANS_AT) + 16 * expert
        first, count = load_int64(span), load_int64(span + 8)
        record, stride = _pair_record(job, field(job, EXPERT_RECORDS_AT), groups, first, count, place - first)
        _read_records(job, record, stride, groups, scratch)
        line = _line(job, tables, layer, EXPERT_LINES + 3 * expert, place)
        for slot in range(2):
            low = _low(job, slot, place)
            _shrink(scratch, load_int64(line), low, load_int64(line + 16), 0, 1, GROUP * groups)
            line += LINE


@compiled
def change_pairs(tasks, job, layer, rows, scratch):  # type: ignore[no-untyped-def]
    """Add what adapters add to the last product of all rows of experts."""
    thread, threads = tasks
    tables, groups, padded = (
        field(job, PAIR_ADAPTERS_AT),
        field(job, EXPERT_WIDTH) // GROUP,
        field(job, EXPERT_HIDDEN),
    )
    for place in range(thread, rows * field(job, EXPERTS_PER_TOKEN), threads):
        if load_int64(tables + 8 * place) == 0:
            continue
        expert = _expert_of(job, place)
        span = field(job, SPANS_AT) + 16 * expert
        first, count = load_int64(span), load_int64(span + 8)
        line = _line(job, tables, layer, EXPERT_LINES + 3 * expert + 2, place)
        rank, low = load_int64(line + 16), _low(job, 0, place)
        if rank > 0:
            blocks = field(job, EXPERT_WIDE_RECORDS_AT)
            record, stride = _pair_record(job, blocks, groups, first, count, place - first)
            _read_records(job, record, stride, groups, scratch)
            _shrink(scratch, load_int64(line), low, rank, 0, 1, GROUP * groups)
            values = field(job, PAIR_OUTPUTS_AT) + 4 * padded * place
            _expand(values, load_int64(line + 8), low, rank, 0, padded, padded)
