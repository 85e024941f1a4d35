"""The model of `benchmarks gpu` in plain torch: library products and attention, one CUDA graph per step."""

from __future__ import annotations

from typing import cast

import torch
import torch.nn.functional as F

from paceline.models.transformer.attention import GroupedQueryAttention, Norm, Rotation, rotate
from paceline.models.transformer.blocks import MLP, RMSNorm
from paceline.models.transformer.layer import Layer
from paceline.models.transformer.model import Transformer


class PlainDecode:
    """Greedy decoding of several requests of equal length with a static cache."""

    def __init__(self, model: Transformer, requests: int, prompt_tokens: int, longest: int) -> None:
        config, table = model.config, model.embedding
        self.model = model
        self.position = torch.full((1,), prompt_tokens, device=table.device)
        self.tokens = torch.randint(0, config.vocab_size, (requests,), device=table.device)
        self.columns = torch.arange(longest, device=table.device)
        shape = (config.num_layers, requests, config.num_kv_heads, longest, config.head_dim)
        self.keys = torch.randn(shape, dtype=table.dtype, device=table.device)
        self.values = torch.randn(shape, dtype=table.dtype, device=table.device)
        self._run()
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self._run()

    def step(self) -> None:
        """Generate one more token per request."""
        self.graph.replay()

    def _run(self) -> None:
        model = self.model
        hidden = F.embedding(self.tokens, model.embedding)
        visible = (self.columns <= self.position)[None, None, None, :]
        rotation = cast(Rotation, model.rotations(self.position)[model.config.rope])
        for index, layer in enumerate(model.layers):
            mixed = self._attention(index, layer, _norm(hidden, layer.attention_norm), rotation, visible)
            hidden = hidden + mixed
            block, normed = cast(MLP, layer.feed_forward), _norm(hidden, layer.feed_forward_norm)
            activated = F.silu(F.linear(normed, block.gate.weight)) * F.linear(normed, block.up.weight)
            hidden = hidden + F.linear(activated, block.down.weight)
        self.tokens.copy_(F.linear(_norm(hidden, model.norm), model.head).argmax(-1))
        self.position += 1

    def _attention(
        self,
        index: int,
        layer: Layer,
        normed: torch.Tensor,
        rotation: Rotation,
        visible: torch.Tensor,
    ) -> torch.Tensor:
        attention = cast(GroupedQueryAttention, layer.attention)
        query, key, value = (
            F.linear(normed, linear.weight, linear.bias).view(len(normed), -1, self.model.config.head_dim)
            for linear in (attention.query, attention.key, attention.value)
        )
        self.keys[index].index_copy_(2, self.position, rotate(key, rotation)[:, :, None])
        self.values[index].index_copy_(2, self.position, value[:, :, None])
        mixed = F.scaled_dot_product_attention(
            rotate(query, rotation)[:, :, None],
            self.keys[index],
            self.values[index],
            attn_mask=visible,
            enable_gqa=True,
        )
        return F.linear(mixed.flatten(1), attention.output.weight)


def _norm(hidden: torch.Tensor, norm: Norm) -> torch.Tensor:
    assert isinstance(norm, RMSNorm), "only llama's blocks are measured"
    return F.rms_norm(hidden, norm.weight.shape, norm.weight, norm.eps)
