"""Linear layers out of tiles: any number of rows, any range of tiles."""

from __future__ import annotations

from typing import Any

from paceline.backends.cpu.compiled import compiled
from paceline.backends.cpu.simd import load_int64
from paceline.backends.cpu.tiles import FLOAT32, FORMAT_NAMES, GROUP, RECORD, TILE_ROWS, tile_intrinsic

# A matrix descriptor is 5 int64: address, format, groups, tiles, bytes of a tile.
DESCRIPTOR = 40


def _dispatcher() -> Any:
    """`run_tile(format, rows, ...)`: the tile of that format and number of rows.

    Written out as nested ifs, because numba has no table of functions that LLVM could see through.
    """
    scope: dict[str, Any] = {}
    lines = ["def run_tile(weight_format, rows, weights, records, stride, groups, out, out_stride):"]
    for weight_format, name in FORMAT_NAMES.items():
        lines.append(f"    if weight_format == {weight_format}:")
        for rows in TILE_ROWS:
            tile = f"tile_{name}_{rows}"
            scope[f"{tile}_intrinsic"] = tile_intrinsic(weight_format, rows)
            signature = "(weights, records, stride, groups, out, out_stride)"
            exec(f"def {tile}{signature}:\n    {tile}_intrinsic{signature}", scope)
            scope[tile] = compiled(scope[tile], cached=False)
            lines.append(f"        if rows == {rows}:")
            lines.append(f"            {tile}{signature}")
    exec("\n".join(lines), scope)
    return compiled(scope["run_tile"], cached=False)


_run_tile = _dispatcher()
_LARGEST = TILE_ROWS[-1]


@compiled
def multiply_rows(matrix, tile, records, rows, first_row, count, out, out_stride):  # type: ignore[no-untyped-def]
    """Rows first_row..first_row + count of the records times tile `tile` of a matrix.

    Writes 16 floats a row to `out`, whose rows are `out_stride` bytes apart.
    """
    weight_format, groups = load_int64(matrix + 8), load_int64(matrix + 16)
    weights = load_int64(matrix) + tile * load_int64(matrix + 32)
    size = 4 * GROUP if weight_format == FLOAT32 else RECORD
    stride = rows * size
    row = 0
    while row < count:
        step = _LARGEST if count - row >= _LARGEST else min(count - row, 4)
        place = records + (first_row + row) * size
        _run_tile(weight_format, step, weights, place, stride, groups, out + row * out_stride, out_stride)
        row += step
