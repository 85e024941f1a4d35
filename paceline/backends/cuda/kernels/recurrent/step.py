"""Recurrent layers of passes with one row per request, whose states are replaced in the same pass.

In plain decoding a row needs no verification, so the state after it can be stored at once, and no scan of
accepted rows follows:

    step_states    convolves the row's queries, keys and values, then computes its output and its SSM state.
                   A program has a request, a head and some columns of its state, as in scan.py
    gate           also stores the conv states, which programs of several heads have read: see output.py

The arithmetic and the layout of the state are those of scan.py, so both give the same bits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from paceline.backends.cuda.kernels.pdl import pdl_launch, pdl_wait, prefetch, supports_pdl
from paceline.backends.cuda.kernels.recurrent.scan import COLUMNS, recur, softplus, state_sizes
from paceline.backends.cuda.kernels.recurrent.types import (
    RecurrentBuffers,
    RecurrentParameters,
    RecurrentShape,
    StateTensors,
)


@triton.jit  # type: ignore[untyped-decorator]
def _prefetch_taps(conv_at, weight_at, channel, channels: tl.constexpr, kernel: tl.constexpr) -> None:  # type: ignore[no-untyped-def]
    """Prefetch what `_convolved` reads besides the row itself."""
    at = tl.minimum(channel, channels - 1)
    for tap in tl.static_range(kernel):
        prefetch(weight_at + tap * channels + at)
        if tap < kernel - 1:
            prefetch(conv_at + tap * channels + at)


@triton.jit  # type: ignore[untyped-decorator]
def _convolved(  # type: ignore[no-untyped-def]
    line_at, conv_at, weight_at, bias_at, channel, inside, channels: tl.constexpr, kernel: tl.constexpr
):
    """Some channels of a row after the convolution, as `_convolve_kernel` of scan.py computes them."""
    value = tl.load(line_at + channel, mask=inside, other=0.0).to(tl.float32)
    total = tl.zeros_like(value)
    for back in tl.static_range(kernel):
        if back > 0:
            value = tl.load(conv_at + (kernel - 1 - back) * channels + channel, mask=inside, other=0.0)
        tap = tl.load(weight_at + (kernel - 1 - back) * channels + channel, mask=inside, other=0.0)
        total += value * tap
    if bias_at is not None:
        total += tl.load(bias_at + channel, mask=inside, other=0.0)
    return total / (1.0 + tl.exp(-total))


@triton.jit  # type: ignore[untyped-decorator]
def _step_states_kernel(  # type: ignore[no-untyped-def]
    projected_at,
    weight_at,
    bias_at,
    rates_at,
    rate_bias_at,
    skip_at,
    conv_at,
    ssm_at,
    read_at,
    slots_at,
    advances_at,
    width,
    first,
    rate,
    strength: tl.constexpr,  # -1: not the delta rule
    query,
    key,
    value,
    channels: tl.constexpr,
    kernel: tl.constexpr,
    heads: tl.constexpr,
    key_heads: tl.constexpr,
    is_tiled: tl.constexpr,  # heads that share a key head are key_heads apart, else adjacent
    key_dim: tl.constexpr,
    value_dim: tl.constexpr,
    wide_key: tl.constexpr,
    block: tl.constexpr,
    pdl: tl.constexpr,
) -> None:
    pdl_launch(pdl)
    row, head = tl.program_id(0), tl.program_id(1)
    column, along = tl.program_id(2) * block + tl.arange(0, block), tl.arange(0, wide_key)
    inside, in_key = column < value_dim, along < key_dim
    both = in_key[:, None] & inside[None, :]
    shared = (head % key_heads if is_tiled else head // (heads // key_heads)) * key_dim
    # before the wait: states, tables and weights were written before this pass
    slot = tl.load(slots_at + row).to(tl.int64)
    is_stored = tl.load(advances_at + row) >= 0
    valid_slot = tl.maximum(slot, 0)
    ssm_at += (valid_slot * heads + head) * (key_dim * value_dim)
    ssm_at += along[:, None] * value_dim + column[None, :]
    conv_at += valid_slot * (kernel - 1) * channels
    state = tl.load(ssm_at, mask=both, other=0.0)
    if slot < 0:  # padding
        pdl_wait(pdl)  # no program may end before earlier kernels
        return
    if pdl:
        _prefetch_taps(conv_at, weight_at, query + shared + along, channels, kernel)
        _prefetch_taps(conv_at, weight_at, key + shared + along, channels, kernel)
        _prefetch_taps(conv_at, weight_at, value + head * value_dim + column, channels, kernel)
    speed, bias = tl.load(rates_at + head), tl.load(rate_bias_at + head)
    pdl_wait(pdl)
    line_at = projected_at + row.to(tl.int64) * width
    own_rate = tl.load(line_at + rate + head).to(tl.float32)
    share = tl.load(line_at + strength + head).to(tl.float32) if strength >= 0 else 0.0
    mixed_at = line_at + first
    keys = _convolved(mixed_at, conv_at, weight_at, bias_at, key + shared + along, in_key, channels, kernel)
    queries = _convolved(
        mixed_at, conv_at, weight_at, bias_at, query + shared + along, in_key, channels, kernel
    )
    values = _convolved(
        mixed_at, conv_at, weight_at, bias_at, value + head * value_dim + column, inside, channels, kernel
    )
    time = softplus(own_rate + bias)
    state, queries = recur(state, keys, queries, values, time, speed, share, strength >= 0, key_dim)
    given = tl.sum(state * queries[:, None], 0)
    if skip_at is not None:
        given += tl.load(skip_at + head) * values
    tl.store(read_at + (row * heads + head) * value_dim + column, given, mask=inside)
    if is_stored:
        tl.store(ssm_at, state, mask=both)


def step_states(
    shape: RecurrentShape,
    parameters: RecurrentParameters,
    layer: int,
    buffers: RecurrentBuffers,
    states: StateTensors,
    slots: torch.Tensor,
    advances: torch.Tensor,
) -> None:
    """Write the output of a layer's rows, and the SSM state after each to its request's slot.

    `slots` int32 [rows] have the states before the rows; -1: padding. They are replaced where `advances`
    int32 [rows] is not negative.
    """
    config, pdl = shape.config, supports_pdl(slots.device)
    assert parameters.rates is not None
    assert parameters.rate_bias is not None
    _step_states_kernel[(len(slots), config.value_heads, triton.cdiv(config.value_dim, COLUMNS))](
        buffers.projected[layer],
        parameters.convolution[layer],
        None if parameters.bias is None else parameters.bias[layer],
        parameters.rates[layer],
        parameters.rate_bias[layer],
        None if parameters.skip is None else parameters.skip[layer],
        states.conv[layer],
        states.ssm[layer],
        buffers.read,
        slots,
        advances,
        buffers.projected.shape[2],
        shape.convolved,
        shape.rate,
        shape.strength,
        shape.query,
        shape.key,
        shape.value,
        shape.channels,
        parameters.convolution.shape[1],
        *state_sizes(config),
        pdl,
        num_warps=4,
        enable_fp_fusion=False,
        launch_pdl=pdl,
    )
