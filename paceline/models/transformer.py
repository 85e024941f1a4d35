"""The transformer: one readable torch model for all families.

Families differ only by what ModelConfig declares: biases, norms and where they are, windows, rope, scales,
experts, recurrent layers. A pass takes rows, not sequences: see rows.py. So prefill, decoding and draft trees
are the same code.

The weights have the names and shapes of checkpoint.py; constructors take each of them once. A matrix is one
tensor, or as many as the model has pieces: see tensor_parallel.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import replace
from typing import Protocol

import torch

from paceline.models.attention import (
    Attention,
    Heads,
    LatentAttention,
    Norm,
    Rotation,
    SharedAttention,
    soft_cap,
)
from paceline.models.blocks import (
    MLP,
    NORMS,
    FeedForward,
    MixtureOfExperts,
    NormedExperts,
    PerLayerGate,
    PerLayerInputs,
    Take,
    Vocabulary,
    no_norm,
)
from paceline.models.config import FEED_FORWARD, MIXER, ModelConfig, RopeConfig
from paceline.models.recurrent import RecurrentMixer, States
from paceline.models.rope import rope_frequencies
from paceline.models.rows import KeyValues, Rows
from paceline.models.tensor_parallel import WHOLE, TensorParallel


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
        """The mixer of a layer that attends."""
        assert isinstance(self.mixer, Attention)
        return self.mixer

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
    return Attention if config.shape_of(layer).shared_with is None else SharedAttention


def feed_forward(take: Take, config: ModelConfig, layer: int, parallel: TensorParallel) -> FeedForward:
    """The feed-forward block of a layer."""
    name, moe = f"model.layers.{layer}", config.moe
    if moe is None or layer not in moe.layers:
        sizes = config.hidden_size, config.intermediate_of(layer)
        return MLP(take, f"{name}.mlp", *sizes, config.activation, parallel=parallel)
    if moe.own_norms:
        return NormedExperts(take, name, config, moe, parallel)
    return MixtureOfExperts(take, f"{name}.mlp", config.hidden_size, moe, config.activation, parallel)


class Transformer:
    """A whole decoder, or a rank's pieces of one: token rows in, hidden states and logits out."""

    def __init__(
        self, config: ModelConfig, take: Take, parallel: TensorParallel = WHOLE, row_by_row: bool = False
    ) -> None:
        """`row_by_row`: a row is computed as if it were alone, so that its bits depend on its path only."""
        self.config, self.parallel, self.row_by_row = config, parallel, row_by_row
        self.vocabulary = Vocabulary(take, "model.embed_tokens.weight", config.vocab_size, parallel)
        inputs = config.per_layer_input
        self.per_layer_inputs = None if inputs is None else PerLayerInputs(take, config, inputs)
        self.layers = [Layer(take, config, layer, parallel) for layer in range(config.num_layers)]
        self.norm = NORMS[config.norm](take, "model.norm", config.rms_norm_eps)
        self.lm_head = (
            self.vocabulary
            if config.tie_embeddings
            else Vocabulary(take, "lm_head.weight", config.vocab_size, parallel)
        )
        self.dtype, self.device = self.norm.weight.dtype, self.norm.weight.device
        ropes = {config.rope_of(layer) for layer in range(config.num_layers)} - {None}
        # float32 [rotated values of a head // 2] each
        self.frequencies = {rope: self._frequencies(rope) for rope in ropes if rope is not None}

    @property
    def embedding(self) -> torch.Tensor:
        """The whole embedding [vocab, hidden] of a model in one piece."""
        (table,) = self.vocabulary.tables
        return table

    @property
    def head(self) -> torch.Tensor:
        """The whole output matrix [vocab, hidden] of a model in one piece."""
        (table,) = self.lm_head.tables
        return table

    def first_layers(self, count: int) -> Transformer:
        """The model of the first `count` layers, with the same weights."""
        early = copy(self)
        early.layers = self.layers[:count]
        early.config = replace(self.config, num_layers=count)
        return early

    def hidden_states(
        self, rows: Rows, cache: KeyValues, wanted: Sequence[int] = ()
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """The last layer's output [rows, hidden], before the final norm, and the wanted hidden states.

        Index 0 is the embedding's output, index i the output of layer i - 1.
        """
        parts = rows.single_rows() if self.row_by_row else [rows]
        rotations = [self.rotations(part.positions) for part in parts]
        hidden = [self.embed(part.tokens) for part in parts]
        given = [self._given(part.tokens, states) for part, states in zip(parts, hidden, strict=True)]
        seen = {0: hidden}
        for index, layer in enumerate(self.layers):
            rope = self.config.rope_of(index)
            inputs = zip(hidden, parts, rotations, given, strict=True)
            hidden = [
                layer(states, part, rotation[rope], cache, own[index])
                for states, part, rotation, own in inputs
            ]
            if index + 1 in wanted:
                seen[index + 1] = hidden
        return torch.cat(hidden), [torch.cat(seen[index]) for index in wanted]

    @property
    def recurrences(self) -> list[Recurrent]:
        """The mixers of the recurrent layers, in order."""
        return [self.layers[layer].recurrence for layer in self.config.recurrent_layers]

    def make_states(self, count: int) -> States:
        """Zeroed storage for `count` states of every recurrent layer."""
        return States([mixer.make_states(count, self.device) for mixer in self.recurrences])

    def advance(self, states: States, slot: int, rows: Sequence[int], checkpoints: Mapping[int, int]) -> None:
        """Replace a slot's states by those after an accepted path: see RecurrentMixer.advance."""
        for mixer in self.recurrences:
            mixer.advance(states, slot, rows, checkpoints)

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """The residual stream at the bottom [..., hidden] of token ids."""
        hidden, scale = self.vocabulary.embed(tokens), self.config.embedding_scale
        # the factor is rounded first, as models were trained with it
        return hidden if scale == 1 else hidden * torch.tensor(scale, dtype=hidden.dtype)

    def _given(self, tokens: torch.Tensor, embedded: torch.Tensor) -> Sequence[torch.Tensor | None]:
        """What each layer is given beside the residual stream: [rows, size] each, or nothing."""
        if self.per_layer_inputs is None:
            return [None] * len(self.layers)
        return [*self.per_layer_inputs(tokens, embedded)]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Scores over the vocabulary [rows, vocab] of last hidden states [rows, hidden]."""
        return self.parallel.join(self.logit_parts(hidden), self.config.vocab_size)

    def logit_parts(self, hidden: torch.Tensor) -> list[torch.Tensor]:
        """The logits [rows, piece] of each piece of the vocabulary that this rank has."""
        if self.row_by_row and len(hidden) > 1:
            single = [self.logit_parts(row) for row in torch.split(hidden, 1)]
            return [torch.cat(part) for part in zip(*single, strict=True)]
        scale, cap = self.config.logits_scale, self.config.logits_softcap
        parts = self.lm_head.parts(self.norm(hidden))
        return [soft_cap(part if scale == 1 else part * scale, cap) for part in parts]

    def rotations(self, positions: torch.Tensor) -> dict[RopeConfig | None, Rotation | None]:
        """The rotation of each row by its position, for every rope that a layer has."""
        return {None: None} | {
            rope: rotation_of(rope, frequencies, positions, self.dtype)
            for rope, frequencies in self.frequencies.items()
        }

    def _frequencies(self, rope: RopeConfig) -> torch.Tensor:
        return torch.from_numpy(rope_frequencies(rope, self.config.head_dim)).to(self.device)
