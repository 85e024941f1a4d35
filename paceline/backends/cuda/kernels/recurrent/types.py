"""The types of the recurrent kernels: shapes, parameters, states, buffers and scans."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from paceline.models.config import RecurrentConfig

CONTINUES, FIRST, NOTHING = -1, -2, -3  # the state before a row: in registers, in the request's slot, zeros


@dataclass(frozen=True)
class RecurrentShape:
    """The first column of each part of a projected row and of a convolved row."""

    config: RecurrentConfig
    width: int  # columns of a projected row
    channels: int  # columns of a convolved row
    values: int  # columns of all value heads
    convolved: int  # projected: the first channel; in short_conv, the first factor of the input
    factor: int  # projected: the second factor of short_conv's input; else -1
    gate: int  # projected
    rate: int  # projected: time steps (dt); -1: a short_conv, which has no SSM state
    strength: int  # projected: strengths (beta) of the delta rule; else -1
    query: int  # convolved (C of Mamba2)
    key: int  # convolved (B of Mamba2)
    value: int  # convolved (x of Mamba2)


def recurrent_shape(config: RecurrentConfig, hidden: int) -> RecurrentShape:
    """The shape of a recurrent layer: its input projections are concatenated in a projected row."""
    values, channels = config.value_heads * config.value_dim, config.conv_size
    keys, heads = config.key_heads * config.key_dim, config.value_heads
    if config.kind == "short_conv":
        return RecurrentShape(config, 3 * hidden, hidden, hidden, 0, 2 * hidden, hidden, -1, -1, 0, 0, 0)
    if config.kind == "gated_delta":  # queries, keys, values, gate, rates, strengths
        gate = channels
        parts = gate, gate + values, gate + values + heads
        return RecurrentShape(
            config, parts[2] + heads, channels, values, 0, -1, *parts, query=0, key=keys, value=2 * keys
        )
    rate = values + channels  # gate, then values, keys, queries, then rates
    return RecurrentShape(
        config, rate + heads, channels, values, values, -1, 0, rate, -1, values + keys, values, 0
    )


@dataclass(frozen=True)
class RecurrentParameters:
    """The parameters of all recurrent layers besides their matrices: float32."""

    convolution: torch.Tensor  # [layers, kernel, channels] oldest tap first
    bias: torch.Tensor | None  # [layers, channels]
    rates: torch.Tensor | None  # [layers, value heads]
    rate_bias: torch.Tensor | None  # [layers, value heads]
    skip: torch.Tensor | None  # [layers, value heads] factor of the skip connection (D of Mamba2)
    norm: torch.Tensor | None  # [layers, values]
    eps: float


@dataclass(frozen=True)
class RecurrentBuffers:
    """The kept inputs of all layers' rows, for the scan of accepted rows, and buffers that layers share."""

    projected: torch.Tensor  # [layers, rows, padded width]
    convolved: torch.Tensor  # float32 [layers, rows, channels]
    read: torch.Tensor  # float32 [rows, values]
    gated: torch.Tensor  # [rows, padded values]
    nodes: torch.Tensor  # float32 [nodes, value heads, key dim, value dim] stored states of tree nodes


@dataclass(frozen=True)
class StateTensors:
    """The states of all recurrent layers: float32."""

    conv: torch.Tensor  # [layers, slots, kernel - 1, channels] conv states: the last inputs
    ssm: torch.Tensor  # [layers, slots, value heads, key dim, value dim] SSM states

    @property
    def addresses(self) -> tuple[int, ...]:
        """What a captured graph depends on. The SSM state of short_conv is empty, and has no address."""
        return self.conv.data_ptr(), self.ssm.data_ptr(), self.conv.shape[1]


@dataclass(frozen=True)
class Scans:
    """Sequential scans over rows, one per request. All int32, on the device."""

    rows: torch.Tensor  # [rows] rows of all scans, in scan order
    before: torch.Tensor  # [rows] state before each: CONTINUES, FIRST, NOTHING, or index of a stored state
    after: torch.Tensor | None  # [rows] index at which to store the state after each; -1: not stored.
    # None: the last state of a scan goes to its slot
    begins: torch.Tensor  # [scans] index of the first row in `rows`
    counts: torch.Tensor  # [scans] number of rows; 0: padding
    slots: torch.Tensor  # [scans] slot of the state before the first row
    row_stride: int = 0  # rows of scan i are `rows` + i * row_stride
