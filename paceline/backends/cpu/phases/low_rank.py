"""LoRA adapters, several in one batch, in float32: W x becomes W x + up (down x) for rows with an adapter.

    shrink    low = down x of each row, before the product
    expand    up low, added to the product's results

Each row is computed alone, in a fixed order. So its bits do not depend on other rows, and rows without an
adapter have the bits of the model without adapters.

An adapter is a table with a line for each matrix of each layer, in the order of their descriptors: the
address of down [rank, padded inputs], that of up [rank, padded outputs], and the rank (0: not adapted).
"""

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import types

from paceline.backends.cpu.job import LAYER_MATRICES, LOW_AT, LOW_RANK, QUANTIZED, ROW_ADAPTERS_AT, field
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

LINE = 24  # bytes of a line of an adapter's table
EXPANDED_COLUMNS = 256  # columns of an expand task


@operation(floats, types.int64)
def _load_bytes(builder, address):  # type: ignore[no-untyped-def]
    """16 signed bytes at an address, as floats."""
    numbers = builder.sext(read_at(builder, address, ir.VectorType(I8, LANES), 1), ir.VectorType(I32, LANES))
    return builder.sitofp(numbers, ir.VectorType(ir.FloatType(), LANES))


@compiled
def _read_records(job, records, row, rows, groups, out):  # type: ignore[no-untyped-def]
    """Dequantize a row's records to `out`."""
    quantized = field(job, QUANTIZED)
    size = RECORD if quantized else 4 * GROUP
    record = record_block(records, row, rows, groups, quantized) + row % ROW_BLOCK * size
    for group in range(groups):
        first, second = out + 4 * GROUP * group, out + 4 * GROUP * group + 64
        if quantized:
            scale = spread(load_float(record + GROUP))
            store(first, multiply(_load_bytes(record), scale))
            store(second, multiply(_load_bytes(record + 16), scale))
        else:
            store(first, load(record))
            store(second, load(record + 64))
        record += record_stride(rows) * size


@compiled
def _dot(values, others, count):  # type: ignore[no-untyped-def]
    """The sum of products of `count` floats, a multiple of 16."""
    total = spread(np.float32(0))
    for k in range(0, 4 * count, 64):
        total = fma(load(values + k), load(others + k), total)
    return sum_lanes(total)


@compiled
def _line(job, layer, matrix, row):  # type: ignore[no-untyped-def]
    """The address of the adapter line of a row, for a matrix of a layer; 0: the row has no adapter."""
    table = load_int64(field(job, ROW_ADAPTERS_AT) + 8 * row)
    return table + LINE * (LAYER_MATRICES * layer + matrix) if table != 0 else 0


@compiled
def _low(job, matrix, row):  # type: ignore[no-untyped-def]
    """The address of a row's low = down x, for a matrix."""
    return field(job, LOW_AT) + 4 * field(job, LOW_RANK) * (LAYER_MATRICES * row + matrix)


@compiled
def shrink_rows(tasks, job, layer, first, last, records, rows, groups, scratch):  # type: ignore[no-untyped-def]
    """Compute down x of all rows for the matrices first..last of a layer, which read the same records.

    With few rows, threads split the ranks of each row.
    """
    thread, threads = tasks
    parts = threads if rows < 2 * threads else 1
    for task in range(thread, rows * parts, threads):
        row, part = task // parts, task % parts
        line, read = _line(job, layer, first, row), False
        for matrix in range(first, last if line != 0 else first):
            down, rank = load_int64(line), load_int64(line + 16)
            if rank > 0 and not read:
                _read_records(job, records, row, rows, groups, scratch)
                read = True
            for at in range(part, rank, parts):
                value = _dot(scratch, down + 4 * GROUP * groups * at, GROUP * groups)
                store_float(_low(job, matrix, row) + 4 * at, value)
            line += LINE


@compiled
def add_low_rank(job, layer, matrix, row, values, first, last, columns):  # type: ignore[no-untyped-def]
    """Add up low to columns first..last, of `columns`, of a row's product; `values` is the row's address."""
    line = _line(job, layer, matrix, row)
    rank = load_int64(line + 16) if line != 0 else 0
    if rank == 0:
        return
    up, low = load_int64(line + 8), _low(job, matrix, row)
    for column in range(4 * first, 4 * last, 64):
        total = load(values + column)
        for at in range(rank):
            total = fma(spread(load_float(low + 4 * at)), load(up + 4 * columns * at + column), total)
        store(values + column, total)


@compiled
def expand_rows(tasks, job, layer, matrix, rows, out, stride, columns):  # type: ignore[no-untyped-def]
    """Add up low to the results of a layer's matrix, whose rows are `stride` bytes apart."""
    thread, threads = tasks
    parts = (columns + EXPANDED_COLUMNS - 1) // EXPANDED_COLUMNS
    for task in range(thread, rows * parts, threads):
        row, first = task // parts, task % parts * EXPANDED_COLUMNS
        last = min(first + EXPANDED_COLUMNS, columns)
        add_low_rank(job, layer, matrix, row, out + row * stride, first, last, columns)
