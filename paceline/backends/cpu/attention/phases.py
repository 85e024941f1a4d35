"""The phases of attention: RoPE, storing keys and values in their pages, then attention.

In each phase, threads take tasks until none is left, and meet at a barrier. A task's result does not depend
on the thread that runs it or on other tasks.
"""

from __future__ import annotations

from paceline.backends.cpu.attention.paged_attention import (
    PAGE,
    RESULT_ROWS,
    STATE_BYTES,
    TASK_HEADS,
    attend,
    copy_key_value,
    heads_of_task,
    rows_of_task,
    write_key,
    write_value,
)
from paceline.backends.cpu.job import (
    ATTENTION_AT,
    ATTENTION_PADDED,
    BLOCK_BYTES,
    BLOCK_ROWS_AT,
    CHAIN_AT,
    CONTEXT_AT,
    EPSILON_AT,
    FIRST_INDEX,
    HALF_KV,
    HEAD_NORMS_AT,
    HEAD_NORMS_WIDTH,
    HEAD_WIDTH,
    HEADS,
    JOINT_QK_NORM,
    KV_HEADS,
    KV_LAYER,
    KV_LAYERS_AT,
    KV_LINE,
    KV_SOURCE,
    LATENT_PADDED,
    MAX_PAGES,
    PAGES_AT,
    PARENTS_AT,
    POSITIONS_AT,
    QKV_AT,
    QKV_STRIDE,
    QUERIES_AT,
    QUERIES_STRIDE,
    REQUEST_AT,
    ROPE,
    ROPES_AT,
    ROW_START_AT,
    RUN_PRODUCTS,
    SCORE_CAP,
    SCORE_SCALE,
    SHARED,
    SINKS_AT,
    TARGET_EMBEDDING_AT,
    UNIT_QK_AT,
    UNIT_VALUES_AT,
    VALUES_ARE_KEYS,
    WINDOWS_AT,
    field,
    scale_of,
    shape_of,
    take,
)
from paceline.backends.cpu.primitives.compiled import compiled
from paceline.backends.cpu.primitives.rows import copy_row, normalize, normalize_head, rotate, scale_row
from paceline.backends.cpu.primitives.simd import load_float, load_int32, load_int64, store_int64
from paceline.backends.cpu.tiles.weight_tile import GROUP


@compiled
def block_address(job, layer, page, head):  # type: ignore[no-untyped-def]
    """The address of a page's keys, for a layer and KV head."""
    line = field(job, KV_LAYERS_AT) + KV_LINE * shape_of(job, layer, KV_LAYER)
    window_pages = load_int64(line + 8)
    if window_pages != 0:
        page = load_int32(window_pages + 4 * page)
    block = page * shape_of(job, layer, KV_HEADS) + head
    return load_int64(line) + block * shape_of(job, layer, BLOCK_BYTES)


@compiled
def page_of(job, request, index):  # type: ignore[no-untyped-def]
    """The page that holds a request's KV index."""
    return load_int32(field(job, PAGES_AT) + 4 * (request * field(job, MAX_PAGES) + index // PAGE))


@compiled
def kv_index(job, request, row):  # type: ignore[no-untyped-def]
    """The KV index of a request's row."""
    start = load_int32(field(job, ROW_START_AT) + 4 * request)
    return load_int32(field(job, CONTEXT_AT) + 4 * request) + row - start


@compiled
def _norm_heads(job, values, heads, width, norm):  # type: ignore[no-untyped-def]
    """QK norm of a row's heads in place, per head or over all heads, if the model has one."""
    if field(job, HEAD_NORMS_AT) == 0:
        return
    weight = field(job, HEAD_NORMS_AT) + 4 * field(job, HEAD_NORMS_WIDTH) * norm
    epsilon = load_float(field(job, EPSILON_AT))
    if field(job, JOINT_QK_NORM):
        columns = (heads * width + GROUP - 1) // GROUP * GROUP
        normalize(values, weight, values, heads * width, columns, epsilon)
        return
    for head in range(heads):
        normalize_head(values + 4 * head * width, weight, width, epsilon)


@compiled
def _rotate_heads(job, values, heads, width, cosines, sines, pairs):  # type: ignore[no-untyped-def]
    """RoPE of a row's heads in place, then the norm after RoPE, if the model has one."""
    ones = field(job, UNIT_QK_AT)
    for head in range(heads):
        rotate(values + 4 * head * width, cosines, sines, pairs)
        if ones != 0 and pairs > 0:
            normalize_head(values + 4 * head * width, ones, width, load_float(field(job, EPSILON_AT)))


@compiled
def rope_and_store(tasks, job, counter, rows, layer):  # type: ignore[no-untyped-def]
    """Apply QK norms, RoPE and query factors, and store keys and values in their pages."""
    heads, kv_heads = field(job, HEADS), shape_of(job, layer, KV_HEADS)
    width, source = shape_of(job, layer, HEAD_WIDTH), shape_of(job, layer, KV_SOURCE)
    half_kv, rope = field(job, HALF_KV), field(job, ROPES_AT) + ROPE * layer
    pairs = load_int64(rope + 16)
    query_columns = (heads * width + GROUP - 1) // GROUP * GROUP
    key_columns = (kv_heads * width + GROUP - 1) // GROUP * GROUP
    while True:
        task, _ = take(tasks, counter, rows * 2, 1)
        if task >= rows * 2:
            return
        row = task // 2
        qkv = field(job, QKV_AT) + row * field(job, QKV_STRIDE)
        position = load_int32(field(job, POSITIONS_AT) + 4 * row)
        cosines, sines = load_int64(rope) + 4 * pairs * position, load_int64(rope + 8) + 4 * pairs * position
        if task % 2 == 0:
            _norm_heads(job, qkv, heads, width, 2 * layer)
            _rotate_heads(job, qkv, heads, width, cosines, sines, pairs)
            if load_int64(rope + 24) != 0:
                scale_row(qkv, load_float(load_int64(rope + 24) + 4 * position), query_columns)
        elif source != SHARED:
            request = load_int32(field(job, REQUEST_AT) + 4 * row)
            index = kv_index(job, request, row)
            page = page_of(job, request, index)
            keys = qkv + 4 * query_columns
            if source == VALUES_ARE_KEYS:
                copy_row(keys, keys + 4 * key_columns, key_columns)
            _norm_heads(job, keys, kv_heads, width, 2 * layer + 1)
            _rotate_heads(job, keys, kv_heads, width, cosines, sines, pairs)
            for head in range(kv_heads):
                key = keys + 4 * head * width
                value = key + 4 * key_columns
                if field(job, UNIT_VALUES_AT) != 0:
                    epsilon = load_float(field(job, EPSILON_AT))
                    normalize_head(value, field(job, UNIT_VALUES_AT), width, epsilon)
                address = block_address(job, layer, page, head)
                write_key(key, index % PAGE, address, width, half_kv)
                write_value(value, index % PAGE, address, width, half_kv)


@compiled
def _list_blocks(job, layer, row, request, head, first, last, blocks, spare):  # type: ignore[no-untyped-def]
    """Fill `blocks` with the addresses of the blocks that a row attends to, in the order of its path."""
    context = load_int32(field(job, CONTEXT_AT) + 4 * request)
    start = load_int32(field(job, ROW_START_AT) + 4 * request)
    for block in range(first // PAGE, last // PAGE + 1):
        store_int64(blocks + 8 * block, block_address(job, layer, page_of(job, request, block * PAGE), head))
    if load_int32(field(job, CHAIN_AT) + 4 * request):
        return
    # Draft tree: from the block of the first drafted position on, copy the path's keys and values to scratch.
    width, block_bytes = shape_of(job, layer, HEAD_WIDTH), shape_of(job, layer, BLOCK_BYTES)
    half_kv = field(job, HALF_KV)
    in_keys = field(job, LATENT_PADDED) != 0
    begin = max(context // PAGE, first // PAGE)
    node = row - start
    for position in range(last, begin * PAGE - 1, -1):
        index = position
        if position >= context:
            index = context + node
            node = load_int32(field(job, PARENTS_AT) + 4 * (start + node))
        target = spare + (position // PAGE - begin) * block_bytes
        source = block_address(job, layer, page_of(job, request, index), head)
        copy_key_value(source, index % PAGE, target, position % PAGE, width, in_keys, half_kv)
    for block in range(begin, last // PAGE + 1):
        store_int64(blocks + 8 * block, spare + (block - begin) * block_bytes)


@compiled
def _block_rows(job, layer):  # type: ignore[no-untyped-def]
    """The rows of a parallel head's block, if attention within it is bidirectional in this layer; else 0."""
    table = field(job, BLOCK_ROWS_AT)
    return load_int64(table + 8 * layer) if table != 0 else 0


@compiled
def _rows_together(job, row, rows, most, window):  # type: ignore[no-untyped-def]
    """How many rows from `row` on, up to `most`, can share a task: successive positions of one chain.

    Their first visible position must be equal, so rows beyond a sliding window are alone. A negative `window`
    is the size of attention chunks.
    """
    request = load_int32(field(job, REQUEST_AT) + 4 * row)
    if not load_int32(field(job, CHAIN_AT) + 4 * request):
        return 1
    if window > 0:
        most = min(most, window - load_int32(field(job, POSITIONS_AT) + 4 * row))
    if window < 0:
        most = min(most, -window - load_int32(field(job, POSITIONS_AT) + 4 * row) % -window)
    count = 1
    while (
        count < most
        and row + count < rows
        and load_int32(field(job, REQUEST_AT) + 4 * (row + count)) == request
    ):
        count += 1
    return count


@compiled
def attend_rows(tasks, job, counter, rows, layer, scratch):  # type: ignore[no-untyped-def]
    """Attention. A task is a few rows and one KV head, or some of its query heads if tasks are too few."""
    heads, kv_heads = field(job, HEADS), shape_of(job, layer, KV_HEADS)
    width = shape_of(job, layer, HEAD_WIDTH)
    half_kv, shared, rank = field(job, HALF_KV), heads // kv_heads, field(job, LATENT_PADDED)
    value_width, in_keys = (rank, 1) if rank > 0 else (width, 0)
    each = heads_of_task(rows * kv_heads, shared, tasks[1])
    stride = 4 * PAGE * field(job, MAX_PAGES)
    most = rows_of_task(rows, kv_heads, shared, tasks[1], stride) if each == shared else 1
    # aligned to a cache line: a vector load that crosses two lines takes twice as long
    blocks, scores = scratch, scratch + (8 * field(job, MAX_PAGES) + 63) // 64 * 64
    states = scores + TASK_HEADS * stride
    queries = states + STATE_BYTES + 4 * RESULT_ROWS * (width + 15)
    spare = queries + 4 * TASK_HEADS * width
    window, block_rows = load_int64(field(job, WINDOWS_AT) + 8 * layer), _block_rows(job, layer)
    factor, cap = scale_of(job, SCORE_SCALE), scale_of(job, SCORE_CAP)
    sinks = field(job, SINKS_AT)
    out_row = 4 * field(job, ATTENTION_PADDED)
    parts, run = heads // each, field(job, RUN_PRODUCTS)
    groups = (rows + most - 1) // most
    while True:
        task, _ = take(tasks, counter, groups * parts, 1)
        if task >= groups * parts:
            return
        row, head = task % groups * most, task // groups * each  # successive tasks read the same keys
        end = min(row + most, rows)
        while row < end:
            together = 1 if block_rows > 0 else _rows_together(job, row, end, most, window)
            request = load_int32(field(job, REQUEST_AT) + 4 * row)
            last = field(job, FIRST_INDEX) + load_int32(field(job, POSITIONS_AT) + 4 * row)
            first = field(job, FIRST_INDEX)
            if window > 0:
                first = max(first, last - window + 1)
            if window < 0:
                first = last // -window * -window
            if block_rows > 0:  # up to the end of the block
                last = load_int32(field(job, CONTEXT_AT) + 4 * request) + block_rows - 1
            if field(job, TARGET_EMBEDDING_AT) != 0:  # the row itself has no key
                last -= 1
            final = row + together - 1
            _list_blocks(
                job, layer, final, request, head // shared, first, last + together - 1, blocks, spare
            )
            query = field(job, QUERIES_AT) + row * field(job, QUERIES_STRIDE) + 4 * head * width
            if together > 1:
                for other in range(together):
                    source = query + other * field(job, QUERIES_STRIDE)
                    copy_row(source, queries + 4 * other * each * width, each * width)
                query = queries
            out = field(job, ATTENTION_AT) + row * out_row + 4 * head * value_width
            own_sinks = sinks + 4 * (heads * layer + head) if sinks != 0 else 0
            attend(
                run, half_kv, query, each, together, width, value_width, in_keys, blocks, first, last,
                factor, cap, own_sinks, scores, stride, states, out, out_row,
            )  # fmt: skip
            row += together
