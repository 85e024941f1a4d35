"""What the kernels of recurrent layers read and write."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from paceline.models.config import RecurrentConfig

CONTINUES, FIRST, NOTHING = -1, -2, -3  # where a state is: in registers, in the request's slot, all zeros


@dataclass(frozen=True)
class RecurrentShape:
    """Where the parts of a projected row begin, and of a convolved one."""

    config: RecurrentConfig
    width: int  # of a projected row
    channels: int
    values: int  # of all heads
    convolved: int  # the first channel; of products, the first factor
    factor: int  # of products, the second factor: short_conv; else -1
    gate: int
    rate: int  # -1: there is no memory
    strength: int  # of the delta rule; -1: another one
    query: int  # of a convolved row
    key: int
    value: int


def recurrent_shape(config: RecurrentConfig, hidden: int) -> RecurrentShape:
    """The shape of a layer of this kind: of what its matrices give, one after the other."""
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
    """The parameters of all recurrent layers beside their matrices: float32."""

    convolution: torch.Tensor  # [layers, kernel, channels] the oldest value first
    bias: torch.Tensor | None  # [layers, channels]
    rates: torch.Tensor | None  # [layers, value heads]
    rate_bias: torch.Tensor | None  # [layers, value heads]
    passed: torch.Tensor | None  # [layers, value heads] factor of the skip connection (D of Mamba2)
    norm: torch.Tensor | None  # [layers, values]
    eps: float


@dataclass(frozen=True)
class RecurrentBuffers:
    """What a pass leaves for the scan of the accepted rows, and buffers that layers use in turn."""

    projected: torch.Tensor  # [layers, rows, padded width]
    convolved: torch.Tensor  # float32 [layers, rows, channels]
    read: torch.Tensor  # float32 [rows, values]
    gated: torch.Tensor  # [rows, padded values]
    nodes: torch.Tensor  # float32 [nodes, value heads, key dim, value dim] states that other rows continue


@dataclass(frozen=True)
class StateTensors:
    """States of all recurrent layers: float32."""

    seen: torch.Tensor  # [layers, slots, kernel - 1, channels] the last inputs of convolutions
    memory: torch.Tensor  # [layers, slots, value heads, key dim, value dim] the recurrent states

    @property
    def addresses(self) -> tuple[int, ...]:
        """What a captured graph holds of them. The memory of short_conv is empty, and has no address."""
        return self.seen.data_ptr(), self.memory.data_ptr(), self.seen.shape[1]


@dataclass(frozen=True)
class Walks:
    """Walks along rows. All int32, on the device."""

    rows: torch.Tensor  # [rows] of all walks
    before: torch.Tensor  # [rows] CONTINUES, FIRST, NOTHING, or the number of a stored state
    after: torch.Tensor  # [rows] the number that the state after it is stored under; -1: it is not
    begins: torch.Tensor  # [walks] first of `rows`
    counts: torch.Tensor  # [walks] rows; 0: the walk is padding
    slots: torch.Tensor  # [walks] of the states that walks begin with
