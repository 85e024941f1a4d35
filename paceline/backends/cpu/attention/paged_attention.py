"""Attention over paged keys and values, with the same bits for any batch and any prefill chunking.

A page holds 16 positions. For each layer, page and KV head, keys are stored transposed, values are not:

    keys    [head width][16 positions]      16 scores are computed side by side, one lane per position
    values  [16 positions][head width]      an output is computed 16 columns at a time

Latent attention (MLA) stores no values: they are the last numbers of the keys, and are transposed when they
are read.

Both are float16, or float32 in an unquantized model. Blocks of 16 are aligned to positions, not to the start
of a pass. Which lane computes a score, and the order in which exponentials are summed and values are added,
depend on the position alone. So a row has the same bits for any split of its context into passes.

Keys and values are converted to float32 a few blocks at a time, once for all heads and rows of a task, and
stay in the L1 cache while they are used.

In a draft tree, the KV index of a row is not its position. For such a row the last blocks are first copied to
scratch memory, in the order of the row's path, and then read like any others.
"""

from __future__ import annotations

import numpy as np

from paceline.backends.cpu.attention.tiles import (
    TILE_HEADS,
    TILE_VECTORS,
    call_products,
    transpose_floats,
    transpose_halves,
)
from paceline.backends.cpu.primitives.compiled import compiled
from paceline.backends.cpu.primitives.halves import load_halves, store_half, store_halves
from paceline.backends.cpu.primitives.rows import scale_row, soft_cap
from paceline.backends.cpu.primitives.simd import (
    add,
    exponential,
    keep_lanes,
    larger,
    largest_lane,
    load,
    load_float,
    load_int32,
    load_int64,
    load_word,
    multiply,
    prefetch,
    spread,
    store,
    store_float,
    store_int32,
    store_word,
    sum_lanes,
)

PAGE = 16  # positions of a page
CHUNK = 4  # blocks converted to float32 at a time: their keys, or values, stay in the L1 cache
TASK_HEADS = 48  # most heads of a task, of one row or several, that share each converted block
_SCORE_BYTES = 800_000  # of the scores of several rows: they stay in an L2 cache of 1 MiB
_STATE = 128  # bytes of a head's softmax state: the maximum of each lane, later its negative; the lanes' sums
STATE_BYTES = TASK_HEADS * _STATE
RESULT_ROWS = TASK_HEADS + CHUNK * PAGE  # rows of scratch after the states: results, then converted blocks
_WIDENING = 3  # cost of converting a block, in units of computing one head with it


@compiled
def _note_largest(scores, stride, each, rows, first, last, begin, end, factor, cap, states):  # type: ignore[no-untyped-def]
    """Mask the scores in blocks begin..end to the row's visible positions, and update each lane's maximum.

    With a `cap` above 0, scores are first scaled by `factor` and soft-capped.
    """
    for row in range(rows):
        own_last = last + row
        own_end = own_last // PAGE
        for head in range(each * row, each * (row + 1)):
            largest = load(states + _STATE * head)
            for block in range(begin, min(end, own_end) + 1):
                place = scores + stride * head + 64 * block
                if cap > 0:
                    scale_row(place, factor, PAGE)
                    soft_cap(place, cap, PAGE)
                if block == first // PAGE or block == own_end:
                    store(place, keep_lanes(load(place), first - block * PAGE, own_last - block * PAGE))
                largest = larger(largest, load(place))
            store(states + _STATE * head, largest)


@compiled
def _begin_sum(state, factor, sink):  # type: ignore[no-untyped-def]
    """Turn a head's lane maxima into the offset added to every score, and start the sum of exponentials.

    `sink` is the address of the head's attention sink (a score without a value), or 0.
    """
    # rounding is monotonic, so the largest product belongs to the largest score
    largest, total = largest_lane(load(state)) * factor, spread(np.float32(0))
    if sink != 0:
        largest = largest_lane(larger(spread(largest), spread(load_float(sink))))
        total = exponential(keep_lanes(spread(load_float(sink) - largest), 0, 0))
    store(state, spread(-largest))
    store(state + 64, total)


@compiled
def _exponentiate(scores, stride, each, rows, last, begin, end, factor, states):  # type: ignore[no-untyped-def]
    """Replace scores in blocks begin..end by their exponentials, and add these to each head's sum."""
    scale = spread(factor)
    for row in range(rows):
        own_end = min(end, (last + row) // PAGE)
        for head in range(each * row, each * (row + 1)):
            state = states + _STATE * head
            top, total = load(state), load(state + 64)
            for block in range(begin, own_end + 1):
                place = scores + stride * head + 64 * block
                value = exponential(add(multiply(load(place), scale), top))
                store(place, value)
                total = add(total, value)
            store(state + 64, total)


@compiled
def heads_of_task(parts, shared, threads):  # type: ignore[no-untyped-def]
    """How many of the `shared` query heads of a KV head form a task: all, or fewer if threads were idle."""
    each = shared
    while each > 1 and (shared % each != 0 or shared // each * parts < threads):
        each -= 1
    return each


@compiled
def rows_of_task(rows, parts, shared, threads, stride):  # type: ignore[no-untyped-def]
    """The number of rows of a task, where each row has `parts` tasks of `shared` heads.

    The scores of a head take `stride` bytes. More rows per task convert fewer blocks repeatedly; fewer rows
    balance the threads better.
    """
    best, least, count = 1, 0, 1
    most = min(TASK_HEADS, _SCORE_BYTES // stride)
    while count == 1 or count * shared <= most:
        tasks = (rows + count - 1) // count * parts
        time = (tasks + threads - 1) // threads * (_WIDENING + count * shared)
        if count == 1 or time < least:
            best, least = count, time
        count *= 2
    return best


@compiled
def _widen(blocks, first, last, end, offset, vectors, pitch, step, half, out):  # type: ignore[no-untyped-def]
    """Convert vectors of 16 numbers, an even count, at `offset` bytes of blocks first..last to float32.

    At `out` the vectors of a block are `pitch` bytes apart, the blocks `step` bytes. Prefetches the next
    chunk, up to block `end`, which arrives while this one is multiplied.
    """
    for block in range(first, last + 1):
        source, target = load_int64(blocks + 8 * block) + offset, out + step * (block - first)
        if half == 0:
            for _ in range(vectors):
                store(target, load(source))
                source, target = source + 64, target + pitch
            continue
        ahead = load_int64(blocks + 8 * min(block + CHUNK, end)) + offset - source
        for _ in range(0, vectors, 2):
            prefetch(source + ahead)
            store(target, load_halves(source))
            store(target + pitch, load_halves(source + 32))
            source, target = source + 64, target + 2 * pitch


@compiled
def _widen_transposed(blocks, first, last, offset, vectors, step, half, out):  # type: ignore[no-untyped-def]
    """Convert rows of 16 positions at `offset` bytes of blocks first..last to float32, transposed.

    The number of rows is a multiple of 16. At `out` positions are 4 * `vectors` bytes apart, blocks `step`.
    """
    for block in range(first, last + 1):
        source, target = load_int64(blocks + 8 * block) + offset, out + step * (block - first)
        for vector in range(0, vectors, 16):
            if half:
                transpose_halves(source + 2 * PAGE * vector, target + 4 * vector, 4 * vectors)
            else:
                transpose_floats(source + 4 * PAGE * vector, target + 4 * vector, 4 * vectors)


@compiled
def _products(run, heads, numbers, stride, rows, row, steps, vectors, out, out_stride, added):  # type: ignore[no-untyped-def]
    """`run_products` for any number of heads and vectors, one register tile at a time."""
    head = 0
    while head < heads:
        tile, vector = min(heads - head, TILE_HEADS), 0
        while vector < vectors:
            count = TILE_VECTORS[tile - 1] if vectors - vector >= TILE_VECTORS[tile - 1] else 1
            place, target = rows + 64 * vector, out + head * out_stride + 64 * vector
            call_products(
                run,
                tile,
                count,
                numbers + stride * head,
                stride,
                place,
                row,
                steps,
                target,
                out_stride,
                added,
            )
            vector += count
        head += tile


@compiled
def _mix_chunk(  # type: ignore[no-untyped-def]
    run, each, rows, origin, last, begin, end, scores, stride, values, padded, out
):
    """Add the weighted values of positions begin..end to all rows; beyond `last`, only to rows that see them.

    `values` start at position `origin`. A masked position must not even be added with weight zero: 0 * inf
    is NaN.
    """
    size, vectors, shared_end = 4 * padded, padded // 16, min(end, last)
    if begin <= shared_end:
        place, steps = values + size * (begin - origin), shared_end - begin + 1
        _products(run, each * rows, scores + 4 * begin, stride, place, size, steps, vectors, out, size, 1)
    begin = max(begin, last + 1)
    for row in range(1, rows):
        own_end = min(end, last + row)
        if begin <= own_end:
            place, steps = values + size * (begin - origin), own_end - begin + 1
            weights, target = scores + stride * each * row + 4 * begin, out + size * each * row
            _products(run, each, weights, stride, place, size, steps, vectors, target, size, 1)


@compiled
def _finish(mixed, share, target, width):  # type: ignore[no-untyped-def]
    """Write a head's output: the weighted values, divided by the sum of weights."""
    whole = width // 16 * 16
    for d in range(0, whole, 16):
        store(target + 4 * d, multiply(load(mixed + 4 * d), spread(share)))
    for d in range(whole, width):
        store_float(target + 4 * d, load_float(mixed + 4 * d) * share)


@compiled
def attend(  # type: ignore[no-untyped-def]
    run, half, queries, each, rows, width, value_width, in_keys, blocks, first, last, factor, cap, sinks,
    scores, stride, states, out, out_row,
):  # fmt: skip
    """Attention of `rows` rows at successive positions, for `each` heads of a row that share a KV head.

    The first row attends to positions first..last, each further row to one more. Several rows have at most
    TASK_HEADS heads in total.

        run       address of run_products
        factor    multiplies scores, above 0; `cap`: soft cap of the scaled scores, 0: none
        sinks     address of one attention sink per head of a row, or 0
        blocks    entry b: address of the keys of positions 16 b to 16 b + 15, followed by the values
        in_keys   no values are stored: the last `value_width` numbers of a key, a multiple of 16, are values
        queries   heads are contiguous, row by row
        out       rows are `out_row` bytes apart
        scores    scratch: `stride` bytes for each of up to TASK_HEADS heads
        states    scratch: STATE_BYTES, then RESULT_ROWS rows of a head's padded width

    First all keys are scored, chunk by chunk; then, with the maxima known, exponentials and weighted values,
    chunk by chunk.
    """
    size = 2 if half else 4
    padded = (value_width + 15) // 16 * 16
    final = last + rows - 1
    begin, end = first // PAGE, final // PAGE
    result = states + STATE_BYTES
    floats, row = result + 4 * TASK_HEADS * padded, 64 * CHUNK
    weight_factor = factor if cap == 0 else np.float32(1)
    start = 0
    while start < each:
        heads = min(each - start, TASK_HEADS) if rows == 1 else each
        for head in range(heads * rows):
            store(states + _STATE * head, spread(np.float32(-np.inf)))
        for chunk in range(begin, end + 1, CHUNK):
            chunk_end = min(chunk + CHUNK - 1, end)
            _widen(blocks, chunk, chunk_end, end, 0, width, row, 64, half, floats)
            query, place, count = queries + 4 * start * width, scores + 64 * chunk, chunk_end - chunk + 1
            _products(run, heads * rows, query, 4 * width, floats, row, width, count, place, stride, 0)
            _note_largest(scores, stride, heads, rows, first, last, chunk, chunk_end, factor, cap, states)
        for head in range(heads * rows):
            sink = sinks + 4 * (start + head % heads) if sinks != 0 else 0
            _begin_sum(states + _STATE * head, weight_factor, sink)
            for d in range(0, padded, 16):
                store(result + 4 * (head * padded + d), spread(np.float32(0)))
        for chunk in range(begin, end + 1, CHUNK):
            chunk_end = min(chunk + CHUNK - 1, end)
            _exponentiate(scores, stride, heads, rows, last, chunk, chunk_end, weight_factor, states)
            offset, step = size * PAGE * width, 4 * PAGE * padded
            if in_keys:
                offset -= size * PAGE * value_width
                _widen_transposed(blocks, chunk, chunk_end, offset, padded, step, half, floats)
            else:
                _widen(blocks, chunk, chunk_end, end, offset, padded, 64, step, half, floats)
            low, high = max(first, PAGE * chunk), min(final, PAGE * (chunk_end + 1) - 1)
            _mix_chunk(
                run, heads, rows, PAGE * chunk, last, low, high, scores, stride, floats, padded, result
            )
        for head in range(heads * rows):
            target = out + head // heads * out_row + 4 * ((start + head % heads) * value_width)
            share = np.float32(1) / sum_lanes(load(states + _STATE * head + 64))
            _finish(result + 4 * head * padded, share, target, value_width)
        start += heads


@compiled
def write_key(key, place, block, width, half):  # type: ignore[no-untyped-def]
    """Store a row's key of one KV head at position `place` of a block."""
    for d in range(width):
        if half:
            store_half(block + 2 * (d * PAGE + place), load_float(key + 4 * d))
        else:
            store_float(block + 4 * (d * PAGE + place), load_float(key + 4 * d))


@compiled
def write_value(value, place, block, width, half):  # type: ignore[no-untyped-def]
    """Store a row's value of one KV head at position `place` of a block, behind its keys."""
    padded = (width + 15) // 16 * 16
    if half:
        values = block + 2 * PAGE * width + 2 * place * padded
        for d in range(0, width - 15, 16):
            store_halves(values + 2 * d, load(value + 4 * d))
        for d in range(width // 16 * 16, width):
            store_half(values + 2 * d, load_float(value + 4 * d))
    else:
        values = block + 4 * PAGE * width + 4 * place * padded
        for d in range(width):
            store_float(values + 4 * d, load_float(value + 4 * d))


@compiled
def copy_key_value(source, source_place, target, target_place, width, in_keys, half):  # type: ignore[no-untyped-def]
    """Copy one position of a block of one KV head to a position of another block."""
    padded = (width + 15) // 16 * 16
    for d in range(width):
        a, b = d * PAGE + source_place, d * PAGE + target_place
        if half:
            store_word(target + 2 * b, load_word(source + 2 * a))
        else:
            store_int32(target + 4 * b, load_int32(source + 4 * a))
    if in_keys:
        return
    for d in range(width):
        a, b = PAGE * width + source_place * padded + d, PAGE * width + target_place * padded + d
        if half:
            store_word(target + 2 * b, load_word(source + 2 * a))
        else:
            store_int32(target + 4 * b, load_int32(source + 4 * a))
