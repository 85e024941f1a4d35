"""A torch model with an adapter: the same weights, and what the adapter adds to some products."""

from __future__ import annotations

from copy import copy

import torch
import torch.nn.functional as F

from paceline.models.lora import Adapter, LoraMatrix
from paceline.models.transformer.blocks import Linear
from paceline.models.transformer.layer import Layer
from paceline.models.transformer.model import Transformer

# where the layers have the matrices that an adapter may change
PLACES = {
    "self_attn.q_proj": ("mixer", "query"),
    "self_attn.k_proj": ("mixer", "key"),
    "self_attn.v_proj": ("mixer", "value"),
    "self_attn.o_proj": ("mixer", "output"),
    "mlp.gate_proj": ("feed_forward", "gate"),
    "mlp.up_proj": ("feed_forward", "up"),
    "mlp.down_proj": ("feed_forward", "down"),
}


class AdaptedLinear(Linear):
    """A matrix with what an adapter adds; the matrix itself is shared with the model."""

    def __init__(self, base: Linear, change: LoraMatrix) -> None:
        self.size, self.parallel = base.size, base.parallel
        self.weights, self.biases = base.weights, base.biases
        like = base.weights[0]
        self.down = torch.tensor(change.down, dtype=like.dtype, device=like.device)
        # copies that torch aligns, as those of the matrix: alignment can decide how a product adds
        self.ups = [
            torch.tensor(change.up[rows], dtype=like.dtype, device=like.device)
            for rows in self.parallel.rows(self.size)
        ]

    def parts(self, hidden: torch.Tensor) -> list[torch.Tensor]:
        """The columns of each piece: [rows, piece] each."""
        low = F.linear(hidden, self.down)
        return [part + F.linear(low, up) for part, up in zip(super().parts(hidden), self.ups, strict=True)]


def with_adapter(model: Transformer, adapter: Adapter) -> Transformer:
    """The model with the adapter, over the same KV pools; it shares all weights with `model`."""
    adapted = copy(model)
    adapted.layers = [_layer(layer, index, adapter) for index, layer in enumerate(model.layers)]
    return adapted


def _layer(layer: Layer, index: int, adapter: Adapter) -> Layer:
    adapted = copy(layer)
    adapted.mixer, adapted.feed_forward = copy(layer.mixer), copy(layer.feed_forward)
    for module, (block, part) in PLACES.items():
        change = adapter.matrices.get(f"model.layers.{index}.{module}")
        if change is not None:
            owner = getattr(adapted, block)
            setattr(owner, part, AdaptedLinear(getattr(owner, part), change))
    return adapted
