"""The target over packed documents agrees with transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from paceline.models.registry import load_checkpoint
from paceline.train.loop.sequences import load_target, target_states
from tests import tiny
from tests.train.heads import by_document, random_batch

LENGTHS = (5, 9, 13, 12)  # attention takes the last two together


@pytest.mark.parametrize("family", ["llama", "mistral-window", "qwen2", "qwen3", "mixtral"])
def test_states_of_packed_documents_equal_those_of_each_alone(
    family: str, folder_of: Path, free_padding: int
) -> None:
    folder = tiny.save_checkpoint(family, folder_of / family)
    model = load_target(load_checkpoint(folder), torch.device("cpu"), torch.float32)
    batch = random_batch(LENGTHS, [0] * 4)
    assert [len(group.sizes) for group in batch.groups] == ([4] if free_padding else [1, 1, 2])
    states = target_states(model, batch, (0, 1, 2))
    reference = tiny.random_model(family)
    rows = (by_document(batch, each) for each in (batch.tokens, states.features, states.final))
    for ids, features, final in zip(*rows, strict=True):
        output = reference(ids[None], output_hidden_states=True)
        wanted = torch.cat(output.hidden_states[:3], dim=-1)[0]
        torch.testing.assert_close(features, wanted, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(final @ model.head.T, output.logits[0], rtol=1e-4, atol=1e-3)
