"""The transformer: one readable torch model for all families.

Families differ only by what ModelConfig declares: biases, q/k norms, windows, rope, experts. A pass takes
rows, not sequences: each row has its position, and a RowView has the keys that the rows of one request see.
So prefill, decoding and draft trees are the same code.

The weights have the names and shapes of checkpoint.py; constructors take each of them once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Protocol

import torch
import torch.nn.functional as F

from paceline.models.config import ModelConfig, MoeConfig
from paceline.models.rope import rope_frequencies

# The named tensor of the checkpoint, in the model's dtype and on its device.
Take = Callable[[str], torch.Tensor]
# Cosine and sine of every row's angles, each [rows, 1, head_dim // 2], the same for all heads.
Rotation = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class RowView:
    """The rows of one request in a pass, and the keys that they see."""

    rows: slice
    key_slots: torch.Tensor  # int64 [keys] KV slots of the committed context, then of the rows themselves
    masks: Mapping[int | None, torch.Tensor]  # window -> bool [rows, keys], True where a row sees a key


@dataclass(frozen=True)
class KeyValues:
    """Keys and values of every layer, addressed by KV slot (page * page_size + offset)."""

    keys: torch.Tensor  # [layers, slots, kv_heads, head_dim]
    values: torch.Tensor  # [layers, slots, kv_heads, head_dim]


@dataclass(frozen=True)
class Rows:
    """All rows of a pass."""

    tokens: torch.Tensor  # int64 [rows]
    positions: torch.Tensor  # int64 [rows]
    slot_mapping: torch.Tensor  # int64 [rows] the KV slot of each row
    views: Sequence[RowView]  # one per request


class FeedForward(Protocol):
    """What follows attention in a layer: one MLP or a mixture of them."""

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor: ...


class Linear:
    """A matrix [out, in], with or without a bias [out]."""

    def __init__(self, take: Take, name: str, bias: bool = False) -> None:
        self.weight = take(f"{name}.weight")
        self.bias = take(f"{name}.bias") if bias else None

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        return F.linear(hidden, self.weight, self.bias)


class RMSNorm:
    """Scale the last axis to a root mean square of one, then by a learned weight."""

    def __init__(self, take: Take, name: str, eps: float) -> None:
        self.weight = take(f"{name}.weight")
        self.eps = eps

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        wide = hidden.float()
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * normed.to(hidden.dtype)


class MLP:
    """The gated feed-forward block: down(silu(gate(x)) * up(x))."""

    def __init__(self, take: Take, name: str) -> None:
        self.gate = Linear(take, f"{name}.gate_proj")
        self.up = Linear(take, f"{name}.up_proj")
        self.down = Linear(take, f"{name}.down_proj")

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.down(F.silu(self.gate(hidden)) * self.up(hidden))


class MixtureOfExperts:
    """Each row goes through its most probable experts, weighted by the router."""

    def __init__(self, take: Take, name: str, moe: MoeConfig) -> None:
        self.moe = moe
        self.router = Linear(take, f"{name}.gate")
        self.experts = [MLP(take, f"{name}.experts.{expert}") for expert in range(moe.num_experts)]

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        probabilities = self.router(hidden).float().softmax(-1)  # [rows, experts]
        weights, chosen = probabilities.topk(self.moe.experts_per_token)  # both [rows, experts_per_token]
        if self.moe.normalize_weights:
            weights = weights / weights.sum(-1, keepdim=True)
        output = torch.zeros_like(hidden)
        for expert in sorted(set(chosen.flatten().tolist())):
            rows, rank = torch.where(chosen == expert)
            share = weights[rows, rank, None].to(hidden.dtype)
            output[rows] += share * self.experts[expert](hidden[rows])
        return output


class Attention:
    """Grouped-query attention of rows over the keys of their views."""

    def __init__(self, take: Take, name: str, config: ModelConfig, layer: int) -> None:
        self.config, self.layer = config, layer
        self.query = Linear(take, f"{name}.q_proj", config.qkv_bias)
        self.key = Linear(take, f"{name}.k_proj", config.qkv_bias)
        self.value = Linear(take, f"{name}.v_proj", config.qkv_bias)
        self.output = Linear(take, f"{name}.o_proj", config.output_bias)
        self.query_norm = RMSNorm(take, f"{name}.q_norm", config.rms_norm_eps) if config.qk_norm else None
        self.key_norm = RMSNorm(take, f"{name}.k_norm", config.rms_norm_eps) if config.qk_norm else None

    def __call__(
        self, hidden: torch.Tensor, rows: Rows, rotation: Rotation, cache: KeyValues
    ) -> torch.Tensor:
        heads_shape = (len(hidden), -1, self.config.head_dim)
        query = self.query(hidden).view(heads_shape)  # [rows, heads, head_dim]
        key = self.key(hidden).view(heads_shape)  # [rows, kv_heads, head_dim]
        value = self.value(hidden).view(heads_shape)  # [rows, kv_heads, head_dim]
        if self.query_norm and self.key_norm:
            query, key = self.query_norm(query), self.key_norm(key)
        keys, values = cache.keys[self.layer], cache.values[self.layer]
        # Written before anything is read: the rows of a request see each other through the cache.
        keys[rows.slot_mapping] = rotate(key, rotation)
        values[rows.slot_mapping] = value
        query = rotate(query, rotation)
        mixed = torch.empty_like(query)
        window = self.config.window(self.layer)
        for view in rows.views:
            mixed[view.rows] = attend(
                query[view.rows], keys[view.key_slots], values[view.key_slots], view.masks[window]
            )
        return self.output(mixed.flatten(1))


class Layer:
    """Attention, then a feed-forward block, each on a normed copy and added back."""

    def __init__(self, take: Take, config: ModelConfig, layer: int) -> None:
        name = f"model.layers.{layer}"
        self.attention_norm = RMSNorm(take, f"{name}.input_layernorm", config.rms_norm_eps)
        self.attention = Attention(take, f"{name}.self_attn", config, layer)
        self.feed_forward_norm = RMSNorm(take, f"{name}.post_attention_layernorm", config.rms_norm_eps)
        self.feed_forward: FeedForward
        if config.moe and layer in config.moe.layers:
            self.feed_forward = MixtureOfExperts(take, f"{name}.mlp", config.moe)
        else:
            self.feed_forward = MLP(take, f"{name}.mlp")

    def __call__(
        self, hidden: torch.Tensor, rows: Rows, rotation: Rotation, cache: KeyValues
    ) -> torch.Tensor:
        hidden = hidden + self.attention(self.attention_norm(hidden), rows, rotation, cache)
        return hidden + self.feed_forward(self.feed_forward_norm(hidden))


class Transformer:
    """A whole decoder: token rows in, hidden states and logits out."""

    def __init__(self, config: ModelConfig, take: Take) -> None:
        self.config = config
        self.embedding = take("model.embed_tokens.weight")
        self.layers = [Layer(take, config, layer) for layer in range(config.num_layers)]
        self.norm = RMSNorm(take, "model.norm", config.rms_norm_eps)
        self.head = self.embedding if config.tie_embeddings else take("lm_head.weight")
        frequencies = rope_frequencies(config.rope, config.head_dim)
        self.frequencies = torch.from_numpy(frequencies).to(self.embedding.device)  # float32 [head_dim // 2]

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
        rotation = self.rotation(rows.positions)
        hidden = self.embedding[rows.tokens]
        seen = {0: hidden}
        for index, layer in enumerate(self.layers, start=1):
            hidden = layer(hidden, rows, rotation, cache)
            if index in wanted:
                seen[index] = hidden
        return hidden, [seen[index] for index in wanted]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Scores over the vocabulary [rows, vocab] of last hidden states [rows, hidden]."""
        return F.linear(self.norm(hidden), self.head)

    def rotation(self, positions: torch.Tensor) -> Rotation:
        """The rotation of each row, by its position."""
        # Angles stay float32 in every dtype: bfloat16 cannot count positions above 256.
        angles = (positions.float()[:, None] * self.frequencies)[:, None, :]
        return angles.cos().to(self.embedding.dtype), angles.sin().to(self.embedding.dtype)


def rotate(heads: torch.Tensor, rotation: Rotation) -> torch.Tensor:
    """Heads [rows, heads, head_dim] rotated by their positions; element i pairs with i + head_dim // 2."""
    cosine, sine = rotation
    first, second = heads.chunk(2, dim=-1)
    return torch.cat((first * cosine - second * sine, second * cosine + first * sine), dim=-1)


def attend(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Values mixed by softmax(query · key): [rows, heads, head_dim].

    query is [rows, heads, head_dim], keys and values [keys, kv_heads, head_dim], mask [rows, keys].
    Neighbouring query heads share a key head.
    """
    num_rows, num_heads, head_dim = query.shape
    grouped = query.view(num_rows, keys.shape[1], -1, head_dim)  # [rows, kv_heads, group, head_dim]
    scores = torch.einsum("rhgd,khd->hgrk", grouped, keys) * head_dim**-0.5
    weights = scores.float().masked_fill(~mask, float("-inf")).softmax(-1).to(values.dtype)
    return torch.einsum("hgrk,khd->rhgd", weights, values).reshape(num_rows, num_heads, head_dim)
