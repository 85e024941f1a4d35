"""Linear layers out of tiles: any number of rows, any range of tiles."""

from __future__ import annotations

from numba import types

from paceline.backends.cpu.compiled import compiled, kernel, switch
from paceline.backends.cpu.simd import caller, load_int64
from paceline.backends.cpu.tiles import (
    FLOAT32,
    FORMAT_NAMES,
    GROUP,
    RECORD,
    TILE_ARGUMENTS,
    TILE_ROWS,
    emit_tile,
)

# A matrix descriptor is 5 int64: address, format, groups, tiles, bytes of a tile.
DESCRIPTOR = 40

_switch = switch(
    2, TILE_ARGUMENTS, {(name, rows): emit_tile(name, rows) for name in FORMAT_NAMES for rows in TILE_ROWS}
)


@kernel(types.int64, types.int64, *TILE_ARGUMENTS)
def run_tile(weight_format, rows, weights, records, stride, groups, out, out_stride, bias, added):  # type: ignore[no-untyped-def]
    """The tile of a format and a number of rows."""
    _switch(weight_format, rows, weights, records, stride, groups, out, out_stride, bias, added)


_call_tile = caller(types.int64, types.int64, *TILE_ARGUMENTS)
_LARGEST = TILE_ROWS[-1]


@compiled
def multiply_rows(run_tile, matrix, tile, records, stride, first_row, count, out, out_stride, bias, added):  # type: ignore[no-untyped-def]
    """Rows first_row..first_row + count of the records times tile `tile` of a matrix.

    `run_tile` is the address of that kernel; two groups are `stride` records apart. Writes 16 floats a row to
    `out`, or adds them; see tiles.py for the last four arguments.
    """
    weight_format, groups = load_int64(matrix + 8), load_int64(matrix + 16)
    weights = load_int64(matrix) + tile * load_int64(matrix + 32)
    size = 4 * GROUP if weight_format == FLOAT32 else RECORD
    row = 0
    while row < count:
        step = min(count - row, _LARGEST)
        place, target = records + (first_row + row) * size, out + row * out_stride
        _call_tile(
            run_tile,
            weight_format,
            step,
            weights,
            place,
            stride * size,
            groups,
            target,
            out_stride,
            bias,
            added,
        )
        row += step
