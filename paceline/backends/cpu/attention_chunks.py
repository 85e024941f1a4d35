"""Attention for CPUs where widening half floats is expensive: blocks are widened once for all heads.

It replaces attention_tiles.py and `attend` of attention.py where `ISA.slow_half`: on a Neoverse-N1, widening
4 halves keeps one of the two pipes busy for 2 cycles, as long as 4 multiplications of 4 floats take on both.

Each score and each output column is the same chain of fused multiply-adds as there, so it has the same bits.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils

from paceline.backends.cpu.attention import softmax
from paceline.backends.cpu.attention_tiles import PAGE
from paceline.backends.cpu.compiled import compiled, kernel, switch
from paceline.backends.cpu.emit import I32, call, join, load_as_written, splat
from paceline.backends.cpu.simd import (
    LANES,
    caller,
    load,
    load_float,
    load_halves,
    load_int64,
    prefetch,
    read_at,
    spread,
    store,
    store_float,
    write_at,
)

CHUNK = 4  # blocks widened at a time: their keys, or values, stay in L1
TASK_HEADS = 24  # heads, of one row or of several, for which a block is widened once
TILE_HEADS = 4  # heads of a tile: half of the 32 registers hold the sums of 4 heads and 16 positions
# Rows of scratch for `attend`: results, widened blocks, and part of another row for the factors
RESULT_ROWS = TASK_HEADS + CHUNK * PAGE + 1
_WIDENING = 3  # heads whose work on a block costs as much as widening it
_MIX_COLUMNS = (4, 2, 1, 1)  # vectors of 16 columns side by side, for 1, 2, 3, ... heads

_FLOAT, _I64 = ir.FloatType(), ir.IntType(64)
_FLOATS = ir.VectorType(_FLOAT, LANES)


def _at(builder: ir.IRBuilder, address: Any, step: Any, index: int) -> Any:
    """address + step * index."""
    return builder.add(address, builder.mul(step, _I64(index)))


def _add_product(builder: ir.IRBuilder, place: Any, a: Any, b: Any) -> None:
    builder.store(call(builder, "llvm.fma.v16f32", _FLOATS, a, b, builder.load(place)), place)


def _products(
    builder: ir.IRBuilder, sums: list[list[Any]], steps: Any, factors: list[Any], vectors: Any, row: Any
) -> None:
    """Add to sums[i][j], for each step, number `step` at factors[i] times vector j of row `step`.

    Rows of vectors are `row` bytes apart. Four steps at a time read their factors at once: a multiplication
    takes one of the four lanes for nothing.
    """

    def add_row(step: Any, count: int) -> None:
        kind = ir.VectorType(_FLOAT, count)
        offset = builder.mul(step, _I64(4))
        lanes = [read_at(builder, builder.add(address, offset), kind, 4) for address in factors]
        for lane in range(count):
            place = builder.add(vectors, builder.mul(builder.add(step, _I64(lane)), row))
            every = ir.Constant(ir.VectorType(I32, LANES), [lane] * LANES)
            loaded = [_load_vector(builder, place, 4 * LANES * j) for j in range(len(sums[0]))]
            for i, four in enumerate(lanes):
                factor = builder.shuffle_vector(four, ir.Constant(kind, ir.Undefined), every)
                for j, vector in enumerate(loaded):
                    _add_product(builder, sums[i][j], factor, vector)

    whole = builder.and_(steps, _I64(-4))
    with cgutils.for_range_slice(builder, _I64(0), whole, _I64(4), _I64) as (step, _):
        add_row(step, 4)
    with cgutils.for_range_slice(builder, whole, steps, _I64(1), _I64) as (step, _):
        add_row(step, 1)


def _load_vector(builder: ir.IRBuilder, address: Any, offset: int) -> Any:
    """16 floats, a register at a time: see Isa.single_loads."""
    four, parts = ir.VectorType(_FLOAT, 4), []
    for part in range(offset, offset + 4 * LANES, 16):
        place = builder.inttoptr(builder.add(address, _I64(part)), four.as_pointer())
        parts.append(load_as_written(builder, place, four))
    return join(builder, parts)


def _emit_scores(heads: int, builder: ir.IRBuilder, args: list[Any]) -> None:
    query, query_stride, keys, width, count, scores, stride, factor = args
    sums = [[cgutils.alloca_once(builder, _FLOATS)] for _ in range(heads)]
    scale, row = splat(builder, factor, _FLOATS), _I64(4 * PAGE)
    queries = [_at(builder, query, query_stride, head) for head in range(heads)]
    with cgutils.for_range(builder, count) as blocks:
        for (place,) in sums:
            builder.store(ir.Constant(_FLOATS, [0.0] * LANES), place)
        block = builder.add(keys, builder.mul(blocks.index, builder.mul(width, row)))
        _products(builder, sums, width, queries, block, row)
        for head, (place,) in enumerate(sums):
            target = builder.add(_at(builder, scores, stride, head), builder.mul(blocks.index, _I64(64)))
            write_at(builder, target, builder.fmul(builder.load(place), scale), 4)


def _emit_mix(heads: int, columns: int, builder: ir.IRBuilder, args: list[Any]) -> None:
    weights, stride, values, row, count, out, out_stride = args
    sums = [[cgutils.alloca_once(builder, _FLOATS) for _ in range(columns)] for _ in range(heads)]
    targets = [
        (sums[head][column], _at(builder, _at(builder, out, out_stride, head), _I64(64), column))
        for head in range(heads)
        for column in range(columns)
    ]
    for held, place in targets:
        builder.store(read_at(builder, place, _FLOATS, 4), held)
    factors = [_at(builder, weights, stride, head) for head in range(heads)]
    _products(builder, sums, count, factors, values, row)
    for held, place in targets:
        write_at(builder, place, builder.load(held), 4)


_HEADS = range(1, TILE_HEADS + 1)
# query, query_stride, keys, width, count, scores, stride, factor
_SCORE_ARGUMENTS = (*[types.int64] * 7, types.float32)
# weights, stride, values, row, count, out, out_stride
_MIX_ARGUMENTS = (types.int64,) * 7

_score_switch = switch(1, _SCORE_ARGUMENTS, {(heads,): partial(_emit_scores, heads) for heads in _HEADS})
_mix_switch = switch(
    2,
    _MIX_ARGUMENTS,
    {
        (heads, columns): partial(_emit_mix, heads, columns)
        for heads in _HEADS
        for columns in (1, _MIX_COLUMNS[heads - 1])
    },
)


@kernel(types.int64, *_SCORE_ARGUMENTS)
def run_score(heads, query, query_stride, keys, width, count, scores, stride, factor):  # type: ignore[no-untyped-def]
    """Scores of `heads` queries with the keys of `count` blocks, times `factor`."""
    _score_switch(heads, query, query_stride, keys, width, count, scores, stride, factor)


@kernel(types.int64, types.int64, *_MIX_ARGUMENTS)
def run_mix(heads, columns, weights, stride, values, row, count, out, out_stride):  # type: ignore[no-untyped-def]
    """For `heads` heads and 16 * `columns` columns: add to `out` the sum over positions of weight * value."""
    _mix_switch(heads, columns, weights, stride, values, row, count, out, out_stride)


_call_score = caller(types.int64, *_SCORE_ARGUMENTS)
_call_mix = caller(types.int64, types.int64, *_MIX_ARGUMENTS)


@compiled
def rows_of_task(rows, parts, shared, threads):  # type: ignore[no-untyped-def]
    """The number of rows of a task, where each row has `parts` tasks of `shared` heads.

    More rows per task widen fewer blocks twice; fewer balance the threads better.
    """
    best, least, count = 1, 0, 1
    while count == 1 or count * shared <= TASK_HEADS:
        tasks = (rows + count - 1) // count * parts
        time = (tasks + threads - 1) // threads * (_WIDENING + count * shared)
        if count == 1 or time < least:
            best, least = count, time
        count *= 2
    return best


@compiled
def _widen(blocks, first, last, offset, count, half, out):  # type: ignore[no-untyped-def]
    """`count` numbers at `offset` bytes of each of the blocks first..last, as floats behind each other."""
    for block in range(first, last + 1):
        source, target = load_int64(blocks + 8 * block) + offset, out + 4 * count * (block - first)
        if half == 0:
            for i in range(0, count, 16):
                store(target + 4 * i, load(source + 4 * i))
            continue
        following = load_int64(blocks + 8 * block + 8) + offset if block < last else source
        for i in range(0, count, 32):
            prefetch(following + 2 * i)
            store(target + 4 * i, load_halves(source + 2 * i))
            if i + 16 < count:
                store(target + 4 * i + 64, load_halves(source + 2 * i + 32))


@compiled
def _mix(run_mix, heads, weights, stride, values, padded, count, out):  # type: ignore[no-untyped-def]
    """Add to `out` of some heads the sum over `count` positions of weight * value, a tile at a time."""
    head = 0
    while head < heads:
        tile = min(heads - head, TILE_HEADS)
        most, column = _MIX_COLUMNS[tile - 1], 0
        while column < padded:
            columns = most if padded - column >= 16 * most else 1
            target = out + 4 * (head * padded + column)
            _call_mix(
                run_mix, tile, columns, weights + stride * head, stride, values + 4 * column, 4 * padded,
                count, target, 4 * padded,
            )  # fmt: skip
            column += 16 * columns
        head += tile


@compiled
def _mix_chunk(  # type: ignore[no-untyped-def]
    run_mix, each, rows, origin, last, begin, end, scores, stride, values, padded, out
):
    """Add what the positions begin..end give: to all rows, and beyond `last` to the rows that go on.

    `values` are those of position `origin` and the next.
    """
    shared_end = min(end, last)
    if begin <= shared_end:
        place = values + 4 * padded * (begin - origin)
        count = shared_end - begin + 1
        _mix(run_mix, each * rows, scores + 4 * begin, stride, place, padded, count, out)
    begin = max(begin, last + 1)
    for row in range(1, rows):
        own_end = min(end, last + row)
        if begin <= own_end:
            place = values + 4 * padded * (begin - origin)
            weights = scores + stride * each * row + 4 * begin
            target = out + 4 * each * row * padded
            _mix(run_mix, each, weights, stride, place, padded, own_end - begin + 1, target)


@compiled
def attend(  # type: ignore[no-untyped-def]
    run_score, run_mix, half, queries, each, rows, width, blocks, first, last, factor, cap, sinks, scores,
    stride, result, out, out_row,
):  # fmt: skip
    """Attention as `attend` of attention.py gives it, for up to TASK_HEADS heads, or any number of one row.

    After the results of TASK_HEADS heads, `result` has room for CHUNK blocks of widened keys or values.
    """
    size = 2 if half else 4
    padded = (width + 15) // 16 * 16
    final = last + rows - 1
    begin, end = first // PAGE, final // PAGE
    floats = result + 4 * TASK_HEADS * padded
    start = 0
    while start < each:
        heads = min(each - start, TASK_HEADS) if rows == 1 else each
        total_heads = heads * rows
        for chunk in range(begin, end + 1, CHUNK):
            chunk_end = min(chunk + CHUNK - 1, end)
            _widen(blocks, chunk, chunk_end, 0, PAGE * width, half, floats)
            head = 0
            while head < total_heads:
                tile = min(total_heads - head, TILE_HEADS)
                query = queries + 4 * (start + head) * width
                place = scores + stride * head + 64 * chunk
                count = chunk_end - chunk + 1
                _call_score(run_score, tile, query, 4 * width, floats, width, count, place, stride, factor)
                head += tile
        for head in range(total_heads):
            for d in range(0, padded, 16):
                store(result + 4 * (head * padded + d), spread(np.float32(0)))
        sums = floats + 4 * PAGE * CHUNK * padded
        for head in range(total_heads):
            sink = sinks + 4 * (start + head % heads) if sinks != 0 else 0
            total = softmax(scores + stride * head, first, last + head // heads, cap, sink)
            store_float(sums + 4 * head, np.float32(1) / total)
        for chunk in range(begin, end + 1, CHUNK):
            chunk_end = min(chunk + CHUNK - 1, end)
            _widen(blocks, chunk, chunk_end, size * PAGE * width, PAGE * padded, half, floats)
            low, high = max(first, PAGE * chunk), min(final, PAGE * (chunk_end + 1) - 1)
            _mix_chunk(
                run_mix, heads, rows, PAGE * chunk, last, low, high, scores, stride, floats, padded, result
            )
        for head in range(total_heads):
            target = out + head // heads * out_row + 4 * ((start + head % heads) * width)
            share = load_float(sums + 4 * head)
            for d in range(width):
                store_float(target + 4 * d, load_float(result + 4 * (head * padded + d)) * share)
        start += heads
