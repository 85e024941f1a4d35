"""Per-layer embeddings (PLE, Gemma's E sizes): weights, buffers, and the launch of their kernels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from paceline.backends.cuda.kernels.per_layer import activate_given, join_embeddings
from paceline.backends.cuda.kernels.products.linear import project
from paceline.backends.cuda.kernels.products.matrix import Matrix, Normed, Scratch
from paceline.backends.cuda.kernels.residual import plain
from paceline.backends.cuda.weights.tiled import matrix
from paceline.models.config import ModelConfig


@dataclass(frozen=True)
class PerLayerInputs:
    """The weights that compute the per-layer inputs of all layers."""

    table: torch.Tensor  # [vocab, layers * size]
    projection: Matrix  # of embeddings, to layers * size
    norm: torch.Tensor  # [size]
    eps: float
    scale: float  # of the projection

    @property
    def size(self) -> int:
        """The size of a layer's input."""
        return len(self.norm)


@dataclass(frozen=True)
class PerLayerGate:
    """The weights of one layer that gate its input and project it to the residual stream."""

    gate: Matrix  # residual stream -> input size
    projection: Matrix  # gated input -> residual stream
    norm: torch.Tensor  # [padded hidden] of the projection


@dataclass(frozen=True)
class PerLayerBuffers:
    given: torch.Tensor  # float32 [rows, layers * size]
    gates: torch.Tensor  # float32 [rows, size]
    activated: torch.Tensor  # [rows, padded size] padding is zero
    ones: torch.Tensor  # float32 [rows, 1]


def load_per_layer_inputs(config: ModelConfig, take: Callable[[str], torch.Tensor]) -> PerLayerInputs | None:
    """The shared weights of per-layer embeddings, if the model has them."""
    if config.per_layer_input is None:
        return None
    return PerLayerInputs(
        take("model.embed_tokens_per_layer.weight"),
        matrix(take("model.per_layer_model_projection.weight"), None),
        take("model.per_layer_projection_norm.weight"),
        config.rms_norm_eps,
        config.hidden_size**-0.5,
    )


def make_per_layer_buffers(
    inputs: PerLayerInputs, gate: PerLayerGate, rows: int, like: torch.Tensor
) -> PerLayerBuffers:
    """Zeroed buffers for passes of at most `rows` padded rows, in the dtype and on the device of `like`."""
    sizes = inputs.projection.width, inputs.size, 1
    given, gates, ones = (torch.zeros((rows, size), device=like.device) for size in sizes)
    return PerLayerBuffers(given, gates, like.new_zeros((rows, gate.projection.depth)), ones + 1)


def give_inputs(
    inputs: PerLayerInputs, tokens: torch.Tensor, embedded: Normed, buffers: PerLayerBuffers, scratch: Scratch
) -> None:
    """Write the inputs of all layers for `tokens` [rows], given their scaled embeddings `embedded`."""
    project(embedded, inputs.projection, buffers.given, len(tokens), scratch)
    join_embeddings(tokens, inputs.table, inputs.norm, buffers.given, inputs.eps, inputs.scale)


def project_given(
    gate: PerLayerGate,
    layer: int,
    read: Normed,
    activation: str,
    added: torch.Tensor,
    rows: int,
    buffers: PerLayerBuffers,
    scratch: Scratch,
) -> None:
    """Write the projection of `layer`'s gated input to `added`, before its norm; `read`: residual stream."""
    size = buffers.gates.shape[1]
    project(read, gate.gate, buffers.gates, rows, scratch)
    given = buffers.given[:, layer * size : (layer + 1) * size]
    activate_given(buffers.gates, given, buffers.activated, rows, activation)
    project(plain(buffers.activated, buffers.ones), gate.projection, added, rows, scratch)
