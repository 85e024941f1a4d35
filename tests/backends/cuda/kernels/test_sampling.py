"""The device draws the tokens that the host draws from the same logits, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from paceline.core.params import SamplingParams
from paceline.core.sampling import SamplingState
from paceline.verify.sampling import Sampler

SEEDS = [0, 7, 2**40 + 5, 2**63 + 1]
POSITIONS = [0, 3, 1000, 65535]


def draw(logits: torch.Tensor, temperature: float, device: torch.device) -> tuple[list[int], torch.Tensor]:
    """The tokens of rows [4, vocab], and the scores that won."""
    from paceline.backends.cuda.kernels.sampling.gumbel import candidates_for, gumbel_argmax, take_best

    vocab = logits.shape[1]
    candidates = candidates_for(4, vocab, device)
    temperatures = torch.full((4,), temperature, dtype=torch.float64, device=device)
    seeds = torch.from_numpy(np.array(SEEDS, dtype=np.uint64).view(np.int64)).to(device)
    positions = torch.tensor(POSITIONS, dtype=torch.int32, device=device)
    gumbel_argmax(logits.to(device), vocab, temperatures, seeds, positions, candidates, 4)
    tokens = torch.empty(4, dtype=torch.int32, device=device)
    take_best(candidates, tokens)
    return tokens.tolist(), candidates.scores.cpu().max(-1).values


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_tokens_are_those_of_the_host(temperature: float, device: torch.device) -> None:
    from paceline.verify.kernels import gumbel

    vocab = 2500  # more than a block, and not whole blocks
    logits = torch.randn(4, vocab, generator=torch.Generator().manual_seed(1)) * 2
    tokens, scores = draw(logits, temperature, device)
    for row, token in enumerate(tokens):
        state = SamplingState(SamplingParams(temperature=temperature), SEEDS[row], (), ())
        assert token == Sampler(vocab).sample(state, logits[row].numpy(), POSITIONS[row] + 1, 0)
        if temperature:
            noise = gumbel(np.uint64(SEEDS[row]), np.uint64(POSITIONS[row] + 1), np.array([token]))[0]
            assert float(scores[row]) == float(logits[row, token]) / temperature + noise  # every bit


def test_ties_go_to_the_lowest_id_and_unusable_logits_give_no_token(device: torch.device) -> None:
    logits = torch.zeros(4, 2500)
    logits[1, [2200, 40]] = 3.0
    logits[2, 17] = torch.nan
    logits[3, 2400] = torch.inf
    tokens, _ = draw(logits, 0.0, device)
    assert tokens == [0, 40, -1, -1]
