"""The training losses."""

from __future__ import annotations

import math

import pytest
import torch

from paceline.errors import ConfigError
from paceline.train.losses import LOSSES, cross_entropy, lk_hybrid
from paceline.train.options import TrainOptions

WANTED = torch.tensor([[0.5, 0.3, 0.2, 0.0], [0.1, 0.0, 0.0, 0.9]])
GUESSED = torch.tensor([[0.25, 0.25, 0.25, 0.25], [0.7, 0.1, 0.1, 0.1]])


def test_the_hybrid_loss_mixes_divergence_and_rejection_by_the_overlap() -> None:
    for wanted, guessed in zip(WANTED.tolist(), GUESSED.tolist(), strict=True):
        overlap = sum(map(min, wanted, guessed))
        divergence = sum(p * math.log(p / q) for p, q in zip(wanted, guessed, strict=True) if p)
        share = math.exp(-3 * overlap)
        expected = share * divergence + (1 - share) * (1 - overlap)
        loss = lk_hybrid(torch.tensor([guessed]).log() + 5.0, torch.tensor([wanted]))  # logits may be shifted
        assert loss.tolist() == pytest.approx([expected])


@pytest.mark.parametrize("name", LOSSES)
def test_gradient_descent_reaches_the_targets_distribution(name: str) -> None:
    guesses = GUESSED.log().requires_grad_()
    optimizer = torch.optim.Adam([guesses], lr=0.1)
    for _ in range(300):
        optimizer.zero_grad()
        LOSSES[name](guesses, WANTED).sum().backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    assert torch.isfinite(guesses).all()
    torch.testing.assert_close(guesses.softmax(-1).detach(), WANTED, rtol=0, atol=0.03)


def test_cross_entropy_is_smallest_for_equal_distributions() -> None:
    entropy = -torch.xlogy(WANTED, WANTED).sum(-1)
    torch.testing.assert_close(cross_entropy(WANTED.clamp(min=1e-30).log(), WANTED), entropy)


def test_an_unknown_loss_is_refused() -> None:
    with pytest.raises(ConfigError, match="loss must be one of kl, lk"):
        TrainOptions(loss="mse")
