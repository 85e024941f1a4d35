"""The training losses."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch

from paceline.errors import ConfigError
from paceline.train.objectives.losses import (
    LOSSES,
    TargetPredictions,
    answered_cross_entropy,
    cross_entropy,
    lk_hybrid,
)
from paceline.train.options import TrainOptions

WANTED = torch.tensor([[0.5, 0.3, 0.2, 0.0], [0.1, 0.0, 0.0, 0.9]])
GUESSED = torch.tensor([[0.25, 0.25, 0.25, 0.25], [0.7, 0.1, 0.1, 0.1]])


def test_the_hybrid_loss_mixes_divergence_and_rejection_by_the_overlap() -> None:
    for wanted, guessed in zip(WANTED.tolist(), GUESSED.tolist(), strict=True):
        overlap = sum(map(min, wanted, guessed))
        divergence = sum(p * math.log(p / q) for p, q in zip(wanted, guessed, strict=True) if p)
        share = math.exp(-3 * overlap)
        expected = share * divergence + (1 - share) * (1 - overlap)
        logits = torch.tensor([guessed]).log() + 5.0  # logits may be shifted
        loss = lk_hybrid(logits, predictions(torch.tensor([wanted])))
        assert loss.tolist() == pytest.approx([expected])


def predictions(wanted: torch.Tensor, answered: Sequence[int] = (0, 3)) -> TargetPredictions:
    """Predictions with these distributions; the answered tokens are in no other loss than `ce`."""
    return TargetPredictions(wanted, wanted.argmax(-1), torch.tensor(answered)[: len(wanted)])


def test_the_loss_of_the_answered_token_is_its_negative_log_chance_and_of_an_unknown_one_nothing() -> None:
    logits = (GUESSED.log() + 5.0).requires_grad_()
    losses = answered_cross_entropy(logits, predictions(WANTED, (2, -1)))
    assert losses.tolist() == pytest.approx([-math.log(0.25), 0.0])
    losses.sum().backward()  # type: ignore[no-untyped-call]
    assert logits.grad is not None
    assert logits.grad.abs().sum(-1).gt(0).tolist() == [True, False]


@pytest.mark.parametrize("name", sorted(set(LOSSES) - {"ce"}))
def test_gradient_descent_reaches_the_targets_distribution(name: str) -> None:
    guesses = GUESSED.log().requires_grad_()
    optimizer = torch.optim.Adam([guesses], lr=0.1)
    for _ in range(300):
        optimizer.zero_grad()
        LOSSES[name](guesses, predictions(WANTED)).sum().backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    assert torch.isfinite(guesses).all()
    torch.testing.assert_close(guesses.softmax(-1).detach(), WANTED, rtol=0, atol=0.03)


def test_cross_entropy_is_smallest_for_equal_distributions() -> None:
    entropy = -torch.xlogy(WANTED, WANTED).sum(-1)
    torch.testing.assert_close(cross_entropy(WANTED.clamp(min=1e-30).log(), predictions(WANTED)), entropy)


def test_an_unknown_loss_is_refused() -> None:
    with pytest.raises(ConfigError, match="loss must be one of kl, ce, lk"):
        TrainOptions(loss="mse")
