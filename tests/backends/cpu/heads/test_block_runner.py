"""The compiled runner of parallel heads computes what the torch runner computes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest

from paceline.backends.block_chains import chains_by_guesses
from paceline.backends.cpu import CpuBackend
from paceline.backends.cpu.heads.block_runner import CpuBlockRunner
from paceline.backends.heads import ChainNoise
from paceline.backends.torch.backend import TorchBackend
from paceline.backends.torch.block_runner import TorchBlockRunner
from paceline.models.checkpoint import Checkpoint
from tests.models.heads.block_driver import LENGTHS, Scattered
from tests.models.heads.driver import random_checkpoint
from tests.models.heads.tiny_heads import BLOCK_CONFIGS, DFLASH, DSPARK, VOCAB

MAX_ROWS = 64
SEEDS, TEMPERATURES = np.array([3, 4, 5], np.uint64), np.array([0.0, 1.0, 0.7])  # of the requests
RUN_HERE = dict(BLOCK_CONFIGS)
# a block that reaches over two page borders
RUN_HERE["long"] = replace(DFLASH, qkv_bias=True, block=replace(DFLASH.block, size=20))


@pytest.fixture(scope="module")
def target(checkpoint_of: Callable[[str], Checkpoint]) -> Checkpoint:
    return checkpoint_of("llama-attention-bias")  # its embedding and its head are two matrices


@pytest.fixture(scope="module")
def backend(target: Checkpoint) -> Iterator[CpuBackend]:
    backend = CpuBackend.load(target, quantization="none", threads=2, max_rows=MAX_ROWS)
    yield backend
    backend.close()


@pytest.mark.parametrize("chunk", [7, 20])
@pytest.mark.parametrize("name", RUN_HERE)
def test_blocks_are_those_of_the_torch_runner(name, chunk, target, backend):
    head = random_checkpoint(RUN_HERE[name])
    runner = CpuBlockRunner(head, backend, MAX_ROWS)
    reference = TorchBlockRunner.load(head, TorchBackend.load(target), MAX_ROWS)
    scattered = Scattered(runner, head.config)
    scattered.pool.data[:] = 0x3C  # numbers of no slot
    scattered.run(chunk)
    Scattered(reference, head.config).run(40)
    slots = np.arange(len(LENGTHS) * head.config.block.size, dtype=np.int32)
    previous = np.random.default_rng(1).integers(0, VOCAB, len(slots)).astype(np.int32)
    found, expected = runner.guess(slots, previous), reference.guess(slots, previous)
    np.testing.assert_allclose(found.logits, expected.logits, rtol=0, atol=1e-4)
    assert (found.confidences is None) == (expected.confidences is None)
    if expected.confidences is not None:
        np.testing.assert_allclose(found.confidences, expected.confidences, rtol=0, atol=1e-5)


@pytest.mark.parametrize("least_chance", [0.0, 0.2])
@pytest.mark.parametrize("name", ["dflash", "dspark", "dflash2"])
def test_chains_in_one_call_are_those_of_one_guess_after_the_other(name, least_chance, backend):
    head = random_checkpoint(RUN_HERE[name])
    runner = CpuBlockRunner(head, backend, MAX_ROWS)
    scattered = Scattered(runner, head.config)
    scattered.run(20)
    block = head.config.block
    most, noise = [block.num_drafts, 1, block.num_drafts], ChainNoise(SEEDS, TEMPERATURES)
    blocks = scattered.blocks()
    expected = chains_by_guesses(runner.guess, blocks, block, head.draft_ids, most, least_chance, noise)
    found = runner.run_chains(blocks, most, least_chance, noise)
    assert found.lengths.tolist() == expected.lengths.tolist()
    assert found.lengths.tolist() != most or least_chance == 0.0
    for request, length in enumerate(found.lengths):
        assert found.tokens[request, :length].tolist() == expected.tokens[request, :length].tolist()
        np.testing.assert_allclose(
            found.chances[request, :length], expected.chances[request, :length], rtol=1e-4
        )


def test_a_block_leaves_the_contexts_of_all_requests_alone(backend):
    head = random_checkpoint(DSPARK)
    runner = CpuBlockRunner(head, backend, MAX_ROWS)
    scattered = Scattered(runner, head.config)
    scattered.run(20)
    slots, previous = np.arange(12, dtype=np.int32), np.zeros(12, dtype=np.int32)
    first = runner.guess(slots, previous).logits.copy()
    scattered.run(40)  # over what the first blocks left
    np.testing.assert_array_equal(runner.guess(slots, previous).logits, first)
