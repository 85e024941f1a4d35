"""A layer of the transformer: what mixes tokens, then a feed-forward block, as the config declares them."""

from __future__ import annotations

from typing import Protocol

import torch

from paceline.models.config import FEED_FORWARD, MIXER, ModelConfig, RopeConfig
from paceline.models.transformer.attention import (
    Attention,
    GroupedQueryAttention,
    Heads,
    LatentAttention,
    Norm,
    Rotation,
    SharedAttention,
)
from paceline.models.transformer.blocks import MLP, NORMS, FeedForward, PerLayerGate, Take, no_norm
from paceline.models.transformer.experts import MixtureOfExperts, NormedExperts
from paceline.models.transformer.recurrent import RecurrentMixer
from paceline.models.transformer.rows import KeyValues, Rows
from paceline.models.transformer.tensor_parallel import WHOLE, TensorParallel


class Mixer(Protocol):
    """What mixes the tokens of a request in a layer: attention or a recurrence."""

    def mix(
        self, normed: torch.Tensor, rows: Rows, rotation: Rotation | None, cache: KeyValues
    ) -> torch.Tensor:
        """What it adds to the residual stream [rows, hidden]."""
        ...


class Recurrent(RecurrentMixer):
    """A recurrence as a Mixer."""

    def mix(
        self, normed: torch.Tensor, rows: Rows, rotation: Rotation | None, cache: KeyValues
    ) -> torch.Tensor:
        assert rows.recurrent is not None
        return self.mix_rows(normed, rows.recurrent)


class SideBySide:
    """Attention and a recurrence over the same rows, as a Mixer: what they give is added."""

    def __init__(self, attention: Attention, recurrence: Recurrent) -> None:
        self.attention, self.recurrence = attention, recurrence

    def mix(
        self, normed: torch.Tensor, rows: Rows, rotation: Rotation | None, cache: KeyValues
    ) -> torch.Tensor:
        own = self.recurrence.mix(normed, rows, rotation, cache)
        return own + self.attention.mix(normed, rows, rotation, cache)


class Layer:
    """Attention or a recurrence, then a feed-forward block, each added to the residual stream."""

    def __init__(self, take: Take, config: ModelConfig, layer: int, parallel: TensorParallel = WHOLE) -> None:
        name, placement = f"model.layers.{layer}", config.norm_placement
        self.is_parallel, self.residual_scale = placement == "parallel", config.residual_scale

        def norm(part: str, *placements: str) -> Norm:
            """The norm of this name, if a family with these placements has it."""
            has_it = placement in placements
            return NORMS[config.norm](take, f"{name}.{part}", config.rms_norm_eps) if has_it else no_norm

        self.attention_norm = norm("input_layernorm", "pre", "sandwich", "parallel")
        self.mixer = mixer(take, config, layer, parallel)
        if self.mixer is None:
            self.attention_norm = no_norm
        self.attention_output_norm = norm("attention_output_norm", "post", "sandwich")
        moe = config.moe if config.moe and layer in config.moe.layers else None
        self.feed_forward: FeedForward | None = None
        self.feed_forward_norm: Norm = no_norm
        if config.has_part(layer, FEED_FORWARD):
            self.feed_forward = feed_forward(take, config, layer, parallel)
            before = "post_attention_layernorm" if self.mixer else "input_layernorm"
            if moe is None or not moe.own_norms:
                self.feed_forward_norm = norm(before, "pre", "sandwich")
        self.feed_forward_output_norm = norm("feed_forward_output_norm", "post", "sandwich")
        inputs = config.per_layer_input
        self.per_layer_gate = None if inputs is None else PerLayerGate(take, name, config, inputs)
        self.scale = take(f"{name}.layer_scalar") if config.layer_scales else None

    def __call__(
        self,
        hidden: torch.Tensor,
        rows: Rows,
        rotation: Rotation | None,
        cache: KeyValues,
        given: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The layer's output; `given` is its input of PerLayerInputs, if the model has them."""
        if self.mixer is None:
            return self._add_fed_forward(hidden)
        mixed = self.mixer.mix(self.attention_norm(hidden), rows, rotation, cache)
        hidden = self._joined(hidden, mixed)
        if self.per_layer_gate is not None and given is not None:
            hidden = hidden + self.per_layer_gate(hidden, given)
        return hidden if self.scale is None else hidden * self.scale

    @property
    def attention(self) -> Attention:
        """The mixer of a layer that attends, or the part of it that does."""
        own = self.mixer.attention if isinstance(self.mixer, SideBySide) else self.mixer
        assert isinstance(own, Attention)
        return own

    @property
    def recurrence(self) -> Recurrent:
        """The mixer of a recurrent layer."""
        own = self.mixer.recurrence if isinstance(self.mixer, SideBySide) else self.mixer
        assert isinstance(own, Recurrent)
        return own

    def before(self, hidden: torch.Tensor, rotation: Rotation | None) -> Heads:
        """Queries, keys and values of [..., hidden], of a model in one piece."""
        (heads,) = self.attention.heads(self.attention_norm(hidden), rotation)
        return heads

    def after(self, hidden: torch.Tensor, mixed: torch.Tensor) -> torch.Tensor:
        """The layer's output, from its input and the mixed values [..., heads, head_dim]."""
        return self._joined(hidden, self.attention.output(mixed.flatten(-2)))

    def _joined(self, hidden: torch.Tensor, mixed: torch.Tensor) -> torch.Tensor:
        """The layer's output, from its input and what its mixer adds."""
        attended = self.attention_output_norm(mixed)
        if self.is_parallel:
            return hidden + attended + self._fed_forward(self.attention_norm(hidden))
        hidden = self._add(hidden, attended)
        return hidden if self.feed_forward is None else self._add_fed_forward(hidden)

    def _add_fed_forward(self, hidden: torch.Tensor) -> torch.Tensor:
        fed = self._fed_forward(self.feed_forward_norm(hidden))
        return self._add(hidden, self.feed_forward_output_norm(fed))

    def _fed_forward(self, normed: torch.Tensor) -> torch.Tensor:
        """The feed-forward block, over flat rows because experts select rows."""
        assert self.feed_forward is not None
        return self.feed_forward(normed.flatten(0, -2)).view(normed.shape)

    def _add(self, hidden: torch.Tensor, added: torch.Tensor) -> torch.Tensor:
        return hidden + (added if self.residual_scale == 1 else added * self.residual_scale)


def rotation_of(
    rope: RopeConfig, frequencies: torch.Tensor, positions: torch.Tensor, dtype: torch.dtype
) -> Rotation:
    """The rotation of rows at these positions."""
    # Angles stay float32 in every dtype: bfloat16 cannot count positions above 256.
    angles = (positions.float()[:, None] * frequencies)[:, None, :]
    factor = rope.attention_factor
    return (angles.cos() * factor).to(dtype), (angles.sin() * factor).to(dtype)


def mixer(take: Take, config: ModelConfig, layer: int, parallel: TensorParallel) -> Mixer | None:
    """What mixes tokens in a layer, if it does."""
    name, recurrent = f"model.layers.{layer}", config.recurrent
    if not config.has_part(layer, MIXER):
        return None
    recurrence = Recurrent(take, name, config, layer) if config.is_recurrent(layer) else None
    if recurrence is not None and recurrent is not None and not recurrent.beside_attention:
        return recurrence
    attention = attention_class(config, layer)(take, f"{name}.self_attn", config, layer, parallel)
    return attention if recurrence is None else SideBySide(attention, recurrence)


def attention_class(config: ModelConfig, layer: int) -> type[Attention]:
    """The class of the attention of a layer."""
    if config.latent:
        return LatentAttention
    return GroupedQueryAttention if config.shape_of(layer).shared_with is None else SharedAttention


def feed_forward(take: Take, config: ModelConfig, layer: int, parallel: TensorParallel) -> FeedForward:
    """The feed-forward block of a layer."""
    name, moe = f"model.layers.{layer}", config.moe
    if moe is None or layer not in moe.layers:
        sizes = config.hidden_size, config.intermediate_of(layer)
        return MLP(take, f"{name}.mlp", *sizes, config.activation, parallel=parallel)
    if moe.own_norms:
        return NormedExperts(take, name, config, moe, parallel)
    return MixtureOfExperts(take, f"{name}.mlp", config.hidden_size, moe, config.activation, parallel)
