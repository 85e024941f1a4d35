"""Norm and gate of a recurrent layer's scan output, which the output projection reads.

In passes that replace states (step.py), further programs of the same launch store the conv states.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from paceline.backends.cuda.kernels.pdl import pdl_sync, supports_pdl
from paceline.backends.cuda.kernels.recurrent.scan import CHANNELS
from paceline.backends.cuda.kernels.recurrent.types import (
    RecurrentBuffers,
    RecurrentParameters,
    RecurrentShape,
)


@dataclass(frozen=True)
class NewConvStates:
    """Conv states that rows replace: one row per request."""

    conv: torch.Tensor  # float32 [layers, slots, kernel - 1, channels]
    slots: torch.Tensor  # int32 [rows] slot of each row's request; -1: padding
    advances: torch.Tensor  # int32 [rows] negative: the state stays as it is


@triton.jit  # type: ignore[untyped-decorator]
def _shift_conv_state(  # type: ignore[no-untyped-def]
    line_at,
    conv_at,
    channel,
    first,
    factor: tl.constexpr,
    channels: tl.constexpr,
    kernel: tl.constexpr,
) -> None:
    """Drop the oldest input of a conv state, and append the row's."""
    inside = channel < channels
    newest = tl.load(line_at + first + channel, mask=inside, other=0.0).to(tl.float32)
    if factor >= 0:
        newest *= tl.load(line_at + factor + channel, mask=inside, other=0.0).to(tl.float32)
    for index in tl.static_range(kernel - 1):
        value = newest
        if index < kernel - 2:
            value = tl.load(conv_at + (index + 1) * channels + channel, mask=inside, other=0.0)
        tl.store(conv_at + index * channels + channel, value, mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _gate_kernel(  # type: ignore[no-untyped-def]
    read_at,
    projected_at,
    norm_at,
    output_at,
    conv_at,
    slots_at,
    advances_at,
    width,
    gate,
    output_width,
    eps,
    first,
    factor: tl.constexpr,
    channels: tl.constexpr,
    kernel: tl.constexpr,  # of the convolution; 0: conv states are not stored
    block: tl.constexpr,
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
    if kernel > 0:  # noqa: SIM102 -- resolved at compile time
        if tl.program_id(1) >= groups:  # further programs
            slot = tl.load(slots_at + row).to(tl.int64)
            if (slot >= 0) & (tl.load(advances_at + row) >= 0):
                channel = (tl.program_id(1) - groups) * block + tl.arange(0, block)
                state_at = conv_at + slot * ((kernel - 1) * channels)
                _shift_conv_state(
                    projected_at + row * width, state_at, channel, first, factor, channels, kernel
                )
            return
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
    stored: NewConvStates | None = None,
) -> None:
    """Write the normed and gated rows that the output projection of a layer reads; store conv states."""
    config, is_linear = shape.config, shape.rate < 0
    groups = config.value_heads if config.kind == "gated_delta" else max(config.norm_groups, 1)
    size, pdl = shape.values // groups, supports_pdl(buffers.read.device)
    kernel = 0 if stored is None else parameters.convolution.shape[1]
    storing = 0 if stored is None else triton.cdiv(shape.channels, CHANNELS)
    _gate_kernel[(rows, groups + storing)](
        buffers.convolved[layer] if is_linear else buffers.read,
        buffers.projected[layer],
        None if parameters.norm is None else parameters.norm[layer],
        buffers.gated,
        None if stored is None else stored.conv[layer],
        None if stored is None else stored.slots,
        None if stored is None else stored.advances,
        buffers.projected.shape[2],
        shape.gate,
        buffers.gated.shape[1],
        parameters.eps,
        shape.convolved,
        shape.factor,
        shape.channels,
        kernel,
        CHANNELS,
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
