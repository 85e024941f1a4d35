from __future__ import annotations

import gc
from pathlib import Path

import pytest

from tests.models.model_files import config_of, random_tensors, write_gguf


@pytest.fixture
def tiny_gguf(tiny_file: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A llama of two layers with a context of 128, in a .gguf file.

    Garbage collection between engines is skipped: they are tiny, and a collection over everything that tests
    have loaded takes a third of a second.
    """
    monkeypatch.setattr(gc, "collect", lambda *generation: 0)
    return tiny_file


@pytest.fixture(scope="session")
def tiny_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bench") / "tiny.gguf"
    return write_gguf(path, "llama", random_tensors(config_of("llama")))
