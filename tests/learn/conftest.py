from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from paceline.learn.data.rows import TrafficRow
from paceline.learn.data.store import StoreLimits, TrafficStore
from paceline.models.checkpoint import Checkpoint
from paceline.models.heads.config import TargetName
from paceline.models.heads.fingerprint import target_fingerprint
from paceline.models.registry import load_checkpoint
from paceline.models.transformer.model import Transformer
from paceline.train.loop.sequences import load_target
from paceline.train.objectives.eagle3_objective import Eagle3Objective
from paceline.train.options import Eagle3Options
from tests import tiny, tiny_families
from tests.train.sampling import sampled


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """A random target of three layers with its own head."""
    return load_checkpoint(tiny.save_checkpoint("llama-llama3-rope", tmp_path_factory.mktemp("target")))


@pytest.fixture(scope="session")
def target_name(checkpoint: Checkpoint) -> TargetName:
    return TargetName(target_fingerprint(checkpoint), checkpoint.source.name)


@pytest.fixture(scope="session")
def rows(checkpoint: Checkpoint) -> list[TrafficRow]:
    """Greedy answers of the target, which repeat themselves soon: a head can learn them."""
    target = load_target(checkpoint, torch.device("cpu"), torch.float32)
    generator = np.random.default_rng(0)
    prompts = [generator.integers(0, tiny_families.VOCAB_SIZE, size=3).tolist() for _ in range(120)]
    answers = sampled(target, prompts, 0.0, (), 20)
    return [
        TrafficRow(tuple(prompt), tuple(answer), "s", time=1000.0 + number)
        for number, (prompt, answer) in enumerate(zip(prompts, answers, strict=True))
    ]


@pytest.fixture(scope="session")
def traffic(
    rows: list[TrafficRow], target_name: TargetName, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A store with these rows."""
    folder = tmp_path_factory.mktemp("traffic")
    store = TrafficStore(folder, target_name, tiny_families.VOCAB_SIZE, StoreLimits(), lambda: 2000.0)
    for row in rows:
        store.append(row)
    store.close()
    return folder


@pytest.fixture(scope="session")
def head(checkpoint: Checkpoint, target_name: TargetName, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A new EAGLE-3 head for the target: it guesses badly."""
    target: Transformer = load_target(checkpoint, torch.device("cpu"), torch.float32)
    options = Eagle3Options(draft_vocab_size=tiny_families.VOCAB_SIZE, intermediate_size=32)

    class Counts:
        """All tokens are answered equally often."""

        tokens = ()

        @staticmethod
        def answer_counts() -> np.ndarray[tuple[int], np.dtype[np.int64]]:
            return np.ones(tiny_families.VOCAB_SIZE, dtype=np.int64)

    folder = tmp_path_factory.mktemp("head")
    Eagle3Objective(target, Counts(), options, target_name).snapshot()(folder)  # type: ignore[arg-type]
    return folder
