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
            kernels = self._kernels(f"{layer}.attention_conv", inputs)
            inputs = _convolved(inputs, kernels, 0)
            keys = [self._heads(layer, "k", state, place) for place, state in enumerate([*context, *inputs])]
            values = [self._heads(layer, "v", state, 0) for state in [*context, *inputs]]
            attended = []
            for slot, state in enumerate(inputs):
                place = before + slot
                seen = [key for key in range(before + len(inputs)) if key < before or key <= place]
                if not attention.causal:
                    seen = list(range(before + len(inputs)))
                if attention.window is not None:
                    seen = [key for key in seen if place - key < attention.window]
                query = self._heads(layer, "q", state, place)
                mixed = self._mixed(query, [keys[key] for key in seen], [values[key] for key in seen])
                attended.append(t[f"{layer}.self_attn.o_proj.weight"] @ mixed)
            attended = _convolved(attended, kernels, 1)
            hidden = [residual + output for residual, output in zip(hidden, attended, strict=True)]
            inputs = [self.norm(state, f"{layer}.post_attention_layernorm") for state in hidden]
            kernels = self._kernels(f"{layer}.mlp_conv", inputs)
            outputs = []
            for x in _convolved(inputs, kernels, 0):
                gate, up = t[f"{layer}.mlp.gate_proj.weight"] @ x, t[f"{layer}.mlp.up_proj.weight"] @ x
                outputs.append(t[f"{layer}.mlp.down_proj.weight"] @ (gate / (1 + np.exp(-gate)) * up))
            outputs = _convolved(outputs, kernels, 1)
            hidden = [residual + output for residual, output in zip(hidden, outputs, strict=True)]
        return np.stack([self.norm(state, "norm") for state in hidden])

    def _kernels(self, name: str, inputs: list[np.ndarray]) -> list[np.ndarray]:
        """The kernels [side, tap, channel] of each slot; the identity if there are no convolutions."""
        hidden = self.config.hidden_size
        if not self.block.convolution_group:
            return [np.stack([[np.ones(hidden), np.zeros(hidden)]] * 2) for _ in inputs]
        kernels = []
        for x in inputs:
            flat = self.tensors[f"{name}.kernel_projection.weight"] @ x
            groups = hidden // self.block.convolution_group
            kernel = self.tensors[f"{name}.base_kernel"].copy()
            for side in range(2):
                for tap in range(2):
                    for channel in range(hidden):
                        group = channel // self.block.convolution_group
                        kernel[side, tap, channel] += flat[(side * 2 + tap) * groups + group]
            kernels.append(kernel)
        return kernels

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
        if self.block.selector_rank:
            logits = np.stack([self._selected(*slot) for slot in zip(logits, outputs, previous, strict=True)])
        if not self.block.confidence:
            return logits, None
        read = outputs
        if self.block.confidence_with_markov:
            read = np.concatenate((outputs, np.stack(before)), axis=1)
        raw = read @ t["confidence_head.proj.weight"][0] + t["confidence_head.proj.bias"]
        return logits, 1 / (1 + np.exp(-raw))

    def _selected(self, logits: np.ndarray, output: np.ndarray, previous: int) -> np.ndarray:
        """The best logits with what the pair selector adds to them; -inf elsewhere."""
        t, name = self.tensors, "candidate_selector"
        state = t[f"{name}.predecessor_codebook"][previous] * (t[f"{name}.hidden_projection.weight"] @ output)
        selected = np.full_like(logits, -np.inf)
        for token in np.argsort(-logits)[: self.block.selector_candidates]:
            selected[token] = logits[token] + state @ t[f"{name}.successor_codebook"][token]
        return selected

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


def _convolved(states: list[np.ndarray], kernels: list[np.ndarray], side: int) -> list[np.ndarray]:
    """Each slot's state mixed with that of the slot before it; before the first there is nothing."""
    before = [np.zeros_like(states[0]), *states[:-1]]
    return [
        kernel[side, 0] * state + kernel[side, 1] * last
        for kernel, state, last in zip(kernels, states, before, strict=True)
    ]
