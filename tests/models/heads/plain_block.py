"""A parallel head in plain numpy, one slot, one head and one key at a time: the formulas themselves."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from paceline.models.heads.config import HeadConfig
from paceline.models.heads.torch_head import Shared
from tests.models.heads.tiny_heads import PlainHead


class PlainBlock(PlainHead):
    """Computes a block from the features of all tokens before its anchor, in float64."""

    def __init__(self, config: HeadConfig, shared: Shared) -> None:
        super().__init__(config, shared)
        assert config.block is not None
        self.block = config.block

    def outputs(self, features: np.ndarray, anchor: int) -> np.ndarray:
        """The outputs [slots, hidden] of the block behind these features [tokens, width]."""
        t, before = self.tensors, len(features)
        context = [self.norm(t["fc.weight"] @ self._normed(row), "hidden_norm") for row in features]
        hidden = [self._embedding(token) for token in [anchor] + [self.block.mask_token_id] * self._masks]
        for number, attention in enumerate(self.block.layers):
            layer = f"layers.{number}"
            inputs = [self.norm(state, f"{layer}.input_layernorm") for state in hidden]
            keys = [self._heads(layer, "k", state, place) for place, state in enumerate([*context, *inputs])]
            values = [self._heads(layer, "v", state, 0) for state in [*context, *inputs]]
            after = []
            for slot, (state, residual) in enumerate(zip(inputs, hidden, strict=True)):
                place = before + slot
                seen = [key for key in range(before + len(inputs)) if key < before or key <= place]
                if not attention.causal:
                    seen = list(range(before + len(inputs)))
                if attention.window is not None:
                    seen = [key for key in seen if place - key < attention.window]
                query = self._heads(layer, "q", state, place)
                mixed = self._mixed(query, [keys[key] for key in seen], [values[key] for key in seen])
                a = residual + t[f"{layer}.self_attn.o_proj.weight"] @ mixed
                x = self.norm(a, f"{layer}.post_attention_layernorm")
                gate, up = t[f"{layer}.mlp.gate_proj.weight"] @ x, t[f"{layer}.mlp.up_proj.weight"] @ x
                after.append(a + t[f"{layer}.mlp.down_proj.weight"] @ (gate / (1 + np.exp(-gate)) * up))
            hidden = after
        return np.stack([self.norm(state, "norm") for state in hidden])

    def _normed(self, features: np.ndarray) -> np.ndarray:
        """The features of a token [width], each of them normed where the head has norms for them."""
        if not self.config.fc_norm:
            return features
        parts = np.split(features, self.config.num_features)
        return np.concatenate([self.norm(part, f"fc_norm.{i}") for i, part in enumerate(parts)])

    def guesses(self, outputs: np.ndarray, previous: Sequence[int]) -> tuple[np.ndarray, np.ndarray | None]:
        """Logits, and chances of acceptance, of slots with these outputs after these tokens."""
        t = self.tensors
        logits = outputs @ t.get("lm_head.weight", self.lm_head).T
        before = [t["markov_head.markov_w1.weight"][token] for token in previous] if self._has_markov else []
        if before:
            logits = logits + np.stack([t["markov_head.markov_w2.weight"] @ state for state in before])
        if not self.block.confidence:
            return logits, None
        read = outputs
        if self.block.confidence_with_markov:
            read = np.concatenate((outputs, np.stack(before)), axis=1)
        raw = read @ t["confidence_head.proj.weight"][0] + t["confidence_head.proj.bias"]
        return logits, 1 / (1 + np.exp(-raw))

    @property
    def _masks(self) -> int:
        return self.block.size - 1

    @property
    def _has_markov(self) -> bool:
        return self.block.markov_rank > 0

    def _embedding(self, token: int) -> np.ndarray:
        if token == self.block.mask_token_id and self.block.mask_embedding:
            return self.tensors["mask_embedding"]
        return self.embedding[token]

    def _heads(self, layer: str, part: str, state: np.ndarray, place: int) -> np.ndarray:
        """The queries, keys or values of one slot: [heads, head_dim], rotated unless values."""
        name, t = f"{layer}.self_attn.{part}", self.tensors
        flat = t[f"{name}_proj.weight"] @ state + t.get(f"{name}_proj.bias", 0.0)
        if part == "v":
            return flat.reshape(-1, self.config.head_dim)
        if self.config.qk_norm:
            flat = np.concatenate(
                [self.norm(head, f"{name}_norm") for head in flat.reshape(-1, self.config.head_dim)]
            )
        return self.rotated(flat, place)

    def _mixed(self, query: np.ndarray, keys: list[np.ndarray], values: list[np.ndarray]) -> np.ndarray:
        group, mixed = self.config.num_heads // self.config.num_kv_heads, []
        for head in range(self.config.num_heads):
            shared = head // group
            scores = np.array([query[head] @ key[shared] for key in keys]) / np.sqrt(self.config.head_dim)
            weights = np.exp(scores - scores.max())
            weights /= weights.sum()
            mixed.append(sum(w * value[shared] for w, value in zip(weights, values, strict=True)))
        return np.concatenate(mixed)
