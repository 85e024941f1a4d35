"""Attention over blocks has the bits of numpy: one chain of multiply-adds per score and per output."""

from __future__ import annotations

import numpy as np
import pytest

from paceline.backends.cpu.attention import PAGE, RESULT_ROWS, TASK_HEADS, attend, rows_of_task, softmax
from paceline.backends.cpu.attention_tiles import run_products
from paceline.backends.cpu.compiled import compiled
from tests.backends.cpu.numbers import assert_same_bits, fma

PAGES = 12  # three chunks
GUARD = 77.0  # what lies beside the results


@compiled(cached=True)
def _attend(*arguments):  # type: ignore[no-untyped-def]
    attend(*arguments)


@compiled(cached=True)
def _softmax(scores, first, last, factor, cap, sink):  # type: ignore[no-untyped-def]
    return softmax(scores, first, last, factor, cap, sink)


def attended(
    pages: np.ndarray, queries: np.ndarray, first: int, last: int, cap: float, sinks: np.ndarray
) -> np.ndarray:
    """What rows at positions from `last` on get out of positions from `first` on; a cap comes with sinks."""
    rows, each, width = queries.shape
    blocks = np.array([page.ctypes.data for page in pages], np.int64)
    scores = np.full((TASK_HEADS, PAGE * PAGES), np.nan, np.float32)
    room = np.full(16 + RESULT_ROWS * (width + 15), np.nan, np.float32)
    out = np.full((rows, each * width + 8), np.float32(GUARD), np.float32)
    _attend(
        run_products.address,
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
    return out[:, : each * width].reshape(queries.shape)


def expected(
    pages: np.ndarray, queries: np.ndarray, first: int, last: int, cap: float, sinks: np.ndarray
) -> np.ndarray:
    """The same position by position. Only the softmax itself is the compiled one."""
    rows, each, width = queries.shape
    padded = -(-width // 16) * 16
    floats = pages.astype(np.float32)
    keys = floats[:, : PAGE * width].reshape(PAGES, width, PAGE).swapaxes(1, 2).reshape(-1, width)
    values = floats[:, PAGE * width :].reshape(-1, padded)[:, :width]
    scores = np.zeros((rows, each, len(keys)), np.float32)
    for d in range(width):
        scores = fma(queries[:, :, d, None], keys[:, d], scores)
    out = np.zeros(queries.shape, np.float32)
    for row in range(rows):
        end = last + row
        for head in range(each):
            sink = sinks[head:].ctypes.data if cap > 0 else 0
            weights = scores[row, head].copy()
            total = _softmax(weights.ctypes.data, first, end, np.float32(width**-0.5), np.float32(cap), sink)
            for position in range(first, end + 1):
                out[row, head] = fma(weights[position], values[position], out[row, head])
            out[row, head] *= np.float32(1) / np.float32(total)
    return out


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize(
    ("width", "each", "rows", "first", "last"),
    [
        (64, 3, 8, 0, 130),
        (64, 3, 1, 70, 150),
        (64, 1, 4, 0, 63),
        (128, 6, 4, 1, 64),
        (48, 7, 1, 0, 186),
        (18, 50, 1, 0, 70),
        (18, 2, 2, 0, 0),
    ],
)
def test_attention_has_the_bits_of_numpy(
    dtype: type[np.generic], width: int, each: int, rows: int, first: int, last: int
) -> None:
    random = np.random.default_rng(each)
    padded = -(-width // 16) * 16
    pages = random.standard_normal((PAGES, PAGE * (width + padded))).astype(dtype)
    pages[-1, -padded:] = np.nan  # of a position that none of the rows sees
    queries = random.standard_normal((rows, each, width)).astype(np.float32)
    arguments = (pages, queries, first, last, 0.0 if width == 64 else 2.5)
    sinks = np.linspace(-3, 3, each, dtype=np.float32)
    assert_same_bits(attended(*arguments, sinks), expected(*arguments, sinks))


@pytest.mark.parametrize(("first", "last"), [(0, 0), (3, 40), (16, 79)])
@pytest.mark.parametrize("sink", [None, -1.0, 9.0])
def test_softmax_is_that_of_double_precision(first: int, last: int, sink: float | None) -> None:
    scores = np.random.default_rng(last).standard_normal(96).astype(np.float32) * 8
    found, held = scores.copy(), np.array([sink or 0.0], np.float32)
    total = _softmax(
        found.ctypes.data, first, last, np.float32(0.5), np.float32(0), held.ctypes.data if sink else 0
    )
    seen = 0.5 * scores[first : last + 1].astype(np.float64)
    largest = max(seen.max(), sink) if sink else seen.max()
    weights = np.exp(seen - largest)
    np.testing.assert_allclose(found[first : last + 1], weights, rtol=1e-5)
    np.testing.assert_allclose(total, weights.sum() + (np.exp(sink - largest) if sink else 0), rtol=1e-5)


def test_many_rows_are_one_task_where_threads_have_enough_of_them() -> None:
    assert rows_of_task(1, 3, 3, 2, 2048) == 1
    assert rows_of_task(8, 3, 3, 2, 2048) == 4
    assert rows_of_task(512, 3, 3, 2, 2048) == 16
    assert rows_of_task(512, 3, 3, 2, 32768) == 8  # longer scores, fewer of them
    assert rows_of_task(512, 1, 80, 2, 2048) == 1  # more heads than a task has room for
