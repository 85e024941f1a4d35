"""Attention over stretches of positions that many rows see alike: each is read once for all of them.

Requests that begin with the same text have its keys and values in the same pages, and all rows of a prompt's
chunk, or of a tree, see what lies before it. kernels/attention.py has a program for each 16 lanes of a
request, so it reads such a stretch again and again. Here a program has a stretch, a key head and 64 lanes of
any rows that see the stretch, and leaves what it has summed where the other kernel finds its parts:

    request a   |  common stretches  |  its own ...           common: this kernel, for all rows of a and b
    request b   |  the same pages    |  its own ...           own: attention.py, which merges all parts

The bits of a part are those of attention.py. So sums of weights are added up in the order that four warps
have there, whatever the layout here.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from paceline.backends.cuda.kernels.launching import let_next_start, overlaps, wait
from paceline.backends.cuda.kernels.softmax import (
    BLOCK,
    MERGED,
    leave,
    merge,
    nothing,
    places_of,
    read_lines,
    rows_of_lanes,
    soften,
)

STRETCH = BLOCK * MERGED
LANES = 64  # rows times query heads of a program
WARPS = 4
STAGES, FEW_STAGES = 6, 4  # of the loop over blocks: three of them on their way; two before Hopper
PROGRAMS = 264  # at once
ITEM = 4  # numbers that say what a program has to do
_BLOCK, _MERGED, _ITEM = tl.constexpr(BLOCK), tl.constexpr(MERGED), tl.constexpr(ITEM)


@dataclass(frozen=True)
class CommonRows:
    """Which rows see which stretches alike. All int32, on the device: see ../common.py."""

    skipped: torch.Tensor  # [tiles] stretches, from the first on, that are summed here
    count: torch.Tensor  # [1] items
    rows: torch.Tensor  # [rows] those that see some, in an order that items refer to
    items: torch.Tensor  # [most items, ITEM] the first of `rows`, how many, where pages begin, stretch


def rows_together(heads: int, kv_heads: int) -> int:
    """How many rows a program has."""
    return rows_of_lanes(LANES, heads, kv_heads)


@triton.jit
def _sum_of_weights(weights):  # type: ignore[no-untyped-def]
    """The sums of lines of 64, in the order of a tile of 16 lanes that four warps have.

    There a thread has columns c, c + 1, c + 32 and c + 33, four threads have neighbours of eight, and a warp
    has every fourth eight.
    """
    lanes: tl.constexpr = weights.shape[0]
    by_thread = tl.reshape(weights, (lanes, 2, 2, 2, 4, 2))
    even, odd = tl.split(by_thread)  # [lanes, 2, 2, 2, 4]
    low_even, high_even = tl.split(tl.permute(even, (0, 2, 3, 4, 1)))
    low_odd, high_odd = tl.split(tl.permute(odd, (0, 2, 3, 4, 1)))
    sums = ((low_even + low_odd) + high_even) + high_odd  # [lanes, 2, 2, 4]
    return tl.sum(tl.sum(tl.sum(sums, 3), 1), 1)


@triton.jit  # type: ignore[untyped-decorator]
def _common_kernel(  # type: ignore[no-untyped-def]
    query_at,
    keys_at,
    values_at,
    count_at,
    rows_at,
    items_at,
    pages_at,
    mixed_at,
    totals_at,
    most_parts,
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
    overlap: tl.constexpr,
) -> None:
    head, taker, takers = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    let_next_start(overlap)
    count = tl.load(count_at)  # tables were written before this pass began
    lane, part = tl.arange(0, lanes), tl.arange(0, wide)
    in_chunk, in_group = lane // (lanes // height), lane % (lanes // height)
    group: tl.constexpr = heads // kv_heads
    stride: tl.constexpr = kv_heads * dim
    whole_lines = tl.full([_BLOCK], True, tl.int1)
    wait(overlap)
    for item in range(taker, count, takers):
        item_at = items_at + item * _ITEM
        first, rows = tl.load(item_at), tl.load(item_at + 1)
        own_pages_at, stretch = pages_at + tl.load(item_at + 2), tl.load(item_at + 3)
        used = (in_chunk < rows) & (in_group < group)
        row = tl.load(rows_at + first + tl.minimum(in_chunk, rows - 1))
        line = row * heads + head * group + in_group
        mask = used[:, None] & (part < dim)[None, :]
        query = tl.load(query_at + line[:, None] * dim + part[None, :], mask=mask, other=0.0)
        whole = nothing(lanes, wide)
        for index in tl.range(0, _MERGED, num_stages=stages):
            column = stretch * (_MERGED * _BLOCK) + index * _BLOCK + tl.arange(0, _BLOCK)
            place = places_of(column, whole_lines, own_pages_at, page_size)
            key = read_lines(keys_at + head * dim, place, whole_lines, stride, dim, wide)
            value = read_lines(values_at + head * dim, place, whole_lines, stride, dim, wide)
            visible = tl.broadcast_to((column >= earliest)[None, :], (lanes, _BLOCK))
            highest, weights = soften(tl.dot(query, tl.trans(key)), visible, scale)
            mixed = tl.dot(weights.to(value.dtype), value)
            whole = merge(whole, (highest, _sum_of_weights(weights), mixed))
        leave(whole, (line * most_parts + stretch).to(tl.int64), (mixed_at, totals_at), used, dim)


def attend_common(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    common: CommonRows,
    pages: torch.Tensor,
    page_size: int,
    parts: tuple[torch.Tensor, torch.Tensor, int],
    scale: float,
    earliest: int,
) -> None:
    """Leave parts of common stretches, as of AttentionScratch: mixed values, totals, and parts of a row."""
    _, heads, dim = query.shape
    kv_heads = keys.shape[1]
    height = rows_together(heads, kv_heads)
    overlap = overlaps(query.device)
    mixed, totals, most_parts = parts
    _common_kernel[(kv_heads, max(1, PROGRAMS // kv_heads))](
        query,
        keys,
        values,
        common.count,
        common.rows,
        common.items,
        pages,
        mixed,
        totals,
        most_parts,
        earliest,
        scale,
        heads,
        kv_heads,
        dim,
        max(16, triton.next_power_of_2(dim)),
        height,
        height * triton.next_power_of_2(heads // kv_heads),
        page_size,
        STAGES if overlap else FEW_STAGES,
        overlap,
        num_warps=WARPS,
        enable_fp_fusion=False,
        launch_pdl=overlap,
    )
