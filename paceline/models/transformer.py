"""The transformer: one readable torch model for all families.

Families differ only by what ModelConfig declares: biases, norms and where they are, windows, rope, scales,
experts. A pass takes rows, not sequences: each row has its position, and a RowView has the keys that the
rows of one request see. So prefill, decoding and draft trees are the same code.

The weights have the names and shapes of checkpoint.py; constructors take each of them once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Protocol

import torch
import torch.nn.functional as F

from paceline.models.config import ModelConfig, MoeConfig, RopeConfig
from paceline.models.rope import rope_frequencies

# The named tensor of the checkpoint, in the model's dtype and on its device.
Take = Callable[[str], torch.Tensor]
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


class LayerNorm(RMSNorm):
    """The same of the distance from the mean, without a bias."""

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        wide = hidden.float()
        return super().__call__((wide - wide.mean(-1, keepdim=True)).to(hidden.dtype))


def no_norm(hidden: torch.Tensor) -> torch.Tensor:
    """In place of a norm that a family does not have."""
    return hidden


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return F.silu(gate) * up


def geglu_tanh(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """With GELU by its tanh approximation."""
    return F.gelu(gate, approximate="tanh") * up


def clamped_swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """That of gpt-oss: both sides are kept within 7."""
    gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
    return gate * torch.sigmoid(gate * 1.702) * (up + 1)


NORMS = {"rms": RMSNorm, "layer": LayerNorm}
ACTIVATIONS = {"silu": swiglu, "gelu_tanh": geglu_tanh, "clamped_silu": clamped_swiglu}


class MLP:
    """The gated feed-forward block: down(activation(gate(x), up(x)))."""

    def __init__(self, take: Take, name: str, activation: str = "silu", biases: bool = False) -> None:
        self.activation = ACTIVATIONS[activation]
        self.gate = Linear(take, f"{name}.gate_proj", biases)
        self.up = Linear(take, f"{name}.up_proj", biases)
        self.down = Linear(take, f"{name}.down_proj", biases)

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.down(self.activation(self.gate(hidden), self.up(hidden)))


class MixtureOfExperts:
    """Each row goes through its best experts, weighted by the router, and the shared one if there is any."""

    def __init__(self, take: Take, name: str, moe: MoeConfig, activation: str) -> None:
        self.moe = moe
        self.router = Linear(take, f"{name}.gate", moe.biases)
        self.correction = take(f"{name}.gate.e_score_correction_bias") if moe.correction_bias else None
        self.experts = [
            MLP(take, f"{name}.experts.{expert}", activation, moe.biases) for expert in range(moe.num_experts)
        ]
        self.shared = (
            MLP(take, f"{name}.shared_experts", activation) if moe.shared_intermediate_size else None
        )

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        weights, chosen = self._route(hidden)
        output = torch.zeros_like(hidden)
        for expert in sorted(set(chosen.flatten().tolist())):
            rows, rank = torch.where(chosen == expert)
            share = weights[rows, rank, None].to(hidden.dtype)
            output[rows] += share * self.experts[expert](hidden[rows])
        return output if self.shared is None else output + self.shared(hidden)

    def _route(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The weights and numbers of the chosen experts: [rows, experts_per_token] each."""
        moe, scores = self.moe, self.router(hidden).float()  # [rows, experts]
        scores = scores.softmax(-1) if moe.scoring == "softmax" else scores.sigmoid()
        if self.correction is None and moe.groups == 1:
            weights, chosen = scores.topk(moe.experts_per_token)
        else:
            chosen = self._preferences(scores).topk(moe.experts_per_token).indices
            weights = scores.gather(1, chosen)
        if moe.normalize_weights:
            weights = weights / weights.sum(-1, keepdim=True)
        return weights * moe.weight_scale, chosen

    def _preferences(self, scores: torch.Tensor) -> torch.Tensor:
        """What experts are chosen by [rows, experts]: corrected scores, of the best groups only.

        A group is as good as its two best experts together.
        """
        moe = self.moe
        corrected = scores if self.correction is None else scores + self.correction.float()
        grouped = corrected.view(len(scores), moe.groups, -1)
        best = grouped.topk(2).values.sum(-1).topk(moe.chosen_groups).indices  # [rows, chosen groups]
        is_chosen = torch.zeros(grouped.shape[:2], dtype=torch.bool, device=scores.device).scatter(
            1, best, True
        )
        return grouped.masked_fill(~is_chosen[:, :, None], float("-inf")).view(scores.shape)


class Attention:
    """Grouped-query attention of rows over the keys of their views."""

    def __init__(self, take: Take, name: str, config: ModelConfig, layer: int) -> None:
        self.config, self.layer = config, layer
        self.query = Linear(take, f"{name}.q_proj", config.qkv_bias)
        self.key = Linear(take, f"{name}.k_proj", config.qkv_bias)
        self.value = Linear(take, f"{name}.v_proj", config.qkv_bias)
        self.output = Linear(take, f"{name}.o_proj", config.output_bias)
        has_norms = config.qk_norm or config.joint_qk_norm
        self.query_norm = RMSNorm(take, f"{name}.q_norm", config.rms_norm_eps) if has_norms else no_norm
        self.key_norm = RMSNorm(take, f"{name}.k_norm", config.rms_norm_eps) if has_norms else no_norm
        self.sinks = take(f"{name}.sinks") if config.attention_sinks else None

    def heads(self, hidden: torch.Tensor, rotation: Rotation | None) -> Heads:
        """Queries, keys and values of [..., hidden]: [..., heads, head_dim] each, with norms and rope."""
        shape = (*hidden.shape[:-1], -1, self.config.head_dim)
        query, key, value = self.query(hidden), self.key(hidden), self.value(hidden)
        if self.config.joint_qk_norm:
            query, key = self.query_norm(query).view(shape), self.key_norm(key).view(shape)
        else:
            query, key = self.query_norm(query.view(shape)), self.key_norm(key.view(shape))
        return rotate(query, rotation), rotate(key, rotation), value.view(shape)

    def attend_rows(self, heads: Heads, rows: Rows, cache: KeyValues) -> torch.Tensor:
        """Store keys and values, and mix the values that each row sees: [rows, heads, head_dim]."""
        query, key, value = heads
        keys, values = cache.keys[self.layer], cache.values[self.layer]
        # Written before anything is read: the rows of a request see each other through the cache.
        keys[rows.slot_mapping] = key
        values[rows.slot_mapping] = value
        mixed = torch.empty_like(query)
        window = self.config.window(self.layer)
        for view in rows.views:
            own = query[view.rows], keys[view.key_slots], values[view.key_slots], view.masks[window]
            scale, cap = self.config.attention_scale, self.config.attention_softcap
            mixed[view.rows] = attend(*own, scale, cap, self.sinks)
        return mixed


class Layer:
    """Attention, then a feed-forward block, each added to the residual stream."""

    def __init__(self, take: Take, config: ModelConfig, layer: int) -> None:
        name, placement = f"model.layers.{layer}", config.norm_placement
        self.is_parallel, self.residual_scale = placement == "parallel", config.residual_scale

        def norm(part: str, *placements: str) -> Norm:
            """The norm of this name, if a family with these placements has it."""
            has_it = placement in placements
            return NORMS[config.norm](take, f"{name}.{part}", config.rms_norm_eps) if has_it else no_norm

        self.attention_norm = norm("input_layernorm", "pre", "sandwich", "parallel")
        self.attention = Attention(take, f"{name}.self_attn", config, layer)
        self.attention_output_norm = norm("attention_output_norm", "post", "sandwich")
        self.feed_forward_norm = norm("post_attention_layernorm", "pre", "sandwich")
        self.feed_forward: FeedForward
        if config.moe and layer in config.moe.layers:
            self.feed_forward = MixtureOfExperts(take, f"{name}.mlp", config.moe, config.activation)
        else:
            self.feed_forward = MLP(take, f"{name}.mlp", config.activation)
        self.feed_forward_output_norm = norm("feed_forward_output_norm", "post", "sandwich")

    def __call__(
        self, hidden: torch.Tensor, rows: Rows, rotation: Rotation | None, cache: KeyValues
    ) -> torch.Tensor:
        return self.after(hidden, self.attention.attend_rows(self.before(hidden, rotation), rows, cache))

    def before(self, hidden: torch.Tensor, rotation: Rotation | None) -> Heads:
        """Queries, keys and values of [..., hidden]."""
        return self.attention.heads(self.attention_norm(hidden), rotation)

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
    """A whole decoder: token rows in, hidden states and logits out."""

    def __init__(self, config: ModelConfig, take: Take) -> None:
        self.config = config
        self.embedding = take("model.embed_tokens.weight")
        self.layers = [Layer(take, config, layer) for layer in range(config.num_layers)]
        self.norm = NORMS[config.norm](take, "model.norm", config.rms_norm_eps)
        self.head = self.embedding if config.tie_embeddings else take("lm_head.weight")
        ropes = {config.rope_of(layer) for layer in range(config.num_layers)} - {None}
        # float32 [rotated values of a head // 2] each
        self.frequencies = {rope: self._frequencies(rope) for rope in ropes if rope is not None}

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
        hidden, scale = self.embedding[tokens], self.config.embedding_scale
        # the factor is rounded first, as models were trained with it
        return hidden if scale == 1 else hidden * torch.tensor(scale, dtype=hidden.dtype)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Scores over the vocabulary [rows, vocab] of last hidden states [rows, hidden]."""
        logits = F.linear(self.norm(hidden), self.head)
        logits = logits if self.config.logits_scale == 1 else logits * self.config.logits_scale
        return soft_cap(logits, self.config.logits_softcap)

    def rotations(self, positions: torch.Tensor) -> dict[RopeConfig | None, Rotation | None]:
        """The rotation of each row by its position, for every rope that a layer has."""
        return {None: None} | {rope: self._rotation(rope, positions) for rope in self.frequencies}

    def _rotation(self, rope: RopeConfig, positions: torch.Tensor) -> Rotation:
        # Angles stay float32 in every dtype: bfloat16 cannot count positions above 256.
        angles, dtype = (
            (positions.float()[:, None] * self.frequencies[rope])[:, None, :],
            self.embedding.dtype,
        )
        factor = rope.attention_factor
        return (angles.cos() * factor).to(dtype), (angles.sin() * factor).to(dtype)

    def _frequencies(self, rope: RopeConfig) -> torch.Tensor:
        return torch.from_numpy(rope_frequencies(rope, self.config.head_dim)).to(self.embedding.device)


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
    """Values mixed by softmax(query · key): [rows, heads, head_dim].

    query is [rows, heads, head_dim], keys and values [keys, kv_heads, head_dim], mask [rows, keys].
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
    return torch.einsum("hgrk,khd->rhgd", weights, values).reshape(num_rows, num_heads, head_dim)
