"""Attention of one row over its own past, out of paged keys and values.

A page holds 16 positions. For each layer, page and KV head, keys lie transposed and values straight:

    keys    [head width][16 positions]      16 scores grow side by side, one lane a position
    values  [16 positions][head width]      an output grows 16 columns at a time

Both are half floats, or floats where `half` is 0. Blocks of 16 are aligned to positions, not to
what happens to be in a pass; a lane's score, the order of the sum of exponentials and the order in
which values are added follow the position alone. So a row gets the same bits however its past was
cut into passes.

A drafted tree's rows are not at the place of their position. For such a row the last blocks are
first put together in scratch memory, in the order of its own path, and then read like any other.
"""

from __future__ import annotations

import math

import numpy as np

from paceline.backends.cpu.compiled import compiled
from paceline.backends.cpu.simd import (
    add,
    exponential,
    fma,
    keep_lanes,
    larger,
    largest_lane,
    load,
    load_float,
    load_halves,
    load_int32,
    load_int64,
    load_word,
    multiply,
    spread,
    store,
    store_float,
    store_half,
    store_int32,
    store_word,
    sum_lanes,
)

PAGE = 16  # positions of a page


@compiled(inline=True)
def _load_lanes(address, index, half):  # type: ignore[no-untyped-def]
    """16 elements starting at an element index, as floats."""
    if half:
        return load_halves(address + 2 * index)
    return load(address + 4 * index)


@compiled
def _score_block(query, keys, width, half):  # type: ignore[no-untyped-def]
    """The 16 dot products of a query with the keys of a block, one a lane."""
    scores = spread(np.float32(0))
    for d in range(width):
        scores = fma(spread(load_float(query + 4 * d)), _load_lanes(keys, d * PAGE, half), scores)
    return scores


@compiled
def _score_four(query, keys, width, half, scores, scale):  # type: ignore[no-untyped-def]
    """As four `_score_block`s, of four entries of a list of key addresses, side by side to hide the latency of one."""
    zero = spread(np.float32(0))
    a, b, c, d = zero, zero, zero, zero
    first, second = load_int64(keys), load_int64(keys + 8)
    third, fourth = load_int64(keys + 16), load_int64(keys + 24)
    for i in range(width):
        value = spread(load_float(query + 4 * i))
        a = fma(value, _load_lanes(first, i * PAGE, half), a)
        b = fma(value, _load_lanes(second, i * PAGE, half), b)
        c = fma(value, _load_lanes(third, i * PAGE, half), c)
        d = fma(value, _load_lanes(fourth, i * PAGE, half), d)
    factor = spread(scale)
    store(scores, multiply(a, factor))
    store(scores + 64, multiply(b, factor))
    store(scores + 128, multiply(c, factor))
    store(scores + 192, multiply(d, factor))


@compiled
def _softmax(scores, first, last):  # type: ignore[no-untyped-def]
    """Turn the scores of positions first..last into exponentials; their sum. Blocks are aligned to 16."""
    begin, end = first // PAGE, last // PAGE
    start = scores + 64 * begin
    store(start, keep_lanes(load(start), first - begin * PAGE, PAGE - 1))
    finish = scores + 64 * end
    store(finish, keep_lanes(load(finish), 0, last - end * PAGE))
    maximum = spread(np.float32(-np.inf))
    for block in range(begin, end + 1):
        maximum = larger(maximum, load(scores + 64 * block))
    top = spread(-largest_lane(maximum))
    total = spread(np.float32(0))
    for block in range(begin, end + 1):
        value = exponential(add(load(scores + 64 * block), top))
        store(scores + 64 * block, value)
        total = add(total, value)
    return sum_lanes(total)


@compiled
def _mix_values(weights, blocks, half, value_offset, width, first, last, inverse, out):  # type: ignore[no-untyped-def]
    """out = sum over positions first..last of weight * value, then times `inverse`."""
    size = 2 if half else 4
    for column in range(0, width, 64):
        chunks = min(4, (width - column) // 16)
        a = spread(np.float32(0))
        b, c, d = a, a, a
        for block in range(first // PAGE, last // PAGE + 1):
            values = load_int64(blocks + 8 * block) + value_offset + column * size
            for position in range(max(first, block * PAGE), min(last, block * PAGE + PAGE - 1) + 1):
                weight = spread(load_float(weights + 4 * position))
                lane = (position - block * PAGE) * width
                a = fma(weight, _load_lanes(values, lane, half), a)
                if chunks > 1:
                    b = fma(weight, _load_lanes(values, lane + 16, half), b)
                if chunks > 2:
                    c = fma(weight, _load_lanes(values, lane + 32, half), c)
                if chunks > 3:
                    d = fma(weight, _load_lanes(values, lane + 48, half), d)
        factor = spread(inverse)
        store(out + 4 * column, multiply(a, factor))
        if chunks > 1:
            store(out + 4 * column + 64, multiply(b, factor))
        if chunks > 2:
            store(out + 4 * column + 128, multiply(c, factor))
        if chunks > 3:
            store(out + 4 * column + 192, multiply(d, factor))


@compiled
def attend(queries, heads, query_stride, width, blocks, value_offset, half, first, last, scores, result, out):  # type: ignore[no-untyped-def]
    """Attention of one row for the `heads` query heads that share a KV head.

    Entry b of `blocks` is the address of the keys of positions 16 b to 16 b + 15; the values lie
    `value_offset` bytes behind. The heads of `out` are `query_stride` bytes apart, as the queries are.
    """
    scale = np.float32(1.0 / math.sqrt(width))
    padded = (width + 15) // 16 * 16
    begin, end = first // PAGE, last // PAGE
    for head in range(heads):
        query = queries + head * query_stride
        block = begin
        while block + 4 <= end + 1:
            _score_four(query, blocks + 8 * block, width, half, scores + 64 * block, scale)
            block += 4
        while block <= end:
            raw = _score_block(query, load_int64(blocks + 8 * block), width, half)
            store(scores + 64 * block, multiply(raw, spread(scale)))
            block += 1
        total = _softmax(scores, first, last)
        inverse = np.float32(1) / total
        _mix_values(scores, blocks, half, value_offset, padded, first, last, inverse, result)
        for d in range(width):  # heads may be narrower than a multiple of 16
            store_float(out + head * query_stride + 4 * d, load_float(result + 4 * d))


@compiled
def write_key_value(keys, values, place, key_address, value_offset, width, half):  # type: ignore[no-untyped-def]
    """Store a row's key and value of one KV head at position `place` of a block."""
    padded = (width + 15) // 16 * 16
    value_address = key_address + value_offset
    for d in range(width):
        if half:
            store_half(key_address + 2 * (d * PAGE + place), load_float(keys + 4 * d))
            store_half(value_address + 2 * (place * padded + d), load_float(values + 4 * d))
        else:
            store_float(key_address + 4 * (d * PAGE + place), load_float(keys + 4 * d))
            store_float(value_address + 4 * (place * padded + d), load_float(values + 4 * d))


@compiled
def copy_key_value(source, source_place, target, target_place, value_offset, width, half):  # type: ignore[no-untyped-def]
    """Copy one position of a block of one KV head to a position of another block."""
    padded = (width + 15) // 16 * 16
    for d in range(width):
        a, b = d * PAGE + source_place, d * PAGE + target_place
        if half:
            store_word(target + 2 * b, load_word(source + 2 * a))
        else:
            store_int32(target + 4 * b, load_int32(source + 4 * a))
    for d in range(padded):
        a, b = source_place * padded + d, target_place * padded + d
        if half:
            store_word(target + value_offset + 2 * b, load_word(source + value_offset + 2 * a))
        else:
            store_int32(target + value_offset + 4 * b, load_int32(source + value_offset + 4 * a))
