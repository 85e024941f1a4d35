"""Register tiles of attention: several query heads, of one or more rows, that share a KV head.

Scores and outputs are the same kind of product: numbers of a head times rows of floats that all heads share.
For scores the numbers are the query, and row d is column d of the keys, one lane per position. For outputs
they are the softmax weights, and each row is a value.

A tile only decides which sums are computed side by side in registers. Each sum is one chain of fused
multiply-adds in the order of the rows, so its bits are the same in every tile.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from paceline.backends.cpu.primitives.compiled import kernel, switch
from paceline.backends.cpu.primitives.emit import I32, call, join, load_as_written
from paceline.backends.cpu.primitives.halves import halves_at
from paceline.backends.cpu.primitives.isa import ISA
from paceline.backends.cpu.primitives.simd import LANES, caller, operation, read_at, write_at

# Vectors of 16 sums of a tile with 1, 2, 3, ... heads. With 32 registers of 16 lanes, a step of 24 vectors
# takes 4 loads and 6 broadcasts; where 16 lanes are 2 or 4 registers, 4 vectors fill the registers.
TILE_VECTORS = (4, 4, 4, 4, 4, 4) if ISA.wide_registers else (4, 2, 1, 1)
TILE_HEADS = len(TILE_VECTORS)
_STEPS = 4 if ISA.single_loads else 1  # steps whose numbers are loaded together: Arm multiplies by a lane

_FLOAT, _I64 = ir.FloatType(), ir.IntType(64)
_FLOATS = ir.VectorType(_FLOAT, LANES)


def _at(builder: ir.IRBuilder, address: Any, step: Any, index: int) -> Any:
    """address + step * index."""
    return builder.add(address, builder.mul(step, _I64(index)))


def _load_vector(builder: ir.IRBuilder, address: Any, offset: int) -> Any:
    """16 floats; where Isa.single_loads says so, a register at a time."""
    if not ISA.single_loads:
        return read_at(builder, builder.add(address, _I64(offset)), _FLOATS, 4)
    four, parts = ir.VectorType(_FLOAT, 4), []
    for part in range(offset, offset + 4 * LANES, 16):
        place = builder.inttoptr(builder.add(address, _I64(part)), four.as_pointer())
        parts.append(load_as_written(builder, place, four))
    return join(builder, parts)


def _add_rows(
    builder: ir.IRBuilder,
    sums: list[list[Any]],
    numbers: list[Any],
    rows: Any,
    row: Any,
    step: Any,
    count: int,
) -> None:
    """sums[i][j] += numbers[i][step : step + count] times vector j of the rows."""
    kind, offset = ir.VectorType(_FLOAT, count), builder.mul(step, _I64(4))
    lanes = [read_at(builder, builder.add(address, offset), kind, 4) for address in numbers]
    for lane in range(count):
        place = builder.add(rows, builder.mul(builder.add(step, _I64(lane)), row))
        every = ir.Constant(ir.VectorType(I32, LANES), [lane] * LANES)
        vectors = [_load_vector(builder, place, 4 * LANES * j) for j in range(len(sums[0]))]
        for i, several in enumerate(lanes):
            number = builder.shuffle_vector(several, ir.Constant(kind, ir.Undefined), every)
            for j, vector in enumerate(vectors):
                total = builder.load(sums[i][j])
                builder.store(call(builder, "llvm.fma.v16f32", _FLOATS, number, vector, total), sums[i][j])


def _emit_products(heads: int, vectors: int, builder: ir.IRBuilder, args: list[Any]) -> None:
    numbers, stride, rows, row, steps, out, out_stride, added = args
    sums = [[cgutils.alloca_once(builder, _FLOATS) for _ in range(vectors)] for _ in range(heads)]
    targets = [
        (sums[head][j], _at(builder, _at(builder, out, out_stride, head), _I64(4 * LANES), j))
        for head in range(heads)
        for j in range(vectors)
    ]
    for held, _ in targets:
        builder.store(ir.Constant(_FLOATS, [0.0] * LANES), held)
    with builder.if_then(builder.icmp_signed("!=", added, _I64(0))):
        for held, place in targets:
            builder.store(read_at(builder, place, _FLOATS, 4), held)
    heads_at = [_at(builder, numbers, stride, head) for head in range(heads)]
    whole = builder.and_(steps, _I64(-_STEPS))
    with cgutils.for_range_slice(builder, _I64(0), whole, _I64(_STEPS), _I64) as (step, _):
        _add_rows(builder, sums, heads_at, rows, row, step, _STEPS)
    if _STEPS > 1:
        with cgutils.for_range_slice(builder, whole, steps, _I64(1), _I64) as (step, _):
            _add_rows(builder, sums, heads_at, rows, row, step, 1)
    for held, place in targets:
        write_at(builder, place, builder.load(held), 4)


# numbers, stride, rows, row, steps, out, out_stride, added
_ARGUMENTS = (types.int64,) * 8

_switch = switch(
    2,
    _ARGUMENTS,
    {
        (heads, vectors): partial(_emit_products, heads, vectors)
        for heads in range(1, TILE_HEADS + 1)
        for vectors in (1, TILE_VECTORS[heads - 1])
    },
)


@kernel(types.int64, types.int64, *_ARGUMENTS)
def run_products(heads, vectors, numbers, stride, rows, row, steps, out, out_stride, added):  # type: ignore[no-untyped-def]
    """Write, for `heads` heads, 16 * `vectors` floats to `out`: the sums over `steps` of number * row.

    The numbers of two heads are `stride` bytes apart, rows `row` bytes, results `out_stride`. With `added`
    the sums start from what is at `out`.
    """
    _switch(heads, vectors, numbers, stride, rows, row, steps, out, out_stride, added)


call_products = caller(types.int64, types.int64, *_ARGUMENTS)


def _write_transposed(builder: ir.IRBuilder, rows: list[Any], out: Any, pitch: Any) -> None:
    """Write 16 vectors of 16 lanes transposed: lane i of all of them goes to out + pitch * i.

    Blocks of 1, 2, 4 and 8 lanes are swapped across the diagonal, two vectors at a time.
    """
    for size in (1, 2, 4, 8):
        below = [lane + LANES - size if lane & size else lane for lane in range(LANES)]
        above = [lane + LANES if lane & size else lane + size for lane in range(LANES)]
        for first in (row for row in range(LANES) if not row & size):
            pair = rows[first], rows[first + size]
            for row, lanes in ((first, below), (first + size, above)):
                rows[row] = builder.shuffle_vector(*pair, ir.Constant(ir.VectorType(I32, LANES), lanes))
    for index, row in enumerate(rows):
        write_at(builder, _at(builder, out, pitch, index), row, 4)


@operation(types.void, types.int64, types.int64, types.int64)
def transpose_floats(builder, source, out, pitch):  # type: ignore[no-untyped-def]
    """Write 16 x 16 floats as columns, `pitch` bytes apart."""
    rows = [read_at(builder, _at(builder, source, _I64(64), row), _FLOATS, 4) for row in range(LANES)]
    _write_transposed(builder, rows, out, pitch)


@operation(types.void, types.int64, types.int64, types.int64)
def transpose_halves(builder, source, out, pitch):  # type: ignore[no-untyped-def]
    """Write 16 x 16 half floats as columns of floats, `pitch` bytes apart."""
    rows = [halves_at(builder, _at(builder, source, _I64(32), row)) for row in range(LANES)]
    _write_transposed(builder, rows, out, pitch)
