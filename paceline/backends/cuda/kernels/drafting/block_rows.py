"""Blocks of a parallel head on the device: the rows of their slots, and the Markov head's logits.

The keys and values of a block's slots follow the context in the request's pages, up to the end of the
anchor's page, and beyond that go to spare pages of the head's pool, because a request holds no pages for a
whole block. Nothing reads them after the pass.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from paceline.backends.cuda.kernels.attention.row_tables import RowTables, UniformRows
from paceline.backends.cuda.kernels.pdl import pdl_sync, supports_pdl

MARKOV_ROWS, MARKOV_COLUMNS = 16, 64  # tile of a program of `add_markov`


@dataclass(frozen=True)
class Anchors:
    """The anchor of each request's block: its last known token. All int32, on the device, with any stride."""

    tokens: torch.Tensor  # [requests]
    positions: torch.Tensor  # [requests]
    slot_mapping: torch.Tensor  # [requests] -1: the request is padding
    pages_begin: torch.Tensor  # [requests] offset of its page table in `pages`
    pages: torch.Tensor  # [pages of all requests]


@dataclass(frozen=True)
class SlotRows:
    """The rows of blocks of at most `max_requests` requests, allocated once for captured graphs."""

    size: int  # slots of a block
    height: int  # rows of an attention tile
    mask_token: int
    is_causal: bool  # False: attention within a block is bidirectional
    max_position: int
    spare_page: int  # the first spare page of the pool
    page_size: int
    lines: torch.Tensor  # int32 [5, max_requests * size] tokens, positions, slots, contiguous_until, visible
    tiles: torch.Tensor  # int32 [3, max_requests * tiles of a block] first row, count, offset of pages
    pages: torch.Tensor  # int32 [max_requests, pages of a request and spare pages]

    @property
    def spare_pages(self) -> int:
        """The most spare pages of a block."""
        return spare_pages(self.size, self.page_size)

    def tables(self, requests: int) -> RowTables:
        """The attention metadata of a pass over the blocks of this many requests."""
        rows, tiles = requests * self.size, -(-self.size // self.height)
        _, positions, slot_mapping, contiguous_until, visible = self.lines[:, :rows]
        tile_rows, tile_counts, tile_pages = self.tiles[:, : requests * tiles]
        return RowTables(
            positions,
            slot_mapping,
            contiguous_until,
            None,
            tile_rows,
            tile_counts,
            tile_pages,
            self.pages.view(-1),
            UniformRows(tiles, self.size, settled=False),
            visible=visible,
        )


def spare_pages(size: int, page_size: int) -> int:
    """The most pages after the anchor's page that a block of this size reaches into."""
    return -(-(size - 1) // page_size)


@triton.jit  # type: ignore[untyped-decorator]
def _block_rows_kernel(  # type: ignore[no-untyped-def]
    anchor_tokens_at,
    anchor_positions_at,
    anchor_slots_at,
    pages_begin_at,
    given_pages_at,
    token_stride,
    position_stride,
    slot_stride,
    begin_stride,
    lines_at,
    tiles_at,
    pages_at,
    lines_stride,
    tiles_stride,
    given_pages,  # of a request
    num_pages,  # of a request, with spare pages
    mask_token,
    max_position,
    spare_page,
    size: tl.constexpr,
    height: tl.constexpr,
    is_causal: tl.constexpr,
    spare: tl.constexpr,
    page_size: tl.constexpr,
    wide: tl.constexpr,  # size, rounded up to a power of two
    wide_pages: tl.constexpr,
) -> None:
    request = tl.program_id(0)
    anchor = tl.load(anchor_positions_at + request * position_stride)
    valid = tl.load(anchor_slots_at + request * slot_stride) >= 0
    given_pages_at += tl.load(pages_begin_at + request * begin_stride)
    held, first_spare = anchor // page_size, spare_page + request * spare
    for start in range(0, num_pages, wide_pages):
        number = start + tl.arange(0, wide_pages)
        page = tl.load(given_pages_at + number, mask=number < given_pages, other=0)
        page = tl.where(number > held, first_spare + tl.minimum(number - held, spare) - 1, page)
        tl.store(pages_at + request * num_pages + number, page, mask=number < num_pages)
    slot = tl.arange(0, wide)
    inside, index = slot < size, anchor + slot
    behind, own = index // page_size - held, tl.load(given_pages_at + held)
    page = tl.where(behind > 0, first_spare + behind - 1, own)
    token = tl.load(anchor_tokens_at + request * token_stride)
    to = lines_at + request * size + slot
    tl.store(to, tl.where(slot == 0, token, mask_token), mask=inside)
    tl.store(to + lines_stride, tl.where(valid, tl.minimum(index, max_position - 1), 0), mask=inside)
    kv_slot = tl.where(valid, page * page_size + index % page_size, -1)
    tl.store(to + 2 * lines_stride, kv_slot, mask=inside)
    tl.store(to + 3 * lines_stride, tl.zeros_like(index) + anchor + size, mask=inside)
    seen = index if is_causal else tl.zeros_like(index) + anchor + size - 1
    tl.store(to + 4 * lines_stride, tl.where(valid, seen, 0), mask=inside)
    tiles: tl.constexpr = (size + height - 1) // height
    tile_to, has_tile = tiles_at + request * tiles + slot, slot < tiles
    count = tl.where(valid, tl.minimum(size - slot * height, height), 0)
    tl.store(tile_to, request * size + slot * height, mask=has_tile)
    tl.store(tile_to + tiles_stride, count, mask=has_tile)
    tl.store(tile_to + 2 * tiles_stride, tl.zeros_like(slot) + request * num_pages, mask=has_tile)


def write_block_rows(anchors: Anchors, given_pages: int, rows: SlotRows, requests: int) -> None:
    """Write the rows of the blocks of these anchors. `given_pages`: pages of a request's page table.

    Launched without PDL, because later kernels read tables before they wait for their predecessors.
    """
    _block_rows_kernel[(requests,)](
        anchors.tokens,
        anchors.positions,
        anchors.slot_mapping,
        anchors.pages_begin,
        anchors.pages,
        anchors.tokens.stride(0),
        anchors.positions.stride(0),
        anchors.slot_mapping.stride(0),
        anchors.pages_begin.stride(0),
        rows.lines,
        rows.tiles,
        rows.pages,
        rows.lines.stride(0),
        rows.tiles.stride(0),
        given_pages,
        rows.pages.shape[1],
        rows.mask_token,
        rows.max_position,
        rows.spare_page,
        rows.size,
        rows.height,
        rows.is_causal,
        max(rows.spare_pages, 1),
        rows.page_size,
        triton.next_power_of_2(rows.size),
        256,
        num_warps=4,
    )


@triton.jit  # type: ignore[untyped-decorator]
def _markov_kernel(  # type: ignore[no-untyped-def]
    base_at,
    tokens_at,
    before_at,
    after_at,
    scales_at,
    least_at,
    output_at,
    rows,
    rows_each,
    width,
    base_stride,
    token_stride,
    scale_stride,
    least_stride,
    output_stride,
    has_scales: tl.constexpr,
    has_least: tl.constexpr,
    rank: tl.constexpr,
    tile: tl.constexpr,
    columns: tl.constexpr,
    pdl: tl.constexpr,
) -> None:
    row = tl.program_id(0) * tile + tl.arange(0, tile)
    column = tl.program_id(1) * columns + tl.arange(0, columns)
    part, real = tl.arange(0, rank), row < rows
    inside = (column < width)[:, None] & real[None, :]
    after = tl.load(
        after_at + column[:, None] * rank + part[None, :], mask=(column < width)[:, None], other=0.0
    )
    pdl_sync(pdl)
    token = tl.load(tokens_at + row * token_stride, mask=real, other=0).to(tl.int64)
    before = tl.load(before_at + token[None, :] * rank + part[:, None], mask=real[None, :], other=0.0)
    block = (row // rows_each)[None, :]
    if has_scales:
        scales = tl.load(scales_at + block * scale_stride + part[:, None], mask=real[None, :], other=0.0)
        before = (before * scales).to(after.dtype)
    base = tl.load(base_at + block * base_stride + column[:, None], mask=inside, other=0.0)
    total = base + tl.dot(after, before)
    if has_least:
        least = tl.load(least_at + block * least_stride, mask=real[None, :], other=0.0)
        total = tl.where(base >= least, total, float("-inf"))
    tl.store(output_at + row[None, :] * output_stride + column[:, None], total, mask=inside)


def add_markov(
    base: torch.Tensor,
    tokens: torch.Tensor,
    before: torch.Tensor,
    after: torch.Tensor,
    output: torch.Tensor,
    scales: torch.Tensor | None = None,
    least: torch.Tensor | None = None,
) -> None:
    """Write base + after @ before[tokens] to the first rows of `output`: the logits after these tokens.

    `base` is float32 [requests, vocabulary], `tokens` int32 [rows], equally many for each request, both with
    any row stride. `before` [target's vocabulary, rank] and `after` [vocabulary, rank] are the matrices of
    the Markov head; rank is a power of two. For a pair selector, before[tokens] is multiplied by `scales`
    float32 [requests, rank], and logits with base below `least` float32 [requests] become -inf.
    """
    (requests, width), rows, pdl = base.shape, len(tokens), supports_pdl(base.device)
    grid = (triton.cdiv(rows, MARKOV_ROWS), triton.cdiv(width, MARKOV_COLUMNS))
    _markov_kernel[grid](
        base,
        tokens,
        before,
        after,
        scales,
        least,
        output,
        rows,
        rows // requests,
        width,
        base.stride(0),
        tokens.stride(0),
        0 if scales is None else scales.stride(0),
        0 if least is None else least.stride(0),
        output.stride(0),
        scales is not None,
        least is not None,
        before.shape[1],
        MARKOV_ROWS,
        MARKOV_COLUMNS,
        pdl,
        num_warps=4,
        launch_pdl=pdl,
    )
