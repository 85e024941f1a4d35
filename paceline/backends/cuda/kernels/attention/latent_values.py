"""Latent attention with few rows: merges split-KV partials and multiplies by W_uv in one kernel.

With few rows, attention has a program for each block of 64 positions. If its last program merged all partials
alone, that would take as long as the blocks, on a single multiprocessor. Here every head has several
programs. Each merges all partials of its head, in the usual order, and multiplies some columns of W_uv.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from paceline.backends.cuda.kernels.attention.latent import HeadMatrices
from paceline.backends.cuda.kernels.attention.paged_attention import (
    AttentionScratch,
    are_few,
    latent_groups,
    max_partials,
    num_kv_splits,
    tile_height,
)
from paceline.backends.cuda.kernels.attention.row_tables import RowTables
from paceline.backends.cuda.kernels.attention.scoring import Scoring
from paceline.backends.cuda.kernels.attention.softmax import BLOCK, MERGE_FAN_IN, merge_partials
from paceline.backends.cuda.kernels.pdl import pdl_launch, pdl_wait, supports_pdl
from paceline.backends.cuda.kernels.products.matrix import MIN_TOKENS

LATE_ROWS = 8  # most rows whose partials are merged here
COLUMNS = 32  # most columns of a program: it loads their weights while it waits for attention
WARPS = 4
_BLOCK, _MERGE_FAN_IN = tl.constexpr(BLOCK), tl.constexpr(MERGE_FAN_IN)


@dataclass(frozen=True)
class Partials:
    """Unmerged partials of attention, in AttentionScratch, for the next kernel."""

    acc: torch.Tensor
    stats: torch.Tensor
    most: int  # most partials of a row and head
    kv_splits: int
    tile_rows: torch.Tensor  # [tiles] the row of each tile
    tile_counts: torch.Tensor  # [tiles] 0: the tile is padding, and its row has none


def late_partials(
    tables: RowTables, heads: int, scratch: AttentionScratch, scoring: Scoring, earliest: int = 0
) -> Partials | None:
    """The partials that `attend` may leave unmerged; None unless rows are few, over latents, one per tile."""
    rows, groups = len(tables.positions), latent_groups(heads)
    is_alone = tile_height(heads, groups) == 1 and tables.prefill is None and tables.visible is None
    is_alone = is_alone and tables.shared_prefix is None and earliest < BLOCK
    if not scoring.rope or not is_alone or rows > LATE_ROWS:
        return None
    tiles, blocks = len(tables.tile_rows), scratch.blocks
    most, kv_splits = max_partials(tiles, groups, blocks), num_kv_splits(tiles, groups, blocks)
    given = scratch.partial_acc, scratch.partial_stats, most, kv_splits
    return Partials(*given, tables.tile_rows, tables.tile_counts)


@triton.jit(do_not_specialize=["row_count", "tile_count"])  # type: ignore[untyped-decorator]
def _merged_values_kernel(  # type: ignore[no-untyped-def]
    partial_acc_at,
    partial_stats_at,
    positions_at,
    tile_rows_at,
    tile_counts_at,
    weight_at,
    output_at,
    row_count,
    tile_count,
    max_partials,
    kv_splits,
    output_stride,
    output_head_stride,
    width,
    heads: tl.constexpr,
    rank: tl.constexpr,
    padded_width: tl.constexpr,
    padded_depth: tl.constexpr,
    columns: tl.constexpr,
    rows: tl.constexpr,  # row_count, rounded up to a power of two
    tiles: tl.constexpr,  # tile_count, likewise
    tokens: tl.constexpr,
    pdl: tl.constexpr,
) -> None:
    pdl_launch(pdl)
    head, column = tl.program_id(0), tl.program_id(1) * columns + tl.arange(0, columns)
    line = (head * padded_width + column).to(tl.int64)[:, None] * padded_depth
    weights = tl.load(weight_at + line + tl.arange(0, padded_depth)[None, :])  # constant in a pass
    row = tl.arange(0, rows)
    real = row < row_count
    position = tl.load(positions_at + row, mask=real, other=0)  # tables were written before the pass
    tile = tl.arange(0, tiles)
    filled = tl.load(tile_counts_at + tile, mask=tile < tile_count, other=0) > 0
    of_tile = tl.load(tile_rows_at + tile, mask=tile < tile_count, other=0)
    has_partials = tl.max(((of_tile[None, :] == row[:, None]) & filled[None, :]).to(tl.int32), 1) > 0
    pdl_wait(pdl)
    blocks = position // _BLOCK + 1
    each = tl.where(are_few(blocks, 0, kv_splits), 1, _MERGE_FAN_IN)
    ends = (blocks + each - 1) // each
    lines, partials_at = (row * heads + head) * max_partials, (partial_acc_at, partial_stats_at)
    _, row_sum, acc = merge_partials(
        lines, 0, tl.max(ends, 0), ends, partials_at, has_partials, rank, padded_depth, rows, _MERGE_FAN_IN
    )
    mixed = (acc / tl.where(has_partials, row_sum, 1.0)[:, None]).to(weights.dtype)
    each_of: tl.constexpr = tokens // rows  # rows are repeated to fill the matrix instruction
    wide = tl.broadcast_to(mixed[:, None, :], (rows, each_of, padded_depth))
    total = tl.dot(weights, tl.trans(tl.reshape(wide, (tokens, padded_depth))))
    token = tl.arange(0, tokens)
    own = token // each_of
    to = output_at + own[None, :] * output_stride + head * output_head_stride + column[:, None]
    mask = (column < width)[:, None] & ((token % each_of == 0) & (own < row_count))[None, :]
    tl.store(to, total.to(output_at.dtype.element_ty), mask=mask)


def can_merge(matrices: HeadMatrices) -> bool:
    """Whether `merged_values` supports these matrices: one iteration over the depth, and few columns.

    Programs have as many columns as those of `head_products`, so the matrix instruction, and its bits, are
    the same.
    """
    depth = matrices.weight.shape[2]
    return depth & (depth - 1) == 0 and matrices.columns <= COLUMNS


def merged_values(
    partials: Partials, matrices: HeadMatrices, output: torch.Tensor, positions: torch.Tensor
) -> None:
    """Write W_uv times every head's attended latents to `output` [rows, heads, at least width].

    Padding rows, which have no partials, get zeros.
    """
    (heads, padded_width, padded_depth), tiles = matrices.weight.shape, len(partials.tile_rows)
    rows, pdl = len(positions), supports_pdl(output.device)
    _merged_values_kernel[(heads, padded_width // matrices.columns)](
        partials.acc,
        partials.stats,
        positions,
        partials.tile_rows,
        partials.tile_counts,
        matrices.weight,
        output,
        rows,
        tiles,
        partials.most,
        partials.kv_splits,
        output.stride(0),
        output.stride(1),
        matrices.width,
        heads,
        matrices.depth,
        padded_width,
        padded_depth,
        matrices.columns,
        triton.next_power_of_2(rows),
        triton.next_power_of_2(tiles),
        MIN_TOKENS,
        pdl,
        num_warps=WARPS,
        enable_fp_fusion=False,
        launch_pdl=pdl,
    )
