"""The register tile: `rows` activation rows times C weight columns, the heart of every linear layer.

C is 16, or 8 where more sums than that do not fit into the registers. Weights are stored in the order
the tile reads them, one sequential stream per C columns:

    int8    per group of 32 k: [8][C columns][4 k] bytes, then C half scales
    int4    per group of 32 k: [4][C columns][4 k] bytes, low nibble k, high nibble k + 16,
            then C half scales and C half minimums (Q4_0 and Q4_1 exactly as published)
    int4k   per 256 k: 8 such groups of nibbles, then C half `d`, C half `dmin`,
            8 x C byte scales, 8 x C byte minimums (Q4_K exactly as published)
    int6k   per 256 k: 8 groups of nibbles as in int4, each followed by [2][C columns][4 k] bytes with bits
            4 and 5 of 16 k: step s of 4 k has bits 2 (s // 2) of vector s % 2; then C half `d`,
            8 x C x 2 signed byte scales, of 16 k each (Q6_K exactly as published: w = d * scale * (q - 32))
    float32 per k: C floats

Activations are stored as [K / 32][rows][record], so that all rows of a group lie together; a record is

    32 int8 values | float scale | float scale * sum of the values | int32 -128 * sum |
    int16 -sum of the first 16 | int16 -sum of the others

(for float32 weights: 32 floats).

Integer sums within a group are exact, and the groups are added in the order of k by one chain of
fused multiply-adds per output. So an output's bits depend on its own row alone, whatever the
number of rows in the tile: the tiles of 1 and of 8 rows are the same function of a row.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from paceline.backends.cpu.compiled import Emit
from paceline.backends.cpu.emit import I8, I16
from paceline.backends.cpu.isa import ISA, Isa
from paceline.backends.cpu.register_tile import (
    COLUMNS,
    GROUP,
    MAGIC_BITS,
    RECORD,
    SCALE,
    SCALED_SUM,
    Tile,
    load_at,
)

__all__ = [
    "COLUMNS",
    "FLOAT32",
    "FORMAT_NAMES",
    "GROUP",
    "INT4",
    "INT4K",
    "INT6K",
    "INT8",
    "RECORD",
    "TILE_ARGUMENTS",
    "TILE_ROWS",
    "emit_tile",
    "tile_bytes",
]

INT8, INT4, INT4K, INT6K, FLOAT32 = range(5)  # weight formats
FORMAT_NAMES = {INT8: "int8", INT4: "int4", INT4K: "int4k", INT6K: "int6k", FLOAT32: "float32"}
TILE_ROWS = tuple(range(1, ISA.tile_rows + 1))
_I64 = ir.IntType(64)


def _emit_int8(tile: Tile) -> None:
    builder, size = tile.builder, GROUP * tile.columns
    with cgutils.for_range(builder, tile.groups) as loop:
        address = builder.add(tile.weights, builder.mul(loop.index, _I64(size + 2 * tile.columns)))
        tile.prefetch(address, size + 2 * tile.columns)
        for start in tile.parts():
            weights = partial(_int8_step, tile, address, start)
            dots = tile.dots(loop.index, weights, tile.isa.dot_wide, tile.isa.offset_weights)
            scale = tile.halves(address, size + 2 * start)
            for row, sums in dots:
                row_scale = tile.spread(loop.index, row, SCALE, tile.floats)
                tile.accumulate(row, start, sums, builder.fmul(scale, row_scale))


def _int8_step(tile: Tile, address: Any, start: int, step: int) -> Any:
    return tile.load_bytes(address, 4 * (tile.columns * step + start))


def _nibble_step(tile: Tile, address: Any, start: int, step: int) -> Any:
    """The low nibbles are the first half of the k, the high ones the second."""
    half = GROUP // 8
    packed = tile.load_bytes(address, 4 * (tile.columns * (step % half) + start))
    if step < half:
        return tile.builder.and_(packed, tile.constant(tile.bytes, 15))
    return tile.builder.lshr(packed, tile.constant(tile.bytes, 4))


def _add_group4(tile: Tile, group: Any, start: int, address: Any, scale: Any, minimum: Any) -> None:
    """One group of one part of the columns; `scale()` and `minimum()` emit theirs when it is time."""
    dots = tile.dots(group, partial(_nibble_step, tile, address, start), tile.isa.dot_narrow, False)
    for row, sums in dots:
        row_scale = tile.spread(group, row, SCALE, tile.floats)
        tile.accumulate(row, start, sums, tile.builder.fmul(scale(), row_scale))
        tile.accumulate(row, start, minimum(), tile.spread(group, row, SCALED_SUM, tile.floats))


def _emit_int4(tile: Tile) -> None:
    builder = tile.builder
    with cgutils.for_range(builder, tile.groups) as loop:
        address = builder.add(tile.weights, builder.mul(loop.index, _I64(20 * tile.columns)))
        tile.prefetch(address, 20 * tile.columns)
        for start in tile.parts():
            scale = partial(tile.halves, address, 16 * tile.columns + 2 * start)
            minimum = partial(tile.halves, address, 18 * tile.columns + 2 * start)
            _add_group4(tile, loop.index, start, address, scale, minimum)


def _emit_int4k(tile: Tile) -> None:
    builder = tile.builder

    def scaled(factor: Any, address: Any, offset: int) -> Any:
        return builder.fmul(factor, _bytes_as_floats(tile, address, offset))

    with cgutils.for_range(builder, builder.lshr(tile.groups, _I64(3))) as loop:
        address = builder.add(tile.weights, builder.mul(loop.index, _I64(148 * tile.columns)))
        starts, side_at = range(0, tile.columns, tile.width), 128 * tile.columns
        scales = {start: tile.halves(address, side_at + 2 * start) for start in starts}
        minus = tile.constant(tile.floats, -1.0)
        minimums = {
            start: builder.fmul(tile.halves(address, side_at + 2 * (tile.columns + start)), minus)
            for start in starts
        }
        tile.prefetch(builder.add(address, _I64(side_at)), 20 * tile.columns)
        with cgutils.for_range(builder, _I64(8)) as inner:
            nibbles = builder.add(address, builder.mul(inner.index, _I64(16 * tile.columns)))
            side = builder.add(address, builder.mul(inner.index, _I64(tile.columns)))
            group = builder.add(builder.mul(loop.index, _I64(8)), inner.index)
            tile.prefetch(nibbles, 16 * tile.columns)
            for start in tile.parts():
                scale = partial(scaled, scales[start], side, side_at + 4 * tile.columns + start)
                minimum = partial(scaled, minimums[start], side, side_at + 12 * tile.columns + start)
                _add_group4(tile, group, start, nibbles, scale, minimum)


def _six_bit_step(tile: Tile, address: Any, start: int, step: int) -> Any:
    """Nibbles with two more bits above them."""
    high = tile.load_bytes(address, 4 * (tile.columns * (4 + step % 2) + start))
    shift = 4 - 2 * (step // 2)
    if shift > 0:
        high = tile.builder.shl(high, tile.constant(tile.bytes, shift))
    elif shift < 0:
        high = tile.builder.lshr(high, tile.constant(tile.bytes, -shift))
    high = tile.builder.and_(high, tile.constant(tile.bytes, 0x30))
    return tile.builder.or_(_nibble_step(tile, address, start, step), high)


def _emit_int6k(tile: Tile) -> None:
    builder, side_at = tile.builder, 8 * 24 * tile.columns
    pairs = ir.VectorType(I8, 2 * tile.width)
    with cgutils.for_range(builder, builder.lshr(tile.groups, _I64(3))) as loop:
        address = builder.add(tile.weights, builder.mul(loop.index, _I64(210 * tile.columns)))
        scales = {
            start: tile.halves(address, side_at + 2 * start) for start in range(0, tile.columns, tile.width)
        }
        tile.prefetch(builder.add(address, _I64(side_at)), 18 * tile.columns)
        with cgutils.for_range(builder, _I64(8)) as inner:
            bits = builder.add(address, builder.mul(inner.index, _I64(24 * tile.columns)))
            side = builder.add(address, builder.mul(inner.index, _I64(2 * tile.columns)))
            group = builder.add(builder.mul(loop.index, _I64(8)), inner.index)
            tile.prefetch(bits, 24 * tile.columns)
            for start in tile.parts():
                of_16 = load_at(builder, side, pairs, side_at + 2 * tile.columns + 2 * start)
                factors = builder.sext(of_16, ir.VectorType(I16, 2 * tile.width))
                weights = partial(_six_bit_step, tile, bits, start)
                for row, sums in tile.scaled_dots(group, weights, tile.isa.dot_scaled, factors):
                    row_scale = tile.spread(group, row, SCALE, tile.floats)
                    tile.accumulate(row, start, sums, builder.fmul(scales[start], row_scale))


def _bytes_as_floats(tile: Tile, address: Any, offset: int) -> Any:
    values = tile.builder.zext(
        load_at(tile.builder, address, ir.VectorType(I8, tile.width), offset), tile.ints
    )
    if tile.isa.slow_conversion:
        values = tile.builder.or_(values, tile.constant(tile.ints, MAGIC_BITS))
    return tile.as_floats(values)


def _emit_float32(tile: Tile) -> None:
    builder = tile.builder
    with cgutils.for_range(builder, tile.groups) as loop:
        address = builder.add(tile.weights, builder.mul(loop.index, _I64(GROUP * 4 * tile.columns)))
        records = builder.add(tile.activations, builder.mul(loop.index, tile.group_stride))
        for step in range(GROUP):
            for start in range(0, tile.columns, tile.width):
                weights = load_at(builder, address, tile.floats, 4 * (step * tile.columns + start))
                for row in range(tile.rows):
                    value = tile.isa.spread(builder, records, row * GROUP + step, tile.floats)
                    tile.accumulate(row, start, weights, value)


_EMITTERS: dict[int, Callable[[Tile], None]] = {
    INT8: _emit_int8,
    INT4: _emit_int4,
    INT4K: _emit_int4k,
    INT6K: _emit_int6k,
    FLOAT32: _emit_float32,
}


TILE_ARGUMENTS = (types.int64,) * 8  # weights, records, group_stride, groups, out, out_stride, bias, added


def emit_tile(weight_format: int, rows: int, isa: Isa = ISA) -> Emit:
    """The code of a tile, for arguments that are addresses or counts.

    It writes `rows` x 16 floats to `out`, whose rows are `out_stride` bytes apart, or adds them there
    if `added` is not 0; `bias` is the address of 16 floats to add to every row, or 0.
    """

    def emit(builder: ir.IRBuilder, arguments: list[Any]) -> None:
        tile = Tile(builder, rows, isa, arguments)
        _EMITTERS[weight_format](tile)
        tile.finish()

    return emit


def tile_bytes(weight_format: int, depth: int) -> int:
    """Bytes of the weights of one tile of `depth` k."""
    bytes_of_column = {
        INT8: depth // GROUP * 34,
        INT4: depth // GROUP * 20,
        INT4K: depth // 256 * 148,
        INT6K: depth // 256 * 210,
        FLOAT32: depth * 4,
    }
    return COLUMNS * bytes_of_column[weight_format]
