"""Attention of prefill chunks, as in FlashAttention-2: tiles of 64 lanes that fill the tensor cores.

In paged_attention.py a program has 16 lanes, and several programs split the KV positions of a tile. Hundreds
of rows give enough programs without splitting. So here a program has 64 lanes (rows times the query heads of
a KV head), reads all positions that its rows attend to, and merges its blocks by itself:

    for each block of 64 positions: one softmax
        merge it into its KV chunk
        at the end of a KV chunk (8 blocks), merge that into its group
        at the end of a group (8 KV chunks), merge that into the result of the groups before, kept in memory

The order, and so the bits, are those of paged_attention.py. Rows are contiguous: their positions are their KV
indices. Latents, and heads as long as latents, leave room for only 16 lanes in a program: tiles of latents
are smaller, and tiles of long heads are split among programs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from paceline.backends.cuda.kernels.attention.scoring import Scoring
from paceline.backends.cuda.kernels.attention.softmax import (
    BLOCK,
    LONG_HEAD,
    LONG_STAGES,
    MERGE_FAN_IN,
    empty_softmax,
    key_products,
    kv_slots_of,
    lanes_of_tile,
    load_kv,
    load_partial,
    load_queries,
    load_values,
    merge,
    pool_of_head,
    rows_of_lanes,
    scaled,
    sight_of,
    store_partial,
    sum_of_weights,
    visible_positions,
    weights_of,
    with_sinks,
    write_attention,
)
from paceline.backends.cuda.kernels.pdl import pdl_launch, pdl_wait, supports_pdl

LANES, LATENT_LANES = 64, 16  # lanes of a program: rows times query heads
WARPS, LATENT_WARPS = 4, 8
STAGES = 2  # pipeline stages of the loop over blocks: with more, a second program would not fit
_BLOCK = tl.constexpr(BLOCK)


@dataclass(frozen=True)
class PrefillTiles:
    """Tiles of contiguous rows, each of one request. All int32 [tiles], on the device."""

    rows: torch.Tensor  # the first row of each
    counts: torch.Tensor  # its number of rows; 0: the tile is padding
    pages: torch.Tensor  # offset of its request's page table


def prefill_height(heads: int, kv_heads: int, has_latents: bool = False) -> int:
    """The number of rows of a tile."""
    return rows_of_lanes(LATENT_LANES if has_latents else LANES, heads, kv_heads)


@triton.jit  # type: ignore[untyped-decorator]
def _merge_groups(part, lines, partials_at, is_used, has_earlier, dim: tl.constexpr):  # type: ignore[no-untyped-def]
    """Merge a group's partial into that of the groups before it, if there are any."""
    row_max, row_sum, acc = part
    if has_earlier:
        earlier = load_partial(lines, partials_at, is_used, dim, acc.shape[1])
        row_max, row_sum, acc = merge(earlier, (row_max, row_sum, acc))
    return row_max, row_sum, acc


@triton.jit  # type: ignore[untyped-decorator]
def _prefill_kernel(  # type: ignore[no-untyped-def]
    query_at,
    keys_at,
    values_at,
    output_at,
    output_scales_at,
    positions_at,
    tile_rows_at,
    tile_counts_at,
    tile_pages_at,
    pages_at,
    partial_acc_at,
    partial_stats_at,
    sinks_at,
    output_stride,
    window,  # 0: no window
    earliest,
    scale,
    heads: tl.constexpr,
    groups: tl.constexpr,  # groups of query heads
    kv_heads: tl.constexpr,
    dim: tl.constexpr,
    wide: tl.constexpr,  # dim, rounded up to a power of two
    height: tl.constexpr,  # rows of a program
    lanes: tl.constexpr,
    page_size: tl.constexpr,
    stages: tl.constexpr,
    fan_in: tl.constexpr,
    quantizes: tl.constexpr,
    softcap: tl.constexpr,  # 0: no cap
    has_sinks: tl.constexpr,
    rope: tl.constexpr,  # size of the RoPE part of latent keys; 0: no latents
    rope_wide: tl.constexpr,
    chunk: tl.constexpr,  # attention chunk; 0: none
    is_long: tl.constexpr,  # long heads, or latents: several programs may share a tile
    pdl: tl.constexpr,
) -> None:
    # the last tiles of a request have the most work: they start first
    group, number = tl.program_id(0), tl.num_programs(1) - 1 - tl.program_id(1)
    pdl_launch(pdl)
    first, count = tl.load(tile_rows_at + number), tl.load(tile_counts_at + number)
    if is_long:
        before = tl.program_id(2) * height
        first, count = first + before, tl.minimum(tl.maximum(count - before, 0), height)
    if count == 0:
        pdl_wait(pdl)  # no program may end before earlier kernels
        return
    in_tile, query_head, is_used = lanes_of_tile(group, count, heads, groups, height, lanes)
    per_group: tl.constexpr = fan_in * fan_in  # blocks
    row = first + tl.minimum(in_tile, count - 1)
    position = tl.load(positions_at + row)
    newest, sight = tl.max(position, 0), sight_of(position, window, earliest, chunk)
    begin, end = tl.min(sight[0], 0) // (_BLOCK * fan_in) * fan_in, newest // _BLOCK + 1
    # the positions that all rows attend to need no mask: whole blocks of them
    all_see, whole = tl.max(sight[0], 0), (tl.min(position, 0) + 1) // _BLOCK
    pages_at += tl.load(tile_pages_at + number)
    pool = pool_of_head(keys_at, values_at, pages_at, (group, groups), kv_heads, dim, rope)
    pdl_wait(pdl)
    line, partials_at = (row * heads + query_head).to(tl.int64), (partial_acc_at, partial_stats_at)
    queries = load_queries(query_at, line, is_used, dim, wide, rope, rope_wide)
    chunk_max, chunk_sum, chunk_acc = empty_softmax(lanes, wide)
    group_max, group_sum, group_acc = empty_softmax(lanes, wide)
    for index in tl.range(begin, end, num_stages=stages):
        column = index * _BLOCK + tl.arange(0, _BLOCK)
        seen = column <= newest
        kv_slot = kv_slots_of(column, seen, pages_at, page_size)
        key = load_kv(pool[0], kv_slot, seen, pool[3], dim, wide)
        value = load_values(key, pool, kv_slot, seen, dim, rope)
        scores = scaled(key_products(queries, key, pool, kv_slot, seen, rope), scale, softcap)
        if (index >= whole) | (index * _BLOCK < all_see):
            scores = tl.where(visible_positions(column, sight), scores, float("-inf"))
        row_max, weights = weights_of(scores)
        row_sum = tl.sum(weights, 1) if is_long else sum_of_weights(weights)
        acc = tl.dot(weights.to(value.dtype), value)
        chunk_max, chunk_sum, chunk_acc = merge((chunk_max, chunk_sum, chunk_acc), (row_max, row_sum, acc))
        if index % fan_in == fan_in - 1:
            group_max, group_sum, group_acc = merge(
                (group_max, group_sum, group_acc), (chunk_max, chunk_sum, chunk_acc)
            )
            chunk_max, chunk_sum, chunk_acc = empty_softmax(lanes, wide)
            if (index % per_group == per_group - 1) & (index + 1 < end):
                has_earlier = index // per_group > begin // per_group
                whole_group = group_max, group_sum, group_acc
                merged = _merge_groups(whole_group, line, partials_at, is_used, has_earlier, dim)
                store_partial(merged, line, partials_at, is_used, dim)
                group_max, group_sum, group_acc = empty_softmax(lanes, wide)
    merged = merge((group_max, group_sum, group_acc), (chunk_max, chunk_sum, chunk_acc))
    has_earlier = (end - 1) // per_group > begin // per_group
    merged = _merge_groups(merged, line, partials_at, is_used, has_earlier, dim)
    if has_sinks:
        merged = with_sinks(merged, query_head, is_used, sinks_at)
    output = (output_at, output_scales_at, output_stride)
    write_attention(merged, row, query_head, is_used, output, heads, dim, quantizes)


def attend_prefill(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    groups: int,
    tiles: PrefillTiles,
    positions: torch.Tensor,
    pages: torch.Tensor,
    window: int | None,
    page_size: int,
    output: torch.Tensor,
    partials: tuple[torch.Tensor, torch.Tensor],
    scoring: Scoring,
    earliest: int,
    scales: torch.Tensor | None,
) -> None:
    """Write the attention output of the rows of these tiles: the contract of `attend` in paged_attention.py.

    `partials` are partial_acc and partial_stats, with a line for each row and head at least.
    """
    heads, rope = query.shape[1], scoring.rope
    dim, pdl = query.shape[2] - rope, supports_pdl(query.device)
    height, is_long = prefill_height(heads, groups, rope > 0), rope > 0 or dim > LONG_HEAD
    parts = min(height, LANES // LATENT_LANES) if is_long and not rope else 1  # programs of a tile
    height //= parts
    _prefill_kernel[(groups, len(tiles.rows), parts)](
        query,
        keys,
        values,
        output,
        scales,
        positions,
        tiles.rows,
        tiles.counts,
        tiles.pages,
        pages,
        *partials,
        scoring.sinks,
        output.stride(0),
        window or 0,
        earliest,
        scoring.scale(dim),
        heads,
        groups,
        keys.shape[1],
        dim,
        max(16, triton.next_power_of_2(dim)),
        height,
        height * triton.next_power_of_2(heads // groups),
        page_size,
        LONG_STAGES if is_long and not rope else STAGES,
        MERGE_FAN_IN,
        scales is not None,
        scoring.softcap(dim),
        scoring.sinks is not None,
        rope,
        max(16, triton.next_power_of_2(rope)),
        scoring.chunk,
        is_long,
        pdl,
        num_warps=LATENT_WARPS if is_long else WARPS,
        enable_fp_fusion=False,
        launch_pdl=pdl,
    )
