"""Requests driven by hand through a runner of parallel heads, as a drafter does it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from paceline.backends.heads import BlockRunner, HeadBatch
from paceline.core.forward import ForwardBatch
from paceline.models.heads.config import HeadConfig

LENGTHS = (37, 3, 16)  # tokens before the anchors: the anchor ends a page, is near its start, begins one
PAGES = 4  # of each request


class Scattered:
    """Requests whose contexts are written to scattered pages, in chunks, and whose blocks run together."""

    def __init__(self, runner: BlockRunner, config: HeadConfig) -> None:
        assert config.block is not None
        rng = np.random.default_rng(0)
        count = len(LENGTHS)
        self.runner, self.block = runner, config.block
        self.pool = runner.make_pool(PAGES * count)
        self.tables = rng.permutation(PAGES * count).reshape(count, PAGES).astype(np.int32)
        width = config.feature_width
        self.features = [rng.standard_normal((length, width), dtype=np.float32) for length in LENGTHS]
        self.anchors = rng.integers(0, 170, count).tolist()

    def run(self, chunk: int) -> None:
        """Write the contexts, `chunk` tokens of each request at a time, and run the blocks."""
        self.write(chunk)
        self.runner.run_blocks(self.blocks())

    def write(self, chunk: int) -> None:
        """Write the contexts, `chunk` tokens of each request at a time."""
        for at in range(0, max(LENGTHS), chunk):
            going = [number for number, length in enumerate(LENGTHS) if at < length]
            parts = [self.features[number][at : at + chunk] for number in going]
            rows = self._batch(going, [at] * len(going), [[0] * len(part) for part in parts])
            self.runner.write_context(HeadBatch(rows, np.concatenate(parts), from_target=True))

    def blocks(self) -> ForwardBatch:
        """The blocks of all requests."""
        masks = [self.block.mask_token_id] * (self.block.size - 1)
        tokens = [[anchor, *masks] for anchor in self.anchors]
        return self._batch(range(len(LENGTHS)), LENGTHS, tokens)

    def _batch(
        self, requests: Sequence[int], starts: Sequence[int], tokens: Sequence[Sequence[int]]
    ) -> ForwardBatch:
        counts = [len(row) for row in tokens]
        places = [range(start, start + count) for start, count in zip(starts, counts, strict=True)]
        return ForwardBatch(
            tokens=np.concatenate(tokens).astype(np.int32),
            positions=np.concatenate(places).astype(np.int32),
            parents=np.concatenate([range(-1, count - 1) for count in counts]).astype(np.int32),
            row_offsets=np.cumsum([0, *counts]).astype(np.int32),
            context_lengths=np.array(starts, np.int32),
            page_tables=self.tables[list(requests)],
            logit_rows=np.empty(0, np.int32),
            pool=self.pool,
        )
