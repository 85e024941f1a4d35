"""Matrix products of any number of rows and any range of tiles, from register tiles.

A register tile unpacks its weights again for every few rows. With Isa.unpack_rows rows or more, tiles are
first unpacked to scratch memory, once for all rows.
"""

from __future__ import annotations

from numba import types

from paceline.backends.cpu.primitives.compiled import compiled, kernel, switch
from paceline.backends.cpu.primitives.isa import ISA
from paceline.backends.cpu.primitives.simd import caller, load_int64, store_int64
from paceline.backends.cpu.tiles.weight_tile import (
    COLUMNS,
    FLOAT32,
    GROUP,
    INT4,
    INT4K,
    INT6K,
    MATRIX_ROWS,
    RECORD,
    TILE_ARGUMENTS,
    TILE_ROWS,
    UNPACKED4,
    UNPACKED4_BYTES,
    UNPACKED6,
    UNPACKED6_BYTES,
    tile_table,
)

# A matrix descriptor is 5 int64: address, format, groups, tiles, bytes of a tile.
DESCRIPTOR = 40

_switch = switch(2, TILE_ARGUMENTS, tile_table())


@kernel(types.int64, types.int64, *TILE_ARGUMENTS)
def run_tile(weight_format, rows, weights, records, stride, groups, out, out_stride, bias, added, tiles):  # type: ignore[no-untyped-def]
    """Run the register tile of a format and number of rows; 0 rows: unpack the tile to `out`."""
    _switch(weight_format, rows, weights, records, stride, groups, out, out_stride, bias, added, tiles)


_call_tile = caller(types.int64, types.int64, *TILE_ARGUMENTS)
_LARGEST = TILE_ROWS[-1]
_UNPACK_ROWS, _HAS_PRODUCTS = ISA.unpack_rows, ISA.product is not None
_LINE = 64  # bytes before unpacked tiles: their descriptor, and the address of the packed descriptor


@compiled
def unit_bytes(groups):  # type: ignore[no-untyped-def]
    """The bytes of scratch memory that `unpack_tiles` needs for 32 columns, at most."""
    return _LINE + groups * GROUP * UNPACKED6_BYTES


@compiled
def tiles_of_task(matrix, rows, threads, space):  # type: ignore[no-untyped-def]
    """How many tiles of a matrix a thread takes at once: an eighth of its share, at most 16.

    If tiles are unpacked first, into `space` bytes of scratch memory, a quarter of its share, so that rows
    are read less often.
    """
    tiles = load_int64(matrix + 24)
    if _UNPACK_ROWS == 0 or rows < _UNPACK_ROWS:
        return max(1, min(16, tiles // (8 * threads)))
    room = (space - _LINE) // (load_int64(matrix + 16) * COLUMNS * UNPACKED6_BYTES)
    return max(1, min(room, max(2, tiles // (4 * threads))))


@compiled
def unpack_tiles(run_tile, matrix, first, last, rows, scratch):  # type: ignore[no-untyped-def]
    """A matrix with the same tiles first..last: itself, or, for many rows, the tiles unpacked to scratch."""
    weight_format, groups = load_int64(matrix + 8), load_int64(matrix + 16)
    if weight_format in (INT4, INT4K):
        unpacked, size = UNPACKED4, groups * COLUMNS * UNPACKED4_BYTES
    else:
        unpacked, size = UNPACKED6, groups * COLUMNS * UNPACKED6_BYTES
    is_packed = unpacked == UNPACKED4 or weight_format == INT6K
    if _UNPACK_ROWS == 0 or rows < _UNPACK_ROWS or not is_packed:
        return matrix
    source, step, target = load_int64(matrix), load_int64(matrix + 32), scratch + _LINE
    for tile in range(first, last):
        place = target + (tile - first) * size
        _call_tile(run_tile, weight_format, 0, source + tile * step, 0, 0, groups, place, 0, 0, 0, 1)
    store_int64(scratch, target - first * size)
    store_int64(scratch + 8, unpacked)
    store_int64(scratch + 16, groups)
    store_int64(scratch + 32, size)
    store_int64(scratch + DESCRIPTOR, matrix)
    return scratch


@compiled
def multiply_rows(run_tile, matrix, first, last, records, stride, count, out, out_stride, bias, added):  # type: ignore[no-untyped-def]
    """Multiply the first `count` rows of the records by tiles first..last of a matrix.

    `run_tile` is the address of that kernel; two groups are `stride` records apart. Writes 16 floats per row
    and tile to `out`, tile after tile, or adds them; see `emit_tile` of weight_tile.py for the last four.
    """
    largest, together = _LARGEST, 1  # rows and tiles of a call
    if _HAS_PRODUCTS and load_int64(matrix + 8) in (UNPACKED4, UNPACKED6):
        if count % MATRIX_ROWS:  # too few rows for the matrix unit: use the packed tile
            matrix = load_int64(matrix + DESCRIPTOR)
        else:
            largest, together = MATRIX_ROWS, last - first
    weight_format, groups = load_int64(matrix + 8), load_int64(matrix + 16)
    size = 4 * GROUP if weight_format == FLOAT32 else RECORD
    for tile in range(first, last, together):
        weights, columns = load_int64(matrix) + tile * load_int64(matrix + 32), 4 * COLUMNS * (tile - first)
        tile_bias, row = bias + columns if bias != 0 else 0, 0
        while row < count:
            step = min(count - row, largest)
            place, target = records + row * size, out + columns + row * out_stride
            _call_tile(
                run_tile, weight_format, step, weights, place, stride * size, groups, target, out_stride,
                tile_bias, added, together,
            )  # fmt: skip
            row += step
