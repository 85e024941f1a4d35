"""Register tiles of all weight formats: a few rows of activations times C columns of weights.

C is 16, or 8 where registers cannot hold more sums. Weights are stored in the order in which a tile reads
them, one sequential stream per C columns:

    int8    per group of 32 k: [8][C columns][4 k] bytes, then C half scales
    int4    per group of 32 k: [4][C columns][4 k] bytes, low nibble k, high nibble k + 16,
            then C half scales and C half minimums (Q4_0 and Q4_1 exactly as published)
    int4k   per 256 k: 8 such groups of nibbles, then C half `d`, C half `dmin`,
            8 x C byte scales, 8 x C byte minimums (Q4_K exactly as published)
    int6k   per 256 k: 8 groups of [2][3][C columns][4 k] bytes for 4 steps of 4 k: each of the first three
            steps has its 6 bits in a byte, whose upper 2 bits are bits of the fourth step, lowest first; then
            C half `d`, 8 x C x 2 signed byte scales, of 16 k each (Q6_K exactly as published:
            w = d * scale * (q - 32)). Where the instruction needs signed weights: q - 32 in 6 bits, and the
            bytes rotated left by 2, which gives 4 w
    float32 per k: C floats

Two more formats exist in scratch memory only (Isa.unpack_rows), for many rows:

    unpacked4  per group of 32 k: [8][C columns][4 k] bytes, C float scales, C float minimums
    unpacked6  the same bytes with 4 w, a quarter of C float scales of each 16 k, C float `d`

Activations are stored as [K / 32][rows][record], so that all rows of a group are contiguous; a record is

    32 int8 values | float scale | float scale * sum of the values | int32 -128 * sum |
    int16 -sum of the first 16 | int16 -sum of the last 16

(for float32 weights: 32 floats).

Integer sums within a group are exact, and groups are added in the order of k by one chain of fused
multiply-adds per output. So an output's bits depend on its own row alone, not on the number of rows in the
tile.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from paceline.backends.cpu.primitives.compiled import Emit
from paceline.backends.cpu.primitives.emit import I8
from paceline.backends.cpu.primitives.isa import ISA, Isa
from paceline.backends.cpu.tiles.products import MATRIX_ROWS
from paceline.backends.cpu.tiles.register_tile import (
    COLUMNS,
    GROUP,
    RECORD,
    UNPACKED4_BYTES,
    UNPACKED6_BYTES,
    Tile,
    load_at,
)
from paceline.backends.cpu.tiles.unpacked_tile import MatrixTile, UnpackedTile

__all__ = [
    "COLUMNS",
    "FLOAT32",
    "FORMAT_NAMES",
    "GROUP",
    "INT4",
    "INT4K",
    "INT6K",
    "INT8",
    "MATRIX_ROWS",
    "RECORD",
    "TILE_ARGUMENTS",
    "TILE_ROWS",
    "UNPACKED4",
    "UNPACKED4_BYTES",
    "UNPACKED6",
    "UNPACKED6_BYTES",
    "UNPACKED_FORMATS",
    "emit_tile",
    "emit_unpacking",
    "tile_bytes",
    "tile_table",
]

INT8, INT4, INT4K, INT6K, FLOAT32, UNPACKED4, UNPACKED6 = range(7)  # weight formats
FORMAT_NAMES = {INT8: "int8", INT4: "int4", INT4K: "int4k", INT6K: "int6k", FLOAT32: "float32"}
UNPACKED_FORMATS = {INT4: UNPACKED4, INT4K: UNPACKED4, INT6K: UNPACKED6}
TILE_ROWS = tuple(range(1, ISA.tile_rows + 1))
_I64 = ir.IntType(64)


def _emit_int8(tile: Tile) -> None:
    builder, size = tile.builder, GROUP * tile.columns
    with cgutils.for_range(builder, tile.groups) as loop:
        address = builder.add(tile.weights, builder.mul(loop.index, _I64(size + 2 * tile.columns)))
        tile.prefetch(address, size + 2 * tile.columns)
        for start in tile.parts():
            weights, scale = tile.stored(address, start), partial(tile.halves, address, size + 2 * start)
            tile.add_group(
                loop.index, start, weights, tile.isa.dot_wide, scale, offset=tile.isa.offset_weights
            )


def _nibbles(tile: Tile, address: Any, start: int) -> Callable[[int], Any]:
    """The weights of each step of 4 k: low nibbles are the first half of the k, high nibbles the second."""
    builder, half = tile.builder, GROUP // 8
    stored = tile.stored(address, start)
    if tile.keeps_weights:
        stored = cache(stored)

    def weights(step: int) -> Any:
        if step < half:
            return builder.and_(stored(step), tile.constant(tile.bytes, 15))
        return builder.lshr(stored(step - half), tile.constant(tile.bytes, 4))

    return weights


def _emit_int4(tile: Tile) -> None:
    builder = tile.builder
    with cgutils.for_range(builder, tile.groups) as loop:
        address = builder.add(tile.weights, builder.mul(loop.index, _I64(20 * tile.columns)))
        tile.prefetch(address, 20 * tile.columns)
        for start in tile.parts():
            scale = partial(tile.halves, address, 16 * tile.columns + 2 * start)
            minimum = partial(tile.halves, address, 18 * tile.columns + 2 * start)
            weights = _nibbles(tile, address, start)
            tile.add_group(loop.index, start, weights, tile.isa.dot_narrow, scale, minimum)


def _emit_int4k(tile: Tile) -> None:
    builder = tile.builder
    with cgutils.for_range(builder, builder.lshr(tile.groups, _I64(3))) as loop:
        address = builder.add(tile.weights, builder.mul(loop.index, _I64(148 * tile.columns)))
        starts, side_at = range(0, tile.columns, tile.width), 128 * tile.columns
        scales = {start: tile.multiplier(tile.halves(address, side_at + 2 * start)) for start in starts}
        minus = tile.constant(tile.floats, -1.0)
        minimums = {
            start: tile.multiplier(
                builder.fmul(tile.halves(address, side_at + 2 * (tile.columns + start)), minus)
            )
            for start in starts
        }
        tile.prefetch(builder.add(address, _I64(side_at)), 20 * tile.columns)
        with cgutils.for_range(builder, _I64(8)) as inner:
            nibbles = builder.add(address, builder.mul(inner.index, _I64(16 * tile.columns)))
            side = builder.add(address, builder.mul(inner.index, _I64(tile.columns)))
            group = builder.add(builder.mul(loop.index, _I64(8)), inner.index)
            tile.prefetch(nibbles, 16 * tile.columns)
            for start in tile.parts():
                scale = cache(partial(scales[start], side, side_at + 4 * tile.columns + start))
                minimum = cache(partial(minimums[start], side, side_at + 12 * tile.columns + start))
                weights = _nibbles(tile, nibbles, start)
                tile.add_group(group, start, weights, tile.isa.dot_narrow, scale, minimum)


def _six_bits(tile: Tile, address: Any, start: int) -> Callable[[int], Any]:
    """The weights of each step of 4 k: three as stored, the fourth from the upper bits of those."""
    builder, stored = tile.builder, cache(tile.stored(address, start))

    def weights(step: int) -> Any:
        first = step // 4 * 3
        if step % 4 < 3:
            mask = 0xFC if tile.isa.signed_six else 63
            return builder.and_(stored(first + step % 4), tile.constant(tile.bytes, mask))
        parts = [stored(first + index) for index in range(3)]
        if tile.isa.signed_six:
            low = builder.shl(parts[0], tile.constant(tile.bytes, 2))
            return tile.isa.insert(builder, tile.isa.insert(builder, low, parts[1], 4), parts[2], 6)
        bits = [
            builder.and_(
                builder.lshr(part, tile.constant(tile.bytes, 6 - 2 * index)),
                tile.constant(tile.bytes, 3 << 2 * index),
            )
            for index, part in enumerate(parts)
        ]
        return builder.or_(builder.or_(bits[0], bits[1]), bits[2])

    return weights


def _emit_int6k(tile: Tile) -> None:
    builder, side_at = tile.builder, 8 * 24 * tile.columns
    pairs = ir.VectorType(I8, 2 * tile.width)
    with cgutils.for_range(builder, builder.lshr(tile.groups, _I64(3))) as loop:
        address = builder.add(tile.weights, builder.mul(loop.index, _I64(210 * tile.columns)))
        starts = range(0, tile.columns, tile.width)
        scales = {start: tile.halves(address, side_at + 2 * start) for start in starts}
        tile.prefetch(builder.add(address, _I64(side_at)), 18 * tile.columns)
        with cgutils.for_range(builder, _I64(8)) as inner:
            bits = builder.add(address, builder.mul(inner.index, _I64(24 * tile.columns)))
            side = builder.add(address, builder.mul(inner.index, _I64(2 * tile.columns)))
            group = builder.add(builder.mul(loop.index, _I64(8)), inner.index)
            tile.prefetch(bits, 24 * tile.columns)
            for start in tile.parts():
                of_16 = load_at(builder, side, pairs, side_at + 2 * tile.columns + 2 * start)
                scale = partial(scales.__getitem__, start)
                tile.add_scaled_group(group, start, _six_bits(tile, bits, start), of_16, scale)


def _emit_unpacked4(tile: Tile) -> None:
    builder, side_at = tile.builder, GROUP * tile.columns
    with tile.unpacked_tiles(UNPACKED4_BYTES, GROUP), cgutils.for_range(builder, tile.groups) as loop:
        address = builder.add(tile.weights, builder.mul(loop.index, _I64(UNPACKED4_BYTES * tile.columns)))
        tile.prefetch_records(loop.index, 4)
        for start in tile.parts():
            scale, minimum = (
                partial(tile.load_floats, address, side_at + 4 * (tile.columns * index + start))
                for index in range(2)
            )
            tile.add_dots(loop.index, start, tile.unpacked_dots(loop.index, address, start), scale, minimum)


def _emit_unpacked6(tile: Tile) -> None:
    builder, side_at = tile.builder, GROUP * tile.columns
    with tile.unpacked_tiles(UNPACKED6_BYTES, GROUP // 2), cgutils.for_range(builder, tile.groups) as loop:
        address = builder.add(tile.weights, builder.mul(loop.index, _I64(UNPACKED6_BYTES * tile.columns)))
        tile.prefetch_records(loop.index, 4)
        for start in tile.parts():
            first, second, scale = (
                partial(tile.load_floats, address, side_at + 4 * (tile.columns * index + start))
                for index in range(3)
            )
            dots = tile.unpacked_scaled_dots(loop.index, address, start, [first, second])
            tile.add_dots(loop.index, start, dots, scale)


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
    UNPACKED4: _emit_unpacked4,
    UNPACKED6: _emit_unpacked6,
}


# weights, records, group_stride, groups, out, out_stride, bias, added, tiles
TILE_ARGUMENTS = (types.int64,) * 9


def tile_table(isa: Isa = ISA) -> dict[tuple[int, ...], Emit]:
    """{(format, rows): the code of the register tile}; 0 rows: the code that unpacks a tile."""
    keys = [(name, rows) for name in FORMAT_NAMES for rows in TILE_ROWS]
    table: dict[tuple[int, ...], Emit] = {key: emit_tile(*key, isa) for key in keys}
    for name, unpacked in UNPACKED_FORMATS.items() if isa.unpack_rows else ():
        table[name, 0] = emit_unpacking(name, isa)
        all_rows = (MATRIX_ROWS,) if isa.product else TILE_ROWS
        table |= {(unpacked, rows): emit_tile(unpacked, rows, isa) for rows in all_rows}
    return table


def emit_unpacking(weight_format: int, isa: Isa = ISA) -> Emit:
    """The code that unpacks a tile of this format to `out`."""
    return lambda builder, arguments: _EMITTERS[weight_format](UnpackedTile(builder, isa, arguments))


def emit_tile(weight_format: int, rows: int, isa: Isa = ISA) -> Emit:
    """The code of a register tile. Its arguments (TILE_ARGUMENTS) are addresses and counts.

    It writes `rows` x 16 floats to `out`, whose rows are `out_stride` bytes apart, or adds them there if
    `added` is not 0; `bias` is the address of 16 floats to add to every row, or 0. The code with matrix
    instructions computes `tiles` contiguous tiles, all other code one.
    """

    def emit(builder: ir.IRBuilder, arguments: list[Any]) -> None:
        matrix = isa.product is not None and rows == MATRIX_ROWS
        tile = MatrixTile(builder, isa, arguments) if matrix else Tile(builder, rows, isa, arguments)
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
        UNPACKED4: depth // GROUP * UNPACKED4_BYTES,
        UNPACKED6: depth // GROUP * UNPACKED6_BYTES,
    }
    return COLUMNS * bytes_of_column[weight_format]
