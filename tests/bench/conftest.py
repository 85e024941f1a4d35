from __future__ import annotations

from pathlib import Path

import pytest

from tests.models.files import config_of, random_tensors, write_gguf


@pytest.fixture(scope="session")
def tiny_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A llama of two layers with a context of 128, in a .gguf file."""
    path = tmp_path_factory.mktemp("bench") / "tiny.gguf"
    return write_gguf(path, "llama", random_tensors(config_of("llama")))
