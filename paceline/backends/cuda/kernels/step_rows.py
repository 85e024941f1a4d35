"""Computes the rows of a decode step on the device, from the requests' state: see draft_shape.py."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from paceline.backends.cuda.kernels.attention.paged_attention import MAX_PATH
from paceline.core.request import UNLIMITED
from paceline.core.truncation import NUM_FIELDS

_PATH_LENGTH = tl.constexpr(MAX_PATH)
LINES = 11
(
    TOKENS,
    POSITIONS,
    ROPE_POSITIONS,
    SLOT_MAPPING,
    CONTIGUOUS_UNTIL,
    SOURCES,
    TILE_ROWS,
    TILE_COUNTS,
    TILE_PAGES,
    LAST,
    WINDOW_MAPPING,
) = range(LINES)


@dataclass(frozen=True)
class DeviceRequests:
    """The state of the requests in the device's slots."""

    tokens: torch.Tensor  # int32 [slots, longest] prompt and output
    lengths: torch.Tensor  # int32 [slots] tokens with keys and values
    limits: torch.Tensor  # int32 [slots] end of the KV indices that have pages; rows beyond are not computed
    pages: torch.Tensor  # int32 [slots, most pages] page tables
    window_pages: torch.Tensor | None  # int32 [slots, most pages] those of the window group, if there is one
    seeds: torch.Tensor  # int64 [slots]
    temperatures: torch.Tensor  # float64 [slots] 0: greedy
    truncation: torch.Tensor  # float64 [slots, NUM_FIELDS] of core/truncation.py
    most_drafted: torch.Tensor  # int32 [slots] drafted tokens that a step accepts, at most
    asks_logprobs: torch.Tensor  # int32 [slots] nonzero: log-probabilities are wanted
    adapters: torch.Tensor  # int32 [slots] the number of the request's LoRA adapter; -1: none


def make_requests(
    slots: int, longest: int, page_size: int, device: torch.device, has_windows: bool = False
) -> DeviceRequests:
    """Empty slots for requests of at most `longest` tokens. `has_windows`: the pool has a window group."""

    def integers(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.int32, device=device)

    return DeviceRequests(
        integers(slots, longest),
        integers(slots),
        integers(slots) + longest,
        integers(slots, -(-longest // page_size)),
        integers(slots, -(-longest // page_size)) if has_windows else None,
        torch.zeros(slots, dtype=torch.int64, device=device),
        torch.zeros(slots, dtype=torch.float64, device=device),
        torch.zeros((slots, NUM_FIELDS), dtype=torch.float64, device=device),
        integers(slots) + UNLIMITED,
        integers(slots),
        integers(slots) - 1,
    )


@dataclass(frozen=True)
class StepRows:
    """The rows of a step, ordered by pass, then by request. Its lines are:

    by row        tokens; positions; rope_positions (one less, for heads); slot_mapping, -1 for padding;
                  contiguous_until; sources (the row whose feature or state the drafter reads);
                  window_mapping, the slot mapping of the window group, if there is one
    by tile       first row, count, offset of pages
    by request    its last row in the drafter's first pass
    """

    lines: torch.Tensor  # int32 [LINES, most rows]
    paths: torch.Tensor  # int32 [most rows, MAX_PATH], or of one row if drafts are chains


@dataclass(frozen=True)
class ShapeTables:
    """A StepPlan on the device, and the constants of its draft."""

    rows: torch.Tensor  # int32 [10, rows of a request]
    tiles: torch.Tensor  # int32 [5, tiles of a request]
    paths: torch.Tensor  # int32 [rows of a request, levels]
    parents: torch.Tensor  # int32 [nodes]
    levels: int
    catch_up_rows: int  # most tokens that the drafter catches up on in a step; 0: no drafter
    always: int  # fixed number of tokens that it catches up on; 0: the newly accepted ones
    is_chain: bool

    def arguments(self, state: DeviceRequests, page_size: int) -> dict[str, int | bool]:
        """The arguments of every kernel that writes rows."""
        return {
            "longest": state.tokens.shape[1],
            "most_pages": state.pages.shape[1],
            "nodes": len(self.parents),
            "num_rows": self.rows.shape[1],
            "num_tiles": self.tiles.shape[1],
            "catch_up_rows": self.catch_up_rows,
            "always": self.always,
            "levels": self.levels,
            "deep": triton.next_power_of_2(max(self.levels, 1)),
            "is_chain": self.is_chain,
            "wide_rows": triton.next_power_of_2(self.rows.shape[1]),
            "wide_tiles": triton.next_power_of_2(self.tiles.shape[1]),
            "page_size": page_size,
        }


@triton.jit  # type: ignore[untyped-decorator]
def _field(at, field: tl.constexpr, number, count, missing: tl.constexpr):  # type: ignore[no-untyped-def]
    """A line of a table [fields, count]."""
    return tl.load(at + field * count + number, mask=number < count, other=missing)


@triton.jit  # type: ignore[untyped-decorator]
def _write_tiles(request, requests, pages_begin, tile, valid, rows, plan, wide: tl.constexpr) -> None:  # type: ignore[no-untyped-def]
    """Write the tiles of a request. `valid`: which of its rows are real; `tile`: the tile of each row."""
    lines_at, _, stride = rows
    _, tiles_at, _, _, num_tiles = plan
    block = tl.arange(0, wide)
    inside = block < num_tiles
    counts = tl.sum(((tile[None, :] == block[:, None]) & valid[None, :]).to(tl.int32), 1)
    first, each = _field(tiles_at, 0, block, num_tiles, 0), _field(tiles_at, 1, block, num_tiles, 0)
    to = lines_at + first * requests + request * each + _field(tiles_at, 2, block, num_tiles, 0)
    row = request * _field(tiles_at, 4, block, num_tiles, 0) + _field(tiles_at, 3, block, num_tiles, 0)
    tl.store(to + 6 * stride, row, mask=inside)
    tl.store(to + 7 * stride, counts, mask=inside)
    tl.store(to + 8 * stride, tl.zeros_like(row) + pages_begin, mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def write_rows(  # type: ignore[no-untyped-def]
    request,
    requests,
    slot,
    length,
    limit,
    fresh,
    state,
    window_pages_at,
    rows,
    plan,
    catch_up_rows: tl.constexpr,
    levels: tl.constexpr,
    deep: tl.constexpr,
    is_chain: tl.constexpr,
    wide_rows: tl.constexpr,
    wide_tiles: tl.constexpr,
    page_size: tl.constexpr,
) -> None:
    """Write all rows of a request of this length; the drafter catches up on its last `fresh` tokens.

    `state`: tokens and pages of slots, with their sizes per slot; `window_pages_at`: pages of the window
    group, or None; `rows`: a StepRows and its stride; `plan`: a StepPlan's rows, tiles and paths, and how
    many rows and tiles.
    """
    slot_tokens_at, pages_at, longest, most_pages = state
    lines_at, paths_at, stride = rows
    plan_at, _, rest_at, num_rows, _ = plan
    number = tl.arange(0, wide_rows)
    inside = number < num_rows
    first = _field(plan_at, 0, number, num_rows, 0)
    each = _field(plan_at, 1, number, num_rows, 0)
    row = first * requests + request * each + _field(plan_at, 2, number, num_rows, 0)
    catches_up = _field(plan_at, 6, number, num_rows, 0)
    # rows that catch up end at the root, or at the token before it
    back = tl.where(catches_up > 0, fresh + catches_up - 2, 0)
    node = _field(plan_at, 3, number, num_rows, 0)
    index, position = length + node - back, length + _field(plan_at, 4, number, num_rows, 0) - back
    # padding has length 0, so rows before its root have negative positions
    end = tl.where((slot >= 0) & (length < limit), limit, -wide_rows)
    valid = inside & (index < end) & ((node < fresh) | (catches_up == 0))
    valid_slot = tl.maximum(slot, 0)
    page = tl.load(pages_at + valid_slot * most_pages + index // page_size, mask=valid, other=0)
    to = lines_at + row
    tl.store(to + 1 * stride, tl.where(valid, position, 0), mask=inside)
    tl.store(to + 2 * stride, tl.where(valid, tl.maximum(position - 1, 0), 0), mask=inside)
    tl.store(to + 3 * stride, tl.where(valid, page * page_size + index % page_size, -1), mask=inside)
    tl.store(to + 4 * stride, length + _field(plan_at, 5, number, num_rows, 0) - back, mask=inside)
    if window_pages_at is not None:
        at = window_pages_at + valid_slot * most_pages + index // page_size
        own = tl.load(at, mask=valid, other=0) * page_size + index % page_size
        tl.store(to + 10 * stride, tl.where(valid, own, -1), mask=inside)
    is_known = valid & (node <= back)
    tl.store(
        to, tl.load(slot_tokens_at + valid_slot * longest + index, mask=is_known, other=0), mask=is_known
    )
    last = request * catch_up_rows + tl.maximum(fresh, 1) - 1
    source = _field(plan_at, 8, number, num_rows, -1)
    source = tl.where(source >= 0, request * _field(plan_at, 7, number, num_rows, 0) + source, last)
    tl.store(to + 5 * stride, source, mask=inside & (first > 0) & (catches_up == 0))
    tl.store(lines_at + 9 * stride + request, last)
    if not is_chain:
        along = tl.arange(0, deep)
        mask = inside[:, None] & (along < levels)[None, :]
        rest = tl.load(rest_at + number[:, None] * levels + along[None, :], mask=mask, other=0)
        tl.store(paths_at + row[:, None] * _PATH_LENGTH + along[None, :], length + rest, mask=mask)
    tile = _field(plan_at, 9, number, num_rows, -1)
    _write_tiles(request, requests, valid_slot * most_pages, tile, valid, rows, plan, wide_tiles)


@triton.jit  # type: ignore[untyped-decorator]
def _begin_kernel(  # type: ignore[no-untyped-def]
    slots_at,
    slot_tokens_at,
    lengths_at,
    limits_at,
    pages_at,
    window_pages_at,
    lines_at,
    paths_at,
    plan_at,
    tiles_at,
    rest_at,
    stride,
    longest,
    most_pages,
    nodes,
    num_rows,
    num_tiles,
    recomputed,
    catch_up_rows: tl.constexpr,
    always: tl.constexpr,
    levels: tl.constexpr,
    deep: tl.constexpr,
    is_chain: tl.constexpr,
    wide_rows: tl.constexpr,
    wide_tiles: tl.constexpr,
    page_size: tl.constexpr,
) -> None:
    request, requests = tl.program_id(0), tl.num_programs(0)
    slot = tl.load(slots_at + request)
    valid_slot = tl.maximum(slot, 0)
    length, limit = tl.load(lengths_at + valid_slot), tl.load(limits_at + valid_slot)
    last = tl.minimum(length, recomputed)
    fresh = tl.minimum(length + 1, always) if always > 0 else tl.maximum(last, 1)
    if catch_up_rows > 0:  # the features of the last computed tokens are in the rows of the first nodes
        number = tl.arange(0, wide_rows)
        source = nodes * requests + request * catch_up_rows + number
        tl.store(lines_at + 5 * stride + source, request * nodes + number, mask=number < fresh)
    write_rows(
        request,
        requests,
        slot,
        length,
        limit,
        fresh,
        (slot_tokens_at, pages_at, longest, most_pages),
        window_pages_at,
        (lines_at, paths_at, stride),
        (plan_at, tiles_at, rest_at, num_rows, num_tiles),
        catch_up_rows,
        levels,
        deep,
        is_chain,
        wide_rows,
        wide_tiles,
        page_size,
    )


def begin_rows(
    slots: torch.Tensor,
    state: DeviceRequests,
    shape: ShapeTables,
    rows: StepRows,
    page_size: int,
    recomputed: int = 1,
) -> None:
    """Write the rows of the first step of the requests in `slots` int32 [requests]; -1: padding.

    A head catches up on the last `recomputed` tokens of each request, or on all if there are fewer.
    """
    _begin_kernel[(len(slots),)](
        slots,
        state.tokens,
        state.lengths,
        state.limits,
        state.pages,
        state.window_pages,
        rows.lines,
        rows.paths,
        shape.rows,
        shape.tiles,
        shape.paths,
        rows.lines.stride(0),
        recomputed=recomputed,
        **shape.arguments(state, page_size),
        num_warps=4,
    )
