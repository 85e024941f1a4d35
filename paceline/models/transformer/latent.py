"""Multi-head latent attention (MLA, DeepSeek-V2): the weights that keep one small vector per token.

A token's keys and values of all heads are products of one latent vector, and only that is stored, beside one
rotated key that all heads share. In the cache it is one KV head:

    key   [rotated key | latent]          value   the latent part of the key, which is not stored again

The products with the latent are moved to the other side (absorbed), so that nothing is unpacked per head:

    score = rope(q) · rotated key + (W_uk^T q) · latent           output = W_uv (sum of weights * latent)

and so is what an adapter adds to them: W_uk^T q becomes W_uk^T q + A^T (B_uk^T q).

checkpoint.py's names, here in the order [rotated | other] of rows, which file_layouts.py makes:

    self_attn.q_proj.weight                [heads * (rope + nope), hidden]     or, with a query latent:
    self_attn.{q_a_proj, q_a_layernorm}    [q_rank, hidden], [q_rank]
    self_attn.q_b_proj.weight              [heads * (rope + nope), q_rank]
    self_attn.kv_a_proj_with_mqa.weight    [rope + rank, hidden]
    self_attn.kv_a_layernorm.weight        [rank]
    self_attn.kv_b_proj.weight             [heads * (nope + value), rank]
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from paceline.models.config import LATENT_NORM_EPS, LatentConfig, ModelConfig
from paceline.models.lora import LoraMatrix
from paceline.models.transformer.blocks import Linear, RMSNorm, Take


@dataclass(frozen=True)
class HeadChange:
    """What an adapter adds to kv_b_proj, head by head: W_uk + up_keys down, W_uv + up_values down."""

    down: torch.Tensor  # [low rank, rank]
    up_keys: torch.Tensor  # [heads, nope, low rank]
    up_values: torch.Tensor  # [heads, value, low rank]

    @classmethod
    def of(cls, latent: LatentProjections, change: LoraMatrix) -> HeadChange:
        """The same for the heads of these projections, in their dtype."""
        like = latent.to_keys
        down, both = (
            torch.tensor(own, dtype=like.dtype, device=like.device) for own in (change.down, change.up)
        )
        both = both.view(latent.num_heads, -1, len(down))
        return cls(down, both[:, : latent.latent.nope_dim], both[:, latent.latent.nope_dim :])


class LatentProjections:
    """Queries and keys as they meet in the cache, and the values of mixed latents."""

    def __init__(self, take: Take, name: str, config: ModelConfig, latent: LatentConfig) -> None:
        self.latent, self.num_heads = latent, config.num_heads
        query_size = config.num_heads * (latent.rope_dim + latent.nope_dim)
        self.query = Linear(take, f"{name}.{'q_b_proj' if latent.query_rank else 'q_proj'}", query_size)
        self.query_latent: Linear | None = None
        if latent.query_rank:
            self.query_latent = Linear(take, f"{name}.q_a_proj", latent.query_rank, latent.biases)
            self.query_norm = RMSNorm(take, f"{name}.q_a_layernorm", LATENT_NORM_EPS)
        self.key = Linear(take, f"{name}.kv_a_proj_with_mqa", latent.rope_dim + latent.rank, latent.biases)
        self.key_norm = RMSNorm(take, f"{name}.kv_a_layernorm", LATENT_NORM_EPS)
        both = take(f"{name}.kv_b_proj.weight").view(config.num_heads, -1, latent.rank)
        # [heads, nope, rank] and [heads, value, rank]
        self.to_keys, self.to_values = both[:, : latent.nope_dim], both[:, latent.nope_dim :]
        self.change: HeadChange | None = None

    def queries(self, hidden: torch.Tensor) -> torch.Tensor:
        """[..., heads, rope + rank], not rotated yet."""
        if self.query_latent is not None:
            hidden = self.query_norm(self.query_latent(hidden))
        queries = self.query(hidden).view(*hidden.shape[:-1], self.num_heads, -1)
        rotated, other = queries[..., : self.latent.rope_dim], queries[..., self.latent.rope_dim :]
        absorbed = torch.einsum("...hn,hnl->...hl", other, self.to_keys)
        if self.change is not None:
            low = torch.einsum("...hn,hnr->...hr", other, self.change.up_keys)
            absorbed = absorbed + low @ self.change.down
        return torch.cat((rotated, absorbed), dim=-1)

    def keys(self, hidden: torch.Tensor) -> torch.Tensor:
        """[..., 1, rope + rank], not rotated yet."""
        keys = self.key(hidden)
        rotated, latent = keys[..., : self.latent.rope_dim], keys[..., self.latent.rope_dim :]
        return torch.cat((rotated, self.key_norm(latent)), dim=-1)[..., None, :]

    def values(self, latents: torch.Tensor) -> torch.Tensor:
        """Each head's values [..., heads, value] of its mixed latents [..., heads, rank]."""
        values = torch.einsum("...hl,hvl->...hv", latents, self.to_values)
        if self.change is None:
            return values
        low = torch.nn.functional.linear(latents, self.change.down)
        return values + torch.einsum("...hr,hvr->...hv", low, self.change.up_values)
