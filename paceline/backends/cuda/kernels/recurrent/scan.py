"""Recurrent layers: convolutions and states along the rows of chains and trees. See transformer/recurrent.py.

    convolve       each row with the rows before it on its path: all rows at once
    scan_states    the recurrent state of each head, row by row: a program has a request, a head and some
                   columns of its state
    gate           norm and gate of the output, all rows at once: see output.py

A row is computed by the same operations in a prefill chunk, in a draft tree and alone. A scan (see Scans)
lists rows in order. For each row it says where the state before it is (in registers, if the previous row left
it there) and where to store the state after it. A pass scans all rows of a request; after verification,
`scan_states` scans the accepted rows again, in all layers at once, and stores the final states.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from paceline.backends.cuda.kernels.pdl import pdl_sync, supports_pdl
from paceline.backends.cuda.kernels.recurrent.types import (
    FIRST,
    NOTHING,
    RecurrentBuffers,
    RecurrentParameters,
    RecurrentShape,
    Scans,
    StateTensors,
)
from paceline.models.config import RecurrentConfig

CHANNELS = 256  # channels of a program of the convolution
COLUMNS = 32  # columns of a head's state, of a program of `scan_states`
_FIRST, _NOTHING = tl.constexpr(FIRST), tl.constexpr(NOTHING)


@triton.jit  # type: ignore[untyped-decorator]
def _convolve_kernel(  # type: ignore[no-untyped-def]
    projected_at,
    parents_at,
    slots_at,
    conv_at,
    weight_at,
    bias_at,
    output_at,
    width,
    first,
    factor: tl.constexpr,
    has_bias: tl.constexpr,
    channels: tl.constexpr,
    kernel: tl.constexpr,
    block: tl.constexpr,
    pdl: tl.constexpr,
) -> None:
    row, channel = tl.program_id(0), tl.program_id(1) * block + tl.arange(0, block)
    inside = channel < channels
    weight_at += channel
    pdl_sync(pdl)
    slot = tl.load(slots_at + row).to(tl.int64)
    node, beyond = row, row * 0
    total = tl.zeros([block], tl.float32)
    for back in tl.static_range(kernel):
        line_at = projected_at + tl.maximum(node, 0).to(tl.int64) * width + channel
        is_row = channel < tl.where(node >= 0, channels, 0)
        is_stored = channel < tl.where((node < 0) & (slot >= 0), channels, 0)
        value = tl.load(line_at + first, mask=is_row, other=0.0).to(tl.float32)
        if factor >= 0:
            value *= tl.load(line_at + factor, mask=is_row, other=0.0).to(tl.float32)
        stored_at = conv_at + (slot * (kernel - 1) + kernel - 1 - beyond) * channels + channel
        value += tl.load(stored_at, mask=is_stored, other=0.0)
        total += value * tl.load(weight_at + (kernel - 1 - back) * channels, mask=inside, other=0.0)
        parent = tl.load(parents_at + tl.maximum(node, 0))
        node = tl.where(node >= 0, parent, -1)
        beyond = tl.where(node >= 0, 0, beyond + 1)
    if has_bias:
        total += tl.load(bias_at + channel, mask=inside, other=0.0)
    if factor < 0:
        total = total / (1.0 + tl.exp(-total))
    tl.store(output_at + row.to(tl.int64) * channels + channel, total, mask=inside)


@triton.jit
def softplus(values):  # type: ignore[no-untyped-def]
    """log(1 + exp(values))."""
    return tl.maximum(values, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(values)))


@triton.jit  # type: ignore[untyped-decorator]
def recur(  # type: ignore[no-untyped-def]
    state, keys, queries, values, time, speed, share, is_delta: tl.constexpr, key_dim: tl.constexpr
):
    """The state after a row, and the queries that read it. `share`: strength of the delta rule (beta)."""
    state *= tl.exp(-speed * time)
    if is_delta:
        keys *= tl.rsqrt(tl.sum(keys * keys, 0) + 1e-6)
        queries *= tl.rsqrt(tl.sum(queries * queries, 0) + 1e-6) * (key_dim**-0.5)
        added = (values - tl.sum(state * keys[:, None], 0)) / (1.0 + tl.exp(-share))
    else:
        added = values * time
    return state + keys[:, None] * added[None, :], queries


@triton.jit  # type: ignore[untyped-decorator]
def _state_before(state, before, first_at, stored_at, line: tl.constexpr, offset, mask):  # type: ignore[no-untyped-def]
    """The state before a row: `state`, left by the previous row, unless `before` names another."""
    if before == _NOTHING:
        state = tl.zeros_like(state)
    elif before == _FIRST:
        state = tl.load(first_at + offset, mask=mask, other=0.0)
    elif before >= 0:
        state = tl.load(stored_at + before.to(tl.int64) * line + offset, mask=mask, other=0.0)
    return state


@triton.jit  # type: ignore[untyped-decorator]
def _scan_states_kernel(  # type: ignore[no-untyped-def]
    projected_at,
    convolved_at,
    rates_at,
    rate_bias_at,
    skip_at,
    ssm_at,
    stored_at,
    read_at,
    rows_at,
    before_at,
    after_at,
    begins_at,
    counts_at,
    slots_at,
    row_stride,
    width,
    lines,  # rows of a layer's buffers
    states,  # number of a layer's states in `ssm_at`
    stored_states,  # number of a layer's states in `stored_at`
    rate,
    strength: tl.constexpr,  # -1: not the delta rule
    query,
    key,
    value,
    channels,
    writes: tl.constexpr,
    has_skip: tl.constexpr,
    heads: tl.constexpr,
    key_heads: tl.constexpr,
    is_tiled: tl.constexpr,  # heads that share a key head are key_heads apart, else adjacent
    key_dim: tl.constexpr,
    value_dim: tl.constexpr,
    wide_key: tl.constexpr,
    block: tl.constexpr,
    pdl: tl.constexpr,
) -> None:
    scan, head = tl.program_id(0), tl.program_id(1)
    blocks: tl.constexpr = (value_dim + block - 1) // block
    layer, part = tl.program_id(2) // blocks, tl.program_id(2) % blocks
    column, along = part * block + tl.arange(0, block), tl.arange(0, wide_key)
    inside, in_key = column < value_dim, along < key_dim
    both = in_key[:, None] & inside[None, :]
    size: tl.constexpr = key_dim * value_dim
    offset = along[:, None] * value_dim + column[None, :]
    pdl_sync(pdl)
    begin, count = tl.load(begins_at + scan), tl.load(counts_at + scan)
    projected_at += (layer * lines).to(tl.int64) * width
    convolved_at += (layer * lines).to(tl.int64) * channels
    slot = tl.load(slots_at + scan)
    first_at = ssm_at + ((layer * states + slot).to(tl.int64) * heads + head) * size
    stored_at += ((layer * stored_states).to(tl.int64) * heads + head) * size
    speed = tl.load(rates_at + layer * heads + head)
    bias = tl.load(rate_bias_at + layer * heads + head)
    shared = (head % key_heads if is_tiled else head // (heads // key_heads)) * key_dim
    state = tl.zeros([wide_key, block], tl.float32)
    for step in range(count):
        row = (tl.load(rows_at + begin + step) + scan * row_stride).to(tl.int64)
        before = tl.load(before_at + begin + step)
        after = tl.where(step + 1 == count, slot, -1)
        if after_at is not None:
            after = tl.load(after_at + begin + step)
        state = _state_before(state, before, first_at, stored_at, heads * size, offset, both)
        line_at, mixed_at = projected_at + row * width, convolved_at + row * channels
        keys = tl.load(mixed_at + key + shared + along, mask=in_key, other=0.0)
        queries = tl.load(mixed_at + query + shared + along, mask=in_key, other=0.0)
        values = tl.load(mixed_at + value + head * value_dim + column, mask=inside, other=0.0)
        time = softplus(tl.load(line_at + rate + head).to(tl.float32) + bias)
        share = tl.load(line_at + strength + head).to(tl.float32) if strength >= 0 else 0.0
        state, queries = recur(state, keys, queries, values, time, speed, share, strength >= 0, key_dim)
        if writes:
            given = tl.sum(state * queries[:, None], 0)
            if has_skip:
                given += tl.load(skip_at + layer * heads + head) * values
            tl.store(read_at + (row * heads + head) * value_dim + column, given, mask=inside)
        if after >= 0:
            tl.store(stored_at + after.to(tl.int64) * (heads * size) + offset, state, mask=both)
            tl.debug_barrier()  # later rows read what other threads have stored


@triton.jit  # type: ignore[untyped-decorator]
def _store_conv_states_kernel(  # type: ignore[no-untyped-def]
    projected_at,
    conv_at,
    rows_at,
    begins_at,
    slots_at,
    counts_at,
    to_at,
    row_stride,
    width,
    lines,
    states,
    first,
    factor: tl.constexpr,
    stored: tl.constexpr,
    channels: tl.constexpr,
    kernel: tl.constexpr,
    block: tl.constexpr,
    pdl: tl.constexpr,
) -> None:
    layer, channel = tl.program_id(0), tl.program_id(1) * block + tl.arange(0, block)
    scan = tl.program_id(2)
    pdl_sync(pdl)
    slot = tl.load(slots_at + scan)  # -1: zeros are before the scan
    rows_at += tl.load(begins_at + scan)
    projected_at += (layer * lines).to(tl.int64) * width + channel
    conv_at += (layer * states).to(tl.int64) * ((kernel - 1) * channels) + channel
    for number in tl.static_range(stored):  # the scan's own slot, which is read, comes last
        count, to = tl.load(counts_at + scan * stored + number), tl.load(to_at + scan * stored + number)
        inside = channel < tl.where((count > 0) & (to >= 0), channels, 0)
        for index in tl.static_range(kernel - 1):
            place = count + index - (kernel - 1)
            row = (tl.load(rows_at + tl.maximum(place, 0)) + scan * row_stride).to(tl.int64)
            is_row = channel < tl.where(place >= 0, channels, 0)
            value = tl.load(projected_at + row * width + first, mask=is_row, other=0.0).to(tl.float32)
            if factor >= 0:
                value *= tl.load(projected_at + row * width + factor, mask=is_row, other=0.0).to(tl.float32)
            before = tl.maximum(slot, 0) * (kernel - 1) + tl.minimum(count + index, kernel - 2)
            is_before = channel < tl.where((place < 0) & (slot >= 0), channels, 0)
            value += tl.load(conv_at + before * channels, mask=is_before, other=0.0)
            tl.store(conv_at + (to * (kernel - 1) + index) * channels, value, mask=inside)


def convolve(
    shape: RecurrentShape,
    parameters: RecurrentParameters,
    layer: int,
    buffers: RecurrentBuffers,
    states: StateTensors,
    parents: torch.Tensor,
    slots: torch.Tensor,
) -> None:
    """Write the convolved rows of a layer. `parents` [rows]: row before each; `slots` [rows]: its state."""
    rows, kernel = len(parents), parameters.convolution.shape[1]
    pdl = supports_pdl(parents.device)
    _convolve_kernel[(rows, triton.cdiv(shape.channels, CHANNELS))](
        buffers.projected[layer],
        parents,
        slots,
        states.conv[layer],
        parameters.convolution[layer],
        None if parameters.bias is None else parameters.bias[layer],
        buffers.convolved[layer],
        buffers.projected.shape[2],
        shape.convolved,
        shape.factor,
        parameters.bias is not None,
        shape.channels,
        kernel,
        CHANNELS,
        pdl,
        num_warps=4,
        enable_fp_fusion=False,
        launch_pdl=pdl,
    )


def state_sizes(config: RecurrentConfig) -> tuple[int, ...]:
    """The last sizes that kernels over SSM states take, from `heads` to `block`."""
    key_columns = triton.next_power_of_2(config.key_dim)
    heads = config.value_heads, config.key_heads, config.tiled_values
    return *heads, config.key_dim, config.value_dim, key_columns, COLUMNS


def scan_states(
    shape: RecurrentShape,
    parameters: RecurrentParameters,
    layers: slice,
    buffers: RecurrentBuffers,
    states: StateTensors,
    stored: torch.Tensor,
    scans: Scans,
    writes: bool,
) -> None:
    """Scan the convolved rows of these layers. With `writes`, also write the output of each row.

    Intermediate states go to `stored` [layers, any, value heads, key dim, value dim].
    """
    config, ssm = shape.config, states.ssm[layers]
    blocks, pdl = triton.cdiv(config.value_dim, COLUMNS), supports_pdl(ssm.device)
    assert parameters.rates is not None
    assert parameters.rate_bias is not None
    _scan_states_kernel[(len(scans.counts), config.value_heads, len(ssm) * blocks)](
        buffers.projected[layers],
        buffers.convolved[layers],
        parameters.rates[layers],
        parameters.rate_bias[layers],
        None if parameters.skip is None else parameters.skip[layers],
        ssm,
        stored,
        buffers.read,
        scans.rows,
        scans.before,
        scans.after,
        scans.begins,
        scans.counts,
        scans.slots,
        scans.row_stride,
        buffers.projected.shape[2],
        buffers.projected.shape[1],
        ssm.shape[1],
        stored.shape[1],
        shape.rate,
        shape.strength,
        shape.query,
        shape.key,
        shape.value,
        shape.channels,
        writes,
        parameters.skip is not None,
        *state_sizes(config),
        pdl,
        num_warps=4,
        enable_fp_fusion=False,
        launch_pdl=pdl,
    )


def store_conv_states(
    shape: RecurrentShape,
    buffers: RecurrentBuffers,
    states: StateTensors,
    rows: torch.Tensor,
    begins: torch.Tensor,
    slots: torch.Tensor,
    counts: torch.Tensor,
    to: torch.Tensor,
    row_stride: int = 0,
) -> None:
    """Store the conv states of all layers after the first `counts` [scans, stored] rows of each scan.

    A scan's rows start at `begins` [scans] of `rows` and continue the state in `slots` [scans]; -1: zeros.
    `row_stride`: see Scans. The new states go to the slots `to` [scans, stored]; the scan's own slot, which
    it reads, comes last.
    """
    layers, states_each, kept, channels = states.conv.shape
    scans, stored = to.shape
    pdl = supports_pdl(to.device)
    _store_conv_states_kernel[(layers, triton.cdiv(channels, CHANNELS), scans)](
        buffers.projected,
        states.conv,
        rows,
        begins,
        slots,
        counts,
        to,
        row_stride,
        buffers.projected.shape[2],
        buffers.projected.shape[1],
        states_each,
        shape.convolved,
        shape.factor,
        stored,
        channels,
        kept + 1,
        CHANNELS,
        pdl,
        num_warps=4,
        enable_fp_fusion=False,
        launch_pdl=pdl,
    )
