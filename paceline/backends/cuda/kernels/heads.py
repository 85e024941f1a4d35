"""The QKV projection: queries, keys and values with RoPE; keys and values go to their KV slots."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from paceline.backends.cuda.kernels.matmul import (
    halves,
    load_squares,
    matmul_tiles,
    norm_factor,
    program_tokens,
    sum_of_squares,
)
from paceline.backends.cuda.kernels.matrix import Matrix, Normed, Scratch, launch_for
from paceline.backends.cuda.kernels.pdl import pdl_sync


@triton.jit  # type: ignore[untyped-decorator]
def _normed(one, two, factor, norm_at, half: tl.constexpr):  # type: ignore[no-untyped-def]
    """The halves of heads [columns // 2, tokens], times a factor of each token and the norm's weights."""
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
    """Store the halves of a head: queries by token, keys and values at their KV slots."""
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
    has_bias: tl.constexpr,
    has_norm: tl.constexpr,
    heads: tl.constexpr,
    kv_heads: tl.constexpr,
    dim: tl.constexpr,
    max_groups: tl.constexpr,
    splits: tl.constexpr,
    is_split_k: tl.constexpr,
    columns: tl.constexpr,
    tokens: tl.constexpr,
    step: tl.constexpr,
    packing: tl.constexpr,
    stages: tl.constexpr,
    tiles: tl.constexpr,  # 1: a tile is a head
    rows_first: tl.constexpr,  # False
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
        if has_bias:
            total += tl.load(bias_at + head * columns + tl.arange(0, columns)).to(tl.float32)[:, None]
        one, two = halves(total, columns, tokens)
        if head < heads + kv_heads:
            if has_norm:
                factor = tl.rsqrt(tl.reshape(sum_of_squares(total), (tokens,)) / dim + eps)[None, :]
                one, two = _normed(one, two, factor, query_norm_at if head < heads else key_norm_at, half)
            one, two = _rotated(one, two, position, cosines_at, sines_at, half)
        _store_heads(one, two, head, token, kv_slot, (query_at, keys_at, values_at), heads, kv_heads, half)


def project_heads(
    normed: Normed,
    matrix: Matrix,
    positions: torch.Tensor,
    slot_mapping: torch.Tensor,
    rotation: tuple[torch.Tensor, torch.Tensor],
    norms: tuple[torch.Tensor, torch.Tensor] | None,
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scratch: Scratch,
) -> None:
    """Write queries, keys and values of norm(rows), with RoPE at `positions` [rows].

    Queries go to `query` [padded rows, heads, head_dim], keys and values to the KV slots `slot_mapping`
    [rows] of one layer's [slots, KV heads, head_dim]; -1: not stored. The matrix is one of `tile_heads`,
    `rotation` is cosine and sine, each [positions, head_dim // 2], and `norms` are the weights [head_dim] of
    the QK norms.
    """
    rows, groups = len(positions), normed.squares.shape[1]
    launch = launch_for(matrix, rows)
    query_norm, key_norm = norms or (None, None)
    _heads_kernel[launch.grid](
        *normed.read_by(matrix),
        normed.squares,
        matrix.weight,
        matrix.scales,
        matrix.bias,
        positions,
        slot_mapping,
        *rotation,
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
        matrix.bias is not None,
        norms is not None,
        query.shape[1],
        keys.shape[1],
        query.shape[2],
        triton.next_power_of_2(groups),
        **launch.options,
    )
