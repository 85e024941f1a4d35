"""Tiny GGUF files of every family that llama.cpp's format has, beside the same weights from elsewhere."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from unittest.mock import patch

from paceline.models.checkpoint import Checkpoint
from paceline.models.files.safetensors_writer import encode
from paceline.models.registry import load_checkpoint
from tests import tiny, tiny_families
from tests.models import model_files as files
from tests.models.gguf import test_gguf_families, test_gguf_hybrids
from tests.models.gguf_converter import with_gguf

Pair = tuple[Checkpoint, Checkpoint]  # of a GGUF file, and the model that it was written from


def gguf_pairs(family: str) -> list[Pair]:
    """Every pair of the family; none: it has no architecture there."""
    return [make() for own, make in _makers() if own == family]


def _makers() -> Iterator[tuple[str, Callable[[], Pair]]]:
    """The family of each pair, and what makes it."""
    for name, values in files.MODELS.items():
        if values["model_type"] in files.ARCHITECTURES:
            yield values["model_type"], partial(_written, name)
    for name, family in test_gguf_families.FAMILIES.items():
        yield family.config().model_type, partial(_converted, name)
    yield "qwen3_5_text", partial(_hybrid, "qwen3-5")
    yield "qwen3_5_moe_text", partial(_hybrid, "qwen3-5-moe")


@cache
def _written(name: str) -> Pair:
    """From tensors as backends read them."""
    path = Path(tempfile.mkdtemp()) / "model.gguf"
    config = files.config_of(name)
    tensors = {key: 0.25 * own for key, own in files.random_tensors(config).items()}
    stored = {key: encode(own) for key, own in tensors.items()}
    return load_checkpoint(files.write_gguf(path, name, tensors)), Checkpoint(config, stored, path)


@cache
def _converted(name: str) -> Pair:
    """From transformers' file, by what llama.cpp's converter does."""
    with patch.dict(tiny_families.TORCH_FAMILIES, test_gguf_families.FAMILIES):
        folder = with_gguf(tiny.save_checkpoint(name, Path(tempfile.mkdtemp())))
    return load_checkpoint(folder / "model.gguf"), load_checkpoint(folder)


@cache
def _hybrid(name: str) -> Pair:
    folder = tiny.save_checkpoint(name, Path(tempfile.mkdtemp()))
    model = load_checkpoint(folder)
    return load_checkpoint(test_gguf_hybrids.write(folder / "model.gguf", model)), model
