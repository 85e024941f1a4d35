"""Tiny heads for tiny targets."""

from __future__ import annotations

import torch

from paceline.models.config import RopeConfig
from paceline.models.heads.config import HeadConfig
from paceline.models.heads.torch_head import Head, Shared, make_head
from paceline.models.transformer import Transformer
from tests import tiny_families

DRAFT_IDS = torch.arange(3, tiny_families.VOCAB_SIZE, 2)


def random_head(target: Transformer, **flags: bool) -> Head:
    """A head with random weights and norms for a tiny target; it predicts DRAFT_IDS."""
    config = HeadConfig(
        kind="eagle3",
        vocab_size=tiny_families.VOCAB_SIZE,
        draft_vocab_size=len(DRAFT_IDS),
        hidden_size=60,
        target_hidden_size=60,
        num_heads=6,
        num_kv_heads=2,
        head_dim=10,
        intermediate_size=35,
        rms_norm_eps=1e-5,
        rope=RopeConfig(theta=100.0),
        max_position=256,
        feature_layers=(1, 2, 3),
        **flags,  # type: ignore[arg-type]
    )
    generator = torch.Generator().manual_seed(5)
    head = make_head(config, Shared(target.embedding, target.head, target.norm.weight, target.norm.eps))
    with torch.no_grad():
        for name, parameter in head.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.2 * noise if "norm" in name else 0.2 * noise)
    return head
