"""Linear layers out of tiles: any number of rows, any range of tiles."""

from __future__ import annotations

from typing import Any

from paceline.backends.cpu.compiled import compiled
from paceline.backends.cpu.simd import load_int64
from paceline.backends.cpu.tiles import FLOAT32, FORMAT_NAMES, GROUP, RECORD, TILE_ARGUMENTS, TILE_ROWS, tile_intrinsic

# A matrix descriptor is 5 int64: address, format, groups, tiles, bytes of a tile.
DESCRIPTOR = 40


def _dispatcher() -> Any:
    """`run_tile(format, rows, ...)`: the tile of that format and number of rows.

    Written out as nested ifs, because numba has no table of functions that LLVM could see through.
    """
    scope: dict[str, Any] = {}
    lines = [f"def run_tile(weight_format, rows, {TILE_ARGUMENTS[1:]}:"]
    for weight_format, name in FORMAT_NAMES.items():
        lines.append(f"    if weight_format == {weight_format}:")
        for rows in TILE_ROWS:
            tile = f"tile_{name}_{rows}"
            scope[f"{tile}_intrinsic"] = tile_intrinsic(weight_format, rows)
            exec(f"def {tile}{TILE_ARGUMENTS}:\n    {tile}_intrinsic{TILE_ARGUMENTS}", scope)
            scope[tile] = compiled(scope[tile])
            lines += [f"        if rows == {rows}:", f"            {tile}{TILE_ARGUMENTS}"]
    exec("\n".join(lines), scope)
    return compiled(scope["run_tile"])


_run_tile = _dispatcher()
_LARGEST = TILE_ROWS[-1]


@compiled
def multiply_rows(matrix, tile, records, rows, first_row, count, out, out_stride, bias, added):  # type: ignore[no-untyped-def]
    """Rows first_row..first_row + count of the records times tile `tile` of a matrix.

    Writes 16 floats a row to `out`, or adds them; see tiles.py for the last four arguments.
    """
    weight_format, groups = load_int64(matrix + 8), load_int64(matrix + 16)
    weights = load_int64(matrix) + tile * load_int64(matrix + 32)
    size = 4 * GROUP if weight_format == FLOAT32 else RECORD
    row = 0
    while row < count:
        step = min(count - row, _LARGEST)
        place, target = records + (first_row + row) * size, out + row * out_stride
        _run_tile(weight_format, step, weights, place, rows * size, groups, target, out_stride, bias, added)
        row += step
