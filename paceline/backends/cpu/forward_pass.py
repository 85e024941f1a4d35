"""The forward pass as one compiled function that all threads of a team run together.

A pass is a list of phases, each followed by a barrier: see phases/ and attention/phases.py.
"""

from __future__ import annotations

from paceline.backends.cpu.attention.latent import absorb_queries, finish_values, store_latents
from paceline.backends.cpu.attention.phases import attend_rows, rope_and_store
from paceline.backends.cpu.features import are_wanted, save_features
from paceline.backends.cpu.heads.draft_chains import choose_drafts, extend_chains
from paceline.backends.cpu.heads.entry import enter_rows, join_rows, join_target, norm_context
from paceline.backends.cpu.heads.slot_convolutions import (
    ATTENTION,
    MLP,
    SUBLAYERS,
    enter_sublayer,
    leave_sublayer,
)
from paceline.backends.cpu.job import (
    ADVANCING,
    ATTENTION_GATE,
    BRANCH_AT,
    CONTEXT_NORM_AT,
    COUNTERS_AT,
    COUNTERS_PER_LAYER,
    DOWN,
    DRAFTING,
    ENTRY_BIAS_AT,
    ENTRY_COUNTERS,
    FROM_TARGET,
    HAS_EXPERTS_AT,
    HEAD_WIDTH,
    HEADS,
    HIDDEN_PADDED,
    INPUT_SIZE,
    INPUTS,
    INPUTS_AT,
    LATENT_PADDED,
    LAYER_MATRICES,
    LAYER_SCALES_AT,
    LAYERS,
    LOGITS_AT,
    LOGITS_STRIDE,
    MATRICES_AT,
    MIX_AT,
    MORE_DRAFTS,
    NUM_CHOSEN,
    OUTPUT,
    OUTPUT_BIAS_AT,
    OUTPUT_NORMS_AT,
    OUTPUTS,
    PARALLEL,
    QKV_AT,
    QKV_BIAS_AT,
    QKV_STRIDE,
    RECORDS_AT,
    RECURRENT_OUTPUT,
    REDUCE_AT,
    ROW_ADAPTERS_AT,
    ROWS,
    SCRATCH_AT,
    SCRATCH_BYTES,
    SLOT_MATRICES_AT,
    STATE_AT,
    STATE_LAYERS_AT,
    TARGET_EMBEDDING_AT,
    field,
    shape_of,
)
from paceline.backends.cpu.phases.feed_forward import feed_forward, project_changed, shrink
from paceline.backends.cpu.phases.layer_inputs import add_layer_input, make_layer_inputs
from paceline.backends.cpu.phases.low_rank import expand_rows
from paceline.backends.cpu.phases.projections import project
from paceline.backends.cpu.phases.recurrent import advance_states, finish_rows, keep_rows, scan_layer
from paceline.backends.cpu.phases.residual import (
    add_branch,
    embed_rows,
    finish_logits,
    has_raw_logits,
    norm_weight,
    normalize_rows,
    quantize_rows,
)
from paceline.backends.cpu.phases.sampling import sample_tokens
from paceline.backends.cpu.primitives.atomics import atomic_load
from paceline.backends.cpu.primitives.compiled import compiled
from paceline.backends.cpu.primitives.simd import load_int64
from paceline.backends.cpu.team import JOB, STOP, await_pass, barrier, start_pass
from paceline.backends.cpu.tiles.matmul import DESCRIPTOR
from paceline.backends.cpu.tiles.weight_tile import COLUMNS


@compiled
def _enter(control, tasks, job, counter, embedding, scratch):  # type: ignore[no-untyped-def]
    """Start the residual stream: from tokens, or, in a draft head, from states and tokens."""
    threads, line, rows = tasks[1], 64 * tasks[1], field(job, ROWS)
    if field(job, INPUTS_AT) == 0:
        embed_rows(tasks, job, counter, rows, embedding)
        barrier(control, threads)
        if field(job, INPUT_SIZE) > 0:
            make_layer_inputs(control, tasks, job, counter + 4 * line, rows, scratch)
        return
    records, state, stride = field(job, RECORDS_AT), field(job, STATE_AT), 4 * field(job, HIDDEN_PADDED)
    bias = field(job, ENTRY_BIAS_AT)
    if field(job, TARGET_EMBEDDING_AT) != 0:
        join_target(tasks, job, counter, rows, scratch)
        barrier(control, threads)
        matrix = field(job, REDUCE_AT)
        project(tasks, job, counter + line, matrix, records, rows, state, stride, 0, 0, scratch)
        barrier(control, threads)
        return
    if field(job, FROM_TARGET):
        enter_rows(tasks, job, counter, rows, scratch)
        barrier(control, threads)
        matrix = field(job, REDUCE_AT)
        if matrix != 0:
            project(tasks, job, counter + line, matrix, records, rows, state, stride, bias, 0, scratch)
            barrier(control, threads)
    if field(job, CONTEXT_NORM_AT) != 0:
        norm_context(tasks, job, counter + 2 * line, rows, scratch)
        barrier(control, threads)
        return
    join_rows(tasks, job, counter + 2 * line, rows, embedding, scratch)
    barrier(control, threads)
    matrix = field(job, MIX_AT)
    if matrix != 0:
        project(tasks, job, counter + 3 * line, matrix, records, rows, state, stride, bias, 0, scratch)
        barrier(control, threads)


@compiled
def _project_inputs(tasks, job, layer, matrices, counter, only_keys, scratch):  # type: ignore[no-untyped-def]
    """Project the input of the layer's mixer (attention or recurrence); returns the gate's first column."""
    rows, records, column, gate_column = field(job, ROWS), field(job, RECORDS_AT), 0, 0
    qkv, stride = field(job, QKV_AT), field(job, QKV_STRIDE)
    bias = field(job, QKV_BIAS_AT)
    if bias != 0:
        bias += stride * layer
    for part in range(INPUTS):
        matrix = matrices + DESCRIPTOR * part
        place = counter + 64 * tasks[1] * part
        part_bias = bias + 4 * column if bias != 0 else 0
        gate_column = column
        if load_int64(matrix) != 0 and (part > 0 or not only_keys):
            out = qkv + 4 * column
            project(tasks, job, place, matrix, records, rows, out, stride, part_bias, 0, scratch)
        column += COLUMNS * load_int64(matrix + 24)
    return gate_column


@compiled
def _expand_inputs(tasks, job, layer, matrices):  # type: ignore[no-untyped-def]
    """Add the LoRA adapters' part of queries, keys and values of all rows."""
    qkv, stride = field(job, QKV_AT), field(job, QKV_STRIDE)
    for part in range(INPUTS):
        columns = COLUMNS * load_int64(matrices + DESCRIPTOR * part + 24)
        expand_rows(tasks, job, layer, part, part, field(job, ROWS), qkv, stride, columns)
        qkv += 4 * columns


@compiled
def _store_keys(tasks, job, counter, rows, layer, matrices, scratch):  # type: ignore[no-untyped-def]
    """Store keys and values of all rows in their pages; rotate queries, or norm their latents."""
    if field(job, LATENT_PADDED) > 0:
        key_column = COLUMNS * load_int64(matrices + 24)
        store_latents(tasks, job, counter, rows, layer, key_column, scratch)
    else:
        rope_and_store(tasks, job, counter, rows, layer)


@compiled
def _project_output(control, tasks, job, layer, number, counter, out, added, scratch):  # type: ignore[no-untyped-def]
    """The mixer's output projection, from records, written to `out` or added to it."""
    bias = field(job, OUTPUT_BIAS_AT)
    if bias != 0:
        bias += 4 * field(job, HIDDEN_PADDED) * layer
    records = field(job, RECORDS_AT)
    project_changed(control, tasks, job, layer, number, counter, records, out, bias, added, scratch)


@compiled
def _mix(control, tasks, job, layer, matrices, counter, scratch, only_keys, out, added):  # type: ignore[no-untyped-def]
    """Attention or a recurrence of all rows, or both, written to `out` or added to it.

    `only_keys`: compute only what later passes read: keys and values, or recurrent states.
    """
    threads, line, rows = tasks[1], 64 * tasks[1], field(job, ROWS)
    output, recurrent_output = matrices + DESCRIPTOR * OUTPUT, matrices + DESCRIPTOR * RECURRENT_OUTPUT
    attends, recurs, state_layer = load_int64(output) != 0, load_int64(recurrent_output) != 0, 0
    shrink(control, tasks, job, layer, 0, INPUTS, field(job, RECORDS_AT), scratch)
    gate_column = _project_inputs(tasks, job, layer, matrices, counter, only_keys and not recurs, scratch)
    barrier(control, threads)
    if field(job, ROW_ADAPTERS_AT) != 0:
        _expand_inputs(tasks, job, layer, matrices)
        barrier(control, threads)
    if attends:
        _store_keys(tasks, job, counter + line * 4, rows, layer, matrices, scratch)
    if recurs:
        state_layer = load_int64(field(job, STATE_LAYERS_AT) + 8 * layer)
        keep_rows(tasks, job, counter + line * 8, rows, state_layer)
    barrier(control, threads)
    if recurs:
        scan_layer(control, tasks, job, counter + line * 9, state_layer, scratch)
    if only_keys:
        return
    if attends:
        latent, later = field(job, LATENT_PADDED) > 0, counter + line * 8  # latent layers have no recurrence
        if latent:
            absorb_queries(control, tasks, job, later, rows, layer, scratch)
        attend_rows(tasks, job, counter + line * 5, rows, layer, scratch)
        barrier(control, threads)
        width = field(job, HEADS) * (
            field(job, LATENT_PADDED) if latent else shape_of(job, layer, HEAD_WIDTH)
        )
        gates = gate_column if field(job, ATTENTION_GATE) else 0
        quantize_rows(tasks, job, counter + line * 6, rows, width, gates)
        barrier(control, threads)
        if latent:
            finish_values(control, tasks, job, later + line * 3, rows, layer, scratch)
        _project_output(control, tasks, job, layer, OUTPUT, counter + line * 7, out, added, scratch)
    if recurs:
        finish_rows(tasks, job, counter + line * 12, rows, state_layer)
        barrier(control, threads)
        added = 1 if added or attends else 0
        _project_output(
            control, tasks, job, layer, RECURRENT_OUTPUT, counter + line * 13, out, added, scratch
        )


@compiled
def _run_layer(control, tasks, job, layer, counter, scratch, only_keys):  # type: ignore[no-untyped-def]
    """One transformer layer; `only_keys`: only its keys and values, because no output is wanted."""
    threads, line, rows = tasks[1], 64 * tasks[1], field(job, ROWS)  # a counter: a cache line for each thread
    matrices = field(job, MATRICES_AT) + DESCRIPTOR * LAYER_MATRICES * layer
    branch, parallel = field(job, BRANCH_AT), field(job, PARALLEL)
    out, added = (branch, 0) if branch != 0 else (field(job, STATE_AT), 1)
    if load_int64(matrices) != 0:  # a mixer
        joined = field(job, INPUTS_AT) != 0 and field(job, TARGET_EMBEDDING_AT) == 0
        entered = joined and field(job, MIX_AT) == 0  # with the first layer's records
        if not entered or (layer > 0 and field(job, CONTEXT_NORM_AT) == 0):
            normalize_rows(tasks, job, counter, rows, norm_weight(job, 2 * layer), 0, scratch)
            barrier(control, threads)
        _mix(control, tasks, job, layer, matrices, counter + line, scratch, only_keys, out, added)
        if only_keys:
            return
        if branch != 0 and not parallel:
            norm = load_int64(field(job, OUTPUT_NORMS_AT) + 16 * layer)
            add_branch(tasks, job, counter + line * 15, rows, norm, 0, scratch)
            barrier(control, threads)
    has_experts = load_int64(field(job, HAS_EXPERTS_AT) + 8 * layer)
    if load_int64(matrices + DESCRIPTOR * DOWN) == 0 and not has_experts:
        return
    before = norm_weight(job, 2 * layer + 1)
    normalize_rows(tasks, job, counter + line * 16, rows, before, 0, scratch)
    barrier(control, threads)
    added = added or parallel
    feed_forward(control, tasks, job, layer, matrices, counter + line * 17, scratch, out, added)
    if branch != 0:
        norm, scale = load_int64(field(job, OUTPUT_NORMS_AT) + 16 * layer + 8), field(job, LAYER_SCALES_AT)
        scale = scale + 4 * layer if scale != 0 else 0
        inputs = field(job, INPUT_SIZE)
        add_branch(tasks, job, counter + line * 25, rows, norm, 0 if inputs > 0 else scale, scratch)
        barrier(control, threads)
        if inputs > 0:
            add_layer_input(control, tasks, job, layer, counter + line * 26, rows, scale, scratch)


@compiled
def _run_convolved_layer(control, tasks, job, layer, counter, scratch):  # type: ignore[no-untyped-def]
    """One layer of a DFlash2 head: convolutions over block slots before and after attention and MLP."""
    line, branch, attention = 64 * tasks[1], field(job, BRANCH_AT), SUBLAYERS * layer + ATTENTION
    matrices, mlp = field(job, MATRICES_AT) + DESCRIPTOR * LAYER_MATRICES * layer, SUBLAYERS * layer + MLP
    enter_sublayer(control, tasks, job, attention, counter, norm_weight(job, 2 * layer), scratch)
    _mix(control, tasks, job, layer, matrices, counter + 3 * line, scratch, False, branch, 0)
    leave_sublayer(control, tasks, job, attention, counter + 17 * line, scratch)
    enter_sublayer(control, tasks, job, mlp, counter + 18 * line, norm_weight(job, 2 * layer + 1), scratch)
    feed_forward(control, tasks, job, layer, matrices, counter + 21 * line, scratch, branch, 0)
    leave_sublayer(control, tasks, job, mlp, counter + 30 * line, scratch)


@compiled
def _run_pass(control, index, threads, job):  # type: ignore[no-untyped-def]
    rows, layers, counter = field(job, ROWS), field(job, LAYERS), field(job, COUNTERS_AT)
    scratch = field(job, SCRATCH_AT) + field(job, SCRATCH_BYTES) * index
    tasks, line = (index, threads), 64 * threads
    embedding = field(job, MATRICES_AT) + DESCRIPTOR * LAYER_MATRICES * layers
    _enter(control, tasks, job, counter, embedding, scratch)
    counter += line * ENTRY_COUNTERS
    outputs = field(job, OUTPUTS)
    silent = outputs == 0 and not are_wanted(job, layers)
    is_context = field(job, INPUTS_AT) != 0 and field(job, CONTEXT_NORM_AT) != 0  # of a parallel head
    for layer in range(layers):
        save_features(tasks, job, counter, rows, layer)
        only_keys = is_context or (silent and layer == layers - 1)
        if field(job, SLOT_MATRICES_AT) != 0 and not is_context:
            _run_convolved_layer(control, tasks, job, layer, counter + line, scratch)
        else:
            _run_layer(control, tasks, job, layer, counter + line, scratch, only_keys)
        counter += line * COUNTERS_PER_LAYER
    save_features(tasks, job, counter, rows, layers)
    if outputs > 0:
        normalize_rows(tasks, job, counter + line, outputs, norm_weight(job, 2 * layers), 1, scratch)
        barrier(control, threads)
        records, logits, stride = field(job, RECORDS_AT), field(job, LOGITS_AT), field(job, LOGITS_STRIDE)
        head = embedding + DESCRIPTOR
        project(tasks, job, counter + 2 * line, head, records, outputs, logits, stride, 0, 0, scratch)
        if has_raw_logits(job):
            barrier(control, threads)
            finish_logits(tasks, job, counter + 3 * line, outputs, COLUMNS * load_int64(head + 24))
    if field(job, NUM_CHOSEN) > 0:
        barrier(control, threads)
        sample_tokens(tasks, job, counter + 4 * line)
    barrier(control, threads)


@compiled
def _run_job(control, index, threads, job):  # type: ignore[no-untyped-def]
    """Run one job: a pass, then, if it drafts chains, one pass per further token; or a state advance.

    A state advance scans the accepted rows of one request and runs no pass."""
    if field(job, ADVANCING):
        scratch = field(job, SCRATCH_AT) + field(job, SCRATCH_BYTES) * index
        advance_states(control, (index, threads), job, field(job, COUNTERS_AT), scratch)
        return
    drafting = field(job, DRAFTING)  # read before the pass ends: after it the caller may change the job
    _run_pass(control, index, threads, job)
    while drafting:
        choose_drafts(index, threads, job)
        barrier(control, threads)
        if index == 0:
            extend_chains(job)
        barrier(control, threads)
        drafting = field(job, MORE_DRAFTS)  # never changed by a caller
        if drafting:
            _run_pass(control, index, threads, job)


@compiled(cached=True)
def run_passes(control, index, threads, job):  # type: ignore[no-untyped-def]
    """Thread 0: start a job and run its share of it. Workers: their share of every job until the team ends.

    `job` is used by thread 0 only; workers read the address of each job from the control block.
    """
    if index == 0:
        start_pass(control, threads, job)
        _run_job(control, index, threads, job)
        return
    seen = 0
    while True:
        seen = await_pass(control, index, seen)
        if load_int64(control + STOP) != 0:
            return
        _run_job(control, index, threads, atomic_load(control + JOB))
