"""A head with a smaller vocabulary than its pilot: what it accepts, and its file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from paceline.models.heads.checkpoint import load_head, write_head
from paceline.train.loop.batches import pack
from paceline.train.plan.vocabulary import accepted_within, restrict_vocabulary
from tests.models.heads.driver import random_checkpoint
from tests.models.heads.tiny_heads import DSPARK, EAGLE3


def test_a_chain_ends_at_a_token_outside_of_the_vocabulary() -> None:
    batch = pack([[5, 1, 2, 9, 3, 4], [1, 2, 9]], [1, 1], torch.device("cpu"))
    accepted = torch.tensor([[0, 4, 3, 2, 1, 0, 0, 1, 0]])
    within = accepted_within(accepted, batch, np.array([1, 2, 3, 4, 5], dtype=np.int32))
    assert within.tolist() == [[0, 1, 0, 2, 1, 0, 0, 0, 0]]
    everything = np.arange(10, dtype=np.int32)
    assert accepted_within(accepted, batch, everything).tolist() == accepted.tolist()


@pytest.mark.parametrize("config", [DSPARK, EAGLE3], ids=["dspark", "eagle3"])
def test_a_restricted_head_scores_the_tokens_that_are_left_as_before(config, tmp_path: Path) -> None:
    head = random_checkpoint(replace(config, own_lm_head=True))
    write_head(head, tmp_path, "vllm")
    before = load_head(tmp_path)
    ids = before.draft_ids if before.draft_ids is not None else np.arange(before.config.draft_vocab_size)
    kept = ids[1::3].astype(np.int32)
    restrict_vocabulary(tmp_path, kept)
    after = load_head(tmp_path)
    assert after.draft_ids.tolist() == kept.tolist()
    assert after.config.draft_vocab_size == len(kept)
    was, now = (each.tensors["lm_head.weight"].float32().astype(np.float16) for each in (before, after))
    assert np.array_equal(now, was[1::3])
