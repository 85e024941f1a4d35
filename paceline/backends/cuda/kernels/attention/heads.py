"""The QKV projection with QK norms and RoPE; writes keys and values to their KV slots."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from paceline.backends.cuda.kernels.pdl import pdl_sync, supports_pdl
from paceline.backends.cuda.kernels.products.low_rank import LowRankRows, add_low_rank, added_by
from paceline.backends.cuda.kernels.products.matmul import (
    halves,
    load_squares,
    matmul_tiles,
    norm_factor,
    program_tokens,
    sum_of_squares,
)
from paceline.backends.cuda.kernels.products.matrix import Matrix, Normed, Scratch, launch_for

Rotation = tuple[torch.Tensor, torch.Tensor]  # cosine and sine: float32 [positions, head_dim // 2] each


@triton.jit  # type: ignore[untyped-decorator]
def _normed(one, two, factor, norm_at, half: tl.constexpr):  # type: ignore[no-untyped-def]
    """The halves of heads [columns // 2, tokens] times each token's norm factor and the norm's weights."""
    part = tl.arange(0, one.shape[0])
    first = tl.load(norm_at + part, mask=part < half, other=0.0).to(tl.float32)[:, None]
    second = tl.load(norm_at + half + part, mask=part < half, other=0.0).to(tl.float32)[:, None]
    return one * (factor * first), two * (factor * second)


@triton.jit  # type: ignore[untyped-decorator]
def _rotated(one, two, position, cosines_at, sines_at, half: tl.constexpr):  # type: ignore[no-untyped-def]
    """The halves of heads, rotated by RoPE for each token's position."""
    part = tl.arange(0, one.shape[0])
    inside, angle = (part < half)[:, None], position[None, :] * half + part[:, None]
    cosine = tl.load(cosines_at + angle, mask=inside, other=0.0)
    sine = tl.load(sines_at + angle, mask=inside, other=0.0)
    return one * cosine - two * sine, two * cosine + one * sine


@triton.jit  # type: ignore[untyped-decorator]
def _store_halves(to, one, two, mask, half: tl.constexpr) -> None:  # type: ignore[no-untyped-def]
    tl.store(to, one.to(to.dtype.element_ty), mask=mask)
    tl.store(to + half, two.to(to.dtype.element_ty), mask=mask)


@triton.jit  # type: ignore[untyped-decorator]
def _store_heads(  # type: ignore[no-untyped-def]
    one, two, head, token, kv_slot, to, heads: tl.constexpr, kv_heads: tl.constexpr, half: tl.constexpr
) -> None:
    """Store the halves of a head: queries by row, keys and values at their KV slots."""
    query_at, keys_at, values_at = to
    part = tl.arange(0, one.shape[0])
    inside, kept = (part < half)[:, None], (kv_slot >= 0)[None, :]
    if head < heads:
        lines = query_at + (token * heads + head)[None, :] * (2 * half) + part[:, None]
        _store_halves(lines, one, two, inside, half)
    elif head < heads + kv_heads:
        lines = keys_at + (kv_slot * kv_heads + head - heads)[None, :] * (2 * half) + part[:, None]
        _store_halves(lines, one, two, inside & kept, half)
    else:
        lines = (
            values_at + (kv_slot * kv_heads + head - heads - kv_heads)[None, :] * (2 * half) + part[:, None]
        )
        _store_halves(lines, one, two, inside & kept, half)


@triton.jit(do_not_specialize=["row_count"])  # type: ignore[untyped-decorator]
def _heads_kernel(  # type: ignore[no-untyped-def]
    rows_at,
    row_scales_at,
    squares_at,
    weight_at,
    scales_at,
    bias_at,
    positions_at,
    slot_mapping_at,
    cosines_at,
    sines_at,
    query_norm_at,
    key_norm_at,
    query_at,
    keys_at,
    values_at,
    partial_at,
    counters_at,
    depth,
    row_count,
    groups,
    size,
    eps,
    head_eps,
    has_bias: tl.constexpr,
    has_norm: tl.constexpr,
    has_rope: tl.constexpr,
    heads: tl.constexpr,
    kv_heads: tl.constexpr,
    dim: tl.constexpr,
    max_groups: tl.constexpr,
    low_at,
    up_at,
    adapters_at,
    up_width,
    rank: tl.constexpr,  # of LoRA adapters; 0: none
    splits: tl.constexpr,
    is_split_k: tl.constexpr,
    columns: tl.constexpr,
    tokens: tl.constexpr,
    step: tl.constexpr,
    packing: tl.constexpr,
    stages: tl.constexpr,
    tiles: tl.constexpr,  # always 1: a tile is a head
    rows_first: tl.constexpr,  # always False
    pdl: tl.constexpr,
) -> None:
    pdl_sync(pdl)
    head = tl.program_id(1)  # a tile is a head: queries, then keys, then values
    half: tl.constexpr = dim // 2
    token = program_tokens(tokens)
    squares, real = load_squares(squares_at, token, groups, max_groups), token < row_count
    position = tl.load(positions_at + token, mask=real, other=0)
    kv_slot = tl.load(slot_mapping_at + token, mask=real, other=-1).to(tl.int64)
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
    )
    if last:
        total *= norm_factor(squares, size, eps)
        column = head * columns + tl.arange(0, columns)
        if has_bias:
            total += tl.load(bias_at + column).to(tl.float32)[:, None]
        if rank > 0:
            total = add_low_rank(total, column, token, row_count, low_at, up_at, adapters_at, up_width, rank)
        one, two = halves(total, columns, tokens)
        if head < heads + kv_heads:
            if has_norm:
                factor = tl.rsqrt(tl.reshape(sum_of_squares(total), (tokens,)) / dim + head_eps)[None, :]
                one, two = _normed(one, two, factor, query_norm_at if head < heads else key_norm_at, half)
            if has_rope:
                one, two = _rotated(one, two, position, cosines_at, sines_at, half)
        _store_heads(one, two, head, token, kv_slot, (query_at, keys_at, values_at), heads, kv_heads, half)


def project_heads(
    normed: Normed,
    matrix: Matrix,
    positions: torch.Tensor,
    slot_mapping: torch.Tensor,
    rotation: Rotation | None,
    norms: tuple[torch.Tensor, torch.Tensor] | None,
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scratch: Scratch,
    head_eps: float | None = None,
    change: LowRankRows | None = None,
) -> None:
    """Write queries, keys and values of norm(rows), with RoPE at `positions` [rows].

    Queries go to `query` [padded rows, heads, head_dim], keys and values to the KV slots `slot_mapping`
    [rows] of one layer's [slots, KV heads, head_dim]; -1: not stored. `matrix` comes from `tile_heads`.
    `rotation`: RoPE's tables; None: the layer has no RoPE. `norms`: weights [head_dim] of the QK norms, with
    `head_eps`, by default the eps of `normed`. `change`: LoRA adapters.
    """
    rows, groups = len(positions), normed.squares.shape[1]
    launch = launch_for(matrix, rows)
    query_norm, key_norm = norms or (None, None)
    cosines, sines = rotation or (None, None)
    assert launch.rows <= len(query)
    _heads_kernel[launch.grid](
        *normed.read_by(matrix),
        normed.squares,
        matrix.weight,
        matrix.scales,
        matrix.bias,
        positions,
        slot_mapping,
        cosines,
        sines,
        query_norm,
        key_norm,
        query,
        keys,
        values,
        scratch.partial,
        scratch.counters,
        matrix.depth,
        rows,
        groups,
        normed.size,
        normed.eps,
        normed.eps if head_eps is None else head_eps,
        matrix.bias is not None,
        norms is not None,
        rotation is not None,
        query.shape[1],
        keys.shape[1],
        query.shape[2],
        triton.next_power_of_2(groups),
        **added_by(change),
        **launch.options,
    )


@triton.jit  # type: ignore[untyped-decorator]
def _scale_queries_kernel(  # type: ignore[no-untyped-def]
    query_at, factors_at, positions_at, width, wide: tl.constexpr, pdl: tl.constexpr
) -> None:
    pdl_sync(pdl)
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, wide)
    factor = tl.load(factors_at + tl.load(positions_at + row))
    at, inside = query_at + row * width + column, column < width
    scaled = tl.load(at, mask=inside, other=0.0).to(tl.float32) * factor
    tl.store(at, scaled.to(query_at.dtype.element_ty), mask=inside)


def scale_queries(query: torch.Tensor, factors: torch.Tensor, positions: torch.Tensor) -> None:
    """Scale the queries [rows, heads, head_dim] in place by the factor of each row's position.

    `factors` are float32 [positions]. Called after `project_heads`.
    """
    pdl, width = supports_pdl(query.device), query.shape[1] * query.shape[2]
    _scale_queries_kernel[(len(positions),)](
        query,
        factors,
        positions,
        width,
        triton.next_power_of_2(width),
        pdl,
        enable_fp_fusion=False,
        launch_pdl=pdl,
    )


@triton.jit  # type: ignore[untyped-decorator]
def _norm_line(  # type: ignore[no-untyped-def]
    line_at,
    norm_at,
    cosines_at,
    sines_at,
    eps,
    has_rope: tl.constexpr,
    half: tl.constexpr,
    halves: tl.constexpr,  # of all heads
    wide: tl.constexpr,  # at least half * halves, a power of two
) -> None:
    """Norm all heads of a row together, in place, then apply RoPE to each."""
    number = tl.arange(0, wide)
    part, inside = number % half, number < half * halves
    column = number // half * (2 * half) + part
    one = tl.load(line_at + column, mask=inside, other=0.0).to(tl.float32)
    two = tl.load(line_at + half + column, mask=inside, other=0.0).to(tl.float32)
    factor = tl.rsqrt((tl.sum(one * one, 0) + tl.sum(two * two, 0)) / (2 * half * halves) + eps)
    one *= factor * tl.load(norm_at + column, mask=inside, other=0.0).to(tl.float32)
    two *= factor * tl.load(norm_at + half + column, mask=inside, other=0.0).to(tl.float32)
    if has_rope:
        cosine = tl.load(cosines_at + part, mask=inside, other=0.0)
        sine = tl.load(sines_at + part, mask=inside, other=0.0)
        one, two = one * cosine - two * sine, two * cosine + one * sine
    tl.store(line_at + column, one.to(line_at.dtype.element_ty), mask=inside)
    tl.store(line_at + half + column, two.to(line_at.dtype.element_ty), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _norm_heads_kernel(  # type: ignore[no-untyped-def]
    query_at,
    keys_at,
    query_norm_at,
    key_norm_at,
    positions_at,
    slot_mapping_at,
    cosines_at,
    sines_at,
    eps,
    has_rope: tl.constexpr,
    heads: tl.constexpr,
    kv_heads: tl.constexpr,
    half: tl.constexpr,
    wide: tl.constexpr,  # half of all values of queries, rounded up to a power of two
    pdl: tl.constexpr,
) -> None:
    pdl_sync(pdl)
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping_at + row).to(tl.int64)
    if has_rope:
        position = tl.load(positions_at + row)
        cosines_at += position * half
        sines_at += position * half
    if tl.program_id(1) == 0:
        query_at += row * (heads * 2 * half)
        _norm_line(query_at, query_norm_at, cosines_at, sines_at, eps, has_rope, half, heads, wide)
    elif slot >= 0:
        keys_at += slot * (kv_heads * 2 * half)
        _norm_line(keys_at, key_norm_at, cosines_at, sines_at, eps, has_rope, half, kv_heads, wide)


def norm_heads(
    query: torch.Tensor,
    keys: torch.Tensor,
    norms: tuple[torch.Tensor, torch.Tensor],
    eps: float,
    positions: torch.Tensor,
    slot_mapping: torch.Tensor,
    rotation: Rotation | None,
) -> None:
    """QK norm over all heads of a row together (queries, then keys), then RoPE, in place.

    Called after `project_heads` without norms and RoPE, with its arguments; `norms` are [heads * head_dim]
    and [KV heads * head_dim]. Rows with a slot of -1 are padding.
    """
    _, heads, dim = query.shape
    pdl = supports_pdl(query.device)
    cosines, sines = rotation or (None, None)
    _norm_heads_kernel[(len(positions), 2)](
        query,
        keys,
        *norms,
        positions,
        slot_mapping,
        cosines,
        sines,
        eps,
        rotation is not None,
        heads,
        keys.shape[1],
        dim // 2,
        triton.next_power_of_2(heads * dim // 2),
        pdl,
        num_warps=4,
        enable_fp_fusion=False,
        launch_pdl=pdl,
    )
