"""Feed-forward blocks: MLPs and experts, built from products with LoRA adapters."""

from __future__ import annotations

from paceline.backends.cpu.job import (
    BRANCH_AT,
    DOWN,
    EXPERT_HIDDEN,
    EXPERT_LATENT_MATRICES_AT,
    EXPERT_LATENT_RECORDS_AT,
    EXPERT_LATENTS_AT,
    EXPERTS_NORM,
    EXPERTS_OUTPUT_NORM,
    GATE,
    HAS_EXPERTS_AT,
    HIDDEN_PADDED,
    LAYER_MATRICES,
    MATRICES_AT,
    RECORDS_AT,
    ROW_ADAPTERS_AT,
    ROWS,
    SHARED_OUTPUT_NORM,
    SHARED_SHARES_AT,
    UP,
    WIDE_RECORDS_AT,
    field,
    own_norm,
)
from paceline.backends.cpu.phases.experts import (
    combine_rows,
    gate_experts,
    gather_rows,
    project_experts,
    sort_pairs,
    write_latents,
)
from paceline.backends.cpu.phases.low_rank import change_pairs, expand_rows, shrink_pairs, shrink_rows
from paceline.backends.cpu.phases.projections import gate_rows, project
from paceline.backends.cpu.phases.residual import norm_branch, normalize_rows
from paceline.backends.cpu.phases.routing import route_rows
from paceline.backends.cpu.primitives.compiled import compiled
from paceline.backends.cpu.primitives.simd import load_int64
from paceline.backends.cpu.team import barrier
from paceline.backends.cpu.tiles.matmul import DESCRIPTOR
from paceline.backends.cpu.tiles.weight_tile import COLUMNS


@compiled
def shrink(control, tasks, job, layer, first, last, records, scratch):  # type: ignore[no-untyped-def]
    """LoRA shrink for the products first..last, which all read these records."""
    if field(job, ROW_ADAPTERS_AT) != 0:
        matrix = field(job, MATRICES_AT) + DESCRIPTOR * (LAYER_MATRICES * layer + first)
        groups = load_int64(matrix + 16)
        shrink_rows(tasks, job, layer, first, last, records, field(job, ROWS), groups, scratch)
        barrier(control, tasks[1])


@compiled
def project_changed(control, tasks, job, layer, number, counter, records, out, bias, added, scratch):  # type: ignore[no-untyped-def]
    """A product of a layer with its LoRA adapters, written to `out` or added to it."""
    rows, stride = field(job, ROWS), 4 * field(job, HIDDEN_PADDED)
    matrix = field(job, MATRICES_AT) + DESCRIPTOR * (LAYER_MATRICES * layer + number)
    shrink(control, tasks, job, layer, number, number + 1, records, scratch)
    project(tasks, job, counter, matrix, records, rows, out, stride, bias, added, scratch)
    barrier(control, tasks[1])
    if field(job, ROW_ADAPTERS_AT) != 0:
        expand_rows(tasks, job, layer, number, 0, rows, out, stride, COLUMNS * load_int64(matrix + 24))
        barrier(control, tasks[1])


@compiled
def _run_mlp(control, tasks, job, layer, matrices, counter, shares, scratch, out, added):  # type: ignore[no-untyped-def]
    """The MLP of all rows, written to `out` or added to it; `shares`: a factor for each row, or 0."""
    rows, line, gates = field(job, ROWS), 64 * tasks[1], matrices + DESCRIPTOR * GATE
    shrink(control, tasks, job, layer, GATE, DOWN, field(job, RECORDS_AT), scratch)
    gate_rows(tasks, job, layer, counter, rows, gates, matrices + DESCRIPTOR * UP, shares, scratch)
    barrier(control, tasks[1])
    wide = field(job, WIDE_RECORDS_AT)
    project_changed(control, tasks, job, layer, DOWN, counter + line, wide, out, 0, added, scratch)


@compiled
def _enter_latents(control, tasks, job, layer, counter, scratch):  # type: ignore[no-untyped-def]
    """Project all rows to the latents that the layer's experts read."""
    rows, threads = field(job, ROWS), tasks[1]
    matrix = field(job, EXPERT_LATENT_MATRICES_AT) + DESCRIPTOR * 2 * layer
    latents, stride = field(job, EXPERT_LATENTS_AT), 4 * field(job, EXPERT_HIDDEN)
    project(tasks, job, counter, matrix, field(job, RECORDS_AT), rows, latents, stride, 0, 0, scratch)
    barrier(control, threads)
    write_latents(tasks, job, counter + 64 * threads, rows)
    barrier(control, threads)


@compiled
def _leave_latents(control, tasks, job, layer, counter, scratch, out, added):  # type: ignore[no-untyped-def]
    """Project the latents that experts gave, to `out` or added to it."""
    rows, threads = field(job, ROWS), tasks[1]
    matrix = field(job, EXPERT_LATENT_MATRICES_AT) + DESCRIPTOR * (2 * layer + 1)
    records, stride = field(job, EXPERT_LATENT_RECORDS_AT), 4 * field(job, HIDDEN_PADDED)
    write_latents(tasks, job, counter, rows)
    barrier(control, threads)
    project(tasks, job, counter + 64 * threads, matrix, records, rows, out, stride, 0, added, scratch)
    barrier(control, threads)


@compiled
def _run_experts(control, tasks, job, layer, counter, scratch, out, added):  # type: ignore[no-untyped-def]
    """The experts of all rows, written to `out` or added to it."""
    rows, threads, line = field(job, ROWS), tasks[1], 64 * tasks[1]
    has_latents = field(job, EXPERT_LATENT_MATRICES_AT) != 0
    route_rows(tasks, job, counter, rows, layer, scratch)
    barrier(control, threads)
    if has_latents:
        _enter_latents(control, tasks, job, layer, counter + line * 17, scratch)
    sort_pairs(tasks, job, rows)
    barrier(control, threads)
    gather_rows(tasks, job, counter + line, rows)
    barrier(control, threads)
    has_adapters = field(job, ROW_ADAPTERS_AT) != 0
    if has_adapters:
        shrink_pairs(tasks, job, layer, rows, scratch)
        barrier(control, threads)
    gate_experts(tasks, job, counter + line * 2, layer, scratch)
    barrier(control, threads)
    project_experts(tasks, job, counter + line * 3, layer)
    barrier(control, threads)
    if has_adapters:
        change_pairs(tasks, job, layer, rows, scratch)
        barrier(control, threads)
    norm = own_norm(job, layer, EXPERTS_OUTPUT_NORM)
    if has_latents:
        combine_rows(tasks, job, counter + line * 4, rows, field(job, EXPERT_LATENTS_AT), 0, norm, scratch)
        barrier(control, threads)
        _leave_latents(control, tasks, job, layer, counter + line * 19, scratch, out, added)
        return
    combine_rows(tasks, job, counter + line * 4, rows, out, added, norm, scratch)
    barrier(control, threads)


@compiled
def _run_normed_experts(control, tasks, job, layer, matrices, counter, scratch):  # type: ignore[no-untyped-def]
    """A shared MLP and experts with norms of their own (Gemma 4), both written to the branch."""
    threads, line, rows, branch = tasks[1], 64 * tasks[1], field(job, ROWS), field(job, BRANCH_AT)
    _run_mlp(control, tasks, job, layer, matrices, counter + line * 5, 0, scratch, branch, 0)
    norm_branch(tasks, job, counter + line * 14, rows, own_norm(job, layer, SHARED_OUTPUT_NORM))
    barrier(control, threads)
    normalize_rows(tasks, job, counter + line * 15, rows, own_norm(job, layer, EXPERTS_NORM), 0, scratch)
    barrier(control, threads)
    _run_experts(control, tasks, job, layer, counter, scratch, branch, 1)


@compiled
def feed_forward(control, tasks, job, layer, matrices, counter, scratch, out, added):  # type: ignore[no-untyped-def]
    """The MLP or the experts of all rows, written to `out` or added to it."""
    if own_norm(job, layer, EXPERTS_NORM) != 0:
        _run_normed_experts(control, tasks, job, layer, matrices, counter, scratch)
    elif load_int64(field(job, HAS_EXPERTS_AT) + 8 * layer):
        _run_experts(control, tasks, job, layer, counter, scratch, out, added)
        if load_int64(matrices + DESCRIPTOR * DOWN) != 0:  # the shared expert
            shares = field(job, SHARED_SHARES_AT)
            _run_mlp(control, tasks, job, layer, matrices, counter + 320 * tasks[1], shares, scratch, out, 1)
    else:
        _run_mlp(control, tasks, job, layer, matrices, counter, 0, scratch, out, added)
