"""Attention of one row over its own past, out of paged keys and values.

A page holds 16 positions. For each layer, page and KV head, keys lie transposed and values straight:

    keys    [head width][16 positions]      16 scores grow side by side, one lane a position
    values  [16 positions][head width]      an output grows 16 columns at a time

Both are half floats, or floats where nothing is quantized. Blocks of 16 are aligned to positions,
not to what happens to be in a pass; a lane's score, the order of the sum of exponentials and the
order in which values are added follow the position alone. So a row gets the same bits however its
past was cut into passes.

A drafted tree's rows are not at the place of their position. For such a row the last blocks are
first put together in scratch memory, in the order of its own path, and then read like any other.
"""

from __future__ import annotations

import math
from typing import Any

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
    store_halves,
    store_int32,
    store_word,
    sum_lanes,
)

PAGE = 16  # positions of a page


def padded_width(width: int) -> int:
    """The columns a head's values take: whole vectors of 16."""
    return (width + 15) // 16 * 16


def block_bytes(width: int, half: int) -> int:
    """Bytes of the keys and values of one page, layer and KV head."""
    return (2 if half else 4) * PAGE * (width + (width + 15) // 16 * 16)


@compiled
def _softmax(scores, first, last):  # type: ignore[no-untyped-def]
    """Turn the scores of positions first..last into exponentials; their sum. Blocks are aligned to 16."""
    begin, end = first // PAGE, last // PAGE
    start = scores + 64 * begin
    store(start, keep_lanes(load(start), first - begin * PAGE, PAGE - 1))
    finish = scores + 64 * end
    store(finish, keep_lanes(load(finish), 0, last - end * PAGE))
    maximum = load(start)
    for block in range(begin + 1, end + 1):
        maximum = larger(maximum, load(scores + 64 * block))
    top = spread(-largest_lane(maximum))
    total = spread(np.float32(0))
    for block in range(begin, end + 1):
        value = exponential(add(load(scores + 64 * block), top))
        store(scores + 64 * block, value)
        total = add(total, value)
    return sum_lanes(total)


def _make_attend(size: int, load_lanes: Any) -> Any:
    """`attend` for keys and values of `size` bytes an element, read 16 at a time by `load_lanes`."""

    @compiled
    def score_one(query, keys, width):  # type: ignore[no-untyped-def]
        """The 16 dot products of a query with the keys of a block, one a lane."""
        scores = spread(np.float32(0))
        for d in range(width):
            scores = fma(spread(load_float(query + 4 * d)), load_lanes(keys + size * PAGE * d), scores)
        return scores

    @compiled
    def score_four(query, keys, width, scores, factor):  # type: ignore[no-untyped-def]
        """As `score_one` for the next four of a list of blocks, side by side to hide the latency of one."""
        a = spread(np.float32(0))
        b, c, d = a, a, a
        first, second = load_int64(keys), load_int64(keys + 8)
        third, fourth = load_int64(keys + 16), load_int64(keys + 24)
        for i in range(width):
            value, place = spread(load_float(query + 4 * i)), size * PAGE * i
            a = fma(value, load_lanes(first + place), a)
            b = fma(value, load_lanes(second + place), b)
            c = fma(value, load_lanes(third + place), c)
            d = fma(value, load_lanes(fourth + place), d)
        store(scores, multiply(a, factor))
        store(scores + 64, multiply(b, factor))
        store(scores + 128, multiply(c, factor))
        store(scores + 192, multiply(d, factor))

    @compiled
    def mix_four(weights, blocks, offset, stride, first, last, factor, out):  # type: ignore[no-untyped-def]
        """64 columns of: out = factor * sum over positions first..last of weight * value."""
        a = spread(np.float32(0))
        b, c, d = a, a, a
        for block in range(first // PAGE, last // PAGE + 1):
            start = max(first, block * PAGE)
            values = load_int64(blocks + 8 * block) + offset + (start - block * PAGE) * stride
            for position in range(start, min(last, block * PAGE + PAGE - 1) + 1):
                weight = spread(load_float(weights + 4 * position))
                a = fma(weight, load_lanes(values), a)
                b = fma(weight, load_lanes(values + size * 16), b)
                c = fma(weight, load_lanes(values + size * 32), c)
                d = fma(weight, load_lanes(values + size * 48), d)
                values += stride
        store(out, multiply(a, factor))
        store(out + 64, multiply(b, factor))
        store(out + 128, multiply(c, factor))
        store(out + 192, multiply(d, factor))

    @compiled
    def mix_one(weights, blocks, offset, stride, first, last, factor, out):  # type: ignore[no-untyped-def]
        """As `mix_four` for 16 columns."""
        a = spread(np.float32(0))
        for block in range(first // PAGE, last // PAGE + 1):
            start = max(first, block * PAGE)
            values = load_int64(blocks + 8 * block) + offset + (start - block * PAGE) * stride
            for position in range(start, min(last, block * PAGE + PAGE - 1) + 1):
                a = fma(spread(load_float(weights + 4 * position)), load_lanes(values), a)
                values += stride
        store(out, multiply(a, factor))

    @compiled
    def attend(queries, heads, width, blocks, first, last, scores, result, out):  # type: ignore[no-untyped-def]
        """Attention of one row, over positions first..last, for the `heads` heads that share a KV head.

        Entry b of `blocks` is the address of the keys of positions 16 b to 16 b + 15; the values lie
        behind them. Heads lie behind each other in `queries` and in `out`.
        """
        factor = spread(np.float32(1.0 / math.sqrt(width)))
        value_offset, padded = size * PAGE * width, (width + 15) // 16 * 16
        begin, end = first // PAGE, last // PAGE
        for head in range(heads):
            query = queries + 4 * head * width
            block = begin
            while block + 4 <= end + 1:
                score_four(query, blocks + 8 * block, width, scores + 64 * block, factor)
                block += 4
            while block <= end:
                raw = score_one(query, load_int64(blocks + 8 * block), width)
                store(scores + 64 * block, multiply(raw, factor))
                block += 1
            inverse = spread(np.float32(1) / _softmax(scores, first, last))
            target = out + 4 * head * width if padded == width else result
            column = 0
            while column < padded:
                offset, place = value_offset + size * column, target + 4 * column
                if padded - column >= 64:
                    mix_four(scores, blocks, offset, size * padded, first, last, inverse, place)
                    column += 64
                else:
                    mix_one(scores, blocks, offset, size * padded, first, last, inverse, place)
                    column += 16
            if padded != width:  # the last vector would reach into the next head
                for d in range(width):
                    store_float(out + 4 * (head * width + d), load_float(result + 4 * d))

    return attend


attend_half = _make_attend(2, load_halves)
attend_float = _make_attend(4, load)


@compiled
def write_key_value(key, value, place, block, width, half):  # type: ignore[no-untyped-def]
    """Store a row's key and value of one KV head at position `place` of a block."""
    padded = (width + 15) // 16 * 16
    if half:
        values = block + 2 * PAGE * width + 2 * place * padded
        for d in range(0, width - 15, 16):
            store_halves(values + 2 * d, load(value + 4 * d))
        for d in range(width // 16 * 16, width):
            store_half(values + 2 * d, load_float(value + 4 * d))
        for d in range(width):
            store_half(block + 2 * (d * PAGE + place), load_float(key + 4 * d))
    else:
        values = block + 4 * PAGE * width + 4 * place * padded
        for d in range(width):
            store_float(values + 4 * d, load_float(value + 4 * d))
            store_float(block + 4 * (d * PAGE + place), load_float(key + 4 * d))


@compiled
def copy_key_value(source, source_place, target, target_place, width, half):  # type: ignore[no-untyped-def]
    """Copy one position of a block of one KV head to a position of another block."""
    padded = (width + 15) // 16 * 16
    for d in range(width):
        a, b = d * PAGE + source_place, d * PAGE + target_place
        if half:
            store_word(target + 2 * b, load_word(source + 2 * a))
        else:
            store_int32(target + 4 * b, load_int32(source + 4 * a))
    for d in range(width):
        a, b = PAGE * width + source_place * padded + d, PAGE * width + target_place * padded + d
        if half:
            store_word(target + 2 * b, load_word(source + 2 * a))
        else:
            store_int32(target + 4 * b, load_int32(source + 4 * a))
