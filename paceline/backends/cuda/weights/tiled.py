"""Builds the tiled matrices of the kernels: stacking, padding, and the choice of tiling."""

from __future__ import annotations

from dataclasses import replace

import torch

from paceline.backends.cuda.kernels.products.matrix import (
    UNPACKED,
    Matrix,
    Tiling,
    tile_heads,
    tile_matrix,
    tile_pair,
)
from paceline.backends.cuda.kernels.products.packing import SCALE_WORDS, depth_of, step_of
from paceline.backends.cuda.weights.shard import TILE, WHOLE, Shard

PROGRAMS = 132  # multiprocessors of an H100 or H200; a constant, because it determines the bits
PACKED_PROGRAMS = 528  # for packed weights: more programs, so that some load while others unpack
FP8_PROGRAMS = 264  # for e4m3: not unpacked, but with short steps
# least size of e4m3 matrices whose lines have 128 bytes, for fused_layer.py; elsewhere 64 are faster
FUSED_SIZE = 2560
MAX_SPLITS = 4
MIN_STEPS = 3  # fewest steps of a split, to fill the pipeline


def pair_matrix(weights: list[torch.Tensor], packing: str, size: int, shard: Shard) -> Matrix:
    """The gate and up matrices of experts, or of one MLP, as one matrix. `weights`: all gates, then all ups.

    They are this rank's rows of matrices with `size` rows.
    """
    own, whole = _filled_rows(weights[0], size, shard)
    padded = [_padded(weight, packing, own) for weight in weights]
    experts = len(weights) // 2
    # half a tile is a group of e4m3 numbers with one scale
    columns = 2 * TILE if packing == "e4m3" else TILE
    tiling = _expert_tiling(2 * whole, depth_of(padded[0], packing), packing, experts, columns)
    return tile_pair(torch.cat(padded[:experts]), torch.cat(padded[experts:]), tiling)


def pair_lines(lines: list[torch.Tensor], matrix: Matrix) -> torch.Tensor:
    """Biases (or other lines) of gates and ups, in the column order of `pair_matrix`."""
    half, experts = matrix.tiling.columns // 2, len(lines) // 2
    padded = [padded_line(line, padded_size(len(line))) for line in lines]
    joined = [torch.cat(part) for part in (padded[:experts], padded[experts:])]
    gates, ups = (part.reshape(-1, half, *part.shape[1:]) for part in joined)
    return torch.stack((gates, ups), dim=1).flatten(0, 2)


def stacked_matrix(weights: list[torch.Tensor], packing: str, size: int, shard: Shard) -> Matrix:
    """The stacked matrices of experts, or of one MLP: this rank's rows of matrices with `size` rows."""
    own, whole = _filled_rows(weights[0], size, shard)
    padded = [_padded(weight, packing, own) for weight in weights]
    tiling = _expert_tiling(whole, depth_of(padded[0], packing), packing, len(weights))
    return tile_matrix(torch.cat(padded), sum(map(len, weights)), tiling)


def same_sizes(weights: list[torch.Tensor], dimension: int) -> list[torch.Tensor]:
    """Matrices resized along a dimension to the size of the first: cut, or zero-padded."""
    size = weights[0].shape[dimension]
    parts = [part for weight in weights for part in torch.split(weight, size, dimension)]
    missing = [size - part.shape[dimension] for part in parts]
    return [
        torch.nn.functional.pad(part, (0, 0, 0, more) if dimension == 0 else (0, more)) if more else part
        for part, more in zip(parts, missing, strict=True)
    ]


def _filled_rows(weight: torch.Tensor, size: int, shard: Shard) -> tuple[int, int]:
    """The rows of this rank, and of the whole matrix of `size` rows, both padded to whole tiles."""
    size = len(weight) if shard.size == 1 else size  # experts have a size of their own
    return shard.width(size), padded_size(size)


def _expert_tiling(width: int, depth: int, packing: str, experts: int, columns: int = TILE) -> Tiling:
    """The tiling of experts of this padded shape: no split-K if a row has several experts."""
    tiling = tiling_for(width, depth, columns, packing)
    return tiling if experts == 1 else replace(tiling, splits=1)


def tiling_for(width: int, depth: int, columns: int = TILE, packing: str = "none") -> Tiling:
    """The tiling of a matrix of this padded shape. It determines the bits, so only the shape matters."""
    is_wide = packing == "none" or (packing == "e4m3" and min(width, depth) >= FUSED_SIZE)
    step = 128 if is_wide and depth % 128 == 0 else 64 if packing in UNPACKED else step_of(packing)
    tiles, steps = width // columns, depth // (step_of(packing) if packing == "e4m3" else step)
    programs, most = (PROGRAMS, MAX_SPLITS) if packing == "none" else (PACKED_PROGRAMS, 4 * MAX_SPLITS)
    programs = FP8_PROGRAMS if packing == "e4m3" else programs
    splits = 1
    while splits < most and 2 * splits * tiles <= programs and steps >= 2 * splits * MIN_STEPS:
        splits *= 2
    return Tiling(columns, step, splits, warps=columns // 16, packing=packing)


def matrix(
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    size: int = 0,
    shard: Shard = WHOLE,
    packing: str = "none",
) -> Matrix:
    """A matrix, or a rank's rows of one of `size` rows."""
    own, whole = _filled_rows(weight, size, shard)
    padded = _padded(weight, packing, own)
    tiling = tiling_for(whole, depth_of(padded, packing), TILE, packing)
    return tile_matrix(padded, len(weight), tiling, None if bias is None else padded_line(bias, own))


def heads_matrix(
    weight: torch.Tensor, dim: int, bias: torch.Tensor | None, packing: str = "none", heads: int | None = None
) -> Matrix:
    """A matrix [heads * dim, hidden] whose tiles are heads: all of them, or those of a rank."""
    columns = max(TILE, 1 << (dim - 1).bit_length())
    line = weight.shape[1] if packing in SCALE_WORDS else padded_size(weight.shape[1])
    padded = torch.nn.functional.pad(weight, (0, line - weight.shape[1]))
    width = (heads or len(weight) // dim) * columns
    return tile_heads(padded, dim, tiling_for(width, depth_of(padded, packing), columns, packing), bias)


def padded_size(size: int) -> int:
    """The size, rounded up to whole tiles."""
    return -(-size // TILE) * TILE


def _padded(weight: torch.Tensor, packing: str, rows: int) -> torch.Tensor:
    """The matrix with zeros up to these rows, and to whole tiles of columns, as `block_lines` have."""
    columns = weight.shape[1] if packing in SCALE_WORDS else padded_size(weight.shape[1])
    if (rows, columns) == tuple(weight.shape):
        return weight.contiguous()
    return torch.nn.functional.pad(weight, (0, columns - weight.shape[1], 0, rows - weight.shape[0]))


def padded_line(line: torch.Tensor, size: int) -> torch.Tensor:
    """The line with zeros up to this size; or such lines [size, ...]."""
    return torch.cat((line, line.new_zeros((size - len(line), *line.shape[1:]))))
