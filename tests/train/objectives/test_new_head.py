"""A new head begins like its target, and a widened one as the head that it was made of."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from paceline.models.checkpoint import Checkpoint
from paceline.models.transformer.model import Transformer
from paceline.train.objectives.new_head import (
    choose_draft_ids,
    coverage,
    head_config,
    new_head,
    widened,
    wider_sizes,
)
from paceline.train.options import Eagle3Options
from tests import tiny_families
from tests.train.heads import DRAFT_IDS, random_head

COUNTS = np.arange(tiny_families.VOCAB_SIZE, dtype=np.int64)  # the higher an id, the more frequent


def test_a_widened_head_scores_the_tokens_that_it_knew_as_before(target: Transformer) -> None:
    narrow, narrow_ids = random_head(target, num_layers=2), DRAFT_IDS.numpy().astype(np.int32)
    sizes: dict[str, Any] = {"draft_vocab_size": len(narrow_ids) + 4, "intermediate_size": 50}
    wide, draft_ids = widened(narrow, narrow_ids, replace(narrow.config, **sizes), target, COUNTS, seed=0)
    unknown = sorted(set(COUNTS.tolist()) - set(narrow_ids.tolist()))
    assert draft_ids.tolist() == sorted([*narrow_ids.tolist(), *unknown[-4:]])
    assert wide.logits(torch.zeros(1, 60)).shape == (1, len(draft_ids))
    features, token, position = torch.randn(5, 180), torch.arange(5), torch.arange(5)

    def logits(head: torch.nn.Module) -> torch.Tensor:
        assert isinstance(head, type(narrow))
        mixed = [lambda query, key, value: value.repeat_interleave(3, dim=1)] * 2
        return head.logits(head(head.fuse(features), token, position, *mixed))

    known = np.isin(draft_ids, narrow_ids)
    torch.testing.assert_close(logits(wide)[:, torch.from_numpy(known)], logits(narrow))
    outputs = wide.logits(torch.randn(3, 60))[:, torch.from_numpy(~known)]
    assert outputs.abs().min() > 0  # the target's output weights, not zeros


def test_only_larger_sizes_that_were_asked_for_widen_a_head(target: Transformer) -> None:
    config = replace(random_head(target).config, vocab_size=49_152, draft_vocab_size=4096)
    assert wider_sizes(config, Eagle3Options()) == {}  # the default is larger, but nobody asked
    assert wider_sizes(config, Eagle3Options(draft_vocab_size=6000)) == {"draft_vocab_size": 6000}
    assert wider_sizes(config, Eagle3Options(draft_vocab_size=10**6)) == {"draft_vocab_size": 49_152}
    asked = Eagle3Options(draft_vocab_size=4096, intermediate_size=64)
    assert wider_sizes(config, asked) == {"intermediate_size": 64}


def test_the_draft_vocabulary_is_the_most_frequent_tokens() -> None:
    counts = np.array([3, 0, 9, 3, 5])
    assert choose_draft_ids(counts, 3).tolist() == [0, 2, 4]  # of 0 and 3, alike, the lower
    assert coverage(counts, choose_draft_ids(counts, 3)) == 17 / 20


def test_a_new_head_scores_like_its_target_without_its_certainty(
    target: Transformer, checkpoint: Checkpoint
) -> None:
    draft_ids = np.array([1, 4, 9], dtype=np.int32)
    options = Eagle3Options(draft_vocab_size=3, intermediate_size=32)
    head = new_head(head_config(checkpoint.config, options, None), target, draft_ids, 0)
    state = torch.randn(60, generator=torch.Generator().manual_seed(0))
    size = target.norm.weight.square().mean().sqrt()
    torch.testing.assert_close(head.logits(state), target.logits(state)[[1, 4, 9]] / size)
