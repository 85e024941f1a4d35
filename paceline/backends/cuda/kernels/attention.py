"""Attention of rows over paged keys and values: decodes, draft trees and prefill chunks in one kernel.

A program has a tile of rows of one request and one key head; the query heads that share it are its lanes. It
walks over positions in blocks, and over segments of blocks that other programs may take. Segments are cut by
position, so how a row is summed depends on its own position and on nothing else in the pass.

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

from paceline.backends.cuda.kernels.launching import follow, overlaps, prefetch

BLOCK = 64  # positions looked at together
SEGMENT = 64  # positions summed by one program before they meet those of others
MOST_PATH = 64  # positions of a path that are not straight
LANES = 16  # rows times query heads of a tile, at least
WARPS = 2  # part of the result's bits, as BLOCK and SEGMENT are
PROGRAMS = 264  # worth having at once
MOST_SEGMENTS_AT_ONCE = 64


@dataclass(frozen=True)
class RowTables:
    """Where each row of a pass stands and what it sees. All int32, on the device."""

    positions: torch.Tensor  # [rows]
    places: torch.Tensor  # [rows] where its key and value go; -1: nowhere, the row is padding
    straight: torch.Tensor  # [rows] positions below it lie at their own index
    paths: torch.Tensor  # [rows, MOST_PATH] KV indices of the positions from `straight` on
    tile_rows: torch.Tensor  # [tiles] the first row of each tile
    tile_counts: torch.Tensor  # [tiles] how many rows it has; 0: the tile is padding
    tile_pages: torch.Tensor  # [tiles] where the page table of its request begins in `pages`
    pages: torch.Tensor  # [pages of all requests] page numbers


@dataclass(frozen=True)
class AttentionScratch:
    """Where segments meet. One is enough for all layers, which run one after the other."""

    mixed: torch.Tensor  # float32 [rows, heads, segments, head_dim]
    totals: torch.Tensor  # float32 [rows, heads, segments, 2] largest score and sum of weights
    counters: torch.Tensor  # int32 [tiles * key heads] zero between passes


def tile_height(heads: int, kv_heads: int) -> int:
    """How many rows of a request a tile has."""
    return max(1, LANES // int(triton.next_power_of_2(heads // kv_heads)))


def attention_scratch(
    rows: int, heads: int, kv_heads: int, head_dim: int, longest: int, device: torch.device
) -> AttentionScratch:
    """Scratch for passes of at most so many rows over contexts up to `longest`."""
    segments = -(-longest // SEGMENT)
    return AttentionScratch(
        torch.empty((rows, heads, segments, head_dim), dtype=torch.float32, device=device),
        torch.empty((rows, heads, segments, 2), dtype=torch.float32, device=device),
        torch.zeros(rows * kv_heads, dtype=torch.int32, device=device),
    )


@triton.jit  # type: ignore[untyped-decorator]
def _places(index, seen, pages_at, page_size: tl.constexpr):  # type: ignore[no-untyped-def]
    """The places of KV indices in the pool."""
    page = tl.load(pages_at + index // page_size, mask=seen, other=0)
    return page * page_size + index % page_size


@triton.jit  # type: ignore[untyped-decorator]
def _own_places(column, row, rows_at, pages_at, path_length: tl.constexpr, page_size: tl.constexpr):  # type: ignore[no-untyped-def]
    """The places of a row's positions `column`, along its path, and which of them it has."""
    positions_at, straight_at, paths_at = rows_at
    seen = column <= tl.load(positions_at + row)
    straight = tl.load(straight_at + row)
    behind = seen & (column >= straight)
    on_path = tl.load(paths_at + row * path_length + (column - straight), mask=behind, other=0)
    return _places(tl.where(behind, on_path, column), seen, pages_at, page_size), seen


@triton.jit  # type: ignore[untyped-decorator]
def _read(pool_at, place, seen, stride, dim: tl.constexpr, wide: tl.constexpr):  # type: ignore[no-untyped-def]
    """Keys or values at these places: [block, wide], zero where nothing is seen."""
    part = tl.arange(0, wide)
    mask = seen[:, None] & (part < dim)[None, :]
    return tl.load(pool_at + place[:, None].to(tl.int64) * stride + part[None, :], mask=mask, other=0.0)


@triton.jit
def _soften(scores, visible, scale):  # type: ignore[no-untyped-def]
    """The largest visible score of each lane, and the weights of a softmax, not yet divided by their sum."""
    scores = tl.where(visible, scores * scale, float("-inf"))
    highest = tl.max(scores, 1)
    safe = tl.where(highest == float("-inf"), 0.0, highest)  # where nothing is visible
    return highest, tl.exp2(scores - safe[:, None])


@triton.jit
def _merge(highest, total, mixed, other_highest, other_total, other_mixed):  # type: ignore[no-untyped-def]
    """Two parts of a softmax as one."""
    higher = tl.maximum(highest, other_highest)
    safe = tl.where(higher == float("-inf"), 0.0, higher)  # where neither has seen a key
    shrink, other_shrink = tl.exp2(highest - safe), tl.exp2(other_highest - safe)
    total = total * shrink + other_total * other_shrink
    mixed = mixed * shrink[:, None] + other_mixed * other_shrink[:, None]
    return higher, total, mixed


@triton.jit  # type: ignore[untyped-decorator]
def _attention_kernel(  # type: ignore[no-untyped-def]
    query_at,
    keys_at,
    values_at,
    output_at,
    positions_at,
    straight_at,
    paths_at,
    tile_rows_at,
    tile_counts_at,
    tile_pages_at,
    pages_at,
    mixed_at,
    totals_at,
    counters_at,
    most_segments,
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
    path_length: tl.constexpr,
    page_size: tl.constexpr,
    block: tl.constexpr,
    segment: tl.constexpr,
    overlap: tl.constexpr,
) -> None:
    tile, head, first_segment = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    takers = tl.num_programs(2)
    # tables were written before this pass began: no kernel of it has to be waited for
    count = tl.load(tile_counts_at + tile)
    group: tl.constexpr = heads // kv_heads
    lane, part = tl.arange(0, lanes), tl.arange(0, wide)
    in_tile = lane // (lanes // height)
    query_head = head * group + lane % (lanes // height)
    used = (in_tile < count) & (lane % (lanes // height) < group)
    first = tl.load(tile_rows_at + tile)
    row = first + tl.minimum(in_tile, tl.maximum(count - 1, 0))
    pages_at += tl.load(tile_pages_at + tile)
    position = tl.load(positions_at + row)
    straight = tl.load(straight_at + row)
    newest = tl.max(position, 0)
    # the first position that is not where its index says, for any row of the tile
    crooked = tl.min(tl.where(straight > position, 1 << 30, straight), 0)
    lowest = tl.maximum(tl.min(position, 0) - window + 1, 0) if window > 0 else 0
    segments = tl.where(count > 0, newest // segment + 1, 0)
    begin = lowest // segment
    if overlap:  # keys and values of earlier passes
        early = (begin + first_segment) * segment + tl.arange(0, segment)
        near = (early <= newest) & (early < crooked)
        early_place = _places(early, near, pages_at, page_size).to(tl.int64) * (kv_heads * dim) + head * dim
        lines: tl.constexpr = (wide + 63) // 64
        wanted = tl.where(near, early_place, 0)[:, None] + tl.arange(0, lines)[None, :] * 64
        prefetch(keys_at + wanted)
        prefetch(values_at + wanted)
    follow(overlap)
    queries = (row * heads + query_head)[:, None] * dim + part[None, :]
    query_mask = used[:, None] & (part < dim)[None, :]
    query = tl.load(query_at + queries, mask=query_mask, other=0.0)
    stride = kv_heads * dim
    keys_at += head * dim
    values_at += head * dim
    rows_at = (positions_at, straight_at, paths_at)
    partial = (row * heads + query_head) * most_segments

    for number in range(begin + first_segment, segments, takers):
        highest = tl.full([lanes], float("-inf"), tl.float32)
        total = tl.zeros([lanes], tl.float32)
        mixed = tl.zeros([lanes, wide], tl.float32)
        for start in range(number * segment, tl.minimum((number + 1) * segment, newest + 1), block):
            column = start + tl.arange(0, block)
            shared = start + block <= crooked
            seen = column <= newest
            place = _places(column, seen, pages_at, page_size)
            visible = (column[None, :] <= position[:, None]) & (column[None, :] >= earliest)
            if window > 0:
                visible &= position[:, None] - column[None, :] < window
            if shared:
                key = _read(keys_at, place, seen, stride, dim, wide)
                value = _read(values_at, place, seen, stride, dim, wide)
                higher, weights = _soften(tl.dot(query, tl.trans(key)), visible, scale)
                block_mixed = tl.dot(weights.to(value.dtype), value)
            else:
                scores = tl.zeros([lanes, block], tl.float32)
                for own in range(height):
                    own_place, has = _own_places(
                        column, first + tl.minimum(own, count - 1), rows_at, pages_at, path_length, page_size
                    )
                    key = _read(keys_at, own_place, has, stride, dim, wide)
                    scores = tl.where((in_tile == own)[:, None], tl.dot(query, tl.trans(key)), scores)
                higher, weights = _soften(scores, visible, scale)
                block_mixed = tl.zeros([lanes, wide], tl.float32)
                for own in range(height):
                    own_place, has = _own_places(
                        column, first + tl.minimum(own, count - 1), rows_at, pages_at, path_length, page_size
                    )
                    value = _read(values_at, own_place, has, stride, dim, wide)
                    own_mixed = tl.dot(weights.to(value.dtype), value)
                    block_mixed = tl.where((in_tile == own)[:, None], own_mixed, block_mixed)
            # outside of the branches, so that no product is fused into one of them only
            highest, total, mixed = _merge(highest, total, mixed, higher, tl.sum(weights, 1), block_mixed)
        if segments - begin == 1:
            places = row.to(tl.int64)[:, None] * output_stride + query_head[:, None] * dim + part[None, :]
            tl.store(
                output_at + places, (mixed / total[:, None]).to(output_at.dtype.element_ty), mask=query_mask
            )
        else:
            line = (partial + number).to(tl.int64)
            tl.store(mixed_at + line[:, None] * dim + part[None, :], mixed, mask=query_mask)
            tl.store(totals_at + line * 2, highest, mask=used)
            tl.store(totals_at + line * 2 + 1, total, mask=used)

    if (segments - begin > 1) & (begin + first_segment < segments):
        tl.debug_barrier()
        counter_at = counters_at + tile * kv_heads + head
        arrived = tl.atomic_add(counter_at, 1, sem="acq_rel")
        if arrived == tl.minimum(takers, segments - begin) - 1:
            highest = tl.full([lanes], float("-inf"), tl.float32)
            total = tl.zeros([lanes], tl.float32)
            mixed = tl.zeros([lanes, wide], tl.float32)
            for number in range(begin, segments):
                line = (partial + number).to(tl.int64)
                other = tl.load(
                    mixed_at + line[:, None] * dim + part[None, :],
                    mask=query_mask,
                    other=0.0,
                    cache_modifier=".cg",
                )
                other_highest = tl.load(totals_at + line * 2, mask=used, other=0.0, cache_modifier=".cg")
                other_total = tl.load(totals_at + line * 2 + 1, mask=used, other=0.0, cache_modifier=".cg")
                highest, total, mixed = _merge(highest, total, mixed, other_highest, other_total, other)
            places = row.to(tl.int64)[:, None] * output_stride + query_head[:, None] * dim + part[None, :]
            tl.store(
                output_at + places, (mixed / total[:, None]).to(output_at.dtype.element_ty), mask=query_mask
            )
            tl.store(counter_at, 0)


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
) -> None:
    """Write values mixed by softmax(query · key) to `output` [rows, at least heads * head_dim].

    `query` is [rows, heads, head_dim], `keys` and `values` are one layer's [places, key heads, head_dim].
    Positions before `earliest` hold nothing and are seen by no row.
    """
    _, heads, dim = query.shape
    kv_heads = keys.shape[1]
    tiles = len(tables.tile_rows)
    height = tile_height(heads, kv_heads)
    takers = max(1, min(PROGRAMS // (tiles * kv_heads), scratch.mixed.shape[2], MOST_SEGMENTS_AT_ONCE))
    overlap = overlaps(query.device)
    _attention_kernel[(tiles, kv_heads, takers)](
        query,
        keys,
        values,
        output,
        tables.positions,
        tables.straight,
        tables.paths,
        tables.tile_rows,
        tables.tile_counts,
        tables.tile_pages,
        tables.pages,
        scratch.mixed,
        scratch.totals,
        scratch.counters,
        scratch.mixed.shape[2],
        output.stride(0),
        window or 0,
        earliest,
        dim**-0.5 * 1.4426950408889634,  # weights are powers of two
        heads,
        kv_heads,
        dim,
        max(16, triton.next_power_of_2(dim)),
        height,
        height * triton.next_power_of_2(heads // kv_heads),
        MOST_PATH,
        page_size,
        BLOCK,
        SEGMENT,
        overlap,
        num_warps=WARPS,
        num_stages=2,
        launch_pdl=overlap,
    )
