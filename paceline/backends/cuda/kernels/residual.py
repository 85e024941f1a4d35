"""The residual stream of families whose norms cannot be fused: output norms, LayerNorm, parallel blocks.

Llama's RMSNorm is fused into products (linear.py). An output norm needs the whole row before it is added, and
LayerNorm needs its mean. So norms are a separate kernel here, and products read normed rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from paceline.backends.cuda.kernels.pdl import pdl_sync, supports_pdl
from paceline.backends.cuda.kernels.products.matrix import Normed


@dataclass(frozen=True)
class Residual:
    """The constants of a model's residual stream."""

    size: int  # hidden
    eps: float
    is_centered: bool  # LayerNorm, not RMSNorm
    scale: float  # of the outputs of attention and MLP
    embedding_scale: float
    is_parallel: bool  # attention and MLP read the same norm


def plain(rows: torch.Tensor, ones: torch.Tensor) -> Normed:
    """Rows for products without a norm; `ones` is float32 [rows, 1]."""
    return Normed(rows, ones, 1, 0.0)


@triton.jit  # type: ignore[untyped-decorator]
def _normed(values, norm_at, part, inside, size, eps, is_centered: tl.constexpr):  # type: ignore[no-untyped-def]
    """RMSNorm or LayerNorm of a row."""
    if is_centered:
        values = tl.where(inside, values - tl.sum(values, 0) / size, 0.0)
    factor = tl.rsqrt(tl.sum(values * values, 0) / size + eps)
    return values * factor * tl.load(norm_at + part, mask=inside, other=0.0).to(tl.float32)


@triton.jit  # type: ignore[untyped-decorator]
def _add_normed_kernel(  # type: ignore[no-untyped-def]
    added_at,
    hidden_at,
    output_norm_at,
    norm_at,
    normed_at,
    size,
    padded,
    eps,
    scale,
    layer_scale,
    has_added: tl.constexpr,
    has_output_norm: tl.constexpr,
    has_norm: tl.constexpr,
    has_reader: tl.constexpr,
    is_centered: tl.constexpr,
    wide: tl.constexpr,  # size, rounded up to a power of two
    pdl: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, wide)
    inside = part < size  # padding stays zero
    pdl_sync(pdl)
    hidden = tl.load(hidden_at + row * padded + part, mask=inside, other=0.0)
    if has_added:
        added = tl.load(added_at + row * padded + part, mask=inside, other=0.0)
        if has_output_norm:
            added = _normed(added, output_norm_at, part, inside, size, eps, is_centered)
        hidden = (hidden + added * scale) * layer_scale
    else:
        hidden *= scale
    tl.store(hidden_at + row * padded + part, hidden, mask=inside)
    if has_reader:
        values = hidden
        if has_norm:
            values = _normed(values, norm_at, part, inside, size, eps, is_centered)
        tl.store(normed_at + row * padded + part, values.to(normed_at.dtype.element_ty), mask=inside)


def add_normed(
    residual: Residual,
    hidden: torch.Tensor,
    added: torch.Tensor | None,
    output_norm: torch.Tensor | None,
    norm: torch.Tensor | None,
    normed: Normed | None,
    rows: int,
    layer_scale: float = 1.0,
) -> None:
    """hidden += output_norm(added), then write norm(hidden) to `normed`, if given.

    `hidden` and `added` are float32 [rows, padded hidden], norms are weights [padded hidden]; None: no norm.
    Without `added`, `hidden` are embeddings, which are scaled. `layer_scale` multiplies the sum.
    """
    pdl = supports_pdl(hidden.device)
    _add_normed_kernel[(rows,)](
        added,
        hidden,
        output_norm,
        norm,
        None if normed is None else normed.rows,
        residual.size,
        hidden.shape[1],
        residual.eps,
        residual.embedding_scale if added is None else residual.scale,
        layer_scale,
        added is not None,
        output_norm is not None,
        norm is not None,
        normed is not None,
        residual.is_centered,
        triton.next_power_of_2(residual.size),
        pdl,
        num_warps=8,
        enable_fp_fusion=False,
        launch_pdl=pdl,
    )
