"""The passes by which a backend compiles its kernels and captures its graphs before requests come."""

from __future__ import annotations

import numpy as np

from paceline.core.forward import Choices, ForwardBatch, KeptFeatures, KVPool


def warm_up_pass(
    pool: KVPool,
    rows: int,
    page_size: int,
    most_sampled: int,
    feature_layers: tuple[int, ...],
    kept: tuple[KeptFeatures, ...],
) -> ForwardBatch:
    """A pass over one request's first rows that samples a token after each of the first of them."""
    count = np.arange(rows, dtype=np.int32)
    sampled = count[:most_sampled]
    return ForwardBatch(
        tokens=np.zeros(rows, dtype=np.int32),
        positions=count,
        parents=count - 1,
        row_offsets=np.array([0, rows], dtype=np.int32),
        context_lengths=np.zeros(1, dtype=np.int32),
        page_tables=np.arange(-(-rows // page_size), dtype=np.int32)[None],
        logit_rows=count[:0],
        pool=pool,
        feature_layers=feature_layers,
        choices=Choices(sampled, np.zeros(len(sampled), dtype=np.uint64), np.zeros(len(sampled))),
        kept_features=kept,
    )
