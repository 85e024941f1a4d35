"""The whole forward pass as one compiled function that all threads of a team run together.

A pass is a list of phases. In each phase the threads take tasks from a shared counter until none
is left, then meet at a barrier. No task's result depends on who ran it or on its neighbours.
All the pass needs is in one array of int64, the job: sizes and addresses (see the table below).
"""

from __future__ import annotations

from paceline.backends.cpu.attention import attend, copy_key_value, write_key_value
from paceline.backends.cpu.attention_tiles import MOST_HEADS, PAGE
from paceline.backends.cpu.compiled import compiled
from paceline.backends.cpu.matmul import DESCRIPTOR, multiply_rows
from paceline.backends.cpu.rows import (
    gate,
    normalize,
    normalize_head,
    read_matrix_row,
    rotate,
    write_record,
    write_records,
)
from paceline.backends.cpu.simd import (
    atomic_add,
    load_float,
    load_int32,
    load_int64,
    store_float,
    store_int64,
)
from paceline.backends.cpu.team import STOP, await_generation, barrier
from paceline.backends.cpu.tiles import COLUMNS, GROUP, RECORD

# The job: index of each field. Sizes are counts; names in *_AT are addresses.
(
    # the model, set once
    LAYERS, HIDDEN, HIDDEN_PADDED, HEADS, KV_HEADS, HEAD_WIDTH, INTERMEDIATE, QUANTIZED, HALF_KV, EPSILON_AT,
    MATRICES_AT, NORMS_AT, HEAD_NORMS_AT, QKV_BIAS_AT, OUTPUT_BIAS_AT, COSINES_AT, SINES_AT, WINDOWS_AT,
    # buffers, set once
    STATE_AT, QKV_AT, QKV_STRIDE, ATTENTION_AT, ATTENTION_PADDED, RECORDS_AT, WIDE_RECORDS_AT, SCRATCH_AT,
    SCRATCH_BYTES, COUNTERS_AT,
    # kernels that are called by address
    RUN_TILE, RUN_SCORE, RUN_MIX,
    # the batch, set for every pass
    ROWS, TOKENS_AT, POSITIONS_AT, PARENTS_AT, REQUEST_AT, ROW_START_AT, CONTEXT_AT, PAGES_AT, MAX_PAGES, CHAIN_AT,
    OUTPUTS, LOGIT_ROWS_AT, LOGITS_AT, LOGITS_STRIDE, KV_AT, NUM_PAGES, FEATURE_SLOT_AT, FEATURES_AT,
    FEATURES_STRIDE,
    JOB_SIZE,
) = range(51)  # fmt: skip

# Matrices of a layer, in the order of the descriptor table; behind all layers: the embedding and the head.
Q, K, V, OUTPUT, GATE, UP, DOWN, LAYER_MATRICES = range(8)
COUNTERS_PER_LAYER = 12


@compiled(inline=True)
def _field(job, index):  # type: ignore[no-untyped-def]
    return load_int64(job + 8 * index)


@compiled
def _take(tasks, counters, count, chunk):  # type: ignore[no-untyped-def]
    """The next tasks (first, last) of `count` for this thread; (count, count) when none is left.

    `tasks` is (thread, threads). Each thread owns a contiguous share, which it walks in order so that
    weights stream from memory without a jump, and then helps the others with theirs.
    """
    thread, threads = tasks
    for step in range(threads):
        owner = (thread + step) % threads
        end = count * (owner + 1) // threads
        begin = count * owner // threads
        first = begin + atomic_add(counters + 64 * owner, chunk)
        if first < end:
            return first, min(first + chunk, end)
    return count, count


@compiled
def _normalize_rows(tasks, job, counter, rows, norm, gathered, scratch):  # type: ignore[no-untyped-def]
    """Norm of the residual stream into records; of the rows that want logits only, if `gathered`."""
    padded, state, records = _field(job, HIDDEN_PADDED), _field(job, STATE_AT), _field(job, RECORDS_AT)
    weight = _field(job, NORMS_AT) + 4 * padded * norm
    epsilon = load_float(_field(job, EPSILON_AT))
    while True:
        row, _ = _take(tasks, counter, rows, 1)
        if row >= rows:
            return
        source = load_int32(_field(job, LOGIT_ROWS_AT) + 4 * row) if gathered else row
        normalize(state + 4 * padded * source, weight, scratch, _field(job, HIDDEN), padded, epsilon)
        write_records(scratch, padded // GROUP, records, rows, row, _field(job, QUANTIZED))


@compiled
def _project(tasks, job, counter, matrix, records, rows, out, out_stride, bias, added):  # type: ignore[no-untyped-def]
    """Tiles of one matrix: out = records @ matrix + bias, or with `added` out += that."""
    tiles, run_tile = load_int64(matrix + 24), _field(job, RUN_TILE)
    while True:
        first, last = _take(tasks, counter, tiles, 2)
        if first >= tiles:
            return
        for tile in range(first, last):
            tile_bias = bias + 64 * tile if bias != 0 else 0
            place = out + 64 * tile
            multiply_rows(run_tile, matrix, tile, records, rows, 0, rows, place, out_stride, tile_bias, added)


@compiled
def _block_address(job, layer, page, head):  # type: ignore[no-untyped-def]
    """Where the keys of a page start, for a layer and KV head."""
    width = _field(job, HEAD_WIDTH)
    padded = (width + 15) // 16 * 16
    size = (2 if _field(job, HALF_KV) else 4) * PAGE * (width + padded)
    return (
        _field(job, KV_AT) + ((layer * _field(job, NUM_PAGES) + page) * _field(job, KV_HEADS) + head) * size
    )


@compiled
def _page(job, request, index):  # type: ignore[no-untyped-def]
    """The page that holds a request's KV index."""
    return load_int32(_field(job, PAGES_AT) + 4 * (request * _field(job, MAX_PAGES) + index // PAGE))


@compiled
def _place_rows(tasks, job, counter, rows, layer):  # type: ignore[no-untyped-def]
    """Head norms and rope for queries and keys; keys and values into their pages."""
    heads, kv_heads, width = _field(job, HEADS), _field(job, KV_HEADS), _field(job, HEAD_WIDTH)
    half, half_kv = width // 2, _field(job, HALF_KV)
    query_columns = (heads * width + 15) // 16 * 16
    key_columns = (kv_heads * width + 15) // 16 * 16
    head_norms = _field(job, HEAD_NORMS_AT)
    epsilon = load_float(_field(job, EPSILON_AT))
    while True:
        task, _ = _take(tasks, counter, rows * 2, 1)
        if task >= rows * 2:
            return
        row = task // 2
        qkv = _field(job, QKV_AT) + row * _field(job, QKV_STRIDE)
        position = load_int32(_field(job, POSITIONS_AT) + 4 * row)
        cosines = _field(job, COSINES_AT) + 4 * half * position
        sines = _field(job, SINES_AT) + 4 * half * position
        if task % 2 == 0:
            for head in range(heads):
                query = qkv + 4 * head * width
                if head_norms != 0:
                    normalize_head(query, head_norms + 4 * width * (2 * layer), width, epsilon)
                rotate(query, cosines, sines, half)
        else:
            request = load_int32(_field(job, REQUEST_AT) + 4 * row)
            start = load_int32(_field(job, ROW_START_AT) + 4 * request)
            index = load_int32(_field(job, CONTEXT_AT) + 4 * request) + row - start
            page = _page(job, request, index)
            for head in range(kv_heads):
                key = qkv + 4 * (query_columns + head * width)
                if head_norms != 0:
                    normalize_head(key, head_norms + 4 * width * (2 * layer + 1), width, epsilon)
                rotate(key, cosines, sines, half)
                value = qkv + 4 * (query_columns + key_columns + head * width)
                address = _block_address(job, layer, page, head)
                write_key_value(key, value, index % PAGE, address, width, half_kv)


@compiled
def _list_blocks(job, layer, row, request, head, first, last, blocks, spare):  # type: ignore[no-untyped-def]
    """Fill `blocks` with the addresses of the blocks a row attends to, its own path in order."""
    context = load_int32(_field(job, CONTEXT_AT) + 4 * request)
    start = load_int32(_field(job, ROW_START_AT) + 4 * request)
    for block in range(first // PAGE, last // PAGE + 1):
        store_int64(blocks + 8 * block, _block_address(job, layer, _page(job, request, block * PAGE), head))
    if load_int32(_field(job, CHAIN_AT) + 4 * request):
        return
    # A tree: from the block of the first drafted position on, copy the path's keys and values together.
    width, half_kv = _field(job, HEAD_WIDTH), _field(job, HALF_KV)
    block_bytes = (2 if half_kv else 4) * PAGE * (width + (width + 15) // 16 * 16)
    begin = max(context // PAGE, first // PAGE)
    node = row - start
    for position in range(last, begin * PAGE - 1, -1):
        index = position
        if position >= context:
            index = context + node
            node = load_int32(_field(job, PARENTS_AT) + 4 * (start + node))
        target = spare + (position // PAGE - begin) * block_bytes
        source = _block_address(job, layer, _page(job, request, index), head)
        copy_key_value(source, index % PAGE, target, position % PAGE, width, half_kv)
    for block in range(begin, last // PAGE + 1):
        store_int64(blocks + 8 * block, spare + (block - begin) * block_bytes)


@compiled
def _attend_rows(tasks, job, counter, rows, layer, scratch):  # type: ignore[no-untyped-def]
    """Attention, a task for each row and KV head, or for each row and head where those are too few."""
    heads, kv_heads, width = _field(job, HEADS), _field(job, KV_HEADS), _field(job, HEAD_WIDTH)
    half_kv, shared = _field(job, HALF_KV), heads // kv_heads
    each = 1 if rows * kv_heads < tasks[1] else shared  # query heads of a task
    stride = 4 * PAGE * _field(job, MAX_PAGES)
    blocks, scores = scratch, scratch + 8 * _field(job, MAX_PAGES)
    result = scores + MOST_HEADS * stride
    spare = result + 64 + 4 * MOST_HEADS * (width + 15)
    window = load_int64(_field(job, WINDOWS_AT) + 8 * layer)
    out_row = 4 * _field(job, ATTENTION_PADDED)
    parts, run_score, run_mix = heads // each, _field(job, RUN_SCORE), _field(job, RUN_MIX)
    while True:
        task, _ = _take(tasks, counter, rows * parts, 1)
        if task >= rows * parts:
            return
        row, head = task // parts, task % parts * each
        request = load_int32(_field(job, REQUEST_AT) + 4 * row)
        last = load_int32(_field(job, POSITIONS_AT) + 4 * row)
        first = max(0, last - window + 1) if window > 0 else 0
        _list_blocks(job, layer, row, request, head // shared, first, last, blocks, spare)
        query = _field(job, QKV_AT) + row * _field(job, QKV_STRIDE) + 4 * head * width
        out = _field(job, ATTENTION_AT) + row * out_row + 4 * head * width
        attend(
            run_score, run_mix, half_kv, query, each, width, blocks, first, last, scores, stride, result, out
        )


@compiled
def _quantize_rows(tasks, job, counter, rows):  # type: ignore[no-untyped-def]
    """The attention's output into records."""
    padded = _field(job, ATTENTION_PADDED)
    while True:
        row, _ = _take(tasks, counter, rows, 1)
        if row >= rows:
            return
        source = _field(job, ATTENTION_AT) + 4 * padded * row
        write_records(source, padded // GROUP, _field(job, RECORDS_AT), rows, row, _field(job, QUANTIZED))


@compiled
def _gate_rows(tasks, job, counter, rows, gates, ups, scratch):  # type: ignore[no-untyped-def]
    """Gate and up projections of 32 columns at a time, SwiGLU, and their records."""
    quantized, records = _field(job, QUANTIZED), _field(job, RECORDS_AT)
    size = RECORD if quantized else 4 * GROUP
    units = _field(job, INTERMEDIATE) // GROUP
    ups_at, run_tile = scratch + 64 * 4 * GROUP, _field(job, RUN_TILE)
    while True:
        unit, _ = _take(tasks, counter, units, 1)
        if unit >= units:
            return
        out = _field(job, WIDE_RECORDS_AT) + unit * rows * size
        for start in range(0, rows, 64):
            count = min(64, rows - start)
            for part in range(2):
                tile = 2 * unit + part
                multiply_rows(run_tile, gates, tile, records, rows, start, count, scratch + 64 * part, 4 * GROUP, 0, 0)
                multiply_rows(run_tile, ups, tile, records, rows, start, count, ups_at + 64 * part, 4 * GROUP, 0, 0)
            for row in range(count):
                values = scratch + 4 * GROUP * row
                gate(values, ups_at + 4 * GROUP * row)
                write_record(values, out + (start + row) * size, quantized)


@compiled
def _save_features(tasks, job, counter, rows, index):  # type: ignore[no-untyped-def]
    """Copy the residual stream of all rows to the features, if this layer's were asked for."""
    slot = load_int64(_field(job, FEATURE_SLOT_AT) + 8 * index)
    if slot < 0:
        return
    width, padded = _field(job, HIDDEN), _field(job, HIDDEN_PADDED)
    while True:
        row, _ = _take(tasks, counter, rows, 1)
        if row >= rows:
            return
        source = _field(job, STATE_AT) + 4 * padded * row
        target = _field(job, FEATURES_AT) + _field(job, FEATURES_STRIDE) * row + 4 * width * slot
        for k in range(width):
            store_float(target + 4 * k, load_float(source + 4 * k))


@compiled
def _embed_rows(tasks, job, counter, rows, embedding):  # type: ignore[no-untyped-def]
    """The embedding of each row's token into the residual stream."""
    while True:
        row, _ = _take(tasks, counter, rows, 1)
        if row >= rows:
            return
        token = load_int32(_field(job, TOKENS_AT) + 4 * row)
        out = _field(job, STATE_AT) + 4 * _field(job, HIDDEN_PADDED) * row
        groups, size = load_int64(embedding + 16), load_int64(embedding + 32)
        read_matrix_row(load_int64(embedding), load_int64(embedding + 8), groups, size, token, out)


@compiled
def _run_layer(control, tasks, job, layer, counter, scratch):  # type: ignore[no-untyped-def]
    """One transformer layer."""
    threads, line = tasks[1], 64 * tasks[1]  # a counter is a cache line for each thread
    rows, records, state = _field(job, ROWS), _field(job, RECORDS_AT), _field(job, STATE_AT)
    state_stride = 4 * _field(job, HIDDEN_PADDED)
    matrices = _field(job, MATRICES_AT) + DESCRIPTOR * LAYER_MATRICES * layer
    _normalize_rows(tasks, job, counter, rows, 2 * layer, 0, scratch)
    barrier(control, threads)

    qkv, qkv_stride, column = _field(job, QKV_AT), _field(job, QKV_STRIDE), 0
    bias = _field(job, QKV_BIAS_AT)
    if bias != 0:
        bias += qkv_stride * layer
    for part in range(3):
        matrix = matrices + DESCRIPTOR * part
        place = counter + line * (1 + part)
        part_bias = bias + 4 * column if bias != 0 else 0
        _project(tasks, job, place, matrix, records, rows, qkv + 4 * column, qkv_stride, part_bias, 0)
        column += COLUMNS * load_int64(matrix + 24)
    barrier(control, threads)

    _place_rows(tasks, job, counter + line * 4, rows, layer)
    barrier(control, threads)
    _attend_rows(tasks, job, counter + line * 5, rows, layer, scratch)
    barrier(control, threads)
    _quantize_rows(tasks, job, counter + line * 6, rows)
    barrier(control, threads)

    bias = _field(job, OUTPUT_BIAS_AT)
    if bias != 0:
        bias += state_stride * layer
    matrix = matrices + DESCRIPTOR * OUTPUT
    _project(tasks, job, counter + line * 7, matrix, records, rows, state, state_stride, bias, 1)
    barrier(control, threads)

    _normalize_rows(tasks, job, counter + line * 8, rows, 2 * layer + 1, 0, scratch)
    barrier(control, threads)
    _gate_rows(tasks, job, counter + line * 9, rows, matrices + DESCRIPTOR * GATE, matrices + DESCRIPTOR * UP, scratch)
    barrier(control, threads)
    matrix, wide = matrices + DESCRIPTOR * DOWN, _field(job, WIDE_RECORDS_AT)
    _project(tasks, job, counter + line * 10, matrix, wide, rows, state, state_stride, 0, 1)
    barrier(control, threads)


@compiled
def _run_pass(control, index, threads, job):  # type: ignore[no-untyped-def]
    rows, layers, counter = _field(job, ROWS), _field(job, LAYERS), _field(job, COUNTERS_AT)
    scratch = _field(job, SCRATCH_AT) + _field(job, SCRATCH_BYTES) * index
    tasks, line = (index, threads), 64 * threads
    embedding = _field(job, MATRICES_AT) + DESCRIPTOR * LAYER_MATRICES * layers
    _embed_rows(tasks, job, counter, rows, embedding)
    barrier(control, threads)
    counter += line
    for layer in range(layers):
        _save_features(tasks, job, counter, rows, layer)
        _run_layer(control, tasks, job, layer, counter + line, scratch)
        counter += line * COUNTERS_PER_LAYER
    _save_features(tasks, job, counter, rows, layers)
    outputs = _field(job, OUTPUTS)
    if outputs > 0:
        _normalize_rows(tasks, job, counter + line, outputs, 2 * layers, 1, scratch)
        barrier(control, threads)
        records, logits, stride = _field(job, RECORDS_AT), _field(job, LOGITS_AT), _field(job, LOGITS_STRIDE)
        head = embedding + DESCRIPTOR
        _project(tasks, job, counter + 2 * line, head, records, outputs, logits, stride, 0, 0)
    barrier(control, threads)


@compiled(cached=True)
def run_passes(control, index, threads, job, seen):  # type: ignore[no-untyped-def]
    """Thread 0: its share of one pass, until all threads are done. A worker: its share of every pass.

    A worker returns when no pass came for a while, with the number of the last one it saw.
    """
    while True:
        if index > 0:
            generation = await_generation(control, index, seen)
            if generation == 0 or load_int64(control + 8 * STOP) != 0:
                return seen
            seen = generation
        _run_pass(control, index, threads, job)
        if index == 0:
            return seen
