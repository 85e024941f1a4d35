"""The checkpoints that the tests of this room share."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest

from paceline.models.checkpoint import Checkpoint
from paceline.models.registry import load_checkpoint, resolve
from tests.backends.cpu.checkpoints import (
    all_blocks_checkpoint,
    blocks_checkpoint,
    latent_checkpoint,
    uneven_checkpoint,
)
from tests.tiny import save_checkpoint
from tests.tiny_families import FAMILIES, MORE_FAMILIES, MORE_HYBRIDS, TORCH_FAMILIES


@pytest.fixture(scope="session")
def checkpoint_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Checkpoint]:
    """A checkpoint by name: a tiny family, one of checkpoints.py, or a real model's alias."""
    made = {"blocks": blocks_checkpoint, "uneven": uneven_checkpoint, "all blocks": all_blocks_checkpoint}
    made |= {"latent": latent_checkpoint}

    @functools.cache
    def load(name: str) -> Checkpoint:
        if name in made:
            return made[name]()
        if name in FAMILIES | TORCH_FAMILIES | MORE_HYBRIDS | MORE_FAMILIES:
            return load_checkpoint(save_checkpoint(name, tmp_path_factory.mktemp(name)))
        return load_checkpoint(resolve(name))

    return load
