"""Perplexity equals that of transformers' loss, window by window."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.engine.perplexity import negative_log_likelihood, perplexity
from paceline.backends.torch.backend import TorchBackend
from paceline.bench.text import perplexity_text
from paceline.errors import ConfigError, RequestError
from paceline.models.registry import load_checkpoint
from tests.tiny import random_model, save_checkpoint
from tests.tiny_families import VOCAB_SIZE

TEXT = np.random.default_rng(2).integers(0, VOCAB_SIZE, 300).tolist()


@pytest.fixture(scope="module")
def backend(tmp_path_factory: pytest.TempPathFactory) -> TorchBackend:
    folder: Path = save_checkpoint("llama", tmp_path_factory.mktemp("llama"))
    return TorchBackend.load(load_checkpoint(folder), max_rows=50)


def expected_perplexity(context: int) -> float:
    model = random_model("llama")
    total = 0.0
    with torch.inference_mode():
        for start in range(0, len(TEXT) - 1, context - 1):
            window = torch.tensor(TEXT[start : start + context])
            logits = model(window[None]).logits[0, :-1].double()
            total += torch.nn.functional.cross_entropy(logits, window[1:], reduction="sum").item()
    return float(np.exp(total / (len(TEXT) - 1)))


@pytest.mark.parametrize("context", [2, 70, 100, 1000])
def test_every_token_but_the_first_counts_once(backend: TorchBackend, context: int) -> None:
    assert perplexity(backend, TEXT, context) == pytest.approx(expected_perplexity(context), rel=1e-5)


def test_huge_logits_do_not_overflow() -> None:
    logits = np.array([[3e38, 3e38, -3e38]], dtype=np.float32)
    assert negative_log_likelihood(logits, np.array([1], np.int32)) == pytest.approx(np.log(2))


def test_the_fixed_text_is_long_enough_to_compare_models() -> None:
    assert 1500 < len(perplexity_text().split()) < 2500


def test_too_little_text_or_context_is_an_error(backend: TorchBackend) -> None:
    with pytest.raises(RequestError, match="needs at least 2"):
        perplexity(backend, [5])
    with pytest.raises(ConfigError, match="give 2 or more"):
        perplexity(backend, TEXT, context=1)
