"""The phases of a recurrent layer: short convolution, gated delta rule, Mamba2.

models/transformer/recurrent.py has the readable form of each.

A row continues from the state after its parent. The convolution reads the inputs of the rows before it on its
path, and before those the conv state. The memory (the SSM state of a head) is updated by a sequential scan
over the rows of a request, so that a row has the same bits in a prefill chunk, in a draft tree and alone:

    memory of 16 columns of a value head       [key_dim][16] floats; columns are independent of each other
        delta rule   M = g M + k e,  e = b (v - g M k)
        Mamba2       M = g M + k e,  e = dt v
    output           M q

A pass does not change the states of requests. It keeps the inputs of its rows, in all layers, so that
`advance_states` can scan the accepted rows again. It also stores the states after chains in spare slots,
which become the request's state if the whole chain is accepted (states.py).
"""

from __future__ import annotations

import math

import numpy as np

from paceline.backends.cpu.job import (
    CHANNELS,
    CONV_BIASES_AT,
    CONV_COLUMN,
    CONV_KERNEL,
    CONV_WEIGHTS_AT,
    CONVOLVED_AT,
    EPSILON_AT,
    GATE_COLUMN,
    GATED_NORM,
    HIDDEN,
    KEPT_LAYER,
    KEPT_ROWS_AT,
    KEPT_STRIDE,
    KEY_DIM,
    KEY_HEADS,
    MIXED_AT,
    MIXED_PADDED,
    MIXER_NORMS_AT,
    NODES_AT,
    NODES_BYTES,
    NORM_GROUPS,
    NUM_STATE_LAYERS,
    PASSED_AT,
    POOL_AT,
    QKV_AT,
    QKV_STRIDE,
    QUANTIZED,
    RATE_BIASES_AT,
    RATE_COLUMN,
    RATES_AT,
    READS_AT,
    RECORDS_AT,
    RECURRENCE,
    SCAN_AFTER_AT,
    SCAN_BEFORE_AT,
    SCAN_BEGINS_AT,
    SCAN_COUNTS_AT,
    SCAN_LENGTH,
    SCAN_PREVIOUS_AT,
    SCAN_ROWS_AT,
    SCAN_SLOTS_AT,
    SCANS,
    STATE_BYTES,
    STATE_LAYER_BYTES,
    STRENGTH_COLUMN,
    TILED_VALUES,
    VALUE_DIM,
    VALUE_HEADS,
    field,
    take,
)
from paceline.backends.cpu.phases.recurrent_memory import (
    BLOCK,
    inverse_length,
    product,
    softplus,
    sum_of_squares,
    update,
)
from paceline.backends.cpu.primitives.compiled import compiled
from paceline.backends.cpu.primitives.rows import copy_row, silu, write_row
from paceline.backends.cpu.primitives.simd import (
    add,
    divide,
    exponential,
    fma,
    fma_float,
    load,
    load_float,
    load_int32,
    load_int64,
    multiply,
    spread,
    store,
    store_float,
    store_int64,
)
from paceline.backends.cpu.team import barrier
from paceline.backends.cpu.tiles.weight_tile import GROUP

# Kinds of recurrences, by RecurrentConfig.kind
SHORT_CONV, GATED_DELTA, MAMBA2 = 1, 2, 3
KINDS = {"short_conv": SHORT_CONV, "gated_delta": GATED_DELTA, "mamba2": MAMBA2}
# The state before a row: the request's; that after the previous row of the scan; from 0: a stored tree node
FIRST, CONTINUES = -1, -2
# The state after a row: not stored; in place n (STORED - n); from 0: a tree node that other rows continue
NOT_STORED, STORED = -1, -2
PART = 512  # channels of a convolution task


@compiled
def _heads_padded(job):  # type: ignore[no-untyped-def]
    return (field(job, VALUE_HEADS) + 15) // 16 * 16


@compiled
def _kept_row(job, layer, row):  # type: ignore[no-untyped-def]
    """The address of a row's kept inputs: of the convolution, then decays and strengths of value heads."""
    return field(job, KEPT_ROWS_AT) + layer * field(job, KEPT_LAYER) + row * field(job, KEPT_STRIDE)


@compiled
def _state(job, layer, slot):  # type: ignore[no-untyped-def]
    """The address of a layer's state in a slot: conv state (oldest input first), then memory."""
    return field(job, POOL_AT) + slot * field(job, STATE_BYTES) + layer * field(job, STATE_LAYER_BYTES)


@compiled
def keep_rows(tasks, job, counter, rows, layer):  # type: ignore[no-untyped-def]
    """Keep the part of each projected row that a scan reads."""
    channels, heads = field(job, CHANNELS), _heads_padded(job)
    one, minus_one = spread(np.float32(1)), spread(np.float32(-1))
    rates = field(job, RATES_AT) + 4 * heads * layer
    rate_biases = field(job, RATE_BIASES_AT) + 4 * heads * layer
    while True:
        row, _ = take(tasks, counter, rows, 1)
        if row >= rows:
            return
        source, kept = field(job, QKV_AT) + row * field(job, QKV_STRIDE), _kept_row(job, layer, row)
        if field(job, RECURRENCE) == SHORT_CONV:
            values = source + 8 * field(job, HIDDEN)  # after the two gates
            for k in range(0, channels, 16):
                store(kept + 4 * k, multiply(load(source + 4 * k), load(values + 4 * k)))
            continue
        copy_row(source + 4 * field(job, CONV_COLUMN), kept, channels)
        decays = kept + 4 * channels
        for head in range(0, heads, 16):
            rate = load(source + 4 * (field(job, RATE_COLUMN) + head))
            step = softplus(add(rate, load(rate_biases + 4 * head)))
            minus = multiply(multiply(step, load(rates + 4 * head)), minus_one)
            store(decays + 4 * head, exponential(minus))
            if field(job, RECURRENCE) == GATED_DELTA:
                score = load(source + 4 * (field(job, STRENGTH_COLUMN) + head))
                step = divide(one, add(one, exponential(multiply(score, minus_one))))
            store(decays + 4 * (heads + head), step)


@compiled
def _list_inputs(job, layer, number, inputs):  # type: ignore[no-untyped-def]
    """List the addresses of the inputs that a row's convolution reads, oldest first; 0: zeros."""
    kernel, slot = field(job, CONV_KERNEL), load_int32(field(job, SCAN_SLOTS_AT) + 4 * number)
    back = kernel - 1
    while back >= 0 and number >= 0:
        row = load_int32(field(job, SCAN_ROWS_AT) + 4 * number)
        store_int64(inputs + 8 * back, _kept_row(job, layer, row))
        number = load_int32(field(job, SCAN_PREVIOUS_AT) + 4 * number)
        back -= 1
    before = kernel - 2  # index into the conv state
    while back >= 0:
        seen = _state(job, layer, slot) + 4 * field(job, CHANNELS) * before if slot >= 0 else 0
        store_int64(inputs + 8 * back, seen)
        back -= 1
        before -= 1


@compiled
def convolve_rows(tasks, job, counter, layer, scratch):  # type: ignore[no-untyped-def]
    """The causal convolution of every row of the scans; a task is some channels.

    A short convolution (LFM2) is gated and complete; other kinds apply SiLU.
    """
    channels, kernel = field(job, CHANNELS), field(job, CONV_KERNEL)
    weights = field(job, CONV_WEIGHTS_AT) + 4 * channels * kernel * layer
    biases = field(job, CONV_BIASES_AT)
    parts, count = (channels + PART - 1) // PART, field(job, SCAN_LENGTH)
    while True:
        task, _ = take(tasks, counter, count * parts, 1)
        if task >= count * parts:
            return
        number, first = task // parts, task % parts * PART
        _list_inputs(job, layer, number, scratch)
        row = load_int32(field(job, SCAN_ROWS_AT) + 4 * number)
        gates = field(job, QKV_AT) + row * field(job, QKV_STRIDE) + 4 * field(job, HIDDEN)
        for k in range(first, min(first + PART, channels), 16):
            total = load(biases + 4 * (channels * layer + k)) if biases != 0 else spread(np.float32(0))
            for tap in range(kernel):
                values = load_int64(scratch + 8 * tap)
                if values != 0:
                    total = fma(load(weights + 4 * (channels * tap + k)), load(values + 4 * k), total)
            if field(job, RECURRENCE) == SHORT_CONV:
                mixed = field(job, MIXED_AT) + 4 * field(job, MIXED_PADDED) * row
                store(mixed + 4 * k, multiply(load(gates + 4 * k), total))
            else:
                store(field(job, CONVOLVED_AT) + 4 * (channels * number + k), silu(total))


@compiled
def _step(job, layer, row, convolved, head, block, before, memory):  # type: ignore[no-untyped-def]
    """One scan step: update BLOCK columns of a value head's memory from `before`; returns M q."""
    key_dim, value_dim, heads = field(job, KEY_DIM), field(job, VALUE_DIM), field(job, VALUE_HEADS)
    key_heads = field(job, KEY_HEADS)
    key_head = head % key_heads if field(job, TILED_VALUES) else head // (heads // key_heads)
    size, own = key_heads * key_dim, key_head * key_dim
    decays = _kept_row(job, layer, row) + 4 * field(job, CHANNELS)
    decay = load_float(decays + 4 * head)
    strength = load_float(decays + 4 * (_heads_padded(job) + head))
    place = head * value_dim + BLOCK * block
    if field(job, RECURRENCE) == MAMBA2:
        key = convolved + 4 * (heads * value_dim + own)
        added = multiply(load(convolved + 4 * place), spread(strength))
        return update(before, memory, key, key + 4 * size, key_dim, decay, added)
    query, key = convolved + 4 * own, convolved + 4 * (size + own)
    value = load(convolved + 4 * (2 * size + place))
    length = inverse_length(key, key_dim)  # keys and queries are L2-normalized
    found = multiply(product(before, key, key_dim), spread(-decay * length))
    error = multiply(add(value, found), spread(strength * length))
    read = update(before, memory, key, query, key_dim, decay, error)
    factor = inverse_length(query, key_dim) / np.float32(math.sqrt(np.float32(key_dim)))
    return multiply(read, spread(factor))


@compiled
def _scan(job, layer, part, begin, end, nodes, scratch):  # type: ignore[no-untyped-def]
    """Scan the rows of a request, with BLOCK columns of a value head.

    The memory is updated in `scratch`, or where it is stored at the end.
    """
    heads, channels = field(job, VALUE_HEADS), field(job, CHANNELS)
    blocks, size = (field(job, VALUE_DIM) + BLOCK - 1) // BLOCK, 4 * BLOCK * field(job, KEY_DIM)
    place = 4 * channels * (field(job, CONV_KERNEL) - 1) + size * part  # in a layer's state
    last = load_int32(field(job, SCAN_AFTER_AT) + 4 * (end - 1))
    memory = _state(job, layer, STORED - last) + place if last <= STORED else scratch
    for number in range(begin, end):
        state = load_int32(field(job, SCAN_BEFORE_AT) + 4 * number)
        slot = load_int32(field(job, SCAN_SLOTS_AT) + 4 * number)
        before = memory
        if state >= 0:
            before = nodes + size * state
        elif state == FIRST and slot >= 0:
            before = _state(job, layer, slot) + place
        elif state == FIRST:
            for k in range(0, size, 64):
                store(memory + k, spread(np.float32(0)))
        row = load_int32(field(job, SCAN_ROWS_AT) + 4 * number)
        convolved = field(job, CONVOLVED_AT) + 4 * channels * number
        read = _step(job, layer, row, convolved, part // blocks, part % blocks, before, memory)
        store(field(job, READS_AT) + 64 * (heads * blocks * row + part), read)
        after = load_int32(field(job, SCAN_AFTER_AT) + 4 * number)
        if after >= 0:
            copy_row(memory, nodes + size * after, size // 4)
        elif after <= STORED and number < end - 1:
            copy_row(memory, _state(job, layer, STORED - after) + place, size // 4)


@compiled
def scan_rows(tasks, job, counter, layer, scratch):  # type: ignore[no-untyped-def]
    """Scan the rows of each request; a task is BLOCK columns of a value head."""
    blocks = (field(job, VALUE_DIM) + BLOCK - 1) // BLOCK
    nodes = field(job, NODES_AT) + field(job, NODES_BYTES) * tasks[0]
    parts = field(job, VALUE_HEADS) * blocks
    while True:
        task, _ = take(tasks, counter, field(job, SCANS) * parts, 1)
        if task >= field(job, SCANS) * parts:
            return
        begin = load_int32(field(job, SCAN_BEGINS_AT) + 4 * (task // parts))
        end = begin + load_int32(field(job, SCAN_COUNTS_AT) + 4 * (task // parts))
        _scan(job, layer, task % parts, begin, end, nodes, scratch)


@compiled
def _gather_heads(job, layer, row, mixed):  # type: ignore[no-untyped-def]
    """The scan's output of a row, all heads side by side, plus the skip connection (Mamba2's D)."""
    heads, width = field(job, VALUE_HEADS), field(job, VALUE_DIM)
    padded, passed = (width + BLOCK - 1) // BLOCK * BLOCK, field(job, PASSED_AT)
    reads = field(job, READS_AT) + 4 * heads * padded * row
    values = field(job, CONVOLVED_AT) + 4 * field(job, CHANNELS) * row  # Mamba's; in a pass, rows are numbers
    for head in range(heads):
        share = load_float(passed + 4 * (heads * layer + head)) if passed != 0 else np.float32(0)
        for k in range(width):
            value = load_float(reads + 4 * (padded * head + k))
            if passed != 0:
                value = fma_float(share, load_float(values + 4 * (width * head + k)), value)
            store_float(mixed + 4 * (width * head + k), value)


@compiled
def _norm_groups(job, layer, mixed):  # type: ignore[no-untyped-def]
    """RMSNorm of each group of values in place, if there are groups."""
    groups, width = field(job, NORM_GROUPS), field(job, VALUE_HEADS) * field(job, VALUE_DIM)
    weights = field(job, MIXER_NORMS_AT) + 4 * width * layer
    for group in range(groups):
        size = width // groups
        values, weight = mixed + 4 * size * group, weights + 4 * size * group
        mean = sum_of_squares(values, size) / np.float32(size)
        scale = np.float32(1) / np.float32(math.sqrt(mean + load_float(field(job, EPSILON_AT))))
        whole = size // 16 * 16
        for k in range(0, whole, 16):
            normed = multiply(multiply(load(values + 4 * k), spread(scale)), load(weight + 4 * k))
            store(values + 4 * k, normed)
        for k in range(whole, size):
            normed_value = load_float(values + 4 * k) * scale * load_float(weight + 4 * k)
            store_float(values + 4 * k, normed_value)


@compiled
def finish_rows(tasks, job, counter, rows, layer):  # type: ignore[no-untyped-def]
    """Norm and gate the scan's output of each row, and write its records."""
    padded, width = field(job, MIXED_PADDED), field(job, HIDDEN)
    groups = padded // GROUP
    while True:
        row, _ = take(tasks, counter, rows, 1)
        if row >= rows:
            return
        mixed = field(job, MIXED_AT) + 4 * padded * row
        if field(job, RECURRENCE) != SHORT_CONV:
            width = field(job, VALUE_HEADS) * field(job, VALUE_DIM)
            gates = field(job, QKV_AT) + row * field(job, QKV_STRIDE) + 4 * field(job, GATE_COLUMN)
            _gather_heads(job, layer, row, mixed)
            if not field(job, GATED_NORM):
                _norm_groups(job, layer, mixed)
            for k in range(0, padded, 16):
                store(mixed + 4 * k, multiply(load(mixed + 4 * k), silu(load(gates + 4 * k))))
            if field(job, GATED_NORM):
                _norm_groups(job, layer, mixed)
        for k in range(width, padded):
            store_float(mixed + 4 * k, np.float32(0))
        write_row(mixed, groups, field(job, RECORDS_AT), row, rows, groups, field(job, QUANTIZED))


@compiled
def _store_inputs(job, layer, scratch):  # type: ignore[no-untyped-def]
    """Store the conv state wherever a scan stores a state.

    Oldest input first, because inputs of the same slot move to the front. A scan's own slot comes last.
    """
    channels = field(job, CHANNELS)
    for number in range(field(job, SCAN_LENGTH)):
        after = load_int32(field(job, SCAN_AFTER_AT) + 4 * number)
        if after > STORED:
            continue
        _list_inputs(job, layer, number, scratch)
        for place in range(field(job, CONV_KERNEL) - 1):
            target = _state(job, layer, STORED - after) + 4 * channels * place
            source = load_int64(scratch + 8 * (place + 1))
            if source != 0:
                copy_row(source, target, channels)
            else:
                for k in range(0, channels, 16):
                    store(target + 4 * k, spread(np.float32(0)))


@compiled
def advance_states(control, tasks, job, counter, scratch):  # type: ignore[no-untyped-def]
    """Advance a request's state along the rows of one scan, in all layers."""
    layers, line = field(job, NUM_STATE_LAYERS), 64 * tasks[1]
    if field(job, RECURRENCE) != SHORT_CONV:
        for layer in range(layers):
            convolve_rows(tasks, job, counter, layer, scratch)
            barrier(control, tasks[1])
            scan_rows(tasks, job, counter + line, layer, scratch)
            barrier(control, tasks[1])
            counter += 2 * line
    while True:
        layer, _ = take(tasks, counter, layers, 1)
        if layer >= layers:
            break
        _store_inputs(job, layer, scratch)
    barrier(control, tasks[1])


@compiled
def scan_layer(control, tasks, job, counter, layer, scratch):  # type: ignore[no-untyped-def]
    """The recurrence of all rows of a pass, from their kept inputs."""
    line = 64 * tasks[1]
    convolve_rows(tasks, job, counter, layer, scratch)
    barrier(control, tasks[1])
    if field(job, RECURRENCE) != SHORT_CONV:
        scan_rows(tasks, job, counter + line, layer, scratch)
    task, _ = take(tasks, counter + 2 * line, 1, 1)
    if task == 0:
        _store_inputs(job, layer, scratch)
    barrier(control, tasks[1])
