"""Experts in a latent space (Nemotron 3 Super) compute what transformers' do."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from paceline.backends.torch.backend import TorchBackend
from paceline.models.checkpoint import Checkpoint
from paceline.models.needs import model_needs
from paceline.models.registry import load_checkpoint
from paceline.models.transformer.experts import MixtureOfExperts
from tests.backends.driver import drive
from tests.models.test_near_families import CLOSE, PROMPT, greedy
from tests.tiny import random_model, save_checkpoint

FAMILY = "nemotron-h-latent"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return load_checkpoint(save_checkpoint(FAMILY, tmp_path_factory.mktemp(FAMILY)))


@pytest.fixture(scope="module")
def theirs() -> Callable[[list[int]], np.ndarray]:
    """transformers' logits of all tokens."""
    model = random_model(FAMILY)

    def logits(tokens: list[int]) -> np.ndarray:
        with torch.inference_mode():
            found: np.ndarray = model(torch.tensor([tokens])).logits[0].numpy()
        return found

    return logits


def test_logits_and_greedy_tokens_are_those_of_transformers(
    checkpoint: Checkpoint, theirs: Callable[[list[int]], np.ndarray]
) -> None:
    tokens = greedy(drive(TorchBackend.load(checkpoint), pages_each=6)[0], PROMPT[:20])
    assert theirs(tokens)[19:-1].argmax(-1).tolist() == tokens[20:]
    own = drive(TorchBackend.load(checkpoint), pages_each=6)[0].extend(PROMPT)
    np.testing.assert_allclose(own, theirs(PROMPT), rtol=0, atol=CLOSE)


def test_latents_that_are_not_projected_back_are_noticed(
    checkpoint: Checkpoint, theirs: Callable[[list[int]], np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = TorchBackend.load(checkpoint)
    found = [layer.feed_forward for layer in backend.model.layers]
    (experts,) = (own for own in found if isinstance(own, MixtureOfExperts))
    back = experts.from_latent
    monkeypatch.setattr(experts, "from_latent", lambda latents: back(latents.roll(1, -1)))
    wrong = drive(backend, pages_each=6)[0].extend(PROMPT)
    assert np.abs(wrong - theirs(PROMPT)).max() > 100 * CLOSE


def test_the_cuda_backend_refuses_them_by_name(checkpoint: Checkpoint) -> None:
    needs = model_needs(checkpoint, context=64, requests=1)
    refused = {need.backend: need.refused for need in needs}
    assert refused == {"cpu": "", "torch": "", "cuda": "it has no kernels for experts in a latent space"}
