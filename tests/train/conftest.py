from __future__ import annotations

from pathlib import Path

import pytest
import torch

from paceline.models.checkpoint import Checkpoint
from paceline.models.registry import load_checkpoint
from paceline.models.transformer import Transformer
from paceline.train.sequences import load_target
from tests import tiny


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """A random target of three layers with its own head."""
    return load_checkpoint(tiny.save_checkpoint("llama-llama3-rope", tmp_path_factory.mktemp("target")))


@pytest.fixture(scope="session")
def target(checkpoint: Checkpoint) -> Transformer:
    return load_target(checkpoint, torch.device("cpu"), torch.float32)


@pytest.fixture(scope="session")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("families")
