"""Online softmax over paged keys and values: the partial of a block, and merging partials.

A partial is, for each lane, the largest score (row_max), the sum of weights (row_sum) and the weighted sum of
values (acc), as in FlashAttention. A `pool` is the addresses of keys, values and page numbers, and the stride
between positions.

In latent attention (MLA) all query heads share one KV head, [RoPE part | latent], and latents are the values.
Then `rope` is the size of the RoPE part, `dim` that of a latent, and a pool has the addresses of latents,
RoPE parts and page numbers. Each program has some of the query heads.
"""

from __future__ import annotations

import triton
import triton.language as tl

from paceline.backends.cuda.kernels.attention.scoring import LOG2_E
from paceline.backends.cuda.kernels.pdl import prefetch
from paceline.backends.cuda.kernels.products.fp8 import fp8_scales, scale_offset

BLOCK = 64  # positions of a block
MERGE_FAN_IN = 8  # blocks of a KV chunk, and KV chunks of a group
MAX_PATH = 64  # most non-contiguous positions of a path
TREE_NUMBERS = 256  # a tree block reads the keys of this many rows at once, times the numbers of a key
# above this head size, keys and values of a block fill the shared memory of a multiprocessor, as latents do
LONG_HEAD, LONG_STAGES = 256, 1
_PATH_LENGTH, _LOG2_E, _TREE_NUMBERS = (
    tl.constexpr(MAX_PATH),
    tl.constexpr(LOG2_E),
    tl.constexpr(TREE_NUMBERS),
)


def rows_of_lanes(lanes: int, heads: int, kv_heads: int) -> int:
    """The number of rows that fit in this many lanes: each has the query heads that share a KV head."""
    return max(1, lanes // int(triton.next_power_of_2(heads // kv_heads)))


def head_groups(heads: int, lanes: int) -> int:
    """The number of equal groups of query heads that share a KV head, each of at most `lanes`."""
    return next(count for count in range(1, heads + 1) if heads % count == 0 and heads // count <= lanes)


@triton.jit  # type: ignore[untyped-decorator]
def lanes_of_tile(  # type: ignore[no-untyped-def]
    head, count, heads: tl.constexpr, kv_heads: tl.constexpr, height: tl.constexpr, lanes: tl.constexpr
):
    """For each lane: its row in the tile, its query head, and whether it is in use (`count` rows are)."""
    lane, group = tl.arange(0, lanes), heads // kv_heads
    in_tile, in_group = lane // (lanes // height), lane % (lanes // height)
    return in_tile, head * group + in_group, (in_tile < count) & (in_group < group)


@triton.jit  # type: ignore[untyped-decorator]
def pool_of_head(  # type: ignore[no-untyped-def]
    keys_at, values_at, pages_at, group, kv_heads: tl.constexpr, dim: tl.constexpr, rope: tl.constexpr
):
    """The pool of a group's KV head, or of the latents that all groups share. `group`: (index, groups)."""
    number, groups = group
    if rope > 0:
        return keys_at + rope, keys_at, pages_at, dim + rope
    else:  # noqa: RET505 -- Triton compiles what follows a return
        head = number // (groups // kv_heads)
        return keys_at + head * dim, values_at + head * dim, pages_at, kv_heads * dim


@triton.jit  # type: ignore[untyped-decorator]
def load_queries(  # type: ignore[no-untyped-def]
    query_at,
    line,
    is_used,
    dim: tl.constexpr,
    wide: tl.constexpr,
    rope: tl.constexpr = 0,
    rope_wide: tl.constexpr = 0,
):
    """The queries of these lines (row * heads + head): [lanes, wide], zero in unused lanes; and RoPE parts.

    Without latents there are no RoPE parts, and the queries are returned twice.
    """
    query = _query_parts(query_at + rope, line, is_used, dim, wide, dim + rope)
    rotated = query
    if rope > 0:
        rotated = _query_parts(query_at, line, is_used, rope, rope_wide, dim + rope)
    return query, rotated


@triton.jit  # type: ignore[untyped-decorator]
def _query_parts(  # type: ignore[no-untyped-def]
    query_at, line, is_used, dim: tl.constexpr, wide: tl.constexpr, stride: tl.constexpr
):
    part = tl.arange(0, wide)
    mask = is_used[:, None] & (part < dim)[None, :]
    return tl.load(query_at + line[:, None] * stride + part[None, :], mask=mask, other=0.0)


@triton.jit  # type: ignore[untyped-decorator]
def kv_slots_of(index, seen, pages_at, page_size: tl.constexpr):  # type: ignore[no-untyped-def]
    """The KV slots of KV indices: page * page_size + offset."""
    page = tl.load(pages_at + index // page_size, mask=seen, other=0)
    return page * page_size + index % page_size


@triton.jit  # type: ignore[untyped-decorator]
def prefetch_kv(pool, kv_slot, wide: tl.constexpr, rope: tl.constexpr, pdl: tl.constexpr) -> None:  # type: ignore[no-untyped-def]
    """Prefetch keys and values of these KV slots into the L2 cache, if PDL overlaps kernels."""
    if pdl:
        keys_at, values_at, _, stride = pool
        lines: tl.constexpr = (wide + 63) // 64
        first = kv_slot.to(tl.int64)[:, None] * stride
        wanted = first + tl.arange(0, lines)[None, :] * 64
        prefetch(keys_at + wanted)
        prefetch(values_at + (first if rope > 0 else wanted))


@triton.jit  # type: ignore[untyped-decorator]
def _path_slots(column, tile, tables, pages_at, begin, rows: tl.constexpr, page_size: tl.constexpr):  # type: ignore[no-untyped-def]
    """The KV slots of positions `column` on the paths of a tile's rows, from row `begin` on: [rows, block].

    -1: masked.
    """
    positions_at, contiguous_until_at, paths_at = tables
    first, count, _, _ = tile
    row = (first + tl.minimum(begin + tl.arange(0, rows), count - 1))[:, None]
    at = tl.zeros_like(row) + column[None, :]
    seen, contiguous_until = at <= tl.load(positions_at + row), tl.load(contiguous_until_at + row)
    on_tail = seen & (at >= contiguous_until)
    on_path = tl.load(paths_at + row * _PATH_LENGTH + (at - contiguous_until), mask=on_tail, other=0)
    return tl.where(seen, kv_slots_of(tl.where(on_tail, on_path, at), seen, pages_at, page_size), -1)


@triton.jit  # type: ignore[untyped-decorator]
def load_kv(pool_at, kv_slot, seen, stride, dim: tl.constexpr, wide: tl.constexpr):  # type: ignore[no-untyped-def]
    """Keys or values of these KV slots: [block, wide], zero where masked."""
    part = tl.arange(0, wide)
    mask = seen[:, None] & (part < dim)[None, :]
    return tl.load(pool_at + kv_slot[:, None].to(tl.int64) * stride + part[None, :], mask=mask, other=0.0)


@triton.jit  # type: ignore[untyped-decorator]
def load_values(key, pool, kv_slot, seen, dim: tl.constexpr, rope: tl.constexpr):  # type: ignore[no-untyped-def]
    """The values of these KV slots: [block, wide]; latents are keys and values at once."""
    value = key
    if rope == 0:
        value = load_kv(pool[1], kv_slot, seen, pool[3], dim, key.shape[1])
    return value


@triton.jit  # type: ignore[untyped-decorator]
def key_products(queries, key, pool, kv_slot, seen, rope: tl.constexpr):  # type: ignore[no-untyped-def]
    """The products of queries and keys: [lanes, block]. `queries` are those of `load_queries`."""
    query, rotated = queries
    products = tl.dot(query, tl.trans(key))
    if rope > 0:
        rotated_key = load_kv(pool[1], kv_slot, seen, pool[3], rope, rotated.shape[1])
        products = tl.dot(rotated, tl.trans(rotated_key), products)
    return products


@triton.jit  # type: ignore[untyped-decorator]
def sight_of(position, window, earliest, chunk: tl.constexpr):  # type: ignore[no-untyped-def]
    """The first and last position that each lane attends to, by causal mask, window and chunk."""
    first = tl.zeros_like(position) + earliest
    if chunk > 0:
        first = tl.maximum(first, position // chunk * chunk)
    elif window > 0:
        first = tl.maximum(first, position - window + 1)
    return first, position


@triton.jit
def visible_positions(column, sight):  # type: ignore[no-untyped-def]
    """The attention mask of a block: [lanes, block]. `sight` comes from `sight_of`."""
    first, last = sight
    return (column[None, :] >= first[:, None]) & (column[None, :] <= last[:, None])


@triton.jit  # type: ignore[untyped-decorator]
def scaled(products, scale, softcap: tl.constexpr):  # type: ignore[no-untyped-def]
    """Scores from query-key products, in base 2. With a cap, `scale` applies to the tanh: see Scoring."""
    if softcap > 0:
        products = 1.0 - 2.0 / (tl.exp2(products * softcap) + 1.0)  # tanh
    return products * scale


@triton.jit  # type: ignore[untyped-decorator]
def softmax_weights(products, visible, scale, softcap: tl.constexpr):  # type: ignore[no-untyped-def]
    """row_max of each lane, and the unnormalized weights exp2(score - row_max)."""
    return weights_of(tl.where(visible, scaled(products, scale, softcap), float("-inf")))


@triton.jit
def weights_of(scores):  # type: ignore[no-untyped-def]
    """The same for scores that are already scaled, and -inf where masked."""
    row_max = tl.max(scores, 1)
    safe = tl.where(row_max == float("-inf"), 0.0, row_max)  # all keys are masked
    return row_max, tl.exp2(scores - safe[:, None])


@triton.jit
def sum_of_weights(weights):  # type: ignore[no-untyped-def]
    """The sum of each lane's 64 weights, in the order of a 16-lane tile on four warps (paged_attention.py).

    There a thread has columns c, c + 1, c + 32 and c + 33, four threads have eight adjacent columns, and a
    warp has every fourth eight. All additions are of two numbers, so no layout changes their order.
    """
    lanes: tl.constexpr = weights.shape[0]
    by_thread = tl.reshape(weights, (lanes, 2, 2, 2, 4, 2))
    even, odd = tl.split(by_thread)  # [lanes, 2, 2, 2, 4]
    low_even, high_even = tl.split(tl.permute(even, (0, 2, 3, 4, 1)))
    low_odd, high_odd = tl.split(tl.permute(odd, (0, 2, 3, 4, 1)))
    sums = ((low_even + low_odd) + high_even) + high_odd  # [lanes, 2, 2, 4]
    halves = tl.sum(tl.reshape(sums, (lanes, 2, 2, 2, 2)), 3)
    return tl.sum(tl.sum(tl.sum(halves, 3), 1), 1)


@triton.jit
def merge(part, other):  # type: ignore[no-untyped-def]
    """Merge two partials. Merging with an empty one changes no bits.

    Fused multiply-adds are explicit, because several kernels merge partials and must round alike.
    """
    row_max, row_sum, acc = part
    other_max, other_sum, other_acc = other
    new_max = tl.maximum(row_max, other_max)
    safe = tl.where(new_max == float("-inf"), 0.0, new_max)  # both are empty
    rescale, other_rescale = tl.exp2(row_max - safe), tl.exp2(other_max - safe)
    row_sum = tl.fma(row_sum, rescale, other_sum * other_rescale)
    acc = tl.fma(acc, tl.broadcast_to(rescale[:, None], acc.shape), other_acc * other_rescale[:, None])
    return new_max, row_sum, acc


@triton.jit  # type: ignore[untyped-decorator]
def empty_softmax(lanes: tl.constexpr, wide: tl.constexpr):  # type: ignore[no-untyped-def]
    """The partial of no keys: row_max, row_sum and acc."""
    row_max = tl.full([lanes], float("-inf"), tl.float32)
    return row_max, tl.zeros([lanes], tl.float32), tl.zeros([lanes, wide], tl.float32)


@triton.jit  # type: ignore[untyped-decorator]
def contiguous_block(  # type: ignore[no-untyped-def]
    queries, kv_slot, seen, visible, scale, pool, dim: tl.constexpr, softcap: tl.constexpr, rope: tl.constexpr
):
    """The partial of a contiguous block: its KV slots are the same for all rows of the tile."""
    wide: tl.constexpr = queries[0].shape[1]
    key = load_kv(pool[0], kv_slot, seen, pool[3], dim, wide)
    value = load_values(key, pool, kv_slot, seen, dim, rope)
    products = key_products(queries, key, pool, kv_slot, seen, rope)
    row_max, weights = softmax_weights(products, visible, scale, softcap)
    return row_max, tl.sum(weights, 1), tl.dot(weights.to(value.dtype), value)


@triton.jit  # type: ignore[untyped-decorator]
def tree_block(  # type: ignore[no-untyped-def]
    queries,
    column,
    tile,
    visible,
    scale,
    tables,
    pool,
    dim: tl.constexpr,
    height: tl.constexpr,
    page_size: tl.constexpr,
    softcap: tl.constexpr,
    rope: tl.constexpr,
):
    """The partial of a tree block: each row reads its own KV slots.

    `tile` is (first row, rows, row of each lane, tree_begin). The keys and values of several rows, as many as
    fit, are read and multiplied together like one longer block, with weight zero for other rows' values.
    """
    keys_at, _, pages_at, stride = pool
    _, _, in_tile, _ = tile
    lanes: tl.constexpr = queries[0].shape[0]
    wide: tl.constexpr = queries[0].shape[1]
    block: tl.constexpr = column.shape[0]
    fitting: tl.constexpr = _TREE_NUMBERS // wide if wide < _TREE_NUMBERS else 1
    rows: tl.constexpr = height if height < fitting else fitting
    merged_max, merged_sum, merged_acc = empty_softmax(lanes, wide)
    for begin in tl.range(0, height, rows, num_stages=1):
        kv_slot = tl.reshape(
            _path_slots(column, tile, tables, pages_at, begin, rows, page_size), (rows * block,)
        )
        key = load_kv(keys_at, kv_slot, kv_slot >= 0, stride, dim, wide)
        value = load_values(key, pool, kv_slot, kv_slot >= 0, dim, rope)
        scores = key_products(queries, key, pool, kv_slot, kv_slot >= 0, rope)  # [lanes, rows * block]
        own = in_tile[:, None, None] == begin + tl.arange(0, rows)[None, :, None]
        if rows > 1:
            scores = tl.sum(tl.where(own, tl.reshape(scores, (lanes, rows, block)), 0.0), 1)
        row_max, weights = softmax_weights(scores, visible, scale, softcap)
        row_sum = tl.sum(weights, 1) if rows == 1 else sum_of_weights(weights)
        if rows > 1:
            weights = tl.reshape(tl.where(own, weights[:, None, :], 0.0), (lanes, rows * block))
        acc = tl.dot(weights.to(value.dtype), value)
        chosen = (in_tile >= begin) & (in_tile < begin + rows)
        merged_max, merged_sum = tl.where(chosen, row_max, merged_max), tl.where(chosen, row_sum, merged_sum)
        merged_acc = tl.where(chosen[:, None], acc, merged_acc)
    return merged_max, merged_sum, merged_acc


@triton.jit  # type: ignore[untyped-decorator]
def store_partial(part, line, partials_at, is_used, dim: tl.constexpr) -> None:  # type: ignore[no-untyped-def]
    """Store a partial for the program that merges."""
    row_max, row_sum, acc = part
    partial_acc_at, partial_stats_at = partials_at
    along = tl.arange(0, acc.shape[1])
    tl.store(
        partial_acc_at + line[:, None] * dim + along[None, :],
        acc,
        mask=is_used[:, None] & (along < dim)[None, :],
    )
    tl.store(partial_stats_at + line * 2, row_max, mask=is_used)
    tl.store(partial_stats_at + line * 2 + 1, row_sum, mask=is_used)


@triton.jit  # type: ignore[untyped-decorator]
def load_partial(line, partials_at, is_used, dim: tl.constexpr, wide: tl.constexpr):  # type: ignore[no-untyped-def]
    """A stored partial; empty in unused lanes."""
    partial_acc_at, partial_stats_at = partials_at
    along = tl.arange(0, wide)
    mask = is_used[:, None] & (along < dim)[None, :]
    row_max = tl.load(partial_stats_at + line * 2, mask=is_used, other=float("-inf"))
    row_sum = tl.load(partial_stats_at + line * 2 + 1, mask=is_used, other=0.0)
    return row_max, row_sum, tl.load(partial_acc_at + line[:, None] * dim + along[None, :], mask, other=0.0)


@triton.jit  # type: ignore[untyped-decorator]
def merge_partials(  # type: ignore[no-untyped-def]
    lines,
    begin,
    end,
    ends,
    partials_at,
    is_used,
    dim: tl.constexpr,
    wide: tl.constexpr,
    lanes: tl.constexpr,
    fan_in: tl.constexpr,
):
    """All partials from `begin` to `end`, merged in groups of `fan_in`; the loads of a group overlap.

    Lanes may have fewer: up to `ends` [lanes].
    """
    partial_acc_at, partial_stats_at = partials_at
    along = tl.arange(0, wide)
    merged = empty_softmax(lanes, wide)
    for group in range(begin // fan_in, (end + fan_in - 1) // fan_in):
        inner = empty_softmax(lanes, wide)
        for index in tl.static_range(fan_in):
            number = tl.zeros([lanes], tl.int32) + group * fan_in + index
            there = is_used & (number >= begin) & (number < ends)
            line = (lines + number).to(tl.int64)
            row_max = tl.load(
                partial_stats_at + line * 2, mask=there, other=float("-inf"), cache_modifier=".cg"
            )
            row_sum = tl.load(partial_stats_at + line * 2 + 1, mask=there, other=0.0, cache_modifier=".cg")
            acc = tl.load(
                partial_acc_at + line[:, None] * dim + along[None, :],
                mask=there[:, None] & (along < dim)[None, :],
                other=0.0,
                cache_modifier=".cg",
            )
            inner = merge(inner, (row_max, row_sum, acc))
        merged = merge(merged, inner)
    return merged


@triton.jit
def with_sinks(part, head, is_used, sinks_at):  # type: ignore[no-untyped-def]
    """Merge a result with the head's attention sink: a key with this score and the value zero."""
    _, _, acc = part
    sink = tl.load(sinks_at + head, mask=is_used, other=0.0).to(tl.float32) * _LOG2_E
    return merge(part, (sink, tl.full(sink.shape, 1.0, tl.float32), tl.zeros_like(acc)))


@triton.jit  # type: ignore[untyped-decorator]
def _quantized(acc, row, head, is_used, scales_at, heads: tl.constexpr, dim: tl.constexpr):  # type: ignore[no-untyped-def]
    """Attention output [lanes, dim] scaled for e4m3; writes the scales."""
    groups: tl.constexpr = dim // 64
    parts = tl.reshape(acc, (acc.shape[0], groups, 64))
    scales, inverse = fp8_scales(tl.max(tl.abs(parts), 2))
    group = head[:, None] * groups + tl.arange(0, groups)[None, :]
    offset = scale_offset(row[:, None], group, heads * groups)
    tl.store(scales_at + offset, scales, mask=is_used[:, None])
    return tl.reshape(parts * inverse[:, :, None], acc.shape)


@triton.jit  # type: ignore[untyped-decorator]
def write_attention(  # type: ignore[no-untyped-def]
    merged, row, head, is_used, output, heads: tl.constexpr, dim: tl.constexpr, quantizes: tl.constexpr
) -> None:
    """Normalize the result and write it, quantized to e4m3 if `quantizes`."""
    output_at, scales_at, stride = output
    _, row_sum, acc = merged
    part = tl.arange(0, acc.shape[1])
    offsets = row.to(tl.int64)[:, None] * stride + head[:, None] * dim + part[None, :]
    acc = acc / row_sum[:, None]
    if quantizes:
        acc = _quantized(acc, row, head, is_used, scales_at, heads, dim)
    mask = is_used[:, None] & (part < dim)[None, :]
    tl.store(output_at + offsets, acc.to(output_at.dtype.element_ty), mask=mask)
