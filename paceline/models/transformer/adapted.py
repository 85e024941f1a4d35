"""A torch model with an adapter: the same weights, and what the adapter adds to some products."""

from __future__ import annotations

from copy import copy

import torch
import torch.nn.functional as F

from paceline.models.files.layout import RECURRENT_MATRICES
from paceline.models.lora import Adapter, LoraMatrix
from paceline.models.transformer.attention import Attention, LatentAttention
from paceline.models.transformer.blocks import MLP, FeedForward, Linear
from paceline.models.transformer.experts import MixtureOfExperts
from paceline.models.transformer.latent import HeadChange
from paceline.models.transformer.layer import Layer, Mixer, Recurrent, SideBySide
from paceline.models.transformer.model import Transformer

# where mixers and MLPs have the matrices that an adapter may change
ATTENTION = {"q_proj": "query", "k_proj": "key", "v_proj": "value", "o_proj": "output", "gate_proj": "gate"}
LATENT = {
    "q_proj": "query",
    "q_a_proj": "query_latent",
    "q_b_proj": "query",
    "kv_a_proj_with_mqa": "key",
}
RECURRENT = {
    "in_proj": "input",
    "in_proj_qkv": "input_qkv",
    "in_proj_z": "input_z",
    "in_proj_a": "input_a",
    "in_proj_b": "input_b",
    "out_proj": "output",
    "o_proj": "output",
}
RECURRENT_BLOCKS = tuple(place for place, _, _ in RECURRENT_MATRICES.values())
MLPS = {"gate_proj": "gate", "up_proj": "up", "down_proj": "down"}


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
    adapted, prefix = copy(layer), f"model.layers.{index}."
    adapted.mixer, adapted.feed_forward = _copied(layer.mixer), copy(layer.feed_forward)
    if isinstance(adapted.feed_forward, MixtureOfExperts):
        adapted.feed_forward.experts = [copy(expert) for expert in adapted.feed_forward.experts]
        adapted.feed_forward.shared = copy(adapted.feed_forward.shared)
    for name, change in adapter.matrices.items():
        if name.startswith(prefix):
            block, *place, part = name.removeprefix(prefix).split(".")
            if block == "self_attn":
                _change_attention(adapted.attention, part, change)
            elif block in RECURRENT_BLOCKS:
                _change(adapted.recurrence.recurrence, RECURRENT[part], change)
            else:
                _change(_mlp(adapted.feed_forward, place), MLPS[part], change)
    return adapted


def _copied(mixer: Mixer | None) -> Mixer | None:
    """The mixer with blocks of its own, whose matrices can be replaced; it shares all weights."""
    copied = copy(mixer)
    if isinstance(copied, LatentAttention):
        copied.latent = copy(copied.latent)
    elif isinstance(copied, Recurrent):
        copied.recurrence = copy(copied.recurrence)
    elif isinstance(copied, SideBySide):
        copied.attention, copied.recurrence = copy(copied.attention), copy(copied.recurrence)
        copied.recurrence.recurrence = copy(copied.recurrence.recurrence)
    return copied


def _change_attention(attention: Attention, part: str, change: LoraMatrix) -> None:
    if not isinstance(attention, LatentAttention) or part in ("o_proj", "gate_proj"):
        _change(attention, ATTENTION[part], change)
    elif part == "kv_b_proj":
        attention.latent.change = HeadChange.of(attention.latent, change)
    else:
        _change(attention.latent, LATENT[part], change)


def _mlp(block: FeedForward | None, place: list[str]) -> MLP:
    """The MLP of a feed-forward block: itself, that of all rows, or an expert."""
    found = block
    if isinstance(block, MixtureOfExperts):
        found = block.experts[int(place[1])] if place[0] == "experts" else block.shared
    assert isinstance(found, MLP)
    return found


def _change(owner: object, part: str, change: LoraMatrix) -> None:
    base: Linear = getattr(owner, part)
    adapted = AdaptedLinear(base, change)
    for name, other in [*vars(owner).items()]:
        if other is base:  # keys that are values too, or an MLP's input that stands for its gate
            setattr(owner, name, adapted)
