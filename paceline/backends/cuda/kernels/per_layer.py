"""Kernels of per-layer embeddings (PLE, Gemma's E sizes): the layers' inputs, and their gates."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from paceline.backends.cuda.kernels.pdl import pdl_sync, supports_pdl
from paceline.backends.cuda.kernels.products.activations import activated


@triton.jit  # type: ignore[untyped-decorator]
def _join_kernel(  # type: ignore[no-untyped-def]
    tokens_at,
    table_at,
    norm_at,
    given_at,
    size,
    eps,
    projection_scale,
    table_scale,
    wide: tl.constexpr,  # size, rounded up to a power of two
    pdl: tl.constexpr,
) -> None:
    row, layer, part = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, wide)
    line, inside = tl.num_programs(1) * size, part < size
    pdl_sync(pdl)
    token = tl.load(tokens_at + row).to(tl.int64)
    own = tl.load(table_at + token * line + layer * size + part, mask=inside, other=0.0).to(tl.float32)
    at = given_at + row * line + layer * size + part
    projected = tl.load(at, mask=inside, other=0.0) * projection_scale
    factor = tl.rsqrt(tl.sum(projected * projected, 0) / size + eps)
    normed = projected * factor * tl.load(norm_at + part, mask=inside, other=0.0).to(tl.float32)
    tl.store(at, (normed + own * table_scale) * 0.7071067811865476, mask=inside)


def join_embeddings(
    tokens: torch.Tensor,
    table: torch.Tensor,
    norm: torch.Tensor,
    given: torch.Tensor,
    eps: float,
    projection_scale: float,
) -> None:
    """Turn projected embeddings `given`, float32 [rows, layers * size], into the layers' inputs, in place.

    `table` [vocab, layers * size] has the per-layer embeddings of `tokens` [rows]. `norm` [size] is the
    weight of the norm that is applied to each layer's part of the scaled projection.
    """
    size, pdl = len(norm), supports_pdl(given.device)
    _join_kernel[(len(tokens), given.shape[1] // size)](
        tokens,
        table,
        norm,
        given,
        size,
        eps,
        projection_scale,
        size**0.5,
        triton.next_power_of_2(size),
        pdl,
        num_warps=1,
        enable_fp_fusion=False,
        launch_pdl=pdl,
    )


@triton.jit  # type: ignore[untyped-decorator]
def _activate_kernel(  # type: ignore[no-untyped-def]
    gates_at,
    given_at,
    output_at,
    size,
    given_line,
    padded,
    activation: tl.constexpr,
    wide: tl.constexpr,  # size, rounded up to a power of two
    pdl: tl.constexpr,
) -> None:
    row, part = tl.program_id(0).to(tl.int64), tl.arange(0, wide)
    inside = part < size
    pdl_sync(pdl)
    gate = tl.load(gates_at + row * size + part, mask=inside, other=0.0)
    given = tl.load(given_at + row * given_line + part, mask=inside, other=0.0)
    mixed = activated(gate, given, activation)
    tl.store(output_at + row * padded + part, mixed.to(output_at.dtype.element_ty), mask=inside)


def activate_given(
    gates: torch.Tensor, given: torch.Tensor, output: torch.Tensor, rows: int, activation: str
) -> None:
    """Write activation(gates) * given, float32 [rows, size] each, to `output` [rows, padded size]."""
    size, pdl = gates.shape[1], supports_pdl(gates.device)
    _activate_kernel[(rows,)](
        gates,
        given,
        output,
        size,
        given.stride(0),
        output.shape[1],
        activation,
        triton.next_power_of_2(size),
        pdl,
        num_warps=1,
        enable_fp_fusion=False,
        launch_pdl=pdl,
    )
