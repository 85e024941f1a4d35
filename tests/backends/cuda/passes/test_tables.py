"""What a batch says reaches the device as the kernels read it."""

from __future__ import annotations

import numpy as np
import torch

from paceline.core.forward import Choices, ForwardBatch, chain_parents
from tests.toy import ToyBackend


def test_padding_comes_before_prefill_tiles() -> None:
    """The kernels start with the last tile: padding would delay the work."""
    from paceline.backends.cuda.passes.tables import rows_of

    batch = ForwardBatch(
        tokens=np.zeros(50, dtype=np.int32),
        positions=np.concatenate([np.arange(40), np.arange(10)]).astype(np.int32),
        parents=chain_parents([40, 10]),
        row_offsets=np.array([0, 40, 50], dtype=np.int32),
        context_lengths=np.zeros(2, dtype=np.int32),
        page_tables=np.arange(6, dtype=np.int32).reshape(2, 3),
        logit_rows=np.zeros(0, dtype=np.int32),
        pool=ToyBackend().make_pool(6),
    )
    rows = rows_of(batch, 16, 1, np.array([True, True]), 16, 6)
    assert rows.prefill_tiles.tolist() == [[0, 0, 0, 16, 32, 40], [0, 0, 16, 16, 8, 10], [0, 0, 0, 0, 0, 3]]


def test_sampled_rows_follow_the_rows_with_wanted_logits(device: torch.device) -> None:
    from paceline.backends.cuda.passes.tables import DeviceTables, rows_of

    tables = DeviceTables(16, 64, device)
    seeds = np.array([3, 2**63 + 1], dtype=np.uint64)
    batch = ForwardBatch(
        tokens=np.array([7, 8, 9], dtype=np.int32),
        positions=np.array([40, 41, 42], dtype=np.int32),
        parents=chain_parents([3]),
        row_offsets=np.array([0, 3], dtype=np.int32),
        context_lengths=np.array([40], dtype=np.int32),
        page_tables=np.arange(3, dtype=np.int32)[None],
        logit_rows=np.array([1], dtype=np.int32),
        pool=ToyBackend().make_pool(3),
        choices=Choices(np.array([0, 2], dtype=np.int32), seeds, np.array([0.0, 0.7])),
    )
    tables.send(batch, rows_of(batch, 16, 1))
    assert tables.output_rows(3).tolist() == [1, 0, 2]
    temperatures, keys, positions = tables.options(3)
    assert temperatures.tolist() == [0.0, 0.0, 0.7]
    assert keys.cpu().numpy().view(np.uint64)[1:].tolist() == seeds.tolist()
    assert positions.tolist()[1:] == [40, 42]
