"""The torch runner of parallel heads: blocks behind paged contexts are the formulas, to 1e-4."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from paceline.backends.base import HeadBatch
from paceline.backends.torch_block_runner import TorchBlockRunner
from paceline.core.forward import ForwardBatch
from paceline.models.heads.torch_block import BlockHead
from tests.models.heads.plain_block import PlainBlock
from tests.models.heads.tiny_heads import BLOCK_CONFIGS, VOCAB, random_shared, random_tensors

LENGTHS = (37, 3, 16)  # tokens before the anchors: pages of 16, nearly empty, exactly full


def make_runner(name: str) -> TorchBlockRunner:
    config = BLOCK_CONFIGS[name]
    head = BlockHead(config, random_shared())
    head.load_state_dict({name: torch.from_numpy(values) for name, values in random_tensors(config).items()})
    return TorchBlockRunner(head.requires_grad_(False), max_rows=64)


class Scattered:
    """Requests whose contexts are written to a pool, in chunks, and whose blocks are run together."""

    def __init__(self, runner: TorchBlockRunner, chunk: int) -> None:
        rng = np.random.default_rng(0)
        self.runner, self.chunk = runner, chunk
        self.pool = runner.make_pool(12)
        self.pool.cache.keys[:] = self.pool.cache.values[:] = float("nan")  # what nothing was written to
        self.tables = rng.permutation(12).reshape(3, 4).astype(np.int32)
        width = runner.head.config.feature_width
        self.features = [rng.standard_normal((length, width), dtype=np.float32) for length in LENGTHS]
        self.anchors = rng.integers(0, 170, len(LENGTHS))

    def batch(self, requests: list[int], starts: list[int], tokens: list[list[int]]) -> ForwardBatch:
        counts = [len(row) for row in tokens]
        places = [range(start, start + count) for start, count in zip(starts, counts, strict=True)]
        return ForwardBatch(
            tokens=np.concatenate(tokens).astype(np.int32),
            positions=np.concatenate(places).astype(np.int32),
            parents=np.concatenate([range(-1, count - 1) for count in counts]).astype(np.int32),
            row_offsets=np.cumsum([0, *counts]).astype(np.int32),
            context_lengths=np.array(starts, np.int32),
            page_tables=self.tables[requests],
            logit_rows=np.empty(0, np.int32),
            pool=self.pool,
        )

    def run(self) -> None:
        for at in range(0, max(LENGTHS), self.chunk):
            going = [number for number, length in enumerate(LENGTHS) if at < length]
            parts = [self.features[number][at : at + self.chunk] for number in going]
            rows = self.batch(going, [at] * len(going), [[0] * len(part) for part in parts])
            self.runner.write_context(HeadBatch(rows, np.concatenate(parts), from_target=True))
        block = self.runner.head.block
        masks = [block.mask_token_id] * (block.size - 1)
        tokens = [[int(anchor), *masks] for anchor in self.anchors]
        self.runner.run_blocks(self.batch([0, 1, 2], list(LENGTHS), tokens))


@pytest.mark.parametrize("chunk", [7, 40])
@pytest.mark.parametrize("name", BLOCK_CONFIGS)
def test_blocks_are_those_of_the_formulas(name, chunk):
    runner = make_runner(name)
    scattered = Scattered(runner, chunk)
    scattered.run()
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
    Scattered(runner, 40).run()
    every = runner.guess(np.repeat(np.arange(4, dtype=np.int32), 2), np.tile(np.int32([5, 9]), 4))
    some = runner.guess(np.int32([3, 0]), np.int32([9, 5]))
    np.testing.assert_allclose(some.logits, every.logits[[7, 0]], atol=1e-5)
    assert np.abs(every.logits[0] - every.logits[1]).max() > 0.01, "the token before makes no difference"


def test_a_pool_takes_what_a_page_is_said_to_take():
    runner = make_runner("dflash")
    assert runner.make_pool(3).bytes_per_page == runner.bytes_per_page() == 2 * 2 * 16 * 2 * 14 * 4
