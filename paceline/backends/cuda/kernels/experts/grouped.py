"""Mixtures of experts (fused MoE): grouped products over the rows of each expert.

    router       a score for each expert; with few rows, computed by the kernel before: see router.py
    route        a row's top-k experts and their weights; the row is appended to the experts' lists, and the
                 last program to finish splits the lists into blocks: an expert and at most `tokens` of its
                 rows
    gate, up     of every block, with SwiGLU: an expert's weights are read once for all rows of a block
    down         of every block
    combine      hidden += the weighted sum over a row's experts, best expert first

Where routing weights scale the experts' input (Llama 4), `gate, up` applies them, and `combine` only sums.

A pair is a row and one of its experts. The order of pairs in a list is arbitrary and has no effect: a row's
results do not depend on its index in a tile, and are stored by pair. The grid has programs for the largest
possible number of blocks; programs without a block end at once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from paceline.backends.cuda.kernels.experts.router import score_rows
from paceline.backends.cuda.kernels.experts.routing import Mixture, Routing, block_rows, blocks_for, route
from paceline.backends.cuda.kernels.pdl import pdl_launch, pdl_sync, pdl_wait, supports_pdl
from paceline.backends.cuda.kernels.products.activations import activated
from paceline.backends.cuda.kernels.products.matmul import (
    apply_scales,
    halves,
    matmul_split,
    sum_of_squares,
)
from paceline.backends.cuda.kernels.products.matrix import Normed, stages_for


@triton.jit
def _load_block(blocks_at, block_line):  # type: ignore[no-untyped-def]
    """This program's block: its expert, the first index in the expert's list, and its number of rows."""
    at = blocks_at + tl.program_id(1)
    expert, first = tl.load(at, cache_modifier=".cg"), tl.load(at + block_line, cache_modifier=".cg")
    return expert, first, tl.load(at + 2 * block_line, cache_modifier=".cg")


@triton.jit  # type: ignore[untyped-decorator]
def _block_pairs(  # type: ignore[no-untyped-def]
    lists_at, list_line, expert, first, count, tokens: tl.constexpr, is_alone: tl.constexpr
):
    """The pairs of a block [tokens], padded by repeating the last, and which of them are real."""
    token = tl.arange(0, tokens)
    if is_alone:
        pair = tl.program_id(1) + tl.zeros([tokens], tl.int32)
    else:
        pair = tl.load(lists_at + expert * list_line + first + tl.minimum(token, count - 1))
    return pair, token < count


@triton.jit  # type: ignore[untyped-decorator]
def _gate_up_kernel(  # type: ignore[no-untyped-def]
    rows_at,
    factors_at,
    shares_at,
    weight_at,
    scales_at,
    bias_at,
    lists_at,
    blocks_at,
    output_at,
    depth,
    width,
    list_line,
    block_line,
    activation: tl.constexpr,
    has_bias: tl.constexpr,
    scales_inputs: tl.constexpr,  # routing weights scale the experts' input
    chosen: tl.constexpr,
    columns: tl.constexpr,
    tokens: tl.constexpr,
    step: tl.constexpr,
    packing: tl.constexpr,
    stages: tl.constexpr,
    is_alone: tl.constexpr,
    pdl: tl.constexpr,
) -> None:
    tile = tl.program_id(0)
    pdl_wait(pdl)
    # launch dependents after the wait: _down_kernel reads blocks before its own wait, so `route` must be done
    pdl_launch(pdl)
    expert, first, count = _load_block(blocks_at, block_line)
    if count > 0:
        pair, is_there = _block_pairs(lists_at, list_line, expert, first, count, tokens, is_alone)
        matrix_tile, row = expert * tl.num_programs(0) + tile, pair // chosen
        factor = tl.load(factors_at + row)[None, :]
        if scales_inputs:
            factor *= tl.load(shares_at + pair)[None, :]
        total = matmul_split(
            rows_at,
            row,
            is_there,
            weight_at,
            scales_at,
            depth,
            matrix_tile,
            0,
            1,
            columns,
            tokens,
            step,
            packing,
            stages,
        )
        total = apply_scales(total, scales_at, matrix_tile, columns, packing) * factor
        if has_bias:
            total += tl.load(bias_at + matrix_tile * columns + tl.arange(0, columns)).to(tl.float32)[:, None]
        is_gated: tl.constexpr = activation != "relu2"
        written: tl.constexpr = columns // (2 if is_gated else 1)
        if is_gated:
            gate, up = halves(total, columns, tokens)
            mixed = activated(gate, up, activation)
        else:
            mixed = activated(total, total, activation)
        offset = pair[None, :] * width + tile * written + tl.arange(0, written)[:, None]
        tl.store(output_at + offset, mixed.to(output_at.dtype.element_ty), mask=is_there[None, :])


@triton.jit  # type: ignore[untyped-decorator]
def _down_kernel(  # type: ignore[no-untyped-def]
    rows_at,
    weight_at,
    scales_at,
    bias_at,
    lists_at,
    blocks_at,
    output_at,
    depth,
    width,
    list_line,
    block_line,
    has_bias: tl.constexpr,
    columns: tl.constexpr,
    tokens: tl.constexpr,
    step: tl.constexpr,
    packing: tl.constexpr,
    stages: tl.constexpr,
    is_alone: tl.constexpr,
    pdl: tl.constexpr,
) -> None:
    pdl_launch(pdl)
    tile = tl.program_id(0)
    # before the wait: this kernel starts after every program of _gate_up_kernel has waited for `route`, which
    # wrote the blocks; the next kernel that writes them comes after this one
    expert, first, count = _load_block(blocks_at, block_line)
    pdl_wait(pdl)
    if count > 0:
        matrix_tile = expert * tl.num_programs(0) + tile
        pair, is_there = _block_pairs(lists_at, list_line, expert, first, count, tokens, is_alone)
        total = matmul_split(
            rows_at,
            pair,
            is_there,
            weight_at,
            scales_at,
            depth,
            matrix_tile,
            0,
            1,
            columns,
            tokens,
            step,
            packing,
            stages,
        )
        total = apply_scales(total, scales_at, matrix_tile, columns, packing)
        if has_bias:
            total += tl.load(bias_at + matrix_tile * columns + tl.arange(0, columns)).to(tl.float32)[:, None]
        offset = pair[None, :] * width + tile * columns + tl.arange(0, columns)[:, None]
        tl.store(output_at + offset, total, mask=is_there[None, :])


@triton.jit  # type: ignore[untyped-decorator]
def _combine_kernel(  # type: ignore[no-untyped-def]
    outputs_at,
    shares_at,
    hidden_at,
    norm_at,
    normed_at,
    squares_at,
    width,
    chosen: tl.constexpr,
    group: tl.constexpr,
    scales_inputs: tl.constexpr,
    pdl: tl.constexpr,
) -> None:
    row, tile = tl.program_id(0), tl.program_id(1)
    column = tile * group + tl.arange(0, group)
    norm = tl.load(norm_at + column).to(tl.float32)
    pdl_sync(pdl)
    hidden = tl.load(hidden_at + row * width + column)
    total = tl.zeros([group], tl.float32)
    for rank in tl.static_range(chosen):
        pair = row * chosen + rank
        output = tl.load(outputs_at + pair * width + column)
        if scales_inputs:
            total += output
        else:
            total = tl.fma(output, tl.broadcast_to(tl.load(shares_at + pair), [group]), total)
    hidden += total
    tl.store(hidden_at + row * width + column, hidden)
    tl.store(normed_at + row * width + column, (hidden * norm).to(normed_at.dtype.element_ty))
    tl.store(squares_at + row * tl.num_programs(1) + tile, tl.sum(sum_of_squares(hidden[:, None])))


def add_experts(
    mixture: Mixture,
    read: Normed,
    slot_mapping: torch.Tensor,
    hidden: torch.Tensor,
    norm: torch.Tensor,
    normed: Normed,
    routing: Routing,
    has_parts: bool = False,
    scored: Normed | None = None,
) -> None:
    """Add the experts' output for norm(rows) to `hidden`, and prepare `normed` for the norm of this weight.

    Rows with a negative slot mapping are padding; their results are undefined. `has_parts`: the kernel that
    wrote `read` has stored partial router scores. `scored`: what the router reads, if not `read`.
    """
    scored = scored or read
    rows = len(slot_mapping)
    tokens = block_rows(mixture, rows)
    if not has_parts:
        score_rows(scored, mixture.router, routing.parts, routing.arrivals, routing.scores, rows)
    route(mixture, read, slot_mapping, routing, tokens, has_parts)
    _run_blocks(mixture, read, routing, rows, tokens)
    _combine(mixture, routing, hidden, norm, normed, rows)


def _run_blocks(mixture: Mixture, read: Normed, routing: Routing, rows: int, tokens: int) -> None:
    """Write every expert's output for its rows to `routing.outputs`."""
    pdl, is_alone = supports_pdl(read.rows.device), rows == 1
    gate_up, down, blocks = mixture.gate_up, mixture.down, blocks_for(mixture, rows, tokens)
    grids = [(own.tiles // mixture.experts, blocks) for own in (gate_up, down)]
    stages = [
        stages_for(own, tokens, programs=tiles * blocks if is_alone else 0)
        for own, (tiles, blocks) in zip((gate_up, down), grids, strict=True)
    ]
    _gate_up_kernel[grids[0]](
        read.rows,
        routing.factors,
        routing.shares,
        gate_up.weight,
        gate_up.scales,
        gate_up.bias,
        routing.lists,
        routing.blocks,
        routing.activated,
        gate_up.depth,
        routing.activated.shape[1],
        routing.lists.shape[1],
        routing.blocks.shape[1],
        mixture.activation,
        gate_up.bias is not None,
        mixture.moe.scaled_inputs,
        mixture.chosen,
        gate_up.tiling.columns,
        tokens,
        gate_up.tiling.step,
        gate_up.tiling.packing,
        stages[0],
        is_alone,
        pdl,
        num_warps=gate_up.tiling.warps,
        enable_fp_fusion=False,
        launch_pdl=pdl,
    )
    _down_kernel[grids[1]](
        routing.activated,
        down.weight,
        down.scales,
        down.bias,
        routing.lists,
        routing.blocks,
        routing.outputs,
        down.depth,
        routing.outputs.shape[1],
        routing.lists.shape[1],
        routing.blocks.shape[1],
        down.bias is not None,
        down.tiling.columns,
        tokens,
        down.tiling.step,
        down.tiling.packing,
        stages[1],
        is_alone,
        pdl,
        num_warps=down.tiling.warps,
        enable_fp_fusion=False,
        launch_pdl=pdl,
    )


def _combine(
    mixture: Mixture, routing: Routing, hidden: torch.Tensor, norm: torch.Tensor, normed: Normed, rows: int
) -> None:
    """Add the weighted sum of each row's experts to `hidden`."""
    pdl = supports_pdl(hidden.device)
    groups = normed.squares.shape[1]
    _combine_kernel[(rows, groups)](
        routing.outputs,
        routing.shares,
        hidden,
        norm,
        normed.rows,
        normed.squares,
        hidden.shape[1],
        mixture.chosen,
        hidden.shape[1] // groups,
        mixture.moe.scaled_inputs,
        pdl,
        num_warps=1,
        enable_fp_fusion=False,
        launch_pdl=pdl,
    )
