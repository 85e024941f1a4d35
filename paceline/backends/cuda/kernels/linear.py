"""Matrix products of few rows, at the speed at which the weights come from memory.

    columns of the output    one tile of `columns`, a program each
    depth (what is summed)   cut into `splits` parts, a program each; the last to end adds them up in order
    rows                     tiles of `tokens`; one of 16 costs hardly more than one of 1

The weights are the left operand, so that their columns fill the matrix unit's larger side and rows its
smaller one. They lie in the order in which programs read them, one stream each.

How a number is summed depends on the matrix alone: over the depth in steps of the instruction, then over the
splits. So a row's results are the same bits in a pass of one row and in one of hundreds.

Norms cost nothing: whoever writes the residual stream also writes it times the next norm's weight, and the
sums of its squares by tile; the product that follows multiplies its results by the norm's factor instead of
its inputs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from paceline.backends.cuda.kernels.launching import follow, overlaps
from paceline.backends.cuda.kernels.matrix import Matrix, Normed, Scratch, padded_rows, token_tile


@triton.jit  # type: ignore[untyped-decorator]
def _product(  # type: ignore[no-untyped-def]
    weight_at,
    rows_at,
    depth,
    begin,
    end,
    columns: tl.constexpr,
    tokens: tl.constexpr,
    step: tl.constexpr,
):
    """Weights [columns, depth] times rows [tokens, depth], `begin` to `end`: float32 [columns, tokens]."""
    column, token, along = tl.arange(0, columns), tl.arange(0, tokens), tl.arange(0, step)
    weights = weight_at + column[:, None] * step + along[None, :]
    rows = rows_at + token[None, :] * depth + along[:, None]
    total = tl.zeros([columns, tokens], tl.float32)
    for at in range(begin, end, step):
        at = tl.multiple_of(at, 64)
        total = tl.dot(tl.load(weights + at * columns), tl.load(rows + at), total)
    return total


@triton.jit  # type: ignore[untyped-decorator]
def _split_range(depth, split, splits: tl.constexpr, step: tl.constexpr):  # type: ignore[no-untyped-def]
    """Where a split begins and ends: whole steps, as even as can be."""
    steps = depth // step
    return split * steps // splits * step, (split + 1) * steps // splits * step


@triton.jit  # type: ignore[untyped-decorator]
def _meet(  # type: ignore[no-untyped-def]
    total, partial_at, counter_at, split, splits: tl.constexpr, columns: tl.constexpr, tokens: tl.constexpr
):
    """Whether this program is the last of its tile to get here, and the sum of all splits if it is."""
    last = True
    if splits > 1:
        place = tl.arange(0, columns)[:, None] + tl.arange(0, tokens)[None, :] * columns
        tl.store(partial_at + split * columns * tokens + place, total)
        tl.debug_barrier()
        last = tl.atomic_add(counter_at, 1, sem="acq_rel") == splits - 1
        if last:
            total = tl.load(partial_at + place, cache_modifier=".cg")
            for other in range(1, splits):
                total += tl.load(partial_at + other * columns * tokens + place, cache_modifier=".cg")
            tl.store(counter_at, 0)
    return last, total


@triton.jit  # type: ignore[untyped-decorator]
def _load_squares(squares_at, token, groups, most_groups: tl.constexpr):  # type: ignore[no-untyped-def]
    """The sums of squares of each token's row: float32 [tokens, most_groups]."""
    group = tl.arange(0, most_groups)
    place = token[:, None] * groups + group[None, :]
    return tl.load(squares_at + place, mask=(group < groups)[None, :], other=0.0)


@triton.jit
def _norm_factor(squares, size, eps):  # type: ignore[no-untyped-def]
    """One over the root mean square of each token's row: float32 [1, tokens]."""
    return tl.rsqrt(tl.sum(squares, 1) / size + eps)[None, :]


@triton.jit  # type: ignore[untyped-decorator]
def _project_kernel(  # type: ignore[no-untyped-def]
    rows_at,
    squares_at,
    weight_at,
    bias_at,
    output_at,
    partial_at,
    counters_at,
    depth,
    width,
    row_stride,
    groups,
    size,
    eps,
    has_bias: tl.constexpr,
    most_groups: tl.constexpr,
    splits: tl.constexpr,
    columns: tl.constexpr,
    tokens: tl.constexpr,
    step: tl.constexpr,
    overlap: tl.constexpr,
) -> None:
    token_tile, tile, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    column = tile * columns + tl.arange(0, columns)
    token = token_tile * tokens + tl.arange(0, tokens)
    weight_at += (tile * columns).to(tl.int64) * depth
    begin, end = _split_range(depth, split, splits, step)
    follow(overlap)
    squares = _load_squares(squares_at, token, groups, most_groups)  # asked for early, used late
    rows_at += token_tile * tokens * depth
    total = _product(weight_at, rows_at, depth, begin, end, columns, tokens, step)
    number = token_tile * tl.num_programs(1) + tile
    last, total = _meet(
        total,
        partial_at + number * splits * columns * tokens,
        counters_at + number,
        split,
        splits,
        columns,
        tokens,
    )
    if last:
        total *= _norm_factor(squares, size, eps)
        if has_bias:
            total += tl.load(bias_at + column).to(tl.float32)[:, None]
        place = token[None, :].to(tl.int64) * row_stride + column[:, None]
        tl.store(output_at + place, total.to(output_at.dtype.element_ty), mask=(column < width)[:, None])


@triton.jit  # type: ignore[untyped-decorator]
def _gate_up_kernel(  # type: ignore[no-untyped-def]
    rows_at,
    squares_at,
    weight_at,
    output_at,
    partial_at,
    counters_at,
    depth,
    padded_width,
    groups,
    size,
    eps,
    most_groups: tl.constexpr,
    splits: tl.constexpr,
    columns: tl.constexpr,
    tokens: tl.constexpr,
    step: tl.constexpr,
    overlap: tl.constexpr,
) -> None:
    token_tile, tile, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    half: tl.constexpr = columns // 2
    column = tile * half + tl.arange(0, half)
    token = token_tile * tokens + tl.arange(0, tokens)
    weight_at += (tile * columns).to(tl.int64) * depth
    begin, end = _split_range(depth, split, splits, step)
    follow(overlap)
    squares = _load_squares(squares_at, token, groups, most_groups)
    rows_at += token_tile * tokens * depth
    total = _product(weight_at, rows_at, depth, begin, end, columns, tokens, step)
    number = token_tile * tl.num_programs(1) + tile
    last, total = _meet(
        total,
        partial_at + number * splits * columns * tokens,
        counters_at + number,
        split,
        splits,
        columns,
        tokens,
    )
    if last:
        total *= _norm_factor(squares, size, eps)
        gate, up = tl.split(tl.permute(tl.reshape(total, (2, half, tokens)), (1, 2, 0)))
        mixed = gate / (1.0 + tl.exp(-gate)) * up
        place = token[None, :] * padded_width + column[:, None]
        tl.store(output_at + place, mixed.to(output_at.dtype.element_ty))


@triton.jit  # type: ignore[untyped-decorator]
def _add_kernel(  # type: ignore[no-untyped-def]
    rows_at,
    weight_at,
    bias_at,
    hidden_at,
    norm_at,
    normed_at,
    squares_at,
    partial_at,
    counters_at,
    depth,
    padded_width,
    has_bias: tl.constexpr,
    splits: tl.constexpr,
    columns: tl.constexpr,
    tokens: tl.constexpr,
    step: tl.constexpr,
    overlap: tl.constexpr,
) -> None:
    token_tile, tile, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    column = tile * columns + tl.arange(0, columns)
    token = token_tile * tokens + tl.arange(0, tokens)
    weight_at += (tile * columns).to(tl.int64) * depth
    begin, end = _split_range(depth, split, splits, step)
    norm = tl.load(norm_at + column).to(tl.float32)[:, None]
    follow(overlap)
    place = token[None, :] * padded_width + column[:, None]
    hidden = tl.load(hidden_at + place)  # asked for early, used late
    rows_at += token_tile * tokens * depth
    total = _product(weight_at, rows_at, depth, begin, end, columns, tokens, step)
    number = token_tile * tl.num_programs(1) + tile
    last, total = _meet(
        total,
        partial_at + number * splits * columns * tokens,
        counters_at + number,
        split,
        splits,
        columns,
        tokens,
    )
    if last:
        if has_bias:
            total += tl.load(bias_at + column).to(tl.float32)[:, None]
        hidden += total
        tl.store(hidden_at + place, hidden)
        weighted = hidden * norm
        tl.store(normed_at + place, weighted.to(normed_at.dtype.element_ty))
        tl.store(squares_at + token * tl.num_programs(1) + tile, tl.sum(hidden * hidden, 0))


def project(normed: Normed, matrix: Matrix, output: torch.Tensor, rows: int, scratch: Scratch) -> None:
    """Write norm(rows) @ weight.T + bias to `output` [rows, at least width]."""
    tokens, tiling, groups = token_tile(rows), matrix.tiling, normed.squares.shape[1]
    overlap = overlaps(output.device)
    _project_kernel[(padded_rows(rows) // tokens, matrix.tiles, tiling.splits)](
        normed.rows,
        normed.squares,
        matrix.weight,
        matrix.bias,
        output,
        scratch.partial,
        scratch.counters,
        matrix.depth,
        matrix.width,
        output.stride(0),
        groups,
        normed.size,
        normed.eps,
        matrix.bias is not None,
        triton.next_power_of_2(groups),
        tiling.splits,
        tiling.columns,
        tokens,
        tiling.step,
        overlap,
        num_warps=tiling.warps,
        num_stages=tiling.stages,
        launch_pdl=overlap,
    )


def gate_up(normed: Normed, matrix: Matrix, output: torch.Tensor, rows: int, scratch: Scratch) -> None:
    """Write silu(gate) * up of norm(rows), a `tile_pair`, to `output` [rows, half of the padded width]."""
    tokens, tiling, groups = token_tile(rows), matrix.tiling, normed.squares.shape[1]
    overlap = overlaps(output.device)
    _gate_up_kernel[(padded_rows(rows) // tokens, matrix.tiles, tiling.splits)](
        normed.rows,
        normed.squares,
        matrix.weight,
        output,
        scratch.partial,
        scratch.counters,
        matrix.depth,
        matrix.padded_width // 2,
        groups,
        normed.size,
        normed.eps,
        triton.next_power_of_2(groups),
        tiling.splits,
        tiling.columns,
        tokens,
        tiling.step,
        overlap,
        num_warps=tiling.warps,
        num_stages=tiling.stages,
        launch_pdl=overlap,
    )


def add_product(
    inputs: torch.Tensor,
    matrix: Matrix,
    hidden: torch.Tensor,
    norm: torch.Tensor,
    normed: Normed,
    rows: int,
    scratch: Scratch,
) -> None:
    """Add inputs @ weight.T + bias to `hidden`, and prepare `normed` for the norm of this weight [hidden]."""
    tokens, tiling = token_tile(rows), matrix.tiling
    overlap = overlaps(hidden.device)
    _add_kernel[(padded_rows(rows) // tokens, matrix.tiles, tiling.splits)](
        inputs,
        matrix.weight,
        matrix.bias,
        hidden,
        norm,
        normed.rows,
        normed.squares,
        scratch.partial,
        scratch.counters,
        matrix.depth,
        matrix.padded_width,
        matrix.bias is not None,
        tiling.splits,
        tiling.columns,
        tokens,
        tiling.step,
        overlap,
        num_warps=tiling.warps,
        num_stages=tiling.stages,
        launch_pdl=overlap,
    )
