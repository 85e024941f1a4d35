"""Warm-up passes, which compile kernels and capture graphs before the first request."""

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
    """A pass over a request's first `rows` tokens, with tokens sampled after up to `most_sampled` rows."""
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
