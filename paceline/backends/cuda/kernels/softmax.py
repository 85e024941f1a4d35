"""Parts of a softmax over keys in pages: how one is made of a block of positions, and how they are merged.

A part is three numbers of each lane: the largest score, the sum of weights, and the values mixed by them. A
pool is where keys, values and page numbers begin, and how far apart the keys of positions are.
"""

from __future__ import annotations

import triton
import triton.language as tl

from paceline.backends.cuda.kernels.launching import prefetch

BLOCK = 64  # positions looked at together
MERGED = 8  # blocks of a stretch, stretches of a group
MOST_PATH = 64  # positions of a path that are not straight
_PATH_LENGTH = tl.constexpr(MOST_PATH)


def rows_of_lanes(lanes: int, heads: int, kv_heads: int) -> int:
    """How many rows have room in so many lanes, each with the query heads that share a key head."""
    return max(1, lanes // int(triton.next_power_of_2(heads // kv_heads)))


@triton.jit  # type: ignore[untyped-decorator]
def places_of(index, seen, pages_at, page_size: tl.constexpr):  # type: ignore[no-untyped-def]
    """The places of KV indices in the pool."""
    page = tl.load(pages_at + index // page_size, mask=seen, other=0)
    return page * page_size + index % page_size


@triton.jit  # type: ignore[untyped-decorator]
def prefetch_lines(pool, place, wide: tl.constexpr, overlap: tl.constexpr) -> None:  # type: ignore[no-untyped-def]
    """Fetch keys and values at these places into the cache, where there is time for it."""
    if overlap:
        keys_at, values_at, _, stride = pool
        lines: tl.constexpr = (wide + 63) // 64
        wanted = place.to(tl.int64)[:, None] * stride + tl.arange(0, lines)[None, :] * 64
        prefetch(keys_at + wanted)
        prefetch(values_at + wanted)


@triton.jit  # type: ignore[untyped-decorator]
def _own_places(column, tile, tables, pages_at, height: tl.constexpr, page_size: tl.constexpr):  # type: ignore[no-untyped-def]
    """The places of positions `column` on the path of each row of a tile: [height, block]; -1: not seen."""
    positions_at, straight_at, paths_at = tables
    first, count, _, _ = tile
    row = (first + tl.minimum(tl.arange(0, height), count - 1))[:, None]
    at = tl.zeros_like(row) + column[None, :]
    seen, straight = at <= tl.load(positions_at + row), tl.load(straight_at + row)
    behind = seen & (at >= straight)
    on_path = tl.load(paths_at + row * _PATH_LENGTH + (at - straight), mask=behind, other=0)
    return tl.where(seen, places_of(tl.where(behind, on_path, at), seen, pages_at, page_size), -1)


@triton.jit
def _of_row(places, row):  # type: ignore[no-untyped-def]
    """A row of places [height, block]."""
    number = tl.arange(0, places.shape[0])[:, None]
    return tl.max(tl.where(number == row, places, -1), 0)


@triton.jit  # type: ignore[untyped-decorator]
def read_lines(pool_at, place, seen, stride, dim: tl.constexpr, wide: tl.constexpr):  # type: ignore[no-untyped-def]
    """Keys or values at these places: [block, wide], zero where nothing is seen."""
    part = tl.arange(0, wide)
    mask = seen[:, None] & (part < dim)[None, :]
    return tl.load(pool_at + place[:, None].to(tl.int64) * stride + part[None, :], mask=mask, other=0.0)


@triton.jit
def visible_positions(column, sight):  # type: ignore[no-untyped-def]
    """Which positions each lane sees: [lanes, block]; `sight` is its own, the window, and the earliest."""
    position, window, earliest = sight
    visible = (column[None, :] <= position[:, None]) & (column[None, :] >= earliest)
    if window > 0:
        visible &= position[:, None] - column[None, :] < window
    return visible


@triton.jit
def soften(scores, visible, scale):  # type: ignore[no-untyped-def]
    """The largest visible score of each lane, and the weights of a softmax, not yet divided by their sum."""
    scores = tl.where(visible, scores * scale, float("-inf"))
    highest = tl.max(scores, 1)
    safe = tl.where(highest == float("-inf"), 0.0, highest)  # where nothing is visible
    return highest, tl.exp2(scores - safe[:, None])


@triton.jit
def merge(part, other):  # type: ignore[no-untyped-def]
    """Two parts of a softmax as one. To merge into nothing changes no bit.

    What is fused with what is said, not left to the compiler: parts are merged in several places.
    """
    highest, total, mixed = part
    other_highest, other_total, other_mixed = other
    higher = tl.maximum(highest, other_highest)
    safe = tl.where(higher == float("-inf"), 0.0, higher)  # where neither has seen a key
    shrink, other_shrink = tl.exp2(highest - safe), tl.exp2(other_highest - safe)
    total = tl.fma(total, shrink, other_total * other_shrink)
    mixed = tl.fma(mixed, tl.broadcast_to(shrink[:, None], mixed.shape), other_mixed * other_shrink[:, None])
    return higher, total, mixed


@triton.jit  # type: ignore[untyped-decorator]
def nothing(lanes: tl.constexpr, wide: tl.constexpr):  # type: ignore[no-untyped-def]
    """A softmax that has seen no key: largest score, sum of weights, mixed values."""
    highest = tl.full([lanes], float("-inf"), tl.float32)
    return highest, tl.zeros([lanes], tl.float32), tl.zeros([lanes, wide], tl.float32)


@triton.jit  # type: ignore[untyped-decorator]
def straight_block(query, place, seen, visible, scale, pool, dim: tl.constexpr):  # type: ignore[no-untyped-def]
    """The softmax of a block whose keys and values all rows of the tile read at the same places."""
    keys_at, values_at, _, stride = pool
    wide: tl.constexpr = query.shape[1]
    key = read_lines(keys_at, place, seen, stride, dim, wide)
    value = read_lines(values_at, place, seen, stride, dim, wide)
    highest, weights = soften(tl.dot(query, tl.trans(key)), visible, scale)
    return highest, tl.sum(weights, 1), tl.dot(weights.to(value.dtype), value)


@triton.jit  # type: ignore[untyped-decorator]
def crooked_block(  # type: ignore[no-untyped-def]
    query,
    column,
    tile,
    visible,
    scale,
    tables,
    pool,
    dim: tl.constexpr,
    height: tl.constexpr,
    page_size: tl.constexpr,
):
    """The softmax of a block of which each row reads its own keys.

    `tile` is its first row, the number of its rows, which of them each lane has, and where it gets crooked.
    """
    keys_at, values_at, pages_at, stride = pool
    _, _, in_tile, _ = tile
    lanes: tl.constexpr = query.shape[0]
    wide: tl.constexpr = query.shape[1]
    places = _own_places(column, tile, tables, pages_at, height, page_size)
    scores = tl.zeros([lanes, column.shape[0]], tl.float32)
    for own in tl.range(height, num_stages=2):
        place = _of_row(places, own)
        key = read_lines(keys_at, place, place >= 0, stride, dim, wide)
        scores = tl.where((in_tile == own)[:, None], tl.dot(query, tl.trans(key)), scores)
    highest, weights = soften(scores, visible, scale)
    mixed = tl.zeros([lanes, wide], tl.float32)
    for own in tl.range(height, num_stages=2):
        place = _of_row(places, own)
        value = read_lines(values_at, place, place >= 0, stride, dim, wide)
        own_mixed = tl.dot(weights.to(value.dtype), value)
        mixed = tl.where((in_tile == own)[:, None], own_mixed, mixed)
    return highest, tl.sum(weights, 1), mixed


@triton.jit  # type: ignore[untyped-decorator]
def leave(part, line, left, used, dim: tl.constexpr) -> None:  # type: ignore[no-untyped-def]
    """Write a part to memory for who comes last."""
    highest, total, mixed = part
    mixed_at, totals_at = left
    along = tl.arange(0, mixed.shape[1])
    tl.store(
        mixed_at + line[:, None] * dim + along[None, :], mixed, mask=used[:, None] & (along < dim)[None, :]
    )
    tl.store(totals_at + line * 2, highest, mask=used)
    tl.store(totals_at + line * 2 + 1, total, mask=used)


@triton.jit  # type: ignore[untyped-decorator]
def gather(  # type: ignore[no-untyped-def]
    lines,
    begin,
    end,
    left,
    used,
    dim: tl.constexpr,
    wide: tl.constexpr,
    lanes: tl.constexpr,
    merged: tl.constexpr,
):
    """All parts from `begin` to `end`, merged in groups; several are on their way at a time."""
    mixed_at, totals_at = left
    along = tl.arange(0, wide)
    whole = nothing(lanes, wide)
    for group in range(begin // merged, (end + merged - 1) // merged):
        inner = nothing(lanes, wide)
        for index in tl.static_range(merged):
            number = tl.zeros([lanes], tl.int32) + group * merged + index
            there = used & (number >= begin) & (number < end)
            line = (lines + number).to(tl.int64)
            highest = tl.load(totals_at + line * 2, mask=there, other=float("-inf"), cache_modifier=".cg")
            total = tl.load(totals_at + line * 2 + 1, mask=there, other=0.0, cache_modifier=".cg")
            mixed = tl.load(
                mixed_at + line[:, None] * dim + along[None, :],
                mask=there[:, None] & (along < dim)[None, :],
                other=0.0,
                cache_modifier=".cg",
            )
            inner = merge(inner, (highest, total, mixed))
        whole = merge(whole, inner)
    return whole
