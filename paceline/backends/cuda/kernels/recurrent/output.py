"""Norm and gate of a recurrent layer's scan output, which the output projection reads."""

from __future__ import annotations

import triton
import triton.language as tl

from paceline.backends.cuda.kernels.pdl import pdl_sync, supports_pdl
from paceline.backends.cuda.kernels.recurrent.types import (
    RecurrentBuffers,
    RecurrentParameters,
    RecurrentShape,
)


@triton.jit  # type: ignore[untyped-decorator]
def _gate_kernel(  # type: ignore[no-untyped-def]
    read_at,
    projected_at,
    norm_at,
    output_at,
    width,
    gate,
    output_width,
    eps,
    is_linear: tl.constexpr,
    has_norm: tl.constexpr,
    is_gated_first: tl.constexpr,
    groups: tl.constexpr,
    size: tl.constexpr,
    wide: tl.constexpr,
    pdl: tl.constexpr,
) -> None:
    row, along = tl.program_id(0).to(tl.int64), tl.arange(0, wide)
    column, inside = tl.program_id(1) * size + along, along < size
    pdl_sync(pdl)
    values = tl.load(read_at + row * (groups * size) + column, mask=inside, other=0.0)
    factor = tl.load(projected_at + row * width + gate + column, mask=inside, other=0.0).to(tl.float32)
    if not is_linear:
        factor = factor / (1.0 + tl.exp(-factor))
    if is_gated_first:
        values *= factor
    if has_norm:
        values *= tl.rsqrt(tl.sum(values * values, 0) / size + eps)
        values *= tl.load(norm_at + column, mask=inside, other=0.0)
    if not is_gated_first:
        values *= factor
    tl.store(output_at + row * output_width + column, values.to(output_at.dtype.element_ty), mask=inside)


def gate(
    shape: RecurrentShape,
    parameters: RecurrentParameters,
    layer: int,
    buffers: RecurrentBuffers,
    rows: int,
) -> None:
    """Write the normed and gated rows that the output projection of a layer reads."""
    config, is_linear = shape.config, shape.rate < 0
    groups = config.value_heads if config.kind == "gated_delta" else max(config.norm_groups, 1)
    size, pdl = shape.values // groups, supports_pdl(buffers.read.device)
    _gate_kernel[(rows, groups)](
        buffers.convolved[layer] if is_linear else buffers.read,
        buffers.projected[layer],
        None if parameters.norm is None else parameters.norm[layer],
        buffers.gated,
        buffers.projected.shape[2],
        shape.gate,
        buffers.gated.shape[1],
        parameters.eps,
        is_linear,
        parameters.norm is not None,
        config.kind == "mamba2" and config.gated_norm,
        groups,
        size,
        triton.next_power_of_2(size),
        pdl,
        num_warps=4,
        enable_fp_fusion=False,
        launch_pdl=pdl,
    )
