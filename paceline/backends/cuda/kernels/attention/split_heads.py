"""QK norm and RoPE after the QKV projection, for models whose head size differs by layer (Gemma 4).

In heads.py a tile of the product is a head, but a head of 512 numbers is too long for a tile. So an ordinary
product writes all heads of a row; a program of this kernel norms and rotates one head, and stores it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from paceline.backends.cuda.kernels.attention.heads import Rotation
from paceline.backends.cuda.kernels.pdl import pdl_sync, supports_pdl


@dataclass(frozen=True)
class HeadSplit:
    """How a row of the QKV projection splits into heads: queries, then keys, then values."""

    heads: int
    kv_heads: int  # 0: the layer shares the keys and values of another
    dim: int
    values_are_keys: bool = False  # values are a copy of the keys before norm and RoPE
    norms_values: bool = False  # RMSNorm of values, without weights


@triton.jit  # type: ignore[untyped-decorator]
def _split_heads_kernel(  # type: ignore[no-untyped-def]
    projected_at,
    query_norm_at,
    key_norm_at,
    positions_at,
    slot_mapping_at,
    cosines_at,
    sines_at,
    query_at,
    keys_at,
    values_at,
    line,
    eps,
    heads: tl.constexpr,
    kv_heads: tl.constexpr,
    values_are_keys: tl.constexpr,
    norms_values: tl.constexpr,
    has_norms: tl.constexpr,
    has_rope: tl.constexpr,
    half: tl.constexpr,
    wide: tl.constexpr,  # half, rounded up to a power of two
    pdl: tl.constexpr,
) -> None:
    row, head, part = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, wide)
    inside, is_value = part < half, head >= heads + kv_heads
    pdl_sync(pdl)
    slot = tl.load(slot_mapping_at + row).to(tl.int64)
    source = head
    if values_are_keys:
        source = tl.where(is_value, head - kv_heads, head)
    at = projected_at + row * line + source * (2 * half) + part
    one, two = tl.load(at, mask=inside, other=0.0), tl.load(at + half, mask=inside, other=0.0)
    factor = tl.rsqrt((tl.sum(one * one, 0) + tl.sum(two * two, 0)) / (2 * half) + eps)
    if is_value:
        if norms_values:
            one, two = one * factor, two * factor
    else:
        if has_norms:
            norm_at = (query_norm_at if head < heads else key_norm_at) + part
            one *= factor * tl.load(norm_at, mask=inside, other=0.0).to(tl.float32)
            two *= factor * tl.load(norm_at + half, mask=inside, other=0.0).to(tl.float32)
        if has_rope:
            angle = tl.load(positions_at + row) * half + part
            cosine = tl.load(cosines_at + angle, mask=inside, other=0.0)
            sine = tl.load(sines_at + angle, mask=inside, other=0.0)
            one, two = one * cosine - two * sine, two * cosine + one * sine
    to, line_number = query_at, row * heads + head
    if head >= heads:
        to = values_at if is_value else keys_at
        line_number = tl.where(slot >= 0, slot * kv_heads + (head - heads) % kv_heads, -1)
    number = line_number * (2 * half) + part
    is_kept = inside & (number >= 0)
    to += number
    tl.store(to, one.to(query_at.dtype.element_ty), mask=is_kept)
    tl.store(to + half, two.to(query_at.dtype.element_ty), mask=is_kept)


def split_heads(
    projected: torch.Tensor,
    split: HeadSplit,
    norms: tuple[torch.Tensor, torch.Tensor] | None,
    eps: float,
    positions: torch.Tensor,
    slot_mapping: torch.Tensor,
    rotation: Rotation | None,
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
) -> None:
    """Split `projected`, float32 [rows, width], into normed and rotated queries, keys, and values.

    Outputs and `rotation` are as in `project_heads`; `norms` are weights [dim] of queries and keys.
    """
    query_norm, key_norm = norms or (None, None)
    cosines, sines = rotation or (None, None)
    pdl, half = supports_pdl(projected.device), split.dim // 2
    _split_heads_kernel[(len(positions), split.heads + 2 * split.kv_heads)](
        projected,
        query_norm,
        key_norm,
        positions,
        slot_mapping,
        cosines,
        sines,
        query,
        keys,
        values,
        projected.stride(0),
        eps,
        split.heads,
        max(split.kv_heads, 1),
        split.values_are_keys,
        split.norms_values,
        norms is not None,
        rotation is not None,
        half,
        triton.next_power_of_2(half),
        pdl,
        num_warps=1,
        enable_fp_fusion=False,
        launch_pdl=pdl,
    )
