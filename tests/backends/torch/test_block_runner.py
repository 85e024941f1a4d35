"""The torch runner of parallel heads: blocks behind paged contexts are the formulas, to 1e-4."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from paceline.backends.torch.block_runner import TorchBlockRunner
from paceline.models.heads.torch_block import BlockHead
from tests.models.heads.block_driver import LENGTHS, Scattered
from tests.models.heads.plain_block import PlainBlock
from tests.models.heads.tiny_heads import BLOCK_CONFIGS, VOCAB, random_shared, random_tensors


def make_runner(name: str) -> TorchBlockRunner:
    config = BLOCK_CONFIGS[name]
    head = BlockHead(config, random_shared())
    head.load_state_dict({name: torch.from_numpy(values) for name, values in random_tensors(config).items()})
    return TorchBlockRunner(head.requires_grad_(False), max_rows=64)


@pytest.mark.parametrize("chunk", [7, 40])
@pytest.mark.parametrize("name", BLOCK_CONFIGS)
def test_blocks_are_those_of_the_formulas(name, chunk):
    runner = make_runner(name)
    scattered = Scattered(runner, runner.head.config)
    for stored in (*scattered.pool.cache.keys, *scattered.pool.cache.values):
        stored[:] = float("nan")  # what no slot is written to
    scattered.run(chunk)
    size = runner.head.block.size
    plain = PlainBlock(runner.head.config, random_shared())
    for number in range(len(LENGTHS)):
        previous = np.random.default_rng(number).integers(0, VOCAB, size).astype(np.int32)
        slots = np.arange(number * size, (number + 1) * size, dtype=np.int32)
        found = runner.guess(slots, previous)
        outputs = plain.outputs(scattered.features[number].astype(np.float64), scattered.anchors[number])
        logits, confidences = plain.guesses(outputs, previous)
        np.testing.assert_allclose(found.logits, logits, atol=1e-4)
        assert (found.confidences is None) == (confidences is None)
        if confidences is not None:
            np.testing.assert_allclose(found.confidences, confidences, atol=1e-5)


def test_slots_may_be_asked_for_in_any_order_with_any_token_before():
    runner = make_runner("dspark")
    Scattered(runner, runner.head.config).run(40)
    every = runner.guess(np.repeat(np.arange(4, dtype=np.int32), 2), np.tile(np.int32([5, 9]), 4))
    some = runner.guess(np.int32([3, 0]), np.int32([9, 5]))
    np.testing.assert_allclose(some.logits, every.logits[[7, 0]], atol=1e-5)
    assert np.abs(every.logits[0] - every.logits[1]).max() > 0.01, "the token before makes no difference"


def test_a_pool_takes_bytes_per_page_for_each_page():
    runner = make_runner("dflash")
    assert runner.make_pool(3).bytes_per_page == runner.bytes_per_page() == 2 * 2 * 16 * 2 * 14 * 4
