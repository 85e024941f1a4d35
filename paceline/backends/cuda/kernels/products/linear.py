"""Linear layers with fused RMSNorm: projection, gate-up with SwiGLU, and addition to the residual stream.

The kernel that writes the residual stream also writes the stream times the next norm's weight, and sums of
squares by tile. The next product applies the norm's factor (1 / root mean square) to its results instead of
its inputs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from paceline.backends.cuda.kernels.experts.router import Scores, prefetch_router, store_scores
from paceline.backends.cuda.kernels.pdl import pdl_sync
from paceline.backends.cuda.kernels.products.activations import activated
from paceline.backends.cuda.kernels.products.fp8 import store_fp8
from paceline.backends.cuda.kernels.products.low_rank import LowRankRows, add_low_rank, added_by
from paceline.backends.cuda.kernels.products.matmul import (
    halves,
    load_squares,
    matmul_tiles,
    norm_factor,
    program_tokens,
    sum_of_squares,
)
from paceline.backends.cuda.kernels.products.matrix import MAX_TILES, Matrix, Normed, Scratch, launch_for
from paceline.models.config import UNGATED


@triton.jit(do_not_specialize=["row_count"])  # type: ignore[untyped-decorator]
def _project_kernel(  # type: ignore[no-untyped-def]
    rows_at,
    squares_at,
    weight_at,
    scales_at,
    bias_at,
    output_at,
    partial_at,
    counters_at,
    depth,
    row_count,
    width,
    row_stride,
    groups,
    size,
    eps,
    has_bias: tl.constexpr,
    max_groups: tl.constexpr,
    low_at,
    up_at,
    adapters_at,
    up_width,
    rank: tl.constexpr,  # of adapters; 0: they add nothing
    splits: tl.constexpr,
    is_split_k: tl.constexpr,
    columns: tl.constexpr,
    tokens: tl.constexpr,
    step: tl.constexpr,
    packing: tl.constexpr,
    stages: tl.constexpr,
    tiles: tl.constexpr,
    rows_first: tl.constexpr,
    pdl: tl.constexpr,
) -> None:
    pdl_sync(pdl)
    column = tl.program_id(1) * tiles * columns + tl.arange(0, tiles * columns)
    token = program_tokens(tokens)
    squares = load_squares(squares_at, token, groups, max_groups)
    last, total = matmul_tiles(
        rows_at,
        row_count,
        weight_at,
        scales_at,
        partial_at,
        counters_at,
        depth,
        splits,
        is_split_k,
        columns,
        tokens,
        step,
        packing,
        stages,
        tiles,
        None,
        rows_first,
    )
    if last:
        total *= norm_factor(squares, size, eps)
        if has_bias:
            total += tl.load(bias_at + column).to(tl.float32)[:, None]
        if rank > 0:
            total = add_low_rank(total, column, token, row_count, low_at, up_at, adapters_at, up_width, rank)
        offset = token[None, :].to(tl.int64) * row_stride + column[:, None]
        tl.store(output_at + offset, total.to(output_at.dtype.element_ty), mask=(column < width)[:, None])


@triton.jit(do_not_specialize=["row_count"])  # type: ignore[untyped-decorator]
def _gate_up_kernel(  # type: ignore[no-untyped-def]
    rows_at,
    row_scales_at,
    squares_at,
    weight_at,
    scales_at,
    output_at,
    output_scales_at,
    partial_at,
    counters_at,
    depth,
    row_count,
    padded_width,
    groups,
    size,
    eps,
    activation: tl.constexpr,
    quantizes: tl.constexpr,
    max_groups: tl.constexpr,
    low_at,
    up_at,
    adapters_at,
    up_width,
    rank: tl.constexpr,  # of adapters; 0: they add nothing
    splits: tl.constexpr,
    is_split_k: tl.constexpr,
    columns: tl.constexpr,
    tokens: tl.constexpr,
    step: tl.constexpr,
    packing: tl.constexpr,
    stages: tl.constexpr,
    tiles: tl.constexpr,
    rows_first: tl.constexpr,
    pdl: tl.constexpr,
) -> None:
    pdl_sync(pdl)
    is_gated: tl.constexpr = activation != "relu2"
    written: tl.constexpr = tiles * columns // (2 if is_gated else 1)
    column = tl.program_id(1) * written + tl.arange(0, written)
    token = program_tokens(tokens)
    squares = load_squares(squares_at, token, groups, max_groups)
    last, total = matmul_tiles(
        rows_at,
        row_count,
        weight_at,
        scales_at,
        partial_at,
        counters_at,
        depth,
        splits,
        is_split_k,
        columns,
        tokens,
        step,
        packing,
        stages,
        tiles,
        row_scales_at,
        rows_first,
    )
    if last:
        total *= norm_factor(squares, size, eps)
        if rank > 0:
            both = tl.program_id(1) * tiles * columns + tl.arange(0, tiles * columns)
            total = add_low_rank(total, both, token, row_count, low_at, up_at, adapters_at, up_width, rank)
        if is_gated:
            gate, up = halves(total, columns, tokens, tiles)
            mixed = activated(gate, up, activation)
        else:
            mixed = activated(total, total, activation)
        if quantizes:
            store_fp8(mixed, token, tl.program_id(1), padded_width, output_at, output_scales_at)
        else:
            offset = token[None, :] * padded_width + column[:, None]
            tl.store(output_at + offset, mixed.to(output_at.dtype.element_ty))


@triton.jit(do_not_specialize=["row_count"])  # type: ignore[untyped-decorator]
def _add_kernel(  # type: ignore[no-untyped-def]
    rows_at,
    row_scales_at,
    weight_at,
    scales_at,
    bias_at,
    hidden_at,
    norm_at,
    normed_at,
    squares_at,
    fp8_at,
    fp8_scales_at,
    router_at,
    scores_at,
    partial_at,
    counters_at,
    depth,
    row_count,
    padded_width,
    has_bias: tl.constexpr,
    quantizes: tl.constexpr,
    experts: tl.constexpr,  # padded; 0: store no router scores
    router_step: tl.constexpr,
    low_at,
    up_at,
    adapters_at,
    up_width,
    rank: tl.constexpr,  # of adapters; 0: they add nothing
    splits: tl.constexpr,
    is_split_k: tl.constexpr,
    columns: tl.constexpr,
    tokens: tl.constexpr,
    step: tl.constexpr,
    packing: tl.constexpr,
    stages: tl.constexpr,
    tiles: tl.constexpr,
    rows_first: tl.constexpr,
    pdl: tl.constexpr,
) -> None:
    first = tl.program_id(1) * tiles
    column = first * columns + tl.arange(0, tiles * columns)
    token = program_tokens(tokens)
    norm = tl.load(norm_at + column).to(tl.float32)[:, None]
    if experts > 0 and pdl:
        prefetch_router(router_at, first, padded_width, experts, router_step)
    pdl_sync(pdl)
    offset = token[None, :] * padded_width + column[:, None]
    # with many rows or packed weights, the product needs the registers
    is_early: tl.constexpr = not rows_first and (tokens < 64 or packing == "none" or packing == "e4m3")
    if is_early:
        hidden = tl.load(hidden_at + offset)
    last, total = matmul_tiles(
        rows_at,
        row_count,
        weight_at,
        scales_at,
        partial_at,
        counters_at,
        depth,
        splits,
        is_split_k,
        columns,
        tokens,
        step,
        packing,
        stages,
        tiles,
        row_scales_at,
        rows_first,
    )
    if last:
        if has_bias:
            total += tl.load(bias_at + column).to(tl.float32)[:, None]
        if rank > 0:
            total = add_low_rank(total, column, token, row_count, low_at, up_at, adapters_at, up_width, rank)
        if not is_early:
            hidden = tl.load(hidden_at + offset)
        hidden += total
        tl.store(hidden_at + offset, hidden)
        weighted = hidden * norm
        tl.store(normed_at + offset, weighted.to(normed_at.dtype.element_ty))
        if quantizes:
            store_fp8(weighted, token, first, padded_width, fp8_at, fp8_scales_at)
        tile = first + tl.arange(0, tiles)
        groups = tl.num_programs(1) * tiles
        if experts > 0:
            rows = weighted.to(normed_at.dtype.element_ty)
            store_scores(rows, first, groups, token, router_at, scores_at, padded_width, experts, router_step)
        tl.store(squares_at + token[None, :] * groups + tile[:, None], sum_of_squares(hidden, tiles))


def _most_tiles(change: LowRankRows | None) -> int:
    """The most tiles of a program: one with LoRA adapters, which need registers."""
    return MAX_TILES if change is None else 1


def project(
    normed: Normed,
    matrix: Matrix,
    output: torch.Tensor,
    rows: int,
    scratch: Scratch,
    change: LowRankRows | None = None,
) -> None:
    """Write norm(rows) @ weight.T + bias to `output` [padded rows, at least width]; `change`: LoRA."""
    launch, groups = launch_for(matrix, rows, _most_tiles(change)), normed.squares.shape[1]
    assert launch.rows <= len(output)
    _project_kernel[launch.grid](
        normed.rows,
        normed.squares,
        matrix.weight,
        matrix.scales,
        matrix.bias,
        output,
        scratch.partial,
        scratch.counters,
        matrix.depth,
        rows,
        matrix.width,
        output.stride(0),
        groups,
        normed.size,
        normed.eps,
        matrix.bias is not None,
        triton.next_power_of_2(groups),
        **added_by(change),
        **launch.options,
    )


def gate_up(
    normed: Normed,
    matrix: Matrix,
    output: torch.Tensor,
    rows: int,
    scratch: Scratch,
    scales: torch.Tensor | None = None,
    activation: str = "silu",
    change: LowRankRows | None = None,
) -> None:
    """Write activation(gate) * up of norm(rows) to `output` [padded rows, half of the padded width].

    `matrix` comes from `tile_pair`; for activations without a gate (UNGATED) it is up alone, and `output` is
    [padded rows, padded width]. `scales`, as in Normed: quantize the output to e4m3. `change`: LoRA adapters.
    """
    launch, groups = launch_for(matrix, rows, _most_tiles(change)), normed.squares.shape[1]
    assert launch.rows <= len(output)
    _gate_up_kernel[launch.grid](
        *normed.read_by(matrix),
        normed.squares,
        matrix.weight,
        matrix.scales,
        output,
        scales,
        scratch.partial,
        scratch.counters,
        matrix.depth,
        rows,
        matrix.padded_width // (1 if activation in UNGATED else 2),
        groups,
        normed.size,
        normed.eps,
        activation,
        scales is not None,
        triton.next_power_of_2(groups),
        **added_by(change),
        **launch.options,
    )


def add_product(
    inputs: torch.Tensor,
    matrix: Matrix,
    hidden: torch.Tensor,
    norm: torch.Tensor,
    normed: Normed,
    rows: int,
    scratch: Scratch,
    scales: torch.Tensor | None = None,
    scores: Scores | None = None,
    change: LowRankRows | None = None,
) -> None:
    """Add inputs @ weight.T + bias to `hidden`, and prepare `normed` for the norm of this weight [hidden].

    `scales`, as in Normed: inputs are e4m3. `scores`: also store parts of the router's scores (few rows
    only). `change`: LoRA adapters.
    """
    router = None if scores is None else scores.router
    launch = launch_for(matrix, rows, _most_tiles(change) if normed.fp8 is None else 1)
    assert launch.rows <= min(len(hidden), len(normed.rows))
    _add_kernel[launch.grid](
        inputs,
        scales,
        matrix.weight,
        matrix.scales,
        matrix.bias,
        hidden,
        norm,
        normed.rows,
        normed.squares,
        normed.fp8,
        normed.scales,
        None if router is None else router.weight,
        None if scores is None else scores.parts,
        scratch.partial,
        scratch.counters,
        matrix.depth,
        rows,
        matrix.padded_width,
        matrix.bias is not None,
        normed.fp8 is not None,
        0 if router is None else router.padded_width,
        0 if router is None else router.tiling.step,
        **added_by(change),
        **launch.options,
    )
