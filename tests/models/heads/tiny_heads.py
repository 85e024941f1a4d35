"""Tiny random heads of every kind and flag, and the spec's formulas in plain numpy to hold them to."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from paceline.models.config import RopeConfig
from paceline.models.heads.config import BlockAttention, BlockConfig, HeadConfig, expected_tensors
from paceline.models.heads.torch_head import Head, Shared, make_head

VOCAB = 173
TARGET_HIDDEN = 60
TARGET_EPS = 1e-5

# Sizes of its own in every direction, so that no two can be mistaken for each other
EAGLE3 = HeadConfig(
    kind="eagle3",
    vocab_size=VOCAB,
    draft_vocab_size=91,
    hidden_size=60,
    target_hidden_size=TARGET_HIDDEN,
    num_heads=6,
    num_kv_heads=2,
    head_dim=14,
    intermediate_size=85,
    rms_norm_eps=1e-4,
    rope=RopeConfig(theta=500.0),
    max_position=256,
)
EAGLE = replace(EAGLE3, kind="eagle", draft_vocab_size=VOCAB, own_lm_head=False)
MTP = replace(EAGLE, kind="mtp", feature_layers=(3,), norm_output=True, qkv_bias=True)

CONFIGS = {
    "eagle3": EAGLE3,
    "fc_norm": replace(EAGLE3, fc_norm=True),
    "norm_before_fc": replace(EAGLE3, norm_before_fc=True),
    "norm_output": replace(EAGLE3, norm_output=True),
    "norm_before_residual": replace(EAGLE3, norm_before_residual=True),
    "all flags": replace(EAGLE3, fc_norm=True, norm_output=True, norm_before_residual=True, fc_bias=True),
    "two features": replace(EAGLE3, feature_layers=(3, 1)),
    "target's head": replace(EAGLE3, own_lm_head=False, draft_vocab_size=VOCAB),
    "own embedding": replace(EAGLE3, hidden_size=44, own_embedding=True),
    "linear rope": replace(EAGLE3, rope=RopeConfig(1000.0, "linear", 2.5)),
    "eagle": EAGLE,
    "eagle with bias": replace(EAGLE, fc_bias=True),
    "mtp": MTP,
    "mtp, norms elsewhere": replace(MTP, norm_output=False, norm_features=True, qkv_bias=False),
}


P_EAGLE = replace(EAGLE3, num_layers=3, mask_token_id=170)

_FULL, _MASK = (BlockAttention(),) * 2, 171
DFLASH = replace(
    EAGLE3,
    kind="dflash",
    feature_layers=(1, 3),
    qk_norm=True,
    draft_vocab_size=VOCAB,
    own_lm_head=False,
    block=BlockConfig(5, _MASK, _FULL),
)
_SPARK = BlockConfig(4, _MASK, _FULL, True, markov_rank=9, confidence=True, confidence_with_markov=True)
DSPARK = replace(DFLASH, kind="dspark", draft_vocab_size=91, own_lm_head=True, block=_SPARK)

BLOCK_CONFIGS = {
    "dflash": DFLASH,
    "jetspec": replace(DFLASH, block=BlockConfig(5, _MASK, (BlockAttention(None, True),) * 2)),
    "windows": replace(
        DFLASH, block=BlockConfig(5, _MASK, (BlockAttention(6), BlockAttention(), BlockAttention(3, True)))
    ),
    "own mask": replace(
        DFLASH, qk_norm=False, qkv_bias=True, block=BlockConfig(5, 10**6, _FULL, mask_embedding=True)
    ),
    "dflash2": replace(
        DFLASH,
        block=replace(DFLASH.block, convolution_group=12, selector_rank=7, selector_candidates=16),
    ),
    "dspark": DSPARK,
    "dspark with norms": replace(DSPARK, fc_norm=True),
    "dspark, plain confidence": replace(DSPARK, block=replace(_SPARK, confidence_with_markov=False)),
    "dspark without heads": replace(DSPARK, block=BlockConfig(4, _MASK, _FULL, True)),
}


def random_tensors(config: HeadConfig, seed: int = 3) -> dict[str, np.ndarray]:
    """Every tensor of a head, norms too, at random."""
    rng = np.random.default_rng(seed)
    tensors = {}
    for name, shape in expected_tensors(config):
        noise = rng.standard_normal(shape, dtype=np.float32)
        tensors[name] = 1 + 0.2 * noise if "norm" in name else 0.08 * noise
    return tensors


def random_shared(seed: int = 4, hidden: int = TARGET_HIDDEN) -> Shared:
    """Weights of a target that does not exist otherwise."""
    generator = torch.Generator().manual_seed(seed)
    embedding, lm_head = (torch.randn(VOCAB, hidden, generator=generator) for _ in range(2))
    return Shared(embedding, lm_head * 0.1, 1 + 0.2 * torch.randn(hidden, generator=generator), TARGET_EPS)


def torch_head(config: HeadConfig, shared: Shared) -> Head:
    """The network of a random head."""
    head = make_head(config, shared)
    tensors = random_tensors(config)
    head.load_state_dict({name: torch.from_numpy(values) for name, values in tensors.items()})
    return head


class PlainHead:
    """One sequence of slots, computed one slot and one key at a time, in float64, from the formulas."""

    def __init__(self, config: HeadConfig, shared: Shared) -> None:
        self.config = config
        self.tensors = {name: v.astype(np.float64) for name, v in random_tensors(config).items()}
        self.embedding, self.lm_head, self.target_norm = (
            tensor.numpy().astype(np.float64) for tensor in (shared.embedding, shared.lm_head, shared.norm)
        )
        self.keys: list[np.ndarray] = []
        self.values: list[np.ndarray] = []

    def slot(self, state: np.ndarray, token: int, position: int, seen: list[int]) -> np.ndarray:
        """The output of one more slot, which sees itself and the earlier slots `seen`."""
        t, c = self.tensors, self.config
        embedded = t.get("embed_tokens.weight", self.embedding)[token]
        if c.kind == "eagle":
            u = t["fc.weight"] @ np.concatenate([embedded, state]) + t.get("fc.bias", 0.0)
            residual = u
        elif c.kind == "mtp":
            both = self.norm(embedded, "embedding_norm"), self.norm(state, "state_norm")
            residual = t["fc.weight"] @ np.concatenate(both)
            u = self.norm(residual, "midlayer.input_layernorm")
        else:
            normed_state = self.norm(state, "midlayer.hidden_norm")
            u = np.concatenate([self.norm(embedded, "midlayer.input_layernorm"), normed_state])
            residual = normed_state if c.norm_before_residual else state
        attention = "midlayer.self_attn"
        q, k, v = (
            t[f"{attention}.{part}_proj.weight"] @ u + t.get(f"{attention}.{part}_proj.bias", 0.0)
            for part in "qkv"
        )
        query = self.rotated(q, position)
        self.keys.append(self.rotated(k, position))
        self.values.append(v.reshape(-1, c.head_dim))
        mixed = []
        for head in range(c.num_heads):
            shared = head // (c.num_heads // c.num_kv_heads)
            places = [*seen, len(self.keys) - 1]
            scores = np.array([query[head] @ self.keys[p][shared] for p in places]) / np.sqrt(c.head_dim)
            weights = np.exp(scores - scores.max())
            weights /= weights.sum()
            mixed.append(sum(w * self.values[p][shared] for w, p in zip(weights, places, strict=True)))
        a = residual + t[f"{attention}.o_proj.weight"] @ np.concatenate(mixed)
        x = self.norm(a, "midlayer.post_attention_layernorm")
        gate = t["midlayer.mlp.gate_proj.weight"] @ x
        up = t["midlayer.mlp.up_proj.weight"] @ x
        return a + t["midlayer.mlp.down_proj.weight"] @ (gate / (1 + np.exp(-gate)) * up)

    def fuse(self, feature: np.ndarray) -> np.ndarray:
        c = self.config
        if c.kind == "mtp" and not c.norm_features:
            return feature
        if c.kind != "eagle3":
            return feature / np.sqrt((feature**2).mean() + TARGET_EPS) * self.target_norm
        if c.fc_norm:
            parts = np.split(feature, c.num_features)
            feature = np.concatenate([self.norm(part, f"fc_norm.{i}") for i, part in enumerate(parts)])
        if c.norm_before_fc:
            feature = self.norm(feature, "input_norm")
        return self.tensors["fc.weight"] @ feature + self.tensors.get("fc.bias", 0.0)

    def feed_back(self, output: np.ndarray) -> np.ndarray:
        return self.norm(output, "norm") if self.config.norm_output else output

    def logits(self, output: np.ndarray) -> np.ndarray:
        if self.config.kind != "eagle":
            output = self.norm(output, "norm")
        return self.tensors.get("lm_head.weight", self.lm_head) @ output

    def norm(self, values: np.ndarray, name: str) -> np.ndarray:
        scale = np.sqrt((values**2).mean() + self.config.rms_norm_eps)
        return values / scale * self.tensors[f"{name}.weight"]

    def rotated(self, flat: np.ndarray, position: int) -> np.ndarray:
        size = self.config.head_dim
        heads = flat.reshape(-1, size)
        out = np.empty_like(heads)
        for pair in range(size // 2):
            angle = position / self.config.rope.factor * self.config.rope.theta ** (-2 * pair / size)
            first, second = heads[:, pair], heads[:, pair + size // 2]
            out[:, pair] = first * np.cos(angle) - second * np.sin(angle)
            out[:, pair + size // 2] = second * np.cos(angle) + first * np.sin(angle)
        return out
