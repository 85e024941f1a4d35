"""Attention over widened chunks of blocks gives the bits of attention that reads the blocks as they are."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from paceline.backends.cpu import attention, attention_chunks, attention_tiles
from paceline.backends.cpu.attention_tiles import PAGE
from paceline.backends.cpu.compiled import compiled
from tests.backends.cpu.numbers import assert_same_bits

PAGES = 12  # three chunks
GUARD = 77.0  # what lies beside the results

attend_at_once, attend_in_chunks = attention.attend, attention_chunks.attend


@compiled(cached=True)
def _at_once(*arguments):  # type: ignore[no-untyped-def]
    attend_at_once(*arguments)


@compiled(cached=True)
def _in_chunks(*arguments):  # type: ignore[no-untyped-def]
    attend_in_chunks(*arguments)


def attended(
    run: Any, kernels: Any, pages: np.ndarray, queries: np.ndarray, first: int, last: int, cap: float
) -> np.ndarray:
    """What rows at positions from `last` on get out of positions from `first` on; a cap comes with sinks."""
    rows, each, width = queries.shape
    sinks = np.linspace(-3, 3, each, dtype=np.float32)
    blocks = np.array([page.ctypes.data for page in pages], np.int64)
    scores = np.full((attention_chunks.TASK_HEADS, PAGE * PAGES), np.nan, np.float32)
    room = np.full(16 + attention_chunks.RESULT_ROWS * (width + 15), np.nan, np.float32)
    out = np.full((rows, each * width + 8), np.float32(GUARD), np.float32)
    run(
        kernels.run_score.address,
        kernels.run_mix.address,
        int(pages.dtype == np.float16),
        queries.ctypes.data,
        each,
        rows,
        width,
        blocks.ctypes.data,
        first,
        last,
        np.float32(width**-0.5),
        np.float32(cap),
        sinks.ctypes.data if cap > 0 else 0,
        scores.ctypes.data,
        scores.strides[0],
        room.ctypes.data,
        out.ctypes.data,
        out.strides[0],
    )
    assert np.all(out[:, each * width :] == GUARD)
    return out[:, : each * width]


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("width", [64, 48, 18])
@pytest.mark.parametrize(("each", "rows"), [(1, 1), (3, 1), (7, 1), (30, 1), (1, 4), (2, 2)])
@pytest.mark.parametrize(("first", "last"), [(0, 0), (0, 63), (1, 64), (0, 130), (70, 150), (0, 186)])
def test_chunks_give_the_bits_of_blocks(
    dtype: type[np.generic], width: int, each: int, rows: int, first: int, last: int
) -> None:
    random = np.random.default_rng(each)
    padded = -(-width // 16) * 16
    pages = random.standard_normal((PAGES, PAGE * (width + padded))).astype(dtype)
    pages[-1, -1] = np.nan  # of a position that none of the rows sees
    queries = random.standard_normal((rows, each, width)).astype(np.float32)
    cap = 0.0 if width == 64 else 2.5
    found = attended(_in_chunks, attention_chunks, pages, queries, first, last, cap)
    assert_same_bits(found, attended(_at_once, attention_tiles, pages, queries, first, last, cap))


def test_many_rows_are_one_task_where_threads_have_enough_of_them() -> None:
    assert attention_chunks.rows_of_task(1, 3, 3, 2) == 1
    assert attention_chunks.rows_of_task(8, 3, 3, 2) == 4
    assert attention_chunks.rows_of_task(512, 3, 3, 2) == 8
    assert attention_chunks.rows_of_task(512, 1, 40, 2) == 1  # more heads than a task has room for
