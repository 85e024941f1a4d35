"""Shared-prefix (cascade) attention: KV chunks that many rows attend to are read once for all of them.

Requests with a common prefix share its pages, and all rows of a prefill chunk or draft tree attend to the
context before it. In paged_attention.py a program has 16 lanes of one request, so such a KV chunk would be
read once per program. Here a program has one KV chunk, one KV head and 64 lanes of any rows that attend to
the chunk, and stores its partials where paged_attention.py merges them:

    request a   |  shared KV chunks  |  its own ...      shared: this kernel, for all rows of a and b
    request b   |  the same pages    |  its own ...      own: paged_attention.py, which merges all partials

A partial has the bits of paged_attention.py: weights are summed in the order of that kernel's four warps,
whatever the layout here.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from paceline.backends.cuda.kernels.attention.scoring import Scoring
from paceline.backends.cuda.kernels.attention.softmax import (
    BLOCK,
    MERGE_FAN_IN,
    empty_softmax,
    kv_slots_of,
    lanes_of_tile,
    load_kv,
    load_queries,
    merge,
    rows_of_lanes,
    softmax_weights,
    store_partial,
    sum_of_weights,
)
from paceline.backends.cuda.kernels.pdl import pdl_launch, pdl_wait, supports_pdl

KV_CHUNK = BLOCK * MERGE_FAN_IN
LANES = 64  # lanes of a program: rows times query heads
WARPS = 4
STAGES, FEW_STAGES = 6, 4  # pipeline stages of the loop over blocks; fewer before Hopper
PROGRAMS = 264  # programs that occupy the device
ITEM = 4  # numbers of a work item, see SharedPrefixRows
_BLOCK, _MERGE_FAN_IN, _ITEM = tl.constexpr(BLOCK), tl.constexpr(MERGE_FAN_IN), tl.constexpr(ITEM)


@dataclass(frozen=True)
class SharedPrefixRows:
    """The work items of the shared-prefix kernel. All int32, on the device: see passes/shared_prefix.py."""

    shared_chunks: torch.Tensor  # [tiles] number of leading KV chunks that this kernel computes
    count: torch.Tensor  # [1] number of items
    rows: torch.Tensor  # [rows] rows with shared KV chunks, in the order that items refer to
    items: torch.Tensor  # [max items, ITEM] index of the first row in `rows`, rows, offset of pages, KV chunk


def rows_per_program(heads: int, kv_heads: int) -> int:
    """The number of rows of a program."""
    return rows_of_lanes(LANES, heads, kv_heads)


@triton.jit  # type: ignore[untyped-decorator]
def _shared_prefix_kernel(  # type: ignore[no-untyped-def]
    query_at,
    keys_at,
    values_at,
    count_at,
    rows_at,
    items_at,
    pages_at,
    partial_acc_at,
    partial_stats_at,
    max_partials,
    earliest,
    scale,
    heads: tl.constexpr,
    kv_heads: tl.constexpr,
    dim: tl.constexpr,
    wide: tl.constexpr,  # dim, rounded up to a power of two
    height: tl.constexpr,  # rows of a program
    lanes: tl.constexpr,
    page_size: tl.constexpr,
    stages: tl.constexpr,
    softcap: tl.constexpr,  # 0: no cap
    pdl: tl.constexpr,
) -> None:
    head, kv_split, kv_splits = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    pdl_launch(pdl)
    count = tl.load(count_at)  # tables were written before this pass
    stride: tl.constexpr = kv_heads * dim
    whole_lines = tl.full([_BLOCK], True, tl.int1)
    pdl_wait(pdl)
    for item in range(kv_split, count, kv_splits):
        item_at = items_at + item * _ITEM
        first, rows = tl.load(item_at), tl.load(item_at + 1)
        own_pages_at, kv_chunk = pages_at + tl.load(item_at + 2), tl.load(item_at + 3)
        in_tile, query_head, is_used = lanes_of_tile(head, rows, heads, kv_heads, height, lanes)
        line = tl.load(rows_at + first + tl.minimum(in_tile, rows - 1)) * heads + query_head
        query, _ = load_queries(query_at, line, is_used, dim, wide)
        merged = empty_softmax(lanes, wide)
        for index in tl.range(0, _MERGE_FAN_IN, num_stages=stages):
            column = kv_chunk * (_MERGE_FAN_IN * _BLOCK) + index * _BLOCK + tl.arange(0, _BLOCK)
            kv_slot = kv_slots_of(column, whole_lines, own_pages_at, page_size)
            key = load_kv(keys_at + head * dim, kv_slot, whole_lines, stride, dim, wide)
            value = load_kv(values_at + head * dim, kv_slot, whole_lines, stride, dim, wide)
            visible = tl.broadcast_to((column >= earliest)[None, :], (lanes, _BLOCK))
            row_max, weights = softmax_weights(tl.dot(query, tl.trans(key)), visible, scale, softcap)
            acc = tl.dot(weights.to(value.dtype), value)
            merged = merge(merged, (row_max, sum_of_weights(weights), acc))
        store_partial(
            merged,
            (line * max_partials + kv_chunk).to(tl.int64),
            (partial_acc_at, partial_stats_at),
            is_used,
            dim,
        )


def attend_shared_prefix(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    shared_prefix: SharedPrefixRows,
    pages: torch.Tensor,
    page_size: int,
    parts: tuple[torch.Tensor, torch.Tensor, int],
    scoring: Scoring,
    earliest: int,
) -> None:
    """Store the partials of shared KV chunks in `parts`: partial_acc, partial_stats, partials per row."""
    _, heads, dim = query.shape
    kv_heads = keys.shape[1]
    height = rows_per_program(heads, kv_heads)
    pdl = supports_pdl(query.device)
    partial_acc, partial_stats, max_partials = parts
    _shared_prefix_kernel[(kv_heads, max(1, PROGRAMS // kv_heads))](
        query,
        keys,
        values,
        shared_prefix.count,
        shared_prefix.rows,
        shared_prefix.items,
        pages,
        partial_acc,
        partial_stats,
        max_partials,
        earliest,
        scoring.scale(dim),
        heads,
        kv_heads,
        dim,
        max(16, triton.next_power_of_2(dim)),
        height,
        height * triton.next_power_of_2(heads // kv_heads),
        page_size,
        STAGES if pdl else FEW_STAGES,
        scoring.softcap(dim),
        pdl,
        num_warps=WARPS,
        enable_fp_fusion=False,
        launch_pdl=pdl,
    )
