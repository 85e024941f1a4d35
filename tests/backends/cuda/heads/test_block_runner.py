"""Parallel heads on the device compute what the torch runner computes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from paceline.backends.torch.block_runner import TorchBlockRunner
from paceline.errors import ConfigError
from paceline.models.config import ModelConfig, RopeConfig
from paceline.models.heads.config import HeadConfig
from paceline.models.heads.torch_block import BlockHead
from tests.models.heads.block_driver import LENGTHS, Scattered
from tests.models.heads.driver import random_checkpoint
from tests.models.heads.tiny_heads import (
    BLOCK_CONFIGS,
    DSPARK,
    TARGET_EPS,
    VOCAB,
    random_shared,
    random_tensors,
)

MAX_ROWS = 64
ELSEWHERE = ("windows", "own mask")  # torch only
# a block that reaches over two page borders, with all that a head can have
ALL = replace(DSPARK, fc_norm=True, qkv_bias=True, block=replace(DSPARK.block, size=20))  # type: ignore[type-var]
CONFIGS = {"all": ALL, "dflash2": BLOCK_CONFIGS["dflash2"]}  # interpreted, a pass takes seconds
if torch.cuda.is_available():
    CONFIGS |= {name: config for name, config in BLOCK_CONFIGS.items() if name not in ELSEWHERE}


def random_target(device: torch.device, dtype: torch.dtype) -> Any:
    """The weights that heads share with a target which does not exist otherwise."""
    from paceline.backends.cuda.kernels.products.matrix import Matrix, tile_matrix
    from paceline.backends.cuda.weights.model_weights import Weights
    from paceline.backends.cuda.weights.tiled import padded_size, tiling_for

    shared = random_shared()
    config = ModelConfig("llama", VOCAB, 60, 1, 6, 2, 14, 85, TARGET_EPS, RopeConfig(500.0), 256, False)

    def matrix(weight: torch.Tensor) -> Matrix:
        rows, columns = (padded_size(size) - size for size in weight.shape)
        padded = F.pad(weight, (0, columns, 0, rows)).to(device, dtype)
        return tile_matrix(padded, len(weight), tiling_for(*padded.shape))

    norm = F.pad(shared.norm, (0, 4)).to(device, dtype)
    return Weights(config, matrix(shared.embedding), (), norm, matrix(shared.lm_head))


def make_runner(config: HeadConfig, device: torch.device, dtype: torch.dtype, seed: int = 3) -> Any:
    from paceline.backends.cuda.heads.block_runner import CudaBlockRunner
    from paceline.backends.cuda.heads.block_weights import load_block_weights

    head = random_checkpoint(config, seed)
    return CudaBlockRunner(load_block_weights(head, random_target(device, dtype)), MAX_ROWS)


def make_reference(config: HeadConfig) -> TorchBlockRunner:
    head = BlockHead(config, random_shared()).requires_grad_(False)
    head.load_state_dict({name: torch.from_numpy(each) for name, each in random_tensors(config).items()})
    return TorchBlockRunner(head, MAX_ROWS, random_checkpoint(config).draft_ids)


@pytest.mark.parametrize("name", CONFIGS)
def test_blocks_are_those_of_the_torch_runner(name: str, device: torch.device, dtype: torch.dtype) -> None:
    """Also with values of other passes in all pages, and of another head at the addresses of its weights."""
    config = CONFIGS[name]
    assert config.block is not None
    runner, reference = make_runner(config, device, dtype, seed=8), make_reference(config)
    assert runner.replaced_by(make_runner(config, device, dtype)) is runner
    scattered = Scattered(runner, config)
    scattered.pool.keys.fill_(7.0)  # type: ignore[attr-defined]
    scattered.pool.values.fill_(7.0)  # type: ignore[attr-defined]
    scattered.run(40)
    Scattered(reference, config).run(40)
    slots = np.arange(len(LENGTHS) * config.block.size, dtype=np.int32)
    previous = np.random.default_rng(1).integers(0, VOCAB, len(slots)).astype(np.int32)
    found, expected = runner.guess(slots, previous), reference.guess(slots, previous)
    kept, expected_kept = np.isfinite(found.logits), np.isfinite(expected.logits)
    both = kept & expected_kept  # a pair selector keeps a few
    assert both.sum() >= 0.95 * max(kept.sum(), expected_kept.sum())
    logits, expected_logits = found.logits[both], expected.logits[both]
    assert np.linalg.norm(logits - expected_logits) / np.linalg.norm(expected_logits) < 0.02
    assert (found.confidences is None) == (expected.confidences is None)
    if expected.confidences is not None:
        np.testing.assert_allclose(found.confidences, expected.confidences, rtol=0, atol=0.02)


@pytest.mark.parametrize("name", ELSEWHERE)
def test_heads_that_only_torch_runs_are_refused(name: str, device: torch.device, dtype: torch.dtype) -> None:
    with pytest.raises(ConfigError, match="Use --backend torch"):
        make_runner(BLOCK_CONFIGS[name], device, dtype)
