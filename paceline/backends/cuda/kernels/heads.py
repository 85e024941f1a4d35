"""The product that gives queries, keys and values: turned by their positions, written to their places."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from paceline.backends.cuda.kernels.launching import follow
from paceline.backends.cuda.kernels.matrix import Matrix, Normed, Scratch, cut_for
from paceline.backends.cuda.kernels.product import (
    halves,
    load_squares,
    norm_factor,
    sum_of_squares,
    tile_sums,
)


@triton.jit  # type: ignore[untyped-decorator]
def _normed(one, two, factor, norm_at, half: tl.constexpr):  # type: ignore[no-untyped-def]
    """The halves of heads [columns // 2, tokens], times a factor of each token and the norm's weights."""
    part = tl.arange(0, one.shape[0])
    first = tl.load(norm_at + part, mask=part < half, other=0.0).to(tl.float32)[:, None]
    second = tl.load(norm_at + half + part, mask=part < half, other=0.0).to(tl.float32)[:, None]
    return one * (factor * first), two * (factor * second)


@triton.jit  # type: ignore[untyped-decorator]
def _turned(one, two, position, cosines_at, sines_at, half: tl.constexpr):  # type: ignore[no-untyped-def]
    """The halves of heads, turned by each token's position."""
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
    one, two, head, token, place, to, heads: tl.constexpr, kv_heads: tl.constexpr, half: tl.constexpr
) -> None:
    """Store the halves of a head's lines: of queries by token, of keys and values at their places."""
    query_at, keys_at, values_at = to
    part = tl.arange(0, one.shape[0])
    inside, kept = (part < half)[:, None], (place >= 0)[None, :]
    if head < heads:
        lines = query_at + (token * heads + head)[None, :] * (2 * half) + part[:, None]
        _store_halves(lines, one, two, inside, half)
    elif head < heads + kv_heads:
        lines = keys_at + (place * kv_heads + head - heads)[None, :] * (2 * half) + part[:, None]
        _store_halves(lines, one, two, inside & kept, half)
    else:
        lines = values_at + (place * kv_heads + head - heads - kv_heads)[None, :] * (2 * half) + part[:, None]
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
    places_at,
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
    most_groups: tl.constexpr,
    splits: tl.constexpr,
    apart: tl.constexpr,
    columns: tl.constexpr,
    tokens: tl.constexpr,
    step: tl.constexpr,
    packing: tl.constexpr,
    stages: tl.constexpr,
    tiles: tl.constexpr,  # 1: a tile is a head
    overlap: tl.constexpr,
) -> None:
    follow(overlap)
    head = tl.program_id(1)  # a tile is a head: of queries, then of keys, then of values
    half: tl.constexpr = dim // 2
    token = tl.program_id(0) * tokens + tl.arange(0, tokens)
    squares, real = load_squares(squares_at, token, groups, most_groups), token < row_count
    position = tl.load(positions_at + token, mask=real, other=0)
    place = tl.load(places_at + token, mask=real, other=-1).to(tl.int64)
    last, total = tile_sums(
        rows_at,
        weight_at,
        scales_at,
        partial_at,
        counters_at,
        depth,
        splits,
        apart,
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
            one, two = _turned(one, two, position, cosines_at, sines_at, half)
        _store_heads(one, two, head, token, place, (query_at, keys_at, values_at), heads, kv_heads, half)


def project_heads(
    normed: Normed,
    matrix: Matrix,
    positions: torch.Tensor,
    places: torch.Tensor,
    rotation: tuple[torch.Tensor, torch.Tensor],
    norms: tuple[torch.Tensor, torch.Tensor] | None,
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scratch: Scratch,
) -> None:
    """Write queries, keys and values of norm(rows), turned by their `positions` [rows], where they belong.

    Queries go to `query` [padded rows, heads, head_dim], keys and values to their `places` [rows] of one
    layer's [places, key heads, head_dim]; those with place -1 go nowhere. The matrix is one of `tile_heads`,
    `rotation` is cosine and sine, each [positions, head_dim // 2], and `norms` are the weights [head_dim] of
    queries' and keys' norms.
    """
    rows, groups = len(positions), normed.squares.shape[1]
    cut = cut_for(matrix, rows)
    query_norm, key_norm = norms or (None, None)
    _heads_kernel[cut.grid](
        *normed.read_by(matrix),
        normed.squares,
        matrix.weight,
        matrix.scales,
        matrix.bias,
        positions,
        places,
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
        **cut.options,
    )
