"""Attention: rows mix the values of the keys that they see. Every backend is tested against this one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial

import torch

from paceline.models.config import ModelConfig, Temperature
from paceline.models.transformer.blocks import Linear, RMSNorm, Take, no_norm, take_pieces, unit_mean_square
from paceline.models.transformer.latent import LatentProjections
from paceline.models.transformer.rows import KeyValues, Rows
from paceline.models.transformer.tensor_parallel import WHOLE, TensorParallel

# Cosine and sine of every row's angles, each [rows, 1, rotated values // 2], the same for all heads.
Rotation = tuple[torch.Tensor, torch.Tensor]
Heads = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # queries, keys and values
Norm = Callable[[torch.Tensor], torch.Tensor]


class Attention(ABC):
    """Attention of rows over the keys of their views, without the projections to queries, keys and values.
    A piece has some KV heads, and all of the query heads that share them."""

    def __init__(
        self, take: Take, name: str, config: ModelConfig, layer: int, parallel: TensorParallel = WHOLE
    ) -> None:
        self.config, self.parallel, self.shape = config, parallel, config.shape_of(layer)
        self.reach, self.kv_layer = config.reach(layer), config.kv_layer(layer)
        has_rope = config.rope_of(layer) is not None
        self.unit = partial(unit_mean_square, eps=config.rms_norm_eps)
        self.rotated_norm = self.unit if config.unit_qk and has_rope else no_norm
        is_scaled = config.temperature is not None and config.temperature.with_rope == has_rope
        self.temperature = config.temperature if is_scaled else None
        self.output = Linear(take, f"{name}.o_proj", config.hidden_size, config.output_bias, parallel)
        self.sinks: list[torch.Tensor | None] = [None for _ in parallel.own_pieces]
        if config.attention_sinks:
            self.sinks = [*take_pieces(take, f"{name}.sinks", config.num_heads, parallel)]
        self.gate: Linear | None = None
        if config.attention_gate:
            size = config.num_heads * self.shape.head_dim
            self.gate = Linear(take, f"{name}.gate_proj", size, config.qkv_bias, parallel)

    def mix(
        self, normed: torch.Tensor, rows: Rows, rotation: Rotation | None, cache: KeyValues
    ) -> torch.Tensor:
        """Attention of all rows, projected: [rows, hidden]."""
        pieces = self.heads(normed, rotation)
        if self.temperature is not None:
            factors = query_factors(self.temperature, rows.positions)[:, None, None].to(normed.dtype)
            pieces = [(query * factors, key, value) for query, key, value in pieces]
        mixed = self.attend_rows(pieces, rows, cache).flatten(1)
        return self.output(mixed if self.gate is None else mixed * torch.sigmoid(self.gate(normed)))

    @abstractmethod
    def heads(self, hidden: torch.Tensor, rotation: Rotation | None) -> list[Heads]:
        """Queries, keys and values of [..., hidden], with norms and rope: [..., heads, head_dim] each.

        One of each for every piece that this rank has.
        """

    def attend_rows(self, pieces: list[Heads], rows: Rows, cache: KeyValues) -> torch.Tensor:
        """Store keys and values, and mix the values that each row sees: [rows, heads, head_dim]."""
        stored = zip(cache.keys[self.kv_layer], cache.values[self.kv_layer], self.sinks, strict=True)
        is_windowed = self.kv_layer in cache.windowed
        mixed = [
            self._mix(heads, rows, keys, values, sinks, is_windowed).flatten(1)
            for heads, (keys, values, sinks) in zip(pieces, stored, strict=True)
        ]
        size = self.config.num_heads * self.shape.head_dim
        return self.parallel.join(mixed, size).view(len(mixed[0]), -1, self.shape.head_dim)

    def _mix(
        self,
        heads: Heads,
        rows: Rows,
        keys: torch.Tensor,
        values: torch.Tensor,
        sinks: torch.Tensor | None,
        is_windowed: bool,
    ) -> torch.Tensor:
        """The mixed values [rows, heads, head_dim] of one piece; `keys` and `values` are its [slots, ...]."""
        query, key, value = heads
        if self.shape.shared_with is None:
            # Written before anything is read: the rows of a request see each other through the cache.
            slots = rows.slots_of(is_windowed)
            keys[slots], values[slots] = key, value
        scale, cap = self.config.attention_scale, self.config.attention_softcap
        mixed = []
        for view in rows.views:
            seen = self._seen(keys, values, view.slots_of(is_windowed))
            mixed.append(attend(query[view.rows], *seen, view.masks[self.reach], scale, cap, sinks))
        return torch.cat(mixed)

    def _seen(
        self, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The keys and values [keys, kv_heads, ...] of these slots."""
        return keys[slots], values[slots]


class SharedAttention(Attention):
    """Attention to the keys and values of an earlier layer: it has queries only."""

    def __init__(
        self, take: Take, name: str, config: ModelConfig, layer: int, parallel: TensorParallel = WHOLE
    ) -> None:
        super().__init__(take, name, config, layer, parallel)
        size, self.has_norms = config.num_heads * self.shape.head_dim, config.qk_norm or config.joint_qk_norm
        self.query = Linear(take, f"{name}.q_proj", size, config.qkv_bias, parallel)
        self.query_norm = RMSNorm(take, f"{name}.q_norm", config.rms_norm_eps) if self.has_norms else no_norm

    def heads(self, hidden: torch.Tensor, rotation: Rotation | None) -> list[Heads]:
        """Queries [..., heads, head_dim] of every own piece, and empty keys and values."""
        queries = self._rotated(self.query, self.query_norm, hidden, rotation)
        return [(query, query[..., :0], query[..., :0]) for query in queries]

    def _rotated(
        self, linear: Linear, norm: Norm, hidden: torch.Tensor, rotation: Rotation | None
    ) -> list[torch.Tensor]:
        """Queries or keys [..., heads, head_dim] of each own piece, with norms and rope."""
        return [self.rotated_norm(rotate(part, rotation)) for part in self._normed(linear, norm, hidden)]

    def _normed(self, linear: Linear, norm: Norm, hidden: torch.Tensor) -> list[torch.Tensor]:
        """The heads [..., heads, head_dim] of each own piece, normed one by one or all at once."""
        shape = (*hidden.shape[:-1], -1, self.shape.head_dim)
        parts = linear.parts(hidden)
        if not self.config.joint_qk_norm:
            return [norm(part.view(shape)) for part in parts]
        whole = norm(self.parallel.join(parts, linear.size))
        own = self.parallel.rows(linear.size)
        return [whole[..., columns].contiguous().view(shape) for columns in own]


class GroupedQueryAttention(SharedAttention):
    """Attention with keys and values of its own, which groups of query heads share."""

    def __init__(
        self, take: Take, name: str, config: ModelConfig, layer: int, parallel: TensorParallel = WHOLE
    ) -> None:
        super().__init__(take, name, config, layer, parallel)
        size = self.shape.num_kv_heads * self.shape.head_dim
        self.key = Linear(take, f"{name}.k_proj", size, config.qkv_bias, parallel)
        self.value = (
            self.key
            if self.shape.values_are_keys
            else Linear(take, f"{name}.v_proj", size, config.qkv_bias, parallel)
        )
        self.key_norm = RMSNorm(take, f"{name}.k_norm", config.rms_norm_eps) if self.has_norms else no_norm
        self.value_norm = self.unit if config.value_norm else no_norm

    def heads(self, hidden: torch.Tensor, rotation: Rotation | None) -> list[Heads]:
        """Queries, keys and values of [..., hidden], with norms and rope: [..., heads, head_dim] each."""
        shape = (*hidden.shape[:-1], -1, self.shape.head_dim)
        queries = self._rotated(self.query, self.query_norm, hidden, rotation)
        keys = self._rotated(self.key, self.key_norm, hidden, rotation)
        return [
            (query, key, self.value_norm(value.view(shape)))
            for query, key, value in zip(queries, keys, self.value.parts(hidden), strict=True)
        ]


class LatentAttention(Attention):
    """Attention over the latents of tokens, which are keys and values at once: see latent.py."""

    def __init__(
        self, take: Take, name: str, config: ModelConfig, layer: int, parallel: TensorParallel = WHOLE
    ) -> None:
        super().__init__(take, name, config, layer, parallel)
        assert config.latent is not None
        self.latent = LatentProjections(take, name, config, config.latent)

    def heads(self, hidden: torch.Tensor, rotation: Rotation | None) -> list[Heads]:
        """Queries and keys [..., heads, rope + rank], with rope, and empty values."""
        keys = rotate(self.latent.keys(hidden), rotation)
        return [(rotate(self.latent.queries(hidden), rotation), keys, keys[..., :0])]

    def attend_rows(self, pieces: list[Heads], rows: Rows, cache: KeyValues) -> torch.Tensor:
        """Store latents, and mix the visible ones of each row to its values: [rows, heads, value_dim]."""
        (heads,), (keys,), (values,) = pieces, cache.keys[self.kv_layer], cache.values[self.kv_layer]
        return self.latent.values(self._mix(heads, rows, keys, values, None, self.kv_layer in cache.windowed))

    def _seen(
        self, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        seen = keys[slots]
        return seen, seen[..., -self.latent.latent.rank :]


def query_factors(temperature: Temperature, positions: torch.Tensor) -> torch.Tensor:
    """The factor of the queries at each position: float32 [rows]."""
    periods = torch.floor((positions.float() + temperature.offset) / temperature.period)
    return torch.log1p(periods) * temperature.strength + 1


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
