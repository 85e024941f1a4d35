"""Tiny heads for tiny targets."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from paceline.models.config import RopeConfig
from paceline.models.heads.config import HeadConfig
from paceline.models.heads.torch_head import Head, Shared, make_head
from paceline.models.transformer.model import Transformer
from paceline.train.loop.batches import Batch, pack
from tests import tiny_families

DRAFT_IDS = torch.arange(3, tiny_families.VOCAB_SIZE, 2)


SIZES, ANSWERS = (7, 12, 11), (1, 3, 8)  # attention takes the last two together


def random_batch(sizes: Sequence[int] = SIZES, answers: Sequence[int] = ANSWERS) -> Batch:
    """Documents of random tokens."""
    generator = torch.Generator().manual_seed(1)
    ids = [torch.randint(tiny_families.VOCAB_SIZE, (size,), generator=generator).tolist() for size in sizes]
    return pack(ids, answers, torch.device("cpu"))


def by_document(batch: Batch, row: torch.Tensor) -> Sequence[torch.Tensor]:
    """What a packed row [1, tokens, ...] has for each document: [its tokens, ...]."""
    return row[0].split(list(batch.sizes))


def random_head(target: Transformer, **others: int) -> Head:
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
        **others,  # type: ignore[arg-type]
    )
    generator = torch.Generator().manual_seed(5)
    head = make_head(config, Shared(target.embedding, target.head, target.norm.weight, target.norm.eps))
    with torch.no_grad():
        for name, parameter in head.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.2 * noise if "norm" in name else 0.2 * noise)
    return head
