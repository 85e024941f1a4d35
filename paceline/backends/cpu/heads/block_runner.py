"""CpuBlockRunner: parallel draft heads as compiled passes.

A block is one pass of a small model whose rows attend to each other. Their keys and values go to the
request's pages, up to the end of the anchor's page, and beyond that to spare pages of the pool, because a
request holds no pages for a whole block. Nothing reads them after the pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from paceline.backends.cpu import job as fields
from paceline.backends.cpu.attention.paged_attention import PAGE
from paceline.backends.cpu.backend import CpuBackend
from paceline.backends.cpu.compiled_model import CpuPool
from paceline.backends.cpu.heads.block_chains import PairHead, Walk, walk_blocks
from paceline.backends.cpu.heads.head_runner import CpuHead
from paceline.backends.heads import BlockGuesses, BlockRunner, ChainNoise, HeadBatch, HeadChains, first_slots
from paceline.core.arrays import Float32Array, Int32Array
from paceline.core.forward import ForwardBatch, KVPool
from paceline.models.heads.checkpoint import HeadCheckpoint


class CpuBlockRunner(CpuHead, BlockRunner):
    """A BlockRunner that shares the threads, and some weights, of a CpuBackend."""

    def __init__(
        self, head: HeadCheckpoint, beside: CpuBackend, max_rows: int, quantization: str = "auto"
    ) -> None:
        block = head.config.block
        assert block is not None, "the head is a parallel one"
        super().__init__(head, beside, max_rows, quantization)
        self._size, self._first_guess = block.size, block.first_guess
        ids = () if head.draft_ids is None else head.draft_ids
        self._target_ids = np.array(ids, dtype=np.int64)  # [draft vocabulary] empty: the same ids
        self._pages_each = -(-(block.size - 1) // PAGE)  # most spare pages of a block
        self._spare_pages = max(1, max_rows // block.size) * self._pages_each
        self._base: Float32Array = np.empty((0, 0), dtype=np.float32)  # [rows, padded vocabulary] of a block
        self._pairs = PairHead(head, quantized=beside.quantization != "none")
        self._confidence = _floats(head, "confidence_head.proj.weight")  # [1, hidden (+ rank)]
        self._confidence_bias = _floats(head, "confidence_head.proj.bias")  # [1]

    def make_pool(self, num_pages: int) -> CpuPool:
        return super().make_pool(num_pages + self._spare_pages)

    def prepare(self, pool: KVPool) -> None:
        """Touch the memory of the pool and, by a pass of `max_rows` rows, of the buffers."""
        assert isinstance(pool, CpuPool)
        pool.take_memory()
        rows = min(
            self.max_rows, (pool.num_pages - self._spare_pages) * PAGE - 1, self.config.max_position - 2
        )
        if rows > 0:
            self.write_context(first_slots(pool, PAGE, rows))

    def write_context(self, batch: HeadBatch) -> None:
        """Write the keys and values of committed tokens in all layers, in one pass."""
        self._fill(self._features, batch)
        self._job[fields.INPUTS_AT], self._job[fields.FROM_TARGET] = self._features_at, 1
        self._run(batch.rows, batch.rows.logit_rows[:0])

    def run_blocks(self, blocks: ForwardBatch) -> None:
        """Run the blocks of requests: the logits and outputs of all their rows."""
        self._job[fields.INPUTS_AT] = self._job[fields.FROM_TARGET] = 0
        rows = np.arange(blocks.num_rows, dtype=np.int32)
        self._run(replace(blocks, page_tables=self._with_spare_pages(blocks)), rows)
        self._base = self._logits[: len(rows)]

    def guess(self, slots: Int32Array, previous: Int32Array) -> BlockGuesses:
        """Logits of rows of the last blocks, and their confidences."""
        logits, before = self._pairs.guess(self._base, self._states, slots, previous)
        logits = logits[:, : self.config.vocab_size]
        if self._confidence is None:
            return BlockGuesses(logits, None)
        inputs = self._states[slots, : self.config.hidden_size]
        if inputs.shape[1] < self._confidence.shape[1]:
            inputs = np.concatenate((inputs, before), axis=1)
        raw = inputs @ self._confidence[0] + self._confidence_bias
        return BlockGuesses(logits, 1.0 / (1.0 + np.exp(-raw)))

    def run_chains(
        self, blocks: ForwardBatch, most: Sequence[int], least_chance: float, noise: ChainNoise
    ) -> HeadChains:
        """The best chain from each block, in one compiled call. `guess` cannot be called after it."""
        self.run_blocks(blocks)
        walk = Walk(
            logits=self._base,
            vocabulary=self.config.vocab_size,
            size=self._size,
            first=self._first_guess,
            anchors=blocks.tokens[blocks.row_offsets[:-1]],
            contexts=blocks.context_lengths + 1,
            most=np.array(most, dtype=np.int32),
            seeds=noise.seeds,
            temperatures=noise.temperatures,
            target_ids=self._target_ids,
            states=self._states,
            hidden=self.config.hidden_size,
            confidence=np.empty(0, np.float32) if self._confidence is None else self._confidence[0],
            bias=0.0 if self._confidence_bias is None else float(self._confidence_bias[0]),
        )
        return walk_blocks(self._pairs.weights, walk, least_chance)

    def _with_spare_pages(self, blocks: ForwardBatch) -> Int32Array:
        """The page tables up to each anchor's page, and spare pages after it: int32 [requests, pages]."""
        assert isinstance(blocks.pool, CpuPool)
        held = blocks.context_lengths // PAGE + 1
        tables = np.zeros((len(held), held.max() + self._pages_each), dtype=np.int32)
        spare = blocks.pool.num_pages - self._spare_pages + np.arange(len(held) * self._pages_each)
        for table, known, count, more in zip(
            tables, blocks.page_tables, held, spare.reshape(len(held), -1), strict=True
        ):
            table[:count], table[count : count + self._pages_each] = known[:count], more
        return tables


def _floats(head: HeadCheckpoint, name: str) -> Float32Array | None:
    """A tensor of the head as float32; None if it has no tensor of this name."""
    return head.tensors[name].float32() if name in head.tensors else None
