"""Attention of rows over paged keys and values: decodes, draft trees and prefill chunks in one kernel.

As in Flash-Decoding, several programs split the KV positions of a tile (split-KV). Each runs an online
softmax, and the last to finish merges their partials. A program handles a tile of rows of one request and one
KV head; its lanes are rows times the query heads that share the KV head. Positions are split at fixed
boundaries, so the summation order of a row depends only on its own position (batch invariance):

    block       64 positions: one unnormalized softmax
    KV chunk    8 blocks, merged in order
    group       8 KV chunks, merged in order; then groups are merged in order

Short contexts are split by blocks, to occupy the device; long ones by KV chunks, so that there is little to
merge. KV chunks that many rows share may have been computed by shared_prefix.py before; then programs skip
them. Prefill chunks have larger tiles: see prefill_attention.py.

A row of a draft tree sees its path from the root, whose KV indices need not be contiguous:

    position     0 ... context | root  a   b           row b descends from a, which is not the row before it
    KV index     0 ... context | 0     2   5           beyond the context
                 contiguous -------->|   path: 2, 5

Below `contiguous_until`, a position is its KV index; from there on, `paths` holds the KV indices. A
contiguous block is read once for all rows of a tile. In a tree block each row reads its own keys, in the
order of positions. So a drafted token has the same bits as when it is decoded after its path was committed.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from paceline.backends.cuda.kernels.attention.prefill_attention import attend_prefill
from paceline.backends.cuda.kernels.attention.row_tables import RowTables
from paceline.backends.cuda.kernels.attention.scoring import LLAMA_SCORING, Scoring
from paceline.backends.cuda.kernels.attention.shared_prefix import attend_shared_prefix
from paceline.backends.cuda.kernels.attention.softmax import BLOCK as BLOCK
from paceline.backends.cuda.kernels.attention.softmax import (
    LONG_HEAD,
    LONG_STAGES,
    contiguous_block,
    empty_softmax,
    head_groups,
    kv_slots_of,
    lanes_of_tile,
    load_queries,
    merge,
    merge_partials,
    pool_of_head,
    prefetch_kv,
    rows_of_lanes,
    sight_of,
    store_partial,
    tree_block,
    visible_positions,
    with_sinks,
    write_attention,
)
from paceline.backends.cuda.kernels.attention.softmax import MAX_PATH as MAX_PATH
from paceline.backends.cuda.kernels.attention.softmax import MERGE_FAN_IN as MERGE_FAN_IN
from paceline.backends.cuda.kernels.pdl import pdl_launch, pdl_wait, supports_pdl

LANES = 16  # fewest lanes of a tile: rows times query heads
WARPS = 4  # determines the bits, as BLOCK and MERGE_FAN_IN do
STAGES = 5  # pipeline stages of the loop over blocks: two of them for page numbers
LATENT_WARPS, LATENT_STAGES = 8, 3  # for latents, which are longer than keys
PROGRAMS = 264  # programs that occupy the device
MAX_KV_SPLITS = MERGE_FAN_IN * MERGE_FAN_IN  # most programs of a tile and KV head
_BLOCK, _MERGE_FAN_IN = tl.constexpr(BLOCK), tl.constexpr(MERGE_FAN_IN)


@dataclass(frozen=True)
class AttentionScratch:
    """Buffers of the split-KV reduction, shared by all layers, because they run one after the other."""

    partial_acc: torch.Tensor  # float32 [floats] acc: head_dim numbers for each row, head and partial
    partial_stats: torch.Tensor  # float32 [floats] row_max and row_sum of each of them
    counters: torch.Tensor  # int32 [tiles * KV heads] arrived programs; zero between passes
    blocks: int  # blocks of the longest context


def tile_height(heads: int, kv_heads: int) -> int:
    """The number of rows of a tile."""
    return rows_of_lanes(LANES, heads, kv_heads)


def latent_groups(heads: int) -> int:
    """The number of groups of query heads. All attend to the same latents; a tile has one group's heads."""
    return head_groups(heads, LANES)


def attention_scratch(
    rows: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    longest: int,
    device: torch.device,
    prefilled: int = 0,
) -> AttentionScratch:
    """Scratch for passes of at most `rows` rows over contexts of at most `longest` tokens.

    A pass may have more rows, up to `prefilled`, if those after the first `rows` are in prefill tiles.
    """
    blocks = -(-longest // BLOCK)
    height = tile_height(heads, kv_heads)
    # with fewer tiles, more programs split each of them, and each program stores a partial
    lines = max(
        count * heads * max_partials(-(-count // height), kv_heads, blocks) for count in range(1, rows + 1)
    )
    lines = max(lines, prefilled * heads)
    return AttentionScratch(
        torch.empty(lines * head_dim, dtype=torch.float32, device=device),
        torch.empty(lines * 2, dtype=torch.float32, device=device),
        torch.zeros(max(rows, prefilled) * kv_heads, dtype=torch.int32, device=device),
        blocks,
    )


def _pipeline(dim: int, rope: int) -> tuple[int, int]:
    """The stages and warps of a program for heads of this size."""
    if rope:
        return LATENT_STAGES, LATENT_WARPS
    return (LONG_STAGES, LATENT_WARPS) if dim > LONG_HEAD else (STAGES, WARPS)


def num_kv_splits(tiles: int, kv_heads: int, blocks: int) -> int:
    """The number of programs that split the KV positions of a tile and KV head."""
    return max(1, min(PROGRAMS // (tiles * kv_heads), MAX_KV_SPLITS, blocks))


def max_partials(tiles: int, kv_heads: int, blocks: int) -> int:
    """The most partial results of one softmax: one per program that splits blocks, or one per KV chunk."""
    return max(num_kv_splits(tiles, kv_heads, blocks), -(-blocks // MERGE_FAN_IN))


@triton.jit
def are_few(blocks, oldest, kv_splits):  # type: ignore[no-untyped-def]
    """Whether a partial is a single block: all blocks are in one group, and there is a program for each."""
    in_group: tl.constexpr = _MERGE_FAN_IN * _MERGE_FAN_IN
    return (blocks - oldest <= kv_splits) & (oldest // in_group == (blocks - 1) // in_group)


@triton.jit
def _split_kv(sight, contiguous_until, count, kv_splits, shared_chunks):  # type: ignore[no-untyped-def]
    """How programs split a tile: blocks per partial, first and end partial, blocks, tree_begin.

    A partial is one block or one KV chunk. `tree_begin` is the first position that is not contiguous for some
    row. The first `shared_chunks` KV chunks are skipped: the shared-prefix kernel has stored their partials.
    """
    first, last = sight
    tree_begin = tl.min(tl.where(contiguous_until > last, 1 << 30, contiguous_until), 0)
    blocks, oldest = tl.where(count > 0, tl.max(last, 0) // _BLOCK + 1, 0), tl.min(first, 0) // _BLOCK
    each = tl.where(are_few(blocks, oldest, kv_splits) & (shared_chunks == 0), 1, _MERGE_FAN_IN)
    return each, tl.maximum(oldest // each, shared_chunks), (blocks + each - 1) // each, blocks, tree_begin


@triton.jit  # type: ignore[untyped-decorator]
def _attend_chunk(  # type: ignore[no-untyped-def]
    queries,
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
    has_trees: tl.constexpr,
    softcap: tl.constexpr,
    rope: tl.constexpr,
):
    """The merged softmax of a span of blocks: contiguous blocks first, then tree blocks."""
    begin, end = span
    merged = empty_softmax(queries[0].shape[0], queries[0].shape[1])
    newest = tl.max(sight[1], 0)
    tree_blocks_begin = tl.maximum(tl.minimum(end, tile[3] // _BLOCK), begin)  # the first tree block
    for index in tl.range(begin, tree_blocks_begin, num_stages=stages):
        column = index * _BLOCK + tl.arange(0, _BLOCK)
        seen, visible = column <= newest, visible_positions(column, sight)
        kv_slot = kv_slots_of(column, seen, pool[2], page_size)
        other = contiguous_block(queries, kv_slot, seen, visible, scale, pool, dim, softcap, rope)
        merged = merge(merged, other)
    if has_trees:
        for index in tl.range(tree_blocks_begin, end, num_stages=1):
            column = index * _BLOCK + tl.arange(0, _BLOCK)
            visible = visible_positions(column, sight)
            other = tree_block(
                queries, column, tile, visible, scale, tables, pool, dim, height, page_size, softcap, rope
            )
            merged = merge(merged, other)
    return merged


@triton.jit  # type: ignore[untyped-decorator]
def _merge_if_last(merged, reduction, lines, partials_at, is_used, dim: tl.constexpr):  # type: ignore[no-untyped-def]
    """Whether this program is the last of its tile to arrive, and the merged result of all partials if so."""
    counter_at, oldest, begin, end, kv_splits = reduction
    last = end - oldest == 1
    if end - oldest > 1:
        tl.debug_barrier()
        last = tl.atomic_add(counter_at, 1, sem="acq_rel") == tl.minimum(kv_splits, end - begin) - 1
        if last:
            _, _, acc = merged
            merged = merge_partials(
                lines, oldest, end, end, partials_at, is_used, dim, acc.shape[1], acc.shape[0], _MERGE_FAN_IN
            )
            tl.store(counter_at, 0)
    return last, merged


@triton.jit  # type: ignore[untyped-decorator]
def _attention_kernel(  # type: ignore[no-untyped-def]
    query_at,
    keys_at,
    values_at,
    output_at,
    output_scales_at,
    positions_at,
    contiguous_until_at,
    paths_at,
    tile_rows_at,
    tile_counts_at,
    tile_pages_at,
    pages_at,
    shared_chunks_at,
    partial_acc_at,
    partial_stats_at,
    counters_at,
    sinks_at,
    max_partials,
    output_stride,
    window,  # 0: no window
    earliest,
    scale,
    heads: tl.constexpr,
    groups: tl.constexpr,  # groups of query heads
    kv_heads: tl.constexpr,
    dim: tl.constexpr,
    wide: tl.constexpr,  # dim, rounded up to a power of two
    height: tl.constexpr,  # rows of a tile
    lanes: tl.constexpr,
    page_size: tl.constexpr,
    stages: tl.constexpr,
    has_trees: tl.constexpr,  # paths may be non-contiguous
    quantizes: tl.constexpr,  # output in e4m3
    has_shared: tl.constexpr,  # the shared-prefix kernel ran before
    softcap: tl.constexpr,  # 0: no cap
    has_sinks: tl.constexpr,
    rope: tl.constexpr,  # size of the RoPE part of latent keys; 0: no latents
    rope_wide: tl.constexpr,
    chunk: tl.constexpr,  # attention chunk; 0: none
    merges: tl.constexpr,  # False: the next kernel merges partials
    pdl: tl.constexpr,
) -> None:
    number, group, kv_split, kv_splits = (
        tl.program_id(0),
        tl.program_id(1),
        tl.program_id(2),
        tl.num_programs(2),
    )
    pdl_launch(pdl)
    # tables were written before this pass, so they can be read before pdl_wait
    first, count = tl.load(tile_rows_at + number), tl.load(tile_counts_at + number)
    in_tile, query_head, is_used = lanes_of_tile(group, count, heads, groups, height, lanes)
    row = first + tl.minimum(in_tile, tl.maximum(count - 1, 0))
    position, contiguous_until = tl.load(positions_at + row), tl.load(contiguous_until_at + row)
    newest, sight = tl.max(position, 0), sight_of(position, window, earliest, chunk)
    shared_chunks = tl.load(shared_chunks_at + number) if has_shared else 0
    each, begin, end, blocks, tree_begin = _split_kv(sight, contiguous_until, count, kv_splits, shared_chunks)
    oldest = tl.where(shared_chunks > 0, 0, begin)  # the first partial to merge
    pages_at += tl.load(tile_pages_at + number)
    pool = pool_of_head(keys_at, values_at, pages_at, (group, groups), kv_heads, dim, rope)
    if begin + kv_split >= end:
        pdl_wait(pdl)  # no program may end before earlier kernels, not even that of a padding tile
        return
    column = (begin + kv_split) * each * _BLOCK + tl.arange(0, _BLOCK)
    seen = (column <= newest) & (column < tree_begin)
    kv_slot = kv_slots_of(column, seen, pages_at, page_size)
    prefetch_kv(pool, kv_slot, wide, rope, pdl)  # keys and values of earlier passes
    pdl_wait(pdl)
    line = row * heads + query_head
    queries = load_queries(query_at, line, is_used, dim, wide, rope, rope_wide)
    partials_at, tables = (partial_acc_at, partial_stats_at), (positions_at, contiguous_until_at, paths_at)
    merged, tile = empty_softmax(lanes, wide), (first, count, in_tile, tree_begin)
    if (each == 1) & ((begin + kv_split + 1) * _BLOCK <= tree_begin):
        visible = visible_positions(column, sight)
        merged = contiguous_block(queries, kv_slot, seen, visible, scale, pool, dim, softcap, rope)
        if (not merges) | (end - oldest > 1):
            store_partial(
                merged, (line * max_partials + begin + kv_split).to(tl.int64), partials_at, is_used, dim
            )
    else:
        for partial in range(begin + kv_split, end, kv_splits):
            span = (partial * each, tl.minimum((partial + 1) * each, blocks))
            merged = _attend_chunk(
                queries,
                span,
                tile,
                sight,
                scale,
                tables,
                pool,
                dim,
                height,
                page_size,
                stages,
                has_trees,
                softcap,
                rope,
            )
            if (not merges) | (end - oldest > 1):
                store_partial(merged, (line * max_partials + partial).to(tl.int64), partials_at, is_used, dim)
    if not merges:
        return
    reduction = (counters_at + number * groups + group, oldest, begin, end, kv_splits)
    last, merged = _merge_if_last(merged, reduction, line * max_partials, partials_at, is_used, dim)
    if last:
        if has_sinks:
            merged = with_sinks(merged, query_head, is_used, sinks_at)
        write_attention(
            merged,
            row,
            query_head,
            is_used,
            (output_at, output_scales_at, output_stride),
            heads,
            dim,
            quantizes,
        )


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
    scoring: Scoring = LLAMA_SCORING,
    merges: bool = True,
) -> None:
    """Write attention's output, softmax(query · keys) values, to `output` [rows, at least heads * head_dim].

    `query` is [rows, heads, head_dim], `keys` and `values` are one layer's [slots, KV heads, head_dim].

    earliest    positions before it have no keys and are masked
    scales      as in Normed: the output is quantized to e4m3; head sizes are multiples of 64 then
    scoring     with `scoring.rope`, keys contain latents, which are the values; `values` is not read
    merges      False: leave partials in `scratch` for latent_values.py, instead of an output
    """
    heads, rope, kv_heads = query.shape[1], scoring.rope, keys.shape[1]
    dim, groups = query.shape[2] - rope, latent_groups(heads) if rope else scoring.groups or kv_heads
    tiles, pdl = len(tables.tile_rows), supports_pdl(query.device)
    assert merges or window is None, "the kernel that merges later reads partial results of all blocks"
    if tables.prefill is not None:
        partials = scratch.partial_acc, scratch.partial_stats
        paged = tables.prefill, tables.positions, tables.pages, window, page_size
        attend_prefill(query, keys, values, groups, *paged, output, partials, scoring, earliest, scales)
    if not tiles:
        return
    height, parts = tile_height(heads, groups), max_partials(tiles, groups, scratch.blocks)
    if tables.shared_prefix is not None:
        assert window is None, "rows with windows do not see alike"
        to = scratch.partial_acc, scratch.partial_stats, parts
        paged_prefix = tables.shared_prefix, tables.pages, page_size
        attend_shared_prefix(query, keys, values, *paged_prefix, to, scoring, earliest)
    stages, warps = _pipeline(dim, rope)
    _attention_kernel[(tiles, groups, num_kv_splits(tiles, groups, scratch.blocks))](
        query,
        keys,
        values,
        output,
        scales,
        tables.positions,
        tables.contiguous_until,
        tables.paths,
        tables.tile_rows,
        tables.tile_counts,
        tables.tile_pages,
        tables.pages,
        None if tables.shared_prefix is None else tables.shared_prefix.shared_chunks,
        scratch.partial_acc,
        scratch.partial_stats,
        scratch.counters,
        scoring.sinks,
        parts,
        output.stride(0),
        window or 0,
        earliest,
        scoring.scale(dim),
        heads,
        groups,
        kv_heads,
        dim,
        max(16, triton.next_power_of_2(dim)),
        height,
        height * triton.next_power_of_2(heads // groups),
        page_size,
        stages,
        tables.paths is not None,
        scales is not None,
        tables.shared_prefix is not None,
        scoring.softcap(dim),
        scoring.sinks is not None,
        rope,
        max(16, triton.next_power_of_2(rope)),
        scoring.chunk,
        merges,
        pdl,
        num_warps=warps,
        enable_fp_fusion=False,
        launch_pdl=pdl,
    )
