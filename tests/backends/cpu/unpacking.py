"""A packed matrix read back, by the code that reads embeddings."""

from __future__ import annotations

import numpy as np

from paceline.backends.cpu.primitives.compiled import compiled
from paceline.backends.cpu.primitives.rows import read_matrix_row
from paceline.backends.cpu.tiles.weight_tile import COLUMNS, GROUP, tile_bytes
from paceline.backends.cpu.weights.packing import PackedMatrix


@compiled(cached=True)
def _unpack(address, weight_format, groups, size, rows, out):  # type: ignore[no-untyped-def]
    for row in range(rows):
        read_matrix_row(address, weight_format, groups, size, row, out + 4 * GROUP * groups * row)


def unpack(matrix: PackedMatrix) -> np.ndarray:
    """All rows and their whole depth, with what pads them to whole groups."""
    address, weight_format, groups, tiles, size = matrix.descriptor()
    assert matrix.data.nbytes == tiles * size
    assert size == tile_bytes(matrix.weight_format, groups * GROUP)
    out = np.full((tiles * COLUMNS, groups * GROUP), np.nan, np.float32)
    _unpack(address, weight_format, groups, size, len(out), out.ctypes.data)
    return out
