"""The operands of products: weights in tiles, rows of the residual stream, and split-K scratch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton

from paceline.backends.cuda.kernels.pdl import supports_pdl
from paceline.backends.cuda.kernels.products.packing import depth_of, pack
from paceline.backends.cuda.weights.shard import WHOLE, Shard

MIN_TOKENS = 16  # fewest rows of a tile
MIN_COUNTERS = 512  # more than the work units of fused_layer.py
MAX_TOKENS = 128  # most rows of a tile
MAX_TILES = 4  # most column tiles of a program
MANY_COLUMNS, MANY_WARPS = 256, 8  # of a program with rows as the left operand
MANY_ROW_TILES = 3  # fewest row tiles for rows as the left operand
MANY_DEPTH = 2200  # least depth of a split for rows as the left operand: sums go through memory
MANY_TILES = {4: 448, 2: 264}  # {tiles of a program: fewest column tiles of the matrix}, with full row tiles
SHARED_BYTES = 208 << 10  # shared memory of a Hopper multiprocessor, without what epilogues need
PACKED_PROGRAMS_EACH = {
    "int4": 5,
    "mxfp4": 5,
}  # programs per multiprocessor, where weights are packed; others: 3
FP8_PROGRAMS_EACH = {64: 3, 16: 2}  # {rows of a tile, at least: programs per multiprocessor} of e4m3
MAX_PACKED_TOKENS = 64  # most rows of a tile with packed weights: unpacking needs registers
MAX_STAGES = 6  # pipeline stages
MAX_RESIDENT = 4  # programs per multiprocessor up to which stages are reduced so that all are resident
MULTIPROCESSORS = 132  # of an H100 or H200
FEW_PROGRAMS = 264  # two per multiprocessor
WIDE = 128  # columns of a program that loops over all splits, if there are ENOUGH_PROGRAMS of them
ENOUGH_PROGRAMS = 96  # about one per multiprocessor
SMALL_BYTES = 4 << 20  # a matrix up to this size may be read once per row tile: it stays in L2
MAX_FP8_STAGES = 20  # pipeline stages of steps of 64 bytes
UNPACKED = ("none", "e4m3")  # formats that tensor cores multiply without unpacking


@dataclass(frozen=True)
class Tiling:
    """How a matrix is tiled. Only `splits` affects the bits of the result."""

    columns: int = 64
    step: int = 128  # depth of an iteration
    splits: int = 1
    warps: int = 4
    packing: str = "none"  # or one of kernels/products/packing.py


@dataclass(frozen=True)
class Matrix:
    """Weights in the order in which programs read them, both sides zero-padded to whole tiles."""

    weight: torch.Tensor  # [tiles, steps, columns, step], or words: int32 [tiles, steps, columns, GROUP]
    width: int  # columns of the output, without padding
    tiling: Tiling
    bias: torch.Tensor | None = None  # [padded width]
    scales: torch.Tensor | None = None  # int32 [tiles, steps, words, columns], or float32 [padded width]
    shard: Shard = WHOLE  # the rank's part of a wider matrix that these columns are

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
    """Gate and up as one matrix: one half of each tile's columns is from gate, the other from up."""
    half = tiling.columns // 2
    both = torch.stack((gate.view(-1, half, gate.shape[1]), up.view(-1, half, up.shape[1])), dim=1)
    return tile_matrix(both.view(-1, gate.shape[1]), 2 * len(gate), tiling)


def tile_heads(weight: torch.Tensor, dim: int, tiling: Tiling, bias: torch.Tensor | None = None) -> Matrix:
    """A matrix [heads * dim, padded depth] whose tiles are heads, and half tiles half heads (for RoPE)."""
    lines, columns = spread_heads(weight, dim, tiling.columns), tiling.columns
    return tile_matrix(lines, len(weight), tiling, None if bias is None else spread_heads(bias, dim, columns))


def spread_heads(lines: torch.Tensor, dim: int, columns: int) -> torch.Tensor:
    """Lines [heads * dim, ...] with each half of a head zero-padded to half a tile."""
    heads = len(lines) // dim
    spread = lines.new_zeros((heads, 2, columns // 2, *lines.shape[1:]))
    spread[:, :, : dim // 2] = lines.reshape(heads, 2, dim // 2, *lines.shape[1:])
    return spread.flatten(0, 2)


@dataclass(frozen=True)
class Scratch:
    """Buffers of the split-K reduction, shared by all products, because they run one after the other."""

    partial: torch.Tensor  # float32 [floats] partial sums
    counters: torch.Tensor  # int32 [tiles, or more] arrived programs; zero between products


@dataclass(frozen=True)
class Normed:
    """Rows of the residual stream times the norm's weight; the next product applies the norm's factor."""

    rows: torch.Tensor  # [rows, padded hidden] times the norm's weight, not yet times its factor
    squares: torch.Tensor  # float32 [rows, groups] partial sums of squares of each row
    size: int  # hidden
    eps: float
    fp8: torch.Tensor | None = None  # e4m3 [rows, padded hidden] the same, for matrices in e4m3
    scales: torch.Tensor | None = None  # float32 [rows / 16, groups of 64, 16] their scales: see scale_offset

    @property
    def parts(self) -> list[torch.Tensor | None]:
        """The tensors that a product may read."""
        return [self.rows, self.squares, self.fp8, self.scales]

    def read_by(self, matrix: Matrix) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The rows that a product with this matrix reads, and their scales if they are in e4m3."""
        if matrix.tiling.packing != "e4m3":
            return self.rows, None
        assert self.fp8 is not None
        return self.fp8, self.scales


def scratch_for(matrices: list[Matrix], rows: int, device: torch.device) -> Scratch:
    """Scratch for products of these matrices with at most `rows` rows."""
    split = [matrix for matrix in matrices if matrix.tiling.splits > 1]
    padded = padded_rows(rows)
    floats = max((m.tiling.splits * m.padded_width * padded for m in split), default=1)
    tiles = max((m.tiles * padded // MIN_TOKENS for m in split), default=0)
    return Scratch(
        torch.empty(floats, dtype=torch.float32, device=device),
        torch.zeros(max(tiles, MIN_COUNTERS), dtype=torch.int32, device=device),
    )


def token_tile(rows: int) -> int:
    """The number of rows of a tile."""
    return int(min(MAX_TOKENS, max(MIN_TOKENS, triton.next_power_of_2(rows))))


def padded_rows(rows: int) -> int:
    """The rows of buffers for `rows` rows: kernels read and write whole tiles."""
    tile = token_tile(rows)
    return -(-rows // tile) * tile


def row_tile(matrix: Matrix, rows: int) -> int:
    """The rows of a program: all rows, unless a small matrix would then have few programs."""
    most = MAX_TOKENS if matrix.tiling.packing in UNPACKED else MAX_PACKED_TOKENS
    tokens, programs = min(token_tile(rows), most), matrix.tiles * matrix.tiling.splits
    if matrix.weight.nbytes <= SMALL_BYTES:
        while tokens > MIN_TOKENS and programs * -(-2 * rows // tokens) <= FEW_PROGRAMS:
            tokens //= 2
    return tokens


@dataclass(frozen=True)
class Launch:
    """The grid and compile-time options of a product's kernel. They do not affect the bits."""

    grid: tuple[int, int, int]  # tiles of rows, of columns, splits
    options: dict[str, Any]  # compile-time options of a product's kernel

    @property
    def rows(self) -> int:
        """The rows that the kernel reads and writes: whole tiles, see padded_rows."""
        return self.grid[0] * int(self.options["tokens"])


def launch_for(matrix: Matrix, rows: int, most_tiles: int = 1) -> Launch:
    """The launch of the product of this matrix with `rows` rows; programs have at most `most_tiles` tiles."""
    tiling, tokens, pdl = matrix.tiling, row_tile(matrix, rows), supports_pdl(matrix.weight.device)
    row_tiles = -(-rows // tokens)
    tiles = MANY_COLUMNS // tiling.columns
    rows_first = tiles <= most_tiles and has_many_rows(matrix, tokens, row_tiles, tiles)
    is_split_k = False
    if not rows_first:
        tiles, is_split_k = split_of(matrix, tokens, row_tiles, most_tiles == MAX_TILES)
    options = {
        "splits": tiling.splits,
        "is_split_k": is_split_k,
        "columns": tiling.columns,
        "tokens": tokens,
        "step": tiling.step,
        "packing": tiling.packing,
        "stages": stages_for(matrix, tokens, tiles, rows_first),
        "tiles": tiles,
        "rows_first": rows_first,
        "pdl": pdl,
        "num_warps": MANY_WARPS if rows_first else tiling.warps * tiles,
        "enable_fp_fusion": False,
        "launch_pdl": pdl,
    }
    return Launch((row_tiles, matrix.tiles // tiles, tiling.splits if is_split_k else 1), options)


def has_many_rows(matrix: Matrix, tokens: int, row_tiles: int, tiles: int) -> bool:
    """Whether rows are the left operand, for products that are compute-bound.

    A program has MAX_TOKENS rows, MANY_COLUMNS columns and all splits, which must be deep.
    """
    many = tokens == MAX_TOKENS and row_tiles >= MANY_ROW_TILES and matrix.tiling.packing == "none"
    many &= matrix.tiling.splits == 1 or matrix.depth >= MANY_DEPTH * matrix.tiling.splits
    return many and matrix.tiles % tiles == 0 and matrix.tiles // tiles * row_tiles >= ENOUGH_PROGRAMS


def split_of(matrix: Matrix, tokens: int, row_tiles: int, may_join: bool) -> tuple[int, bool]:
    """The number of column tiles of a program, and whether each split is a separate program (split-K).

    With many rows a program has several tiles, so that rows are read less often. If there are enough
    programs, each loops over all splits instead.
    """
    tiling, tiles = matrix.tiling, matrix.tiles
    if tokens < MAX_TOKENS or tiling.packing != "none" or (tiling.splits > 1 and row_tiles == 1):
        return 1, tiling.splits > 1
    if tiling.splits == 1:
        many = MANY_TILES.items() if may_join else ()
        return next((count for count, least in many if tiles >= least and tiles % count == 0), 1), False
    wide = max(1, WIDE // tiling.columns) if may_join else 1
    wide = wide if tiles % wide == 0 else 1

    def turns(joined: int) -> int:
        """Time of programs with this many tiles per split, in units of the time of one tile."""
        programs = tiles // joined * row_tiles * tiling.splits
        return -(-programs // MULTIPROCESSORS) * joined

    if wide * tiling.columns == WIDE and tiles // wide * row_tiles >= ENOUGH_PROGRAMS:
        return wide, False
    return (wide if turns(wide) <= turns(1) else 1), True


def stages_for(
    matrix: Matrix, tokens: int, tiles: int = 1, rows_first: bool = False, programs: int = 0
) -> int:
    """The number of pipeline stages: as many as fit in shared memory with `programs_each` programs.

    `programs`: with this many programs in the grid, stages are reduced until all are resident at once. Short
    tiles keep their stages, so that all of their loads are in flight.
    """
    each, needed = programs_each(matrix, tokens), -(-programs // MULTIPROCESSORS)
    least = 2 if matrix.tiling.packing in UNPACKED else 3  # stages of packed tiles take more than `size`
    is_long = matrix.weight.shape[1] > MAX_STAGES  # steps
    each = max(least, needed) if 0 < needed <= MAX_RESIDENT and is_long else each
    is_short = matrix.tiling.packing == "e4m3"
    size = tiles * matrix.weight[0, 0].nbytes + tokens * matrix.tiling.step * (1 if is_short else 2)
    if tiles == MAX_TILES or rows_first or is_short:  # iterations have a depth of 64
        size = size * 64 // matrix.tiling.step
    most = MAX_FP8_STAGES if is_short else MAX_STAGES
    return max(2, min(most, shared_bytes(matrix.weight.device) // each // size))


def programs_each(matrix: Matrix, tokens: int) -> int:
    """How many programs of `tokens` rows to make room for on a multiprocessor.

    Not more than needed: under PDL the programs of the next kernel start wherever there is room, and would
    crowd on some multiprocessors. Unpacked weights: two, or one with many rows or split-K, because then there
    are fewer programs than multiprocessors.
    """
    if matrix.tiling.packing == "none":
        return 1 if matrix.tiling.splits > 1 or tokens == MAX_TOKENS else 2
    if matrix.tiling.packing == "e4m3":
        return next(programs for least, programs in FP8_PROGRAMS_EACH.items() if tokens >= least)
    return PACKED_PROGRAMS_EACH.get(matrix.tiling.packing, 3)


def shared_bytes(device: torch.device) -> int:
    """The shared memory that programs of a multiprocessor may use; Hopper has more than others."""
    if device.type != "cuda":
        return SHARED_BYTES
    properties: Any = torch.cuda.get_device_properties(device)  # torch's types lack this one
    return min(SHARED_BYTES, int(properties.shared_memory_per_block_optin))
