"""Attention of rows over paged keys and values: decodes, draft trees and prefill chunks in one kernel.

A program has a tile of rows of one request and one key head; the query heads that share it are its lanes. It
walks over positions, cut by position alone, so how a row is summed depends on its own position and on nothing
else in the pass:

    block      64 positions: one softmax, not yet divided by its sum
    stretch    8 blocks, merged in order
    group      8 stretches, merged in order; groups are merged in order, too

Short contexts are shared out by blocks, so that many programs have something to do, long ones by stretches,
so that there is little to merge. Who comes last merges what the others have left in memory. Stretches that
many rows see alike may have been summed before, by kernels/common.py: then programs have the rest.

A draft's row sees its path from the root, and a path may lie scattered among the rows of its tree:

    position     0 ... context | root  a   b           row b descends from a, which is not the row before it
    KV index     0 ... context | 0     2   5           beyond the context
                 straight ------------>|   path: 2, 5

Up to `straight` a row's positions are its KV indices; behind, `paths` tells them. A block that is straight
for all rows of a tile is read once; of others each row reads its own keys, in the order of positions. So a
drafted token has the bits that it has when it is decoded after its path was committed.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from paceline.backends.cuda.kernels.common import CommonRows, attend_common
from paceline.backends.cuda.kernels.launching import let_next_start, overlaps, wait
from paceline.backends.cuda.kernels.rounding import rounding_scales, scale_place
from paceline.backends.cuda.kernels.softmax import BLOCK as BLOCK
from paceline.backends.cuda.kernels.softmax import MERGED as MERGED
from paceline.backends.cuda.kernels.softmax import MOST_PATH as MOST_PATH
from paceline.backends.cuda.kernels.softmax import (
    crooked_block,
    gather,
    leave,
    merge,
    nothing,
    places_of,
    prefetch_lines,
    rows_of_lanes,
    straight_block,
    visible_positions,
)

LANES = 16  # rows times query heads of a tile, at least
WARPS = 4  # part of the result's bits, as BLOCK and MERGED are
STAGES = 5  # of the loop over blocks: two for pages, as the places of keys follow from them
PROGRAMS = 264  # worth having at once
MOST_TAKERS = MERGED * MERGED  # programs that share a tile and a head
_BLOCK, _MERGED = tl.constexpr(BLOCK), tl.constexpr(MERGED)


@dataclass(frozen=True)
class EvenRows:
    """What is known ahead of a pass in which all requests have as many rows, request after request."""

    tiles: int  # of each request
    span: int  # KV indices of a request that the step computes, at most
    settled: bool  # what a request's rows read before their first one was there before the step


@dataclass(frozen=True)
class RowTables:
    """Where each row of a pass stands and what it sees. All int32, on the device."""

    positions: torch.Tensor  # [rows]
    places: torch.Tensor  # [rows] where its key and value go; -1: nowhere, the row is padding
    straight: torch.Tensor  # [rows] positions below it lie at their own index
    paths: torch.Tensor | None  # [rows, MOST_PATH] KV indices from `straight` on; None: all are straight
    tile_rows: torch.Tensor  # [tiles] the first row of each tile
    tile_counts: torch.Tensor  # [tiles] how many rows it has; 0: the tile is padding
    tile_pages: torch.Tensor  # [tiles] where the page table of its request begins in `pages`
    pages: torch.Tensor  # [pages of all requests] page numbers
    even: EvenRows | None = None  # None: requests have different numbers of rows
    common: CommonRows | None = None  # what many rows see alike, if it is read once for all of them


@dataclass(frozen=True)
class AttentionScratch:
    """Where parts of a softmax meet. One is enough for all layers, which run one after the other."""

    mixed: torch.Tensor  # float32 [floats] a line of head_dim for each row, head and part
    totals: torch.Tensor  # float32 [floats] for each of them the largest score and the sum of weights
    counters: torch.Tensor  # int32 [tiles * key heads] zero between passes
    blocks: int  # of the longest context


def tile_height(heads: int, kv_heads: int) -> int:
    """How many rows of a request a tile has."""
    return rows_of_lanes(LANES, heads, kv_heads)


def attention_scratch(
    rows: int, heads: int, kv_heads: int, head_dim: int, longest: int, device: torch.device
) -> AttentionScratch:
    """Scratch for passes of at most so many rows over contexts up to `longest`."""
    blocks = -(-longest // BLOCK)
    height = tile_height(heads, kv_heads)
    # the fewer tiles there are, the more programs share each, and every one leaves a part
    lines = max(count * heads * _parts(-(-count // height), kv_heads, blocks) for count in range(1, rows + 1))
    return AttentionScratch(
        torch.empty(lines * head_dim, dtype=torch.float32, device=device),
        torch.empty(lines * 2, dtype=torch.float32, device=device),
        torch.zeros(rows * kv_heads, dtype=torch.int32, device=device),
        blocks,
    )


def _takers(tiles: int, kv_heads: int, blocks: int) -> int:
    """How many programs share a tile and a head."""
    return max(1, min(PROGRAMS // (tiles * kv_heads), MOST_TAKERS, blocks))


def _parts(tiles: int, kv_heads: int, blocks: int) -> int:
    """How many parts of one softmax there are at most: blocks of few takers, or stretches."""
    return max(_takers(tiles, kv_heads, blocks), -(-blocks // MERGED))


def score_scale(dim: int) -> float:
    """What scores are multiplied by: weights are powers of two."""
    return float(dim**-0.5 * 1.4426950408889634)


@triton.jit
def _share(position, straight, newest, count, window, takers, skipped):  # type: ignore[no-untyped-def]
    """What programs of a tile sum before they meet: `each` blocks, one or a stretch, from which to which.

    Then the number of blocks, and the first position that is not where its index says, for any row. So many
    stretches were `skipped`: their parts are there.
    """
    crooked = tl.min(tl.where(straight > position, 1 << 30, straight), 0)
    lowest = tl.maximum(tl.min(position, 0) - window + 1, 0) if window > 0 else 0
    blocks, oldest = tl.where(count > 0, newest // _BLOCK + 1, 0), lowest // _BLOCK
    in_group: tl.constexpr = _MERGED * _MERGED
    few = (blocks - oldest <= takers) & (oldest // in_group == (blocks - 1) // in_group) & (skipped == 0)
    each = tl.where(few, 1, _MERGED)
    return each, tl.maximum(oldest // each, skipped), (blocks + each - 1) // each, blocks, crooked


@triton.jit  # type: ignore[untyped-decorator]
def _stretch(  # type: ignore[no-untyped-def]
    query,
    span,
    tile,
    sight,
    scale,
    tables,
    pool,
    dim: tl.constexpr,
    height: tl.constexpr,
    page_size: tl.constexpr,
    stages: tl.constexpr,
    crooks: tl.constexpr,
):
    """Blocks of a span, merged in order: those that are straight, then those that are not."""
    begin, end = span
    whole = nothing(query.shape[0], query.shape[1])
    newest = tl.max(sight[0], 0)
    bend = tl.maximum(tl.minimum(end, tile[3] // _BLOCK), begin)  # where the first crooked one begins
    for index in tl.range(begin, bend, num_stages=stages):
        column = index * _BLOCK + tl.arange(0, _BLOCK)
        seen, visible = column <= newest, visible_positions(column, sight)
        place = places_of(column, seen, pool[2], page_size)
        whole = merge(whole, straight_block(query, place, seen, visible, scale, pool, dim))
    if crooks:
        for index in tl.range(bend, end, num_stages=1):
            column = index * _BLOCK + tl.arange(0, _BLOCK)
            visible = visible_positions(column, sight)
            other = crooked_block(query, column, tile, visible, scale, tables, pool, dim, height, page_size)
            whole = merge(whole, other)
    return whole


@triton.jit  # type: ignore[untyped-decorator]
def _meet(whole, meeting, lines, left, used, dim: tl.constexpr):  # type: ignore[no-untyped-def]
    """Whether this program is its tile's last to get here, and if it is, all that was left, merged."""
    counter_at, oldest, begin, end, takers = meeting
    last = end - oldest == 1
    if end - oldest > 1:
        tl.debug_barrier()
        last = tl.atomic_add(counter_at, 1, sem="acq_rel") == tl.minimum(takers, end - begin) - 1
        if last:
            _, _, mixed = whole
            whole = gather(lines, oldest, end, left, used, dim, mixed.shape[1], mixed.shape[0], _MERGED)
            tl.store(counter_at, 0)
    return last, whole


@triton.jit  # type: ignore[untyped-decorator]
def _rounded(mixed, row, head, used, scales_at, heads: tl.constexpr, dim: tl.constexpr):  # type: ignore[no-untyped-def]
    """What is to be written of heads [lanes, dim] as e4m3 numbers; their scales are written here."""
    groups: tl.constexpr = dim // 64
    parts = tl.reshape(mixed, (mixed.shape[0], groups, 64))
    scales, inverse = rounding_scales(tl.max(tl.abs(parts), 2))
    group = head[:, None] * groups + tl.arange(0, groups)[None, :]
    place = scale_place(row[:, None], group, heads * groups)
    tl.store(scales_at + place, scales, mask=used[:, None])
    return tl.reshape(parts * inverse[:, :, None], mixed.shape)


@triton.jit  # type: ignore[untyped-decorator]
def _write(  # type: ignore[no-untyped-def]
    whole, row, head, used, output, heads: tl.constexpr, dim: tl.constexpr, rounds: tl.constexpr
) -> None:
    """Write what lanes have mixed, which may be rounded."""
    output_at, scales_at, stride = output
    _, total, mixed = whole
    part = tl.arange(0, mixed.shape[1])
    places = row.to(tl.int64)[:, None] * stride + head[:, None] * dim + part[None, :]
    mixed = mixed / total[:, None]
    if rounds:
        mixed = _rounded(mixed, row, head, used, scales_at, heads, dim)
    mask = used[:, None] & (part < dim)[None, :]
    tl.store(output_at + places, mixed.to(output_at.dtype.element_ty), mask=mask)


@triton.jit  # type: ignore[untyped-decorator]
def _attention_kernel(  # type: ignore[no-untyped-def]
    query_at,
    keys_at,
    values_at,
    output_at,
    output_scales_at,
    positions_at,
    straight_at,
    paths_at,
    tile_rows_at,
    tile_counts_at,
    tile_pages_at,
    pages_at,
    skipped_at,
    mixed_at,
    totals_at,
    counters_at,
    most_parts,
    output_stride,
    window,  # 0: no window
    earliest,
    scale,
    heads: tl.constexpr,
    kv_heads: tl.constexpr,
    dim: tl.constexpr,
    wide: tl.constexpr,  # dim, rounded up to a power of two
    height: tl.constexpr,  # rows of a tile
    lanes: tl.constexpr,
    page_size: tl.constexpr,
    stages: tl.constexpr,
    crooks: tl.constexpr,  # whether a row's path may lie scattered
    rounds: tl.constexpr,
    skips: tl.constexpr,  # whether stretches may have been summed before
    overlap: tl.constexpr,
) -> None:
    number, head, taker, takers = tl.program_id(0), tl.program_id(1), tl.program_id(2), tl.num_programs(2)
    let_next_start(overlap)
    # tables were written before this pass began: no kernel of it has to be waited for
    first, count = tl.load(tile_rows_at + number), tl.load(tile_counts_at + number)
    lane, part = tl.arange(0, lanes), tl.arange(0, wide)
    in_tile, in_group = lane // (lanes // height), lane % (lanes // height)
    group: tl.constexpr = heads // kv_heads
    query_head, used = head * group + in_group, (in_tile < count) & (in_group < group)
    row = first + tl.minimum(in_tile, tl.maximum(count - 1, 0))
    position, straight = tl.load(positions_at + row), tl.load(straight_at + row)
    newest, sight = tl.max(position, 0), (position, window, earliest)
    skipped = tl.load(skipped_at + number) if skips else 0
    each, begin, end, blocks, crooked = _share(position, straight, newest, count, window, takers, skipped)
    oldest = tl.where(skipped > 0, 0, begin)  # of the parts that are to be merged
    pages_at += tl.load(tile_pages_at + number)
    pool = (keys_at + head * dim, values_at + head * dim, pages_at, kv_heads * dim)
    if begin + taker >= end:
        wait(overlap)  # nobody may end before what came before, not even where all rows are padding
        return
    column = (begin + taker) * each * _BLOCK + tl.arange(0, _BLOCK)
    seen = (column <= newest) & (column < crooked)
    place = places_of(column, seen, pages_at, page_size)
    prefetch_lines(pool, place, wide, overlap)  # of earlier passes
    wait(overlap)
    mask, line = used[:, None] & (part < dim)[None, :], row * heads + query_head
    query = tl.load(query_at + line[:, None] * dim + part[None, :], mask=mask, other=0.0)
    left, tables = (mixed_at, totals_at), (positions_at, straight_at, paths_at)
    whole, tile = nothing(lanes, wide), (first, count, in_tile, crooked)
    if (each == 1) & ((begin + taker + 1) * _BLOCK <= crooked):
        visible = visible_positions(column, sight)
        whole = straight_block(query, place, seen, visible, scale, pool, dim)
        if end - oldest > 1:
            leave(whole, (line * most_parts + begin + taker).to(tl.int64), left, used, dim)
    else:
        for own in range(begin + taker, end, takers):
            span = (own * each, tl.minimum((own + 1) * each, blocks))
            whole = _stretch(
                query, span, tile, sight, scale, tables, pool, dim, height, page_size, stages, crooks
            )
            if end - oldest > 1:
                leave(whole, (line * most_parts + own).to(tl.int64), left, used, dim)
    meeting = (counters_at + number * kv_heads + head, oldest, begin, end, takers)
    last, whole = _meet(whole, meeting, line * most_parts, left, used, dim)
    if last:
        _write(whole, row, query_head, used, (output_at, output_scales_at, output_stride), heads, dim, rounds)


def leave_common(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    tables: RowTables,
    page_size: int,
    scratch: AttentionScratch,
    parts: int,
    earliest: int,
) -> None:
    """Sum what many rows see alike, as the first of so many parts of each row."""
    assert tables.common is not None
    scale, left = score_scale(query.shape[2]), (scratch.mixed, scratch.totals, parts)
    attend_common(query, keys, values, tables.common, tables.pages, page_size, left, scale, earliest)


def attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    tables: RowTables,
    window: int | None,
    page_size: int,
    output: torch.Tensor,
    scratch: AttentionScratch,
    earliest: int = 0,
    scales: torch.Tensor | None = None,
) -> None:
    """Write values mixed by softmax(query · key) to `output` [rows, at least heads * head_dim].

    `query` is [rows, heads, head_dim], `keys` and `values` are one layer's [places, key heads, head_dim].
    Positions before `earliest` hold nothing and are seen by no row. If there are `scales`, as of Normed, the
    output is rounded to e4m3; heads have whole groups of 64 then.
    """
    _, heads, dim = query.shape
    kv_heads = keys.shape[1]
    tiles = len(tables.tile_rows)
    height, parts = tile_height(heads, kv_heads), _parts(tiles, kv_heads, scratch.blocks)
    overlap = overlaps(query.device)
    if tables.common is not None:
        assert window is None, "rows with windows do not see alike"
        leave_common(query, keys, values, tables, page_size, scratch, parts, earliest)
    _attention_kernel[(tiles, kv_heads, _takers(tiles, kv_heads, scratch.blocks))](
        query,
        keys,
        values,
        output,
        scales,
        tables.positions,
        tables.straight,
        tables.paths,
        tables.tile_rows,
        tables.tile_counts,
        tables.tile_pages,
        tables.pages,
        None if tables.common is None else tables.common.skipped,
        scratch.mixed,
        scratch.totals,
        scratch.counters,
        parts,
        output.stride(0),
        window or 0,
        earliest,
        score_scale(dim),
        heads,
        kv_heads,
        dim,
        max(16, triton.next_power_of_2(dim)),
        height,
        height * triton.next_power_of_2(heads // kv_heads),
        page_size,
        STAGES,
        tables.paths is not None,
        scales is not None,
        tables.common is not None,
        overlap,
        num_warps=WARPS,
        enable_fp_fusion=False,
        launch_pdl=overlap,
    )
