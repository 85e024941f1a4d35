"""The transformer: one readable torch model for all families.

Families differ only by what ModelConfig declares: biases, norms and where they are, windows, rope, scales,
experts. A pass takes rows, not sequences: each row has its position, and a RowView has the keys that the
rows of one request see. So prefill, decoding and draft trees are the same code.

The weights have the names and shapes of checkpoint.py; constructors take each of them once. A matrix is one
tensor, or as many as the model has pieces: see tensor_parallel.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace

import torch

from paceline.models.blocks import (
    MLP,
    NORMS,
    FeedForward,
    Linear,
    MixtureOfExperts,
    RMSNorm,
    Take,
    Vocabulary,
    no_norm,
    take_pieces,
)
from paceline.models.config import ModelConfig, RopeConfig
from paceline.models.latent import LatentProjections
from paceline.models.rope import rope_frequencies
from paceline.models.tensor_parallel import WHOLE, TensorParallel

# Cosine and sine of every row's angles, each [rows, 1, rotated values // 2], the same for all heads.
Rotation = tuple[torch.Tensor, torch.Tensor]
Heads = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # queries, keys and values
Norm = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class RowView:
    """The rows of one request in a pass, and the keys that they see."""

    rows: slice
    key_slots: torch.Tensor  # int64 [keys] KV slots of the committed context, then of the rows themselves
    masks: Mapping[int | None, torch.Tensor]  # window -> bool [rows, keys], True where a row sees a key


@dataclass(frozen=True)
class KeyValues:
    """Keys and values of every layer, addressed by KV slot (page * page_size + offset)."""

    keys: torch.Tensor  # [layers, own pieces, slots, kv_heads // pieces, head_dim]
    values: torch.Tensor  # [layers, own pieces, slots, kv_heads // pieces, stored_value_dim]


@dataclass(frozen=True)
class Rows:
    """All rows of a pass."""

    tokens: torch.Tensor  # int64 [rows]
    positions: torch.Tensor  # int64 [rows]
    slot_mapping: torch.Tensor  # int64 [rows] the KV slot of each row
    views: Sequence[RowView]  # one per request


class Attention:
    """Grouped-query attention of rows over the keys of their views. A piece has some KV heads, and all of
    the query heads that share them."""

    def __init__(
        self, take: Take, name: str, config: ModelConfig, layer: int, parallel: TensorParallel = WHOLE
    ) -> None:
        self.config, self.layer, self.parallel = config, layer, parallel
        self._take_projections(take, name, config, parallel)
        self.output = Linear(take, f"{name}.o_proj", config.hidden_size, config.output_bias, parallel)
        self.sinks: list[torch.Tensor | None] = [None for _ in parallel.own_pieces]
        if config.attention_sinks:
            self.sinks = [*take_pieces(take, f"{name}.sinks", config.num_heads, parallel)]

    def _take_projections(self, take: Take, name: str, config: ModelConfig, parallel: TensorParallel) -> None:
        query_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.query = Linear(take, f"{name}.q_proj", query_size, config.qkv_bias, parallel)
        self.key = Linear(take, f"{name}.k_proj", kv_size, config.qkv_bias, parallel)
        self.value = Linear(take, f"{name}.v_proj", kv_size, config.qkv_bias, parallel)
        has_norms = config.qk_norm or config.joint_qk_norm
        self.query_norm = RMSNorm(take, f"{name}.q_norm", config.rms_norm_eps) if has_norms else no_norm
        self.key_norm = RMSNorm(take, f"{name}.k_norm", config.rms_norm_eps) if has_norms else no_norm

    def heads(self, hidden: torch.Tensor, rotation: Rotation | None) -> list[Heads]:
        """Queries, keys and values of [..., hidden], with norms and rope: [..., heads, head_dim] each.

        One of each for every piece that this rank has.
        """
        shape = (*hidden.shape[:-1], -1, self.config.head_dim)
        queries = self._normed(self.query, self.query_norm, hidden)
        keys = self._normed(self.key, self.key_norm, hidden)
        return [
            (rotate(query, rotation), rotate(key, rotation), value.view(shape))
            for query, key, value in zip(queries, keys, self.value.parts(hidden), strict=True)
        ]

    def _normed(self, linear: Linear, norm: Norm, hidden: torch.Tensor) -> list[torch.Tensor]:
        """The heads [..., heads, head_dim] of each own piece, normed one by one or all at once."""
        shape = (*hidden.shape[:-1], -1, self.config.head_dim)
        parts = linear.parts(hidden)
        if not self.config.joint_qk_norm:
            return [norm(part.view(shape)) for part in parts]
        whole = norm(self.parallel.join(parts, linear.size))
        own = self.parallel.rows(linear.size)
        return [whole[..., columns].contiguous().view(shape) for columns in own]

    def attend_rows(self, pieces: list[Heads], rows: Rows, cache: KeyValues) -> torch.Tensor:
        """Store keys and values, and mix the values that each row sees: [rows, heads, head_dim]."""
        stored = zip(cache.keys[self.layer], cache.values[self.layer], self.sinks, strict=True)
        mixed = [
            self._mix(heads, rows, KeyValues(keys, values), sinks).flatten(1)
            for heads, (keys, values, sinks) in zip(pieces, stored, strict=True)
        ]
        return self.parallel.join(mixed, self.query.size).view(len(mixed[0]), -1, self.config.head_dim)

    def _mix(self, heads: Heads, rows: Rows, stored: KeyValues, sinks: torch.Tensor | None) -> torch.Tensor:
        """The mixed values [rows, heads, head_dim] of one piece; `stored` are its [slots, ...]."""
        query, key, value = heads
        # Written before anything is read: the rows of a request see each other through the cache.
        stored.keys[rows.slot_mapping] = key
        stored.values[rows.slot_mapping] = value
        window, scale, cap = self.config.window(self.layer), *self._scaling
        mixed = [
            attend(
                query[view.rows], *self._seen(stored, view.key_slots), view.masks[window], scale, cap, sinks
            )
            for view in rows.views
        ]
        return torch.cat(mixed)

    @property
    def _scaling(self) -> tuple[float, float]:
        return self.config.attention_scale, self.config.attention_softcap

    def _seen(self, stored: KeyValues, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The keys and values [keys, kv_heads, ...] of these slots."""
        return stored.keys[slots], stored.values[slots]


class LatentAttention(Attention):
    """Attention over the latents of tokens, which are keys and values at once: see latent.py."""

    def _take_projections(self, take: Take, name: str, config: ModelConfig, parallel: TensorParallel) -> None:
        assert config.latent is not None
        self.latent = LatentProjections(take, name, config, config.latent)

    def heads(self, hidden: torch.Tensor, rotation: Rotation | None) -> list[Heads]:
        """Queries and keys [..., heads, rope + rank], with rope, and empty values."""
        keys = rotate(self.latent.keys(hidden), rotation)
        return [(rotate(self.latent.queries(hidden), rotation), keys, keys[..., :0])]

    def attend_rows(self, pieces: list[Heads], rows: Rows, cache: KeyValues) -> torch.Tensor:
        """Store latents, mix those that each row sees, and give their values: [rows, heads, value_dim]."""
        (heads,), (keys,), (values,) = pieces, cache.keys[self.layer], cache.values[self.layer]
        return self.latent.values(self._mix(heads, rows, KeyValues(keys, values), None))

    def _seen(self, stored: KeyValues, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        keys = stored.keys[slots]
        return keys, keys[..., -self.latent.latent.rank :]


class Layer:
    """Attention, then a feed-forward block, each added to the residual stream."""

    def __init__(self, take: Take, config: ModelConfig, layer: int, parallel: TensorParallel = WHOLE) -> None:
        name, placement = f"model.layers.{layer}", config.norm_placement
        self.is_parallel, self.residual_scale = placement == "parallel", config.residual_scale

        def norm(part: str, *placements: str) -> Norm:
            """The norm of this name, if a family with these placements has it."""
            has_it = placement in placements
            return NORMS[config.norm](take, f"{name}.{part}", config.rms_norm_eps) if has_it else no_norm

        self.attention_norm = norm("input_layernorm", "pre", "sandwich", "parallel")
        kind = LatentAttention if config.latent else Attention
        self.attention = kind(take, f"{name}.self_attn", config, layer, parallel)
        self.attention_output_norm = norm("attention_output_norm", "post", "sandwich")
        self.feed_forward_norm = norm("post_attention_layernorm", "pre", "sandwich")
        self.feed_forward: FeedForward
        if config.moe and layer in config.moe.layers:
            self.feed_forward = MixtureOfExperts(
                take, f"{name}.mlp", config.hidden_size, config.moe, config.activation, parallel
            )
        else:
            sizes = config.hidden_size, config.intermediate_size
            self.feed_forward = MLP(take, f"{name}.mlp", *sizes, config.activation, parallel=parallel)
        self.feed_forward_output_norm = norm("feed_forward_output_norm", "post", "sandwich")

    def __call__(
        self, hidden: torch.Tensor, rows: Rows, rotation: Rotation | None, cache: KeyValues
    ) -> torch.Tensor:
        heads = self.attention.heads(self.attention_norm(hidden), rotation)
        return self.after(hidden, self.attention.attend_rows(heads, rows, cache))

    def before(self, hidden: torch.Tensor, rotation: Rotation | None) -> Heads:
        """Queries, keys and values of [..., hidden], of a model in one piece."""
        (heads,) = self.attention.heads(self.attention_norm(hidden), rotation)
        return heads

    def after(self, hidden: torch.Tensor, mixed: torch.Tensor) -> torch.Tensor:
        """The layer's output, from its input and the mixed values [..., heads, head_dim]."""
        attended = self.attention_output_norm(self.attention.output(mixed.flatten(-2)))
        if self.is_parallel:
            return hidden + attended + self._fed_forward(self.attention_norm(hidden))
        hidden = self._add(hidden, attended)
        fed = self._fed_forward(self.feed_forward_norm(hidden))
        return self._add(hidden, self.feed_forward_output_norm(fed))

    def _fed_forward(self, normed: torch.Tensor) -> torch.Tensor:
        """The feed-forward block, over flat rows because experts select rows."""
        return self.feed_forward(normed.flatten(0, -2)).view(normed.shape)

    def _add(self, hidden: torch.Tensor, added: torch.Tensor) -> torch.Tensor:
        return hidden + (added if self.residual_scale == 1 else added * self.residual_scale)


class Transformer:
    """A whole decoder, or a rank's pieces of one: token rows in, hidden states and logits out."""

    def __init__(self, config: ModelConfig, take: Take, parallel: TensorParallel = WHOLE) -> None:
        self.config, self.parallel = config, parallel
        self.vocabulary = Vocabulary(take, "model.embed_tokens.weight", config.vocab_size, parallel)
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
        rotations = self.rotations(rows.positions)
        hidden = self.embed(rows.tokens)
        seen = {0: hidden}
        for index, layer in enumerate(self.layers):
            hidden = layer(hidden, rows, rotations[self.config.rope_of(index)], cache)
            if index + 1 in wanted:
                seen[index + 1] = hidden
        return hidden, [seen[index] for index in wanted]

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """The residual stream at the bottom [..., hidden] of token ids."""
        hidden, scale = self.vocabulary.embed(tokens), self.config.embedding_scale
        # the factor is rounded first, as models were trained with it
        return hidden if scale == 1 else hidden * torch.tensor(scale, dtype=hidden.dtype)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Scores over the vocabulary [rows, vocab] of last hidden states [rows, hidden]."""
        return self.parallel.join(self.logit_parts(hidden), self.config.vocab_size)

    def logit_parts(self, hidden: torch.Tensor) -> list[torch.Tensor]:
        """The logits [rows, piece] of each piece of the vocabulary that this rank has."""
        scale, cap = self.config.logits_scale, self.config.logits_softcap
        parts = self.lm_head.parts(self.norm(hidden))
        return [soft_cap(part if scale == 1 else part * scale, cap) for part in parts]

    def rotations(self, positions: torch.Tensor) -> dict[RopeConfig | None, Rotation | None]:
        """The rotation of each row by its position, for every rope that a layer has."""
        return {None: None} | {rope: self._rotation(rope, positions) for rope in self.frequencies}

    def _rotation(self, rope: RopeConfig, positions: torch.Tensor) -> Rotation:
        # Angles stay float32 in every dtype: bfloat16 cannot count positions above 256.
        angles, dtype = (
            (positions.float()[:, None] * self.frequencies[rope])[:, None, :],
            self.dtype,
        )
        factor = rope.attention_factor
        return (angles.cos() * factor).to(dtype), (angles.sin() * factor).to(dtype)

    def _frequencies(self, rope: RopeConfig) -> torch.Tensor:
        return torch.from_numpy(rope_frequencies(rope, self.config.head_dim)).to(self.device)


def rotate(heads: torch.Tensor, rotation: Rotation | None) -> torch.Tensor:
    """Heads [..., heads, head_dim] rotated by their positions.

    Of the first `rotated` values, element i pairs with i + rotated // 2; the others stay as they are.
    """
    if rotation is None:
        return heads
    cosine, sine = rotation
    rotated = 2 * cosine.shape[-1]
    first, second = heads[..., :rotated].chunk(2, dim=-1)
    return torch.cat(
        (first * cosine - second * sine, second * cosine + first * sine, heads[..., rotated:]), dim=-1
    )


def soft_cap(scores: torch.Tensor, cap: float) -> torch.Tensor:
    """Scores kept between -cap and cap; a cap of 0 changes nothing."""
    return cap * torch.tanh(scores / cap) if cap else scores


def attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor,
    scale: float = 0.0,
    cap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Values mixed by softmax(query · key): [rows, heads, value_dim].

    query is [rows, heads, head_dim], keys [keys, kv_heads, head_dim], values [keys, kv_heads, value_dim],
    mask [rows, keys].
    Neighbouring query heads share a key head. `scale`, `cap` and `sinks` [heads]: see ModelConfig.
    """
    num_rows, num_heads, head_dim = query.shape
    grouped = query.view(num_rows, keys.shape[1], -1, head_dim)  # [rows, kv_heads, group, head_dim]
    scores = torch.einsum("rhgd,khd->hgrk", grouped, keys) * (scale or head_dim**-0.5)
    scores = soft_cap(scores, cap).float().masked_fill(~mask, float("-inf"))
    if sinks is not None:  # one key more, which is dropped after the softmax
        sink = sinks.float().view(*scores.shape[:2], 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat((scores, sink), dim=-1)
    weights = scores.softmax(-1)[..., : len(keys)].to(values.dtype)
    return torch.einsum("hgrk,khd->rhgd", weights, values).reshape(num_rows, num_heads, -1)
