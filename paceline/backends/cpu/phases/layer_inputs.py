"""Per-layer embeddings (PLE) of Gemma's E sizes: the input of each layer, and what the layer adds from it.

    input[layer] = (norm(project(embedding) / sqrt(hidden)) + table[token] sqrt(size)) / sqrt(2)
    state += norm(project(activation(gate(state)) * input[layer]))

The table of matrices has the projection and the token table, then gate and projection of each layer. The
table of norms has the norm of the first line, then one for each layer.
"""

from __future__ import annotations

import math

import numpy as np

from paceline.backends.cpu.job import (
    ACTIVATION,
    BRANCH_AT,
    EPSILON_AT,
    HIDDEN,
    HIDDEN_PADDED,
    INPUT_GATES_AT,
    INPUT_MATRICES_AT,
    INPUT_NORMS_AT,
    INPUT_SIZE,
    LAYER_INPUTS_AT,
    LAYER_INPUTS_STRIDE,
    LAYERS,
    QUANTIZED,
    RECORDS_AT,
    STATE_AT,
    TOKENS_AT,
    field,
    take,
)
from paceline.backends.cpu.phases.projections import project
from paceline.backends.cpu.phases.residual import add_branch, read_embedding
from paceline.backends.cpu.primitives.compiled import compiled
from paceline.backends.cpu.primitives.rows import gate, normalize_head, scale_row, write_row
from paceline.backends.cpu.primitives.simd import load_float, load_int32, load_int64, store_float
from paceline.backends.cpu.team import barrier
from paceline.backends.cpu.tiles.matmul import DESCRIPTOR
from paceline.backends.cpu.tiles.weight_tile import GROUP


@compiled
def _record_states(tasks, job, counter, rows):  # type: ignore[no-untyped-def]
    """Write records of the residual stream, without a norm."""
    padded, groups = field(job, HIDDEN_PADDED), field(job, HIDDEN_PADDED) // GROUP
    while True:
        row, _ = take(tasks, counter, rows, 1)
        if row >= rows:
            return
        state = field(job, STATE_AT) + 4 * padded * row
        write_row(state, groups, field(job, RECORDS_AT), row, rows, groups, field(job, QUANTIZED))


@compiled
def _join_inputs(tasks, job, counter, rows, scratch):  # type: ignore[no-untyped-def]
    """Norm the projected embedding layer by layer, and add the token's row of the table."""
    size, layers = field(job, INPUT_SIZE), field(job, LAYERS)
    table, weight = field(job, INPUT_MATRICES_AT) + DESCRIPTOR, load_int64(field(job, INPUT_NORMS_AT))
    scale = np.float32(1) / np.float32(math.sqrt(np.float32(field(job, HIDDEN))))
    own, half = np.float32(math.sqrt(np.float32(size))), np.float32(0.70710678)
    epsilon = load_float(field(job, EPSILON_AT))
    while True:
        row, _ = take(tasks, counter, rows, 1)
        if row >= rows:
            return
        given = field(job, LAYER_INPUTS_AT) + row * field(job, LAYER_INPUTS_STRIDE)
        read_embedding(table, load_int32(field(job, TOKENS_AT) + 4 * row), scratch)
        scale_row(given, scale, (layers * size + 15) // 16 * 16)
        for layer in range(layers):
            part = given + 4 * layer * size
            normalize_head(part, weight, size, epsilon)
            for k in range(size):
                token = load_float(scratch + 4 * (layer * size + k)) * own
                store_float(part + 4 * k, (load_float(part + 4 * k) + token) * half)


@compiled
def make_layer_inputs(control, tasks, job, counter, rows, scratch):  # type: ignore[no-untyped-def]
    """Compute the inputs of all layers, from the tokens and their embeddings in the residual stream."""
    threads, line = tasks[1], 64 * tasks[1]
    _record_states(tasks, job, counter, rows)
    barrier(control, threads)
    out, stride = field(job, LAYER_INPUTS_AT), field(job, LAYER_INPUTS_STRIDE)
    matrix = field(job, INPUT_MATRICES_AT)
    project(tasks, job, counter + line, matrix, field(job, RECORDS_AT), rows, out, stride, 0, 0, scratch)
    barrier(control, threads)
    _join_inputs(tasks, job, counter + 2 * line, rows, scratch)
    barrier(control, threads)


@compiled
def _gate_inputs(tasks, job, counter, rows, layer, scratch):  # type: ignore[no-untyped-def]
    """Write records of a layer's gated input."""
    size, activation, quantized = field(job, INPUT_SIZE), field(job, ACTIVATION), field(job, QUANTIZED)
    groups = (size + GROUP - 1) // GROUP
    while True:
        row, _ = take(tasks, counter, rows, 1)
        if row >= rows:
            return
        gates = field(job, INPUT_GATES_AT) + 4 * GROUP * groups * row
        given = field(job, LAYER_INPUTS_AT) + row * field(job, LAYER_INPUTS_STRIDE) + 4 * layer * size
        for column in range(GROUP * groups):
            value = load_float(given + 4 * column) if column < size else np.float32(0)
            store_float(scratch + 4 * column, value)
        for group in range(groups):
            gate(gates + 4 * GROUP * group, scratch + 4 * GROUP * group, activation)
        write_row(gates, groups, field(job, RECORDS_AT), row, rows, groups, quantized)


@compiled
def add_layer_input(control, tasks, job, layer, counter, rows, scale, scratch):  # type: ignore[no-untyped-def]
    """Add the projection of a layer's gated input to the residual stream, then scale the stream."""
    threads, line, records = tasks[1], 64 * tasks[1], field(job, RECORDS_AT)
    matrices = field(job, INPUT_MATRICES_AT) + DESCRIPTOR * (2 + 2 * layer)
    _record_states(tasks, job, counter, rows)
    barrier(control, threads)
    groups = (field(job, INPUT_SIZE) + GROUP - 1) // GROUP
    gates = field(job, INPUT_GATES_AT)
    project(tasks, job, counter + line, matrices, records, rows, gates, 4 * GROUP * groups, 0, 0, scratch)
    barrier(control, threads)
    _gate_inputs(tasks, job, counter + 2 * line, rows, layer, scratch)
    barrier(control, threads)
    out, stride = field(job, BRANCH_AT), 4 * field(job, HIDDEN_PADDED)
    matrix = matrices + DESCRIPTOR
    project(tasks, job, counter + 3 * line, matrix, records, rows, out, stride, 0, 0, scratch)
    barrier(control, threads)
    norm = load_int64(field(job, INPUT_NORMS_AT) + 8 * (1 + layer))
    add_branch(tasks, job, counter + 4 * line, rows, norm, scale, scratch)
    barrier(control, threads)
