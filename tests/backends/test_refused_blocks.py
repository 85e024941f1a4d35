"""Models with blocks that a backend or training does not know are refused before anything is loaded."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from paceline.backends.load import load_backend
from paceline.backends.options import BackendOptions
from paceline.errors import BackendError, UnsupportedModelError
from paceline.models.needs import BACKEND_BLOCKS, missing_blocks
from paceline.models.registry import load_checkpoint
from paceline.train.loop.sequences import load_target
from tests.tiny import save_checkpoint


def test_a_backend_names_the_blocks_it_lacks_and_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = load_checkpoint(save_checkpoint("gemma2", tmp_path))
    monkeypatch.setitem(BACKEND_BLOCKS, "cuda", frozenset({"sandwich norms"}))
    monkeypatch.setattr("paceline.backends.load._LOADERS", {})  # none is reached
    blocks = ", ".join(missing_blocks(checkpoint.config, "cuda"))
    assert blocks
    with pytest.raises(BackendError, match=rf"has {blocks}, for which the cuda .* --backend torch"):
        load_backend(checkpoint, BackendOptions("cuda"), 16)


def test_heads_are_not_trained_for_them(tmp_path: Path) -> None:
    checkpoint = load_checkpoint(save_checkpoint("gemma2", tmp_path))
    with pytest.raises(UnsupportedModelError, match=r"gemma2 model has gelu_tanh activations, .* ngram"):
        load_target(checkpoint, torch.device("cpu"), torch.float32)
