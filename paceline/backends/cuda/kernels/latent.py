"""The steps between the products of latent attention: norms and RoPE, and one small product for every head.

A row's first product gives [queries or their latent | rotated key | latent], as models/latent.py names them:

    norm_latents     the key goes to its KV slot, rotated and normed; a latent of queries is normed
    head_products    queries into the space of latents (W_uk^T q), and mixed latents to values (W_uv latent)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from paceline.backends.cuda.kernels.heads import Rotation
from paceline.backends.cuda.kernels.matrix import token_tile
from paceline.backends.cuda.kernels.pdl import pdl_launch, pdl_sync, pdl_wait, prefetch, supports_pdl

MAX_TOKENS = 64  # rows of a program
MAX_STEP = 128  # depth of an iteration
MIN_PROGRAMS = 96  # about one per multiprocessor
NORM_WARPS, PRODUCT_WARPS, STAGES = 4, 4, 3


@dataclass(frozen=True)
class HeadMatrices:
    """A matrix for every head, zero-padded to whole tiles."""

    weight: torch.Tensor  # [heads, padded width, padded depth]
    width: int
    depth: int

    @property
    def step(self) -> int:
        """The depth of an iteration, which decides the bits of the result."""
        return min(MAX_STEP, self.weight.shape[2])

    @property
    def columns(self) -> int:
        """The columns of a program: fewer of small matrices, so that there are programs for the device."""
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
    """The two halves at these addresses, rotated by RoPE; `angles` are offsets in its tables."""
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
def _norm_latents_kernel(  # type: ignore[no-untyped-def]
    projected_at,
    query_norm_at,
    key_norm_at,
    positions_at,
    slot_mapping_at,
    cosines_at,
    sines_at,
    query_latents_at,
    keys_at,
    row_stride,
    key_begin,  # in a row of `projected`
    latent_stride,
    eps,
    query_rank: tl.constexpr,
    query_wide: tl.constexpr,
    rope: tl.constexpr,
    rank: tl.constexpr,
    half_wide: tl.constexpr,  # rope // 2, rounded up to a power of two
    rank_wide: tl.constexpr,
    pdl: tl.constexpr,
) -> None:
    pdl_sync(pdl)
    row = tl.program_id(0).to(tl.int64)
    projected_at += row * row_stride
    if query_rank > 0:  # noqa: SIM102 -- known when it is compiled
        if tl.program_id(1) == 1:
            query_latents_at += row * latent_stride
            _store_normed(projected_at, query_norm_at, query_latents_at, eps, query_rank, query_wide)
    slot = tl.load(slot_mapping_at + row).to(tl.int64)
    if (tl.program_id(1) == 0) & (slot >= 0):
        half: tl.constexpr = rope // 2
        part = tl.arange(0, half_wide)
        inside, angles = part < half, tl.load(positions_at + row) * half + part
        keys_at += slot * (rope + rank)
        own_at = projected_at + key_begin
        one, two = _rotated(own_at + part, angles, (cosines_at, sines_at), inside, half)
        tl.store(keys_at + part, one.to(keys_at.dtype.element_ty), mask=inside)
        tl.store(keys_at + half + part, two.to(keys_at.dtype.element_ty), mask=inside)
        _store_normed(own_at + rope, key_norm_at, keys_at + rope, eps, rank, rank_wide)


def norm_latents(
    projected: torch.Tensor,
    key_begin: int,
    norms: tuple[torch.Tensor | None, torch.Tensor],
    eps: float,
    positions: torch.Tensor,
    slot_mapping: torch.Tensor,
    rotation: Rotation,
    query_latents: torch.Tensor | None,
    keys: torch.Tensor,
) -> None:
    """Write the keys of rows to their KV slots, and the normed latents of their queries, if they have some.

    `projected` is [rows, width]: latents of queries, or queries, and from `key_begin` on keys. `norms` are
    the weights of both norms; `keys` is one layer's [slots, 1, rope + rank]. Slot -1: not stored.
    """
    rope, rank, pdl = 2 * rotation[0].shape[1], len(norms[1]), supports_pdl(keys.device)
    query_rank = 0 if norms[0] is None else len(norms[0])
    _norm_latents_kernel[(len(positions), 2 if query_rank else 1)](
        projected,
        *norms,
        positions,
        slot_mapping,
        *rotation,
        query_latents,
        keys,
        projected.stride(0),
        key_begin,
        0 if query_latents is None else query_latents.stride(0),
        eps,
        query_rank,
        triton.next_power_of_2(query_rank),
        rope,
        rank,
        triton.next_power_of_2(rope // 2),
        triton.next_power_of_2(rank),
        pdl,
        num_warps=NORM_WARPS,
        enable_fp_fusion=False,
        launch_pdl=pdl,
    )


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
    rope: tl.constexpr,  # 0: rows have no rotated part
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
    token = tl.program_id(0) * tokens + tl.arange(0, tokens)
    column, along, real = tile * columns + tl.arange(0, columns), tl.arange(0, step), token < row_count
    weight_at += (head * padded_width + column).to(tl.int64)[:, None] * padded_depth
    if pdl:  # weights are not written in a pass
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
    if rope > 0:  # noqa: SIM102 -- known when it is compiled
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
) -> None:
    """Write every head's matrix times its part of each row: `rows` [rows, heads, depth] to [..., width].

    With `rotation`, the parts of both begin with numbers that RoPE rotates at `positions` [rows] instead.
    """
    heads, padded_width, padded_depth = matrices.weight.shape
    tokens, pdl = min(MAX_TOKENS, token_tile(len(positions))), supports_pdl(rows.device)
    rope = 0 if rotation is None else 2 * rotation[0].shape[1]
    grid = -(-len(positions) // tokens), heads, padded_width // matrices.columns
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
