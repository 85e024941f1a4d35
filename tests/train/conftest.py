from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from paceline.models.checkpoint import Checkpoint
from paceline.models.registry import load_checkpoint
from paceline.models.transformer.model import Transformer
from paceline.train.data.examples import Examples
from paceline.train.loop import batches
from paceline.train.loop.sequences import load_target
from tests import tiny
from tests.train.sampling import sampled


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """A random target of three layers with its own head."""
    return load_checkpoint(tiny.save_checkpoint("llama-llama3-rope", tmp_path_factory.mktemp("target")))


@pytest.fixture(scope="session")
def target(checkpoint: Checkpoint) -> Transformer:
    return load_target(checkpoint, torch.device("cpu"), torch.float32)


@pytest.fixture(params=[0, 128])
def free_padding(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Padding that attention takes: with 0, documents of different lengths are in groups of their own."""
    monkeypatch.setattr(batches, "FREE_PADDING", request.param)
    return int(request.param)


@pytest.fixture(scope="session")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("families")


@pytest.fixture(scope="session")
def examples(target: Transformer) -> Examples:
    """Answers of the target itself to random prompts of different lengths."""
    generator = np.random.default_rng(0)
    prompts = [generator.integers(0, 173, size=generator.integers(2, 9)).tolist() for _ in range(60)]
    answers = sampled(target, prompts, 0.7, (5, 6), 24)
    pairs = [(prompt, answer) for prompt, answer in zip(prompts, answers, strict=True) if len(answer) > 1]
    sequences = [prompt + answer for prompt, answer in pairs]
    return Examples(
        173,
        np.concatenate(sequences).astype(np.int32),
        np.cumsum([0, *map(len, sequences)]),
        np.array([len(prompt) for prompt, _ in pairs], dtype=np.int32),
        np.arange(len(pairs), dtype=np.int32) // 2,
        ["s"] * len(pairs),
    )
