"""The LM head for 65 to 96 rows: a persistent kernel that streams the matrix (see weight_pipeline.py).

A program computes four column tiles at a time. It has the bits of `project`, its fallback.
"""

from __future__ import annotations

import struct

import torch

from paceline.backends.cuda.kernels.products.matrix import Matrix, Normed
from paceline.backends.cuda.native.nvrtc import is_left_out
from paceline.backends.cuda.native.weight_pipeline import (
    MAX_TILES,
    THREADS,
    TILE,
    argument,
    can_stream,
    num_multiprocessors,
    pipeline_kernel,
    product,
    supports_pipeline,
)

PADDED, LEAST = 96, 65  # rows: most and fewest; with fewer than 65 it is not faster
RING = (14, 7)  # pipeline stages: cells of weights, slots of rows
TILES_PER_UNIT = 4  # column tiles of a unit of work


def run_logits(normed: Normed, matrix: Matrix, output: torch.Tensor, rows: int) -> bool:
    """Write norm(rows) @ weight.T to `output` [rows, at least width]; False if this kernel cannot."""
    device = matrix.weight.device
    if not LEAST <= rows <= PADDED or is_left_out("logits"):
        return False
    if not supports_pipeline(device) or not _fits(normed, matrix):
        return False
    kernel = pipeline_kernel("logits", "all_logits", PADDED, RING, device)
    if kernel is None:
        return False
    own = product(matrix, normed.rows, PADDED, matrix.tiles // TILES_PER_UNIT, in_halves=False)
    addresses = normed.squares.data_ptr(), output.data_ptr()
    sizes = output.stride(0), matrix.width, rows, normed.squares.shape[1]
    rest = struct.pack("<2Q4i2f", *addresses, *sizes, float(normed.size), normed.eps)
    kernel.launch(argument(own, rest), (num_multiprocessors(device), 1), (1, 1), THREADS)
    return True


def _fits(normed: Normed, matrix: Matrix) -> bool:
    """Whether the kernel supports such a matrix."""
    tiling = matrix.tiling
    return (
        can_stream(matrix)
        and tiling.columns == TILE
        and tiling.splits == 1
        and matrix.bias is None
        and matrix.tiles % TILES_PER_UNIT == 0
        and normed.squares.shape[1] <= MAX_TILES
    )
