"""Attention of rows over paged keys and values.

A page holds 16 positions. For each layer, page and KV head, keys are stored transposed, values are not:

    keys    [head width][16 positions]      16 scores are computed side by side, one lane per position
    values  [16 positions][head width]      an output is computed 16 columns at a time

Both are half floats, or floats where nothing is quantized. Blocks of 16 are aligned to positions, not to the
pass; a lane's score, the order of the sum of exponentials and the order in which values are added follow the
position alone. So a row gets the same bits however its context was cut into passes.

In a draft tree, the KV index of a row is not its position. For such a row the last blocks are first gathered
in scratch memory, in the order of its own path, and then read like any other.
"""

from __future__ import annotations

import numpy as np

from paceline.backends.cpu.attention_tiles import (
    MAX_HEADS,
    MIX_COLUMNS,
    PAGE,
    SCORE_BLOCKS,
    call_mix,
    call_score,
)
from paceline.backends.cpu.compiled import compiled
from paceline.backends.cpu.rows import soft_cap
from paceline.backends.cpu.simd import (
    add,
    exponential,
    keep_lanes,
    larger,
    largest_lane,
    load,
    load_float,
    load_int32,
    load_word,
    spread,
    store,
    store_float,
    store_half,
    store_halves,
    store_int32,
    store_word,
    sum_lanes,
)


@compiled
def softmax(scores, first, last, cap, sink):  # type: ignore[no-untyped-def]
    """Replace the scores of positions first..last by exponentials, and return their sum. Blocks of 16.

    A `cap` above 0 is that of scores; `sink` is the address of a score that only the sum has, or 0.
    """
    begin, end = first // PAGE, last // PAGE
    start = scores + 64 * begin
    if cap > 0:
        soft_cap(start, cap, PAGE * (end - begin + 1))
    store(start, keep_lanes(load(start), first - begin * PAGE, PAGE - 1))
    finish = scores + 64 * end
    store(finish, keep_lanes(load(finish), 0, last - end * PAGE))
    maximum, alone = load(start), spread(np.float32(-np.inf))
    if sink != 0:
        alone = keep_lanes(spread(load_float(sink)), 0, 0)
        maximum = larger(maximum, alone)
    for block in range(begin + 1, end + 1):
        maximum = larger(maximum, load(scores + 64 * block))
    top = spread(-largest_lane(maximum))
    total = spread(np.float32(0))
    if sink != 0:
        total = exponential(add(alone, top))
    for block in range(begin, end + 1):
        value = exponential(add(load(scores + 64 * block), top))
        store(scores + 64 * block, value)
        total = add(total, value)
    return sum_lanes(total)


@compiled
def _score(run_score, half, heads, query, width, blocks, begin, end, scores, stride, factor):  # type: ignore[no-untyped-def]
    """Scores of `heads` queries with all keys of blocks begin..end, times `factor`."""
    block = begin
    while block <= end:
        count = min(SCORE_BLOCKS[heads - 1], end - block + 1)
        if count < SCORE_BLOCKS[heads - 1]:
            count = 1
        place = scores + 64 * block
        call_score(
            run_score, half, heads, count, query, 4 * width, blocks + 8 * block, width, place, stride, factor
        )
        block += count


@compiled
def rows_of_task(rows, parts, shared, threads):  # type: ignore[no-untyped-def]
    """The number of rows of a task, where each row has `parts` tasks of `shared` heads."""
    return max(1, MAX_HEADS // shared) if rows * parts >= 2 * threads else 1


@compiled
def attend(  # type: ignore[no-untyped-def]
    run_score, run_mix, half, queries, each, rows, width, blocks, first, last, factor, cap, sinks, scores,
    stride, result, out, out_row,
):  # fmt: skip
    """Attention of `rows` rows at successive positions, for `each` heads of a row that share a KV head.

    The first row attends to positions first..last, each next one to one more. Several rows have at most
    MAX_HEADS heads in total.
    `run_score` and `run_mix` are the addresses of those kernels. Scores are multiplied by `factor`; see
    `softmax` for `cap`, and for `sinks`, one for each of a row's heads.
    Entry b of `blocks` is the address of the keys of positions 16 b to 16 b + 15, followed by the values.
    Heads are contiguous in `queries`, row by row; rows of `out` are `out_row` bytes apart; `scores` has
    `stride` bytes for each of up to MAX_HEADS heads, `result` one head's padded width for each.
    """
    size = 2 if half else 4
    padded = (width + 15) // 16 * 16
    head, heads = 0, each * rows
    final = last + rows - 1
    while head < heads:
        count = min(heads - head, MAX_HEADS)
        query = queries + 4 * head * width
        _score(
            run_score, half, count, query, width, blocks, first // PAGE, final // PAGE, scores, stride, factor
        )
        for i in range(count):
            sink = sinks + 4 * ((head + i) % each) if sinks != 0 else 0
            total = softmax(scores + stride * i, first, last + (head + i) // each, cap, sink)
            store_float(result + 4 * i, np.float32(1) / total)
        mixed = result + 64
        column = 0
        while column < padded:
            columns = MIX_COLUMNS[count - 1] if padded - column >= 16 * MIX_COLUMNS[count - 1] else 1
            offset = size * (PAGE * width + column)
            call_mix(
                run_mix, half, count, columns, scores, stride, blocks, offset, size * padded, first, last,
                each, rows, result, mixed + 4 * column, 4 * padded,
            )  # fmt: skip
            column += 16 * columns
        for i in range(count):
            target = out + (head + i) // each * out_row + 4 * ((head + i) % each * width)
            for d in range(width):
                store_float(target + 4 * d, load_float(mixed + 4 * (i * padded + d)))
        head += count


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
