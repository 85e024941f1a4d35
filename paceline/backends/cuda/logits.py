"""Logits of many rows by one kernel that streams the vocabulary's matrix: see streaming.py.

A program has four tiles of columns at a time, and then others. The bits are those of `project`, which runs
wherever this cannot.
"""

from __future__ import annotations

import struct

import torch

from paceline.backends.cuda.kernels.matrix import Matrix, Normed
from paceline.backends.cuda.native import is_left_out
from paceline.backends.cuda.streaming import (
    MOST_TILES,
    THREADS,
    TILE,
    argument,
    is_plain,
    product,
    programs_of,
    streaming_kernel,
    streams_on,
)

PADDED, LEAST = 96, 65  # rows that it is compiled for; with fewer than these it gains nothing
RING = (14, 7)  # cells of weights, and slots of rows
TOGETHER = 4  # tiles


def run_logits(normed: Normed, matrix: Matrix, output: torch.Tensor, rows: int) -> bool:
    """Write norm(rows) @ weight.T to `output` [rows, at least width]; False if this kernel cannot."""
    device = matrix.weight.device
    if not LEAST <= rows <= PADDED or is_left_out("logits"):
        return False
    if not streams_on(device) or not _fits(normed, matrix):
        return False
    kernel = streaming_kernel("logits", "all_logits", PADDED, RING, device)
    if kernel is None:
        return False
    own = product(matrix, normed.rows, PADDED, matrix.tiles // TOGETHER, in_halves=False)
    addresses = normed.squares.data_ptr(), output.data_ptr()
    sizes = output.stride(0), matrix.width, rows, normed.squares.shape[1]
    rest = struct.pack("<2Q4i2f", *addresses, *sizes, float(normed.size), normed.eps)
    kernel.launch(argument(own, rest), (programs_of(device), 1), (1, 1), THREADS)
    return True


def _fits(normed: Normed, matrix: Matrix) -> bool:
    """Whether the kernel is made for such a matrix."""
    tiling = matrix.tiling
    return (
        is_plain(matrix)
        and tiling.columns == TILE
        and tiling.splits == 1
        and matrix.bias is None
        and matrix.tiles % TOGETHER == 0
        and normed.squares.shape[1] <= MOST_TILES
    )
