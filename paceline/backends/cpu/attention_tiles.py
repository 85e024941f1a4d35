"""The two inner loops of attention as register tiles: several heads, of one row or more, for one KV head.

A tile only decides which sums grow side by side in registers. Each score and each output column is
its own chain of fused multiply-adds in the order of the head's columns or of the positions, so its
bits are the same in every tile.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from paceline.backends.cpu.compiled import kernel, switch
from paceline.backends.cpu.emit import call, splat
from paceline.backends.cpu.isa import ISA
from paceline.backends.cpu.simd import LANES, caller, halves_at, read_at, write_at

PAGE = 16  # positions of a page
# Heads, of one row or of several, that share the load of a key or value, and its conversion
MAX_HEADS = 6 if ISA.wide_registers else 4
# Key blocks, and vectors of columns, side by side for 1, 2, 3, ... heads: where a register is not
# 16 lanes wide, 4 sums of 16 lanes fill the registers.
SCORE_BLOCKS = (4, 2, 2, 2, 2, 2) if ISA.wide_registers else (2, 2, 1, 1)
MIX_COLUMNS = (4, 4, 4, 4, 4, 4) if ISA.wide_registers else (2, 2, 1, 1)

_FLOAT, _I64 = ir.FloatType(), ir.IntType(64)
_FLOATS = ir.VectorType(_FLOAT, LANES)
_ZERO = ir.Constant(_FLOATS, [0.0] * LANES)


def _lanes(builder: ir.IRBuilder, address: Any, half: bool) -> Any:
    """16 keys or values at an address, as floats."""
    return halves_at(builder, address) if half else read_at(builder, address, _FLOATS, 4)


def _sums(builder: ir.IRBuilder, count: int) -> list[Any]:
    sums = [cgutils.alloca_once(builder, _FLOATS) for _ in range(count)]
    for place in sums:
        builder.store(_ZERO, place)
    return sums


def _add_product(builder: ir.IRBuilder, place: Any, a: Any, b: Any) -> None:
    builder.store(call(builder, "llvm.fma.v16f32", _FLOATS, a, b, builder.load(place)), place)


def _at(builder: ir.IRBuilder, address: Any, step: Any, index: int) -> Any:
    """address + step * index."""
    return builder.add(address, builder.mul(step, _I64(index)))


def _emit_score(half: bool, heads: int, blocks: int, builder: ir.IRBuilder, args: list[Any]) -> None:
    query, query_stride, keys, width, scores, stride, factor = args
    sums = _sums(builder, heads * blocks)
    starts = [read_at(builder, _at(builder, keys, _I64(8), block), _I64, 8) for block in range(blocks)]
    size = 2 if half else 4
    with cgutils.for_range(builder, width) as loop:
        offset = builder.mul(loop.index, _I64(size * PAGE))
        vectors = [_lanes(builder, builder.add(start, offset), half) for start in starts]
        for head in range(heads):
            place = builder.add(_at(builder, query, query_stride, head), builder.mul(loop.index, _I64(4)))
            value = splat(builder, read_at(builder, place, _FLOAT, 4), _FLOATS)
            for block, vector in enumerate(vectors):
                _add_product(builder, sums[head * blocks + block], value, vector)
    scale = splat(builder, factor, _FLOATS)
    for head in range(heads):
        for block in range(blocks):
            value = builder.fmul(builder.load(sums[head * blocks + block]), scale)
            write_at(builder, _at(builder, _at(builder, scores, stride, head), _I64(64), block), value, 4)


def _emit_mix(half: bool, heads: int, columns: int, builder: ir.IRBuilder, args: list[Any]) -> None:
    weights, stride, blocks, offset, row, first, last, each, rows, factors, out, out_stride = args
    sums = _sums(builder, heads * columns)
    size, page = 2 if half else 4, _I64(PAGE)

    def smaller(a: Any, b: Any) -> Any:
        return builder.select(builder.icmp_signed("<", a, b), a, b)

    after = builder.add(last, _I64(1))
    first_block, blocks_end = builder.sdiv(first, page), builder.add(builder.sdiv(last, page), _I64(1))
    with cgutils.for_range_slice(builder, first_block, blocks_end, _I64(1), _I64) as (block, _):
        begin = builder.mul(block, page)
        start = builder.select(builder.icmp_signed(">", first, begin), first, begin)
        end = smaller(after, builder.add(begin, page))
        address = read_at(builder, builder.add(blocks, builder.mul(block, _I64(8))), _I64, 8)
        values = builder.add(address, offset)
        with cgutils.for_range_slice(builder, start, end, _I64(1), _I64) as (position, _):
            place = builder.add(values, builder.mul(builder.sub(position, begin), row))
            vectors = [
                _lanes(builder, _at(builder, place, _I64(size * LANES), c), half) for c in range(columns)
            ]
            for head in range(heads):
                source = builder.add(_at(builder, weights, stride, head), builder.mul(position, _I64(4)))
                weight = splat(builder, read_at(builder, source, _FLOAT, 4), _FLOATS)
                for column, vector in enumerate(vectors):
                    _add_product(builder, sums[head * columns + column], weight, vector)
    # Later rows continue to their own last position. Earlier ones must not even add zero: 0 * inf is NaN.
    with cgutils.for_range_slice(builder, after, builder.add(last, rows), _I64(1), _I64) as (position, _):
        address = read_at(
            builder, builder.add(blocks, builder.mul(builder.sdiv(position, page), _I64(8))), _I64, 8
        )
        place = builder.add(builder.add(address, offset), builder.mul(builder.srem(position, page), row))
        vectors = [_lanes(builder, _at(builder, place, _I64(size * LANES), c), half) for c in range(columns)]
        for head in range(heads):
            own_last = builder.add(last, builder.sdiv(_I64(head), each))
            with builder.if_then(builder.icmp_signed("<=", position, own_last)):
                source = builder.add(_at(builder, weights, stride, head), builder.mul(position, _I64(4)))
                weight = splat(builder, read_at(builder, source, _FLOAT, 4), _FLOATS)
                for column, vector in enumerate(vectors):
                    _add_product(builder, sums[head * columns + column], weight, vector)
    for head in range(heads):
        scale = splat(builder, read_at(builder, _at(builder, factors, _I64(4), head), _FLOAT, 4), _FLOATS)
        for column in range(columns):
            value = builder.fmul(builder.load(sums[head * columns + column]), scale)
            target = _at(builder, _at(builder, out, out_stride, head), _I64(64), column)
            write_at(builder, target, value, 4)


_HALVES = (0, 1)
_HEADS = range(1, MAX_HEADS + 1)
# query, query_stride, keys, width, scores, stride, factor
_SCORE_ARGUMENTS = (*[types.int64] * 6, types.float32)
# weights, stride, blocks, offset, row, first, last, each, rows, factors, out, out_stride
_MIX_ARGUMENTS = (types.int64,) * 12

_score_switch = switch(
    3,
    _SCORE_ARGUMENTS,
    {
        (half, heads, blocks): partial(_emit_score, bool(half), heads, blocks)
        for half in _HALVES
        for heads in _HEADS
        for blocks in (1, SCORE_BLOCKS[heads - 1])
    },
)
_mix_switch = switch(
    3,
    _MIX_ARGUMENTS,
    {
        (half, heads, columns): partial(_emit_mix, bool(half), heads, columns)
        for half in _HALVES
        for heads in _HEADS
        for columns in (1, MIX_COLUMNS[heads - 1])
    },
)


@kernel(*[types.int64] * 3, *_SCORE_ARGUMENTS)
def run_score(half, heads, blocks, query, query_stride, keys, width, scores, stride, factor):  # type: ignore[no-untyped-def]
    """Scores of `heads` queries with the keys of the next `blocks` blocks, times `factor`."""
    _score_switch(half, heads, blocks, query, query_stride, keys, width, scores, stride, factor)


@kernel(*[types.int64] * 3, *_MIX_ARGUMENTS)
def run_mix(  # type: ignore[no-untyped-def]
    half, heads, columns, weights, stride, blocks, offset, row, first, last, each, rows, factors, out, step
):
    """For `heads` heads and 16 * `columns` columns: factor * sum over first..last of weight * value.

    The heads are those of `rows` rows, `each` of them from one row; the sum of each next row has
    one position more.
    """
    _mix_switch(
        half,
        heads,
        columns,
        weights,
        stride,
        blocks,
        offset,
        row,
        first,
        last,
        each,
        rows,
        factors,
        out,
        step,
    )


call_score = caller(*[types.int64] * 3, *_SCORE_ARGUMENTS)
call_mix = caller(*[types.int64] * 3, *_MIX_ARGUMENTS)
