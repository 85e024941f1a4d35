"""The target over padded sequences agrees with transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from paceline.models.registry import load_checkpoint
from paceline.train.sequences import load_target, target_states
from tests import tiny, tiny_families

LENGTHS = (13, 5, 9)


def padded(seed: int = 0) -> tuple[list[list[int]], torch.Tensor]:
    """Sequences of different lengths, and the same right-padded with tokens that would show."""
    generator = torch.Generator().manual_seed(seed)
    sequences = [
        torch.randint(tiny_families.VOCAB_SIZE, (length,), generator=generator).tolist() for length in LENGTHS
    ]
    return sequences, torch.tensor([row + [7] * (max(LENGTHS) - len(row)) for row in sequences])


@pytest.mark.parametrize("family", ["llama", "mistral-window", "qwen2", "qwen3", "mixtral"])
def test_states_of_padded_sequences_equal_those_of_each_alone(family: str, folder_of: Path) -> None:
    folder = tiny.save_checkpoint(family, folder_of / family)
    model = load_target(load_checkpoint(folder), torch.device("cpu"), torch.float32)
    sequences, tokens = padded()
    states = target_states(model, tokens, (0, 1, 2))
    reference = tiny.random_model(family)
    for row, ids in enumerate(sequences):
        output = reference(torch.tensor([ids]), output_hidden_states=True)
        wanted = torch.cat(output.hidden_states[:3], dim=-1)[0]
        torch.testing.assert_close(states.features[row, : len(ids)], wanted, rtol=1e-4, atol=1e-4)
        logits = states.final[row, : len(ids)] @ model.head.T
        torch.testing.assert_close(logits, output.logits[0], rtol=1e-4, atol=1e-3)
