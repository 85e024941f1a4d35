"""Latent attention (MLA): the per-head products before and after attention, with norms and RoPE.

A row's first product gives [queries or their latent | RoPE part of the key | KV latent] (see
transformer/latent.py):

    norm_queries     norm the query latent, if the model has one
    head_products    absorb W_uk into the queries (W_uk^T q), and turn attended latents into values (W_uv
                     latent); the launch for queries also writes rotated and normed keys to their KV slots

With few rows, latent_values.py computes the values in a kernel of its own.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from paceline.backends.cuda.kernels.attention.heads import Rotation
from paceline.backends.cuda.kernels.pdl import pdl_launch, pdl_sync, pdl_wait, prefetch, supports_pdl
from paceline.backends.cuda.kernels.products.matrix import token_tile

MAX_TOKENS = 64  # most rows of a program
MAX_STEP = 128  # most depth of an iteration
MIN_PROGRAMS = 96  # programs that occupy the device: about one per multiprocessor
NORM_WARPS, PRODUCT_WARPS, STAGES = 4, 4, 3


@dataclass(frozen=True)
class HeadMatrices:
    """A matrix for every head, zero-padded to whole tiles."""

    weight: torch.Tensor  # [heads, padded width, padded depth]
    width: int
    depth: int

    @property
    def step(self) -> int:
        """The depth of an iteration. It determines the summation order, and so the bits."""
        return min(MAX_STEP, self.weight.shape[2])

    @property
    def columns(self) -> int:
        """The columns of a program: fewer for small matrices, so that programs occupy the device."""
        heads, width, _ = self.weight.shape
        return next((size for size in (64, 32) if heads * width // size >= MIN_PROGRAMS), 16)


def head_matrices(weights: torch.Tensor) -> HeadMatrices:
    """Weights [heads, width, depth], padded to whole tiles."""
    _, width, depth = weights.shape
    step = min(MAX_STEP, max(16, triton.next_power_of_2(depth)))
    rest = (0, -depth % step, 0, -width % 64)
    return HeadMatrices(torch.nn.functional.pad(weights, rest).contiguous(), width, depth)


@triton.jit  # type: ignore[untyped-decorator]
def _rotated(rows_at, angles, rotation, inside, half: tl.constexpr):  # type: ignore[no-untyped-def]
    """The two halves at these addresses, rotated by RoPE; `angles` are offsets into its tables."""
    cosines_at, sines_at = rotation
    one = tl.load(rows_at, mask=inside, other=0.0).to(tl.float32)
    two = tl.load(rows_at + half, mask=inside, other=0.0).to(tl.float32)
    cosine = tl.load(cosines_at + angles, mask=inside, other=0.0)
    sine = tl.load(sines_at + angles, mask=inside, other=0.0)
    return one * cosine - two * sine, two * cosine + one * sine


@triton.jit  # type: ignore[untyped-decorator]
def _store_normed(rows_at, norm_at, to, eps, size: tl.constexpr, wide: tl.constexpr) -> None:  # type: ignore[no-untyped-def]
    """RMSNorm of a row of `size` numbers."""
    part = tl.arange(0, wide)
    inside = part < size
    values = tl.load(rows_at + part, mask=inside, other=0.0).to(tl.float32)
    factor = tl.rsqrt(tl.sum(values * values, 0) / size + eps)
    values *= factor * tl.load(norm_at + part, mask=inside, other=0.0).to(tl.float32)
    tl.store(to + part, values.to(to.dtype.element_ty), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _norm_queries_kernel(  # type: ignore[no-untyped-def]
    projected_at,
    norm_at,
    to_at,
    row_stride,
    to_stride,
    eps,
    rank: tl.constexpr,
    wide: tl.constexpr,  # rank, rounded up to a power of two
    pdl: tl.constexpr,
) -> None:
    pdl_sync(pdl)
    row = tl.program_id(0).to(tl.int64)
    _store_normed(projected_at + row * row_stride, norm_at, to_at + row * to_stride, eps, rank, wide)


def norm_queries(
    projected: torch.Tensor, norm: torch.Tensor, eps: float, query_latents: torch.Tensor, rows: int
) -> None:
    """Write the normed query latents of these rows, which are the first columns of `projected`."""
    rank, pdl = len(norm), supports_pdl(projected.device)
    _norm_queries_kernel[(rows,)](
        projected,
        norm,
        query_latents,
        projected.stride(0),
        query_latents.stride(0),
        eps,
        rank,
        triton.next_power_of_2(rank),
        pdl,
        num_warps=NORM_WARPS,
        enable_fp_fusion=False,
        launch_pdl=pdl,
    )


@dataclass(frozen=True)
class KeyRows:
    """Keys within the output of the first product, and the KV slots that they go to."""

    projected: torch.Tensor  # [rows, at least begin + rope + rank]
    begin: int  # first column of the key: [RoPE part | latent]
    norm: torch.Tensor  # [rank]
    eps: float
    slot_mapping: torch.Tensor  # [rows]; -1: not stored
    keys: torch.Tensor  # [slots, 1, rope + rank]


@triton.jit  # type: ignore[untyped-decorator]
def _store_keys(  # type: ignore[no-untyped-def]
    projected_at,
    norm_at,
    slot_mapping_at,
    positions_at,
    rotation,
    keys_at,
    rows,  # first row, end, stride
    row_stride,
    eps,
    rope: tl.constexpr,
    half_wide: tl.constexpr,
    rank: tl.constexpr,
    rank_wide: tl.constexpr,  # rank, rounded up to a power of two
) -> None:
    """Store the keys of some rows in their KV slots: rotated RoPE part, then normed latent."""
    first, end, distance = rows
    half: tl.constexpr = rope // 2
    part = tl.arange(0, half_wide)
    inside = part < half
    for row in range(first, end, distance):
        slot = tl.load(slot_mapping_at + row).to(tl.int64)
        if slot >= 0:
            own_at, angles = projected_at + row * row_stride, tl.load(positions_at + row) * half + part
            to = keys_at + slot * (rope + rank)
            one, two = _rotated(own_at + part, angles, rotation, inside, half)
            tl.store(to + part, one.to(keys_at.dtype.element_ty), mask=inside)
            tl.store(to + half + part, two.to(keys_at.dtype.element_ty), mask=inside)
            _store_normed(own_at + rope, norm_at, to + rope, eps, rank, rank_wide)


@triton.jit(do_not_specialize=["row_count"])  # type: ignore[untyped-decorator]
def _head_products_kernel(  # type: ignore[no-untyped-def]
    rows_at,
    weight_at,
    output_at,
    positions_at,
    cosines_at,
    sines_at,
    row_count,
    row_stride,
    head_stride,
    output_stride,
    output_head_stride,
    width,
    depth,
    projected_at,
    key_norm_at,
    slot_mapping_at,
    keys_at,
    projected_stride,
    eps,
    rank: tl.constexpr,  # of the keys' latent; 0: no keys are stored
    rank_wide: tl.constexpr,
    rope: tl.constexpr,  # 0: rows have no RoPE part
    half_wide: tl.constexpr,  # rope // 2, rounded up to a power of two
    padded_width: tl.constexpr,
    padded_depth: tl.constexpr,
    columns: tl.constexpr,
    tokens: tl.constexpr,
    step: tl.constexpr,
    stages: tl.constexpr,
    pdl: tl.constexpr,
) -> None:
    pdl_launch(pdl)
    head, tile = tl.program_id(1), tl.program_id(2)
    if rank > 0:  # noqa: SIM102 -- resolved at compile time
        if head == tl.num_programs(1) - 1:  # one more than heads: the programs that store keys
            pdl_wait(pdl)
            begin, rotation = tl.program_id(0) * tokens, (cosines_at, sines_at)
            some = begin + tile, tl.minimum(begin + tokens, row_count), tl.num_programs(2)
            stored = projected_at, key_norm_at, slot_mapping_at, positions_at, rotation, keys_at
            _store_keys(*stored, some, projected_stride, eps, rope, half_wide, rank, rank_wide)
            return
    token = tl.program_id(0) * tokens + tl.arange(0, tokens)
    column, along, real = tile * columns + tl.arange(0, columns), tl.arange(0, step), token < row_count
    weight_at += (head * padded_width + column).to(tl.int64)[:, None] * padded_depth
    if pdl:  # weights are constant during a pass
        for line in tl.static_range(0, padded_depth, 64):
            prefetch(weight_at + line)
    pdl_wait(pdl)
    rows = rows_at + token[None, :].to(tl.int64) * row_stride + head * head_stride
    total = tl.zeros([columns, tokens], tl.float32)
    for at in tl.range(0, padded_depth, step, num_stages=stages):
        inside = (at + along < depth)[:, None] & real[None, :]
        own = tl.load(rows + rope + at + along[:, None], mask=inside, other=0.0)
        total = tl.dot(tl.load(weight_at + at + along[None, :]), own, total)
    to = output_at + token[None, :].to(tl.int64) * output_stride + head * output_head_stride
    mask = (column < width)[:, None] & real[None, :]
    tl.store(to + rope + column[:, None], total.to(output_at.dtype.element_ty), mask=mask)
    if rope > 0:  # noqa: SIM102 -- resolved at compile time
        if tile == 0:
            half: tl.constexpr = rope // 2
            part = tl.arange(0, half_wide)[:, None]
            position = tl.load(positions_at + token, mask=real, other=0)[None, :]
            kept = (part < half) & real[None, :]
            one, two = _rotated(rows + part, position * half + part, (cosines_at, sines_at), kept, half)
            tl.store(to + part, one.to(output_at.dtype.element_ty), mask=kept)
            tl.store(to + half + part, two.to(output_at.dtype.element_ty), mask=kept)


def head_products(
    rows: torch.Tensor,
    matrices: HeadMatrices,
    output: torch.Tensor,
    positions: torch.Tensor,
    rotation: Rotation | None = None,
    stored: KeyRows | None = None,
) -> None:
    """Multiply each head's part of every row by the head's matrix: [rows, heads, depth] to [..., width].

    With `rotation`, each head's input and output begin with a RoPE part, which is rotated at `positions`
    [rows] and not multiplied; the launch can also store keys (`stored`).
    """
    heads, padded_width, padded_depth = matrices.weight.shape
    tokens, pdl = min(MAX_TOKENS, token_tile(len(positions))), supports_pdl(rows.device)
    rope = 0 if rotation is None else 2 * rotation[0].shape[1]
    grid = -(-len(positions) // tokens), heads + (stored is not None), padded_width // matrices.columns
    rank = 0 if stored is None else len(stored.norm)
    _head_products_kernel[grid](
        rows,
        matrices.weight,
        output,
        positions,
        *(rotation or (None, None)),
        len(positions),
        rows.stride(0),
        rows.stride(1),
        output.stride(0),
        output.stride(1),
        matrices.width,
        matrices.depth,
        *_stored_by(stored),
        rank,
        triton.next_power_of_2(max(rank, 1)),
        rope,
        triton.next_power_of_2(max(rope // 2, 1)),
        padded_width,
        padded_depth,
        matrices.columns,
        tokens,
        matrices.step,
        STAGES,
        pdl,
        num_warps=PRODUCT_WARPS,
        enable_fp_fusion=False,
        launch_pdl=pdl,
    )


def _stored_by(keys: KeyRows | None) -> tuple[torch.Tensor | int | float | None, ...]:
    """The kernel arguments for storing keys; None and zeros if there are none."""
    if keys is None:
        return None, None, None, None, 0, 0.0
    from_keys = keys.projected[:, keys.begin :]
    return from_keys, keys.norm, keys.slot_mapping, keys.keys, keys.projected.stride(0), keys.eps
