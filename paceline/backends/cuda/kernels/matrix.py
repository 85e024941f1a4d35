"""What products read and write: weights in tiles, rows of the residual stream, and scratch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton

from paceline.backends.cuda.kernels.launching import overlaps
from paceline.backends.cuda.kernels.packing import depth_of, pack

LEAST_TOKENS = 16  # rows of a tile
LEAST_COUNTERS = 512  # more than there are parts of products in between.py
MOST_TOKENS = 128
MANY_TILES = {4: 448, 2: 264}  # of columns: then programs with the most rows take so many
SHARED_BYTES = 208 << 10  # of a multiprocessor of Hopper, less what the ends of programs need
PACKED_TOGETHER = 3  # programs of a multiprocessor, where weights are packed
MOST_PACKED_TOKENS = 64  # registers are needed to unpack
MOST_STAGES = 6
FEW_PROGRAMS = 264  # two for each multiprocessor
WIDE = 128  # columns of programs that have all splits, where these are enough:
ENOUGH_PROGRAMS = 96  # most multiprocessors have one then
SMALL_BYTES = 4 << 20  # of a matrix that may be read again for every tile of rows: it is in the cache
MOST_SHORT_STAGES = 12  # of steps of 64 numbers of 8 bits
UNPACKED = ("none", "e4m3")  # what the matrix unit takes as it is


@dataclass(frozen=True)
class Tiling:
    """How the work on one matrix is cut. `splits` is part of the result's bits, the rest is not."""

    columns: int = 64
    step: int = 128  # of the depth at a time
    splits: int = 1
    warps: int = 4
    packing: str = "none"  # or one of kernels/packing.py


@dataclass(frozen=True)
class Matrix:
    """Weights in the order in which programs read them, both sides padded with zeros to whole tiles."""

    weight: torch.Tensor  # [tiles, steps, columns, step], or words: int32 [tiles, steps, columns, GROUP]
    width: int  # columns of the output, without padding
    tiling: Tiling
    bias: torch.Tensor | None = None  # [padded width]
    scales: torch.Tensor | None = None  # int32 [tiles, steps, words, columns], or float32 [padded width]

    @property
    def tiles(self) -> int:
        return self.weight.shape[0]

    @property
    def depth(self) -> int:
        return self.weight.shape[1] * self.tiling.step

    @property
    def padded_width(self) -> int:
        return self.tiles * self.tiling.columns


def tile_matrix(weight: torch.Tensor, width: int, tiling: Tiling, bias: torch.Tensor | None = None) -> Matrix:
    """A matrix [padded width, padded depth], or its `block_lines`, in the order in which programs read it."""
    tiles, columns, scales = len(weight) // tiling.columns, tiling.columns, None
    steps = depth_of(weight, tiling.packing) // tiling.step
    if tiling.packing != "none":
        weight, scales = pack(weight, tiling.packing)
        if scales.ndim > 1:
            scales = scales.view(tiles, columns, steps, -1).permute(0, 2, 3, 1).contiguous()
    tiled = weight.view(tiles, columns, steps, -1).transpose(1, 2).contiguous()
    return Matrix(tiled, width, tiling, bias, scales)


def tile_pair(gate: torch.Tensor, up: torch.Tensor, tiling: Tiling) -> Matrix:
    """Two matrices of one padded shape as one: half of a tile's columns are of the one, half of the other."""
    half = tiling.columns // 2
    both = torch.stack((gate.view(-1, half, gate.shape[1]), up.view(-1, half, up.shape[1])), dim=1)
    return tile_matrix(both.view(-1, gate.shape[1]), 2 * len(gate), tiling)


def tile_heads(weight: torch.Tensor, dim: int, tiling: Tiling, bias: torch.Tensor | None = None) -> Matrix:
    """A matrix [heads * dim, padded depth] in which a tile is a head, and half of it is half of the head."""
    heads, half = len(weight) // dim, tiling.columns // 2

    def spread(lines: torch.Tensor) -> torch.Tensor:
        """[heads * dim, ...] with the halves of heads filled up with zeros to those of tiles."""
        spread = lines.new_zeros((heads, 2, half, *lines.shape[1:]))
        spread[:, :, : dim // 2] = lines.view(heads, 2, dim // 2, *lines.shape[1:])
        return spread.flatten(0, 2)

    return tile_matrix(spread(weight), len(weight), tiling, None if bias is None else spread(bias))


@dataclass(frozen=True)
class Scratch:
    """Where the splits of a product meet. One is enough for all products, which run one after the other."""

    partial: torch.Tensor  # float32 [floats]
    counters: torch.Tensor  # int32 [tiles, or more] zero between products


@dataclass(frozen=True)
class Normed:
    """Rows of the residual stream as the next product reads them."""

    rows: (
        torch.Tensor
    )  # [rows, padded hidden] times the norm's weight, not yet divided by the root mean square
    squares: torch.Tensor  # float32 [rows, groups] whose sum is the sum of a row's squares
    size: int  # hidden
    eps: float
    rounded: torch.Tensor | None = None  # e4m3 [rows, padded hidden] the same, for matrices packed so
    scales: torch.Tensor | None = None  # float32 [rows / 16, groups of 64, 16] of these: scale_place

    def read_by(self, matrix: Matrix) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The rows that a product with this matrix reads, and their scales if they have such."""
        if matrix.tiling.packing != "e4m3":
            return self.rows, None
        assert self.rounded is not None
        return self.rounded, self.scales


def scratch_for(matrices: list[Matrix], rows: int, device: torch.device) -> Scratch:
    """Scratch for products of these matrices with at most so many rows."""
    split = [matrix for matrix in matrices if matrix.tiling.splits > 1]
    padded = padded_rows(rows)
    floats = max((m.tiling.splits * m.padded_width * padded for m in split), default=1)
    tiles = max((m.tiles * padded // LEAST_TOKENS for m in split), default=0)
    return Scratch(
        torch.empty(floats, dtype=torch.float32, device=device),
        torch.zeros(max(tiles, LEAST_COUNTERS), dtype=torch.int32, device=device),
    )


def token_tile(rows: int) -> int:
    """How many rows a tile has."""
    return int(min(MOST_TOKENS, max(LEAST_TOKENS, triton.next_power_of_2(rows))))


def padded_rows(rows: int) -> int:
    """Rows that buffers of so many rows must have: kernels read and write whole tiles."""
    tile = token_tile(rows)
    return -(-rows // tile) * tile


def row_tile(matrix: Matrix, rows: int) -> int:
    """How many rows a program of this matrix has: as many as there are, unless programs are few then."""
    most = MOST_TOKENS if matrix.tiling.packing in UNPACKED else MOST_PACKED_TOKENS
    tokens, programs = min(token_tile(rows), most), matrix.tiles * matrix.tiling.splits
    if matrix.weight.nbytes <= SMALL_BYTES:
        while tokens > LEAST_TOKENS and programs * -(-2 * rows // tokens) <= FEW_PROGRAMS:
            tokens //= 2
    return tokens


@dataclass(frozen=True)
class Cut:
    """How programs share a product: no part of the result's bits."""

    grid: tuple[int, int, int]  # tiles of rows, of columns, splits
    options: dict[str, Any]  # what every kernel of products is told, and how it is compiled


def cut_for(matrix: Matrix, rows: int, wide: bool = False) -> Cut:
    """How the product of this matrix with so many rows is cut; if `wide`, programs may have several tiles."""
    tiling, tokens, overlap = matrix.tiling, row_tile(matrix, rows), overlaps(matrix.weight.device)
    row_tiles = -(-rows // tokens)
    tiles = tiles_at_once(matrix, tokens, row_tiles) if wide else 1
    apart = tiling.splits > 1 and not has_all_splits(matrix, tokens, row_tiles, tiles)
    options = {
        "splits": tiling.splits,
        "apart": apart,
        "columns": tiling.columns,
        "tokens": tokens,
        "step": tiling.step,
        "packing": tiling.packing,
        "stages": stages_for(matrix, tokens, tiles),
        "tiles": tiles,
        "overlap": overlap,
        "num_warps": tiling.warps * tiles,
        "enable_fp_fusion": False,
        "launch_pdl": overlap,
    }
    return Cut((row_tiles, matrix.tiles // tiles, tiling.splits if apart else 1), options)


def has_all_splits(matrix: Matrix, tokens: int, row_tiles: int, tiles: int) -> bool:
    """Whether a program of so many tiles has all splits of the depth: rows make enough programs then."""
    tiling = matrix.tiling
    many = tokens == MOST_TOKENS and row_tiles > 1 and tiling.packing == "none"
    is_wide = tiles * tiling.columns == WIDE
    return many and is_wide and matrix.tiles // tiles * row_tiles >= ENOUGH_PROGRAMS


def tiles_at_once(matrix: Matrix, tokens: int, row_tiles: int) -> int:
    """How many tiles of columns a program has: several where rows are many, or they are read too often."""
    tiling, tiles = matrix.tiling, matrix.tiles
    if tokens < MOST_TOKENS or tiling.packing != "none":
        return 1
    if tiling.splits > 1:
        both = max(1, WIDE // tiling.columns)
        return both if tiles % both == 0 and has_all_splits(matrix, tokens, row_tiles, both) else 1
    return next((count for count, many in MANY_TILES.items() if tiles >= many and tiles % count == 0), 1)


def stages_for(matrix: Matrix, tokens: int, tiles: int = 1) -> int:
    """How many steps are in shared memory at once: as many as two programs of a multiprocessor have room for,
    or one where rows are many or the depth is split: there are fewer programs than multiprocessors then."""
    is_short = matrix.tiling.packing == "e4m3"
    size = tiles * matrix.weight[0, 0].nbytes + tokens * matrix.tiling.step * (1 if is_short else 2)
    if tiles == 4:  # there is room for two steps, which is too little: programs read 64 of the depth at once
        size = size * 64 // matrix.tiling.step
    alone = matrix.tiling.splits > 1 or tokens == MOST_TOKENS
    together = PACKED_TOGETHER if matrix.tiling.packing != "none" else 1 if alone else 2
    most = MOST_SHORT_STAGES if is_short else MOST_STAGES
    return max(2, min(most, shared_bytes(matrix.weight.device) // together // size))


def shared_bytes(device: torch.device) -> int:
    """What programs of a multiprocessor may take of its shared memory; Hopper has more than others."""
    if device.type != "cuda":
        return SHARED_BYTES
    properties: Any = torch.cuda.get_device_properties(device)  # torch's types lack this one
    return min(SHARED_BYTES, int(properties.shared_memory_per_block_optin))
