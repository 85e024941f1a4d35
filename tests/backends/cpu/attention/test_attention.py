"""Attention over blocks has the bits of numpy: one chain of multiply-adds per score and per output."""

from __future__ import annotations

import numpy as np
import pytest

from paceline.backends.cpu.attention.paged_attention import (
    PAGE,
    RESULT_ROWS,
    STATE_BYTES,
    TASK_HEADS,
    attend,
    heads_of_task,
    rows_of_task,
)
from paceline.backends.cpu.attention.tiles import run_products
from paceline.backends.cpu.primitives.compiled import compiled
from paceline.backends.cpu.primitives.rows import soft_cap
from paceline.backends.cpu.primitives.simd import exponential, load, store
from tests.backends.cpu.numbers import assert_same_bits, fma

PAGES = 12  # three chunks
GUARD = 77.0  # what lies beside the results


@compiled(cached=True)
def _attend(*arguments):  # type: ignore[no-untyped-def]
    attend(*arguments)


@compiled(cached=True)
def _exponentials(values, count):  # type: ignore[no-untyped-def]
    for i in range(0, count, 16):
        store(values + 4 * i, exponential(load(values + 4 * i)))


@compiled(cached=True)
def _soft_cap(values, cap, count):  # type: ignore[no-untyped-def]
    soft_cap(values, cap, count)


def attended(
    pages: np.ndarray,
    queries: np.ndarray,
    first: int,
    last: int,
    cap: float,
    sinks: np.ndarray,
    latent: int = 0,
) -> np.ndarray:
    """What rows at positions from `last` on get out of positions from `first` on; a cap comes with sinks.

    `latent`: how many numbers of each key, the last ones, are its value; 0: values are stored.
    """
    rows, each, width = queries.shape
    size = each * (latent or width)
    blocks = np.array([page.ctypes.data for page in pages], np.int64)
    scores = np.full((TASK_HEADS, PAGE * PAGES), np.nan, np.float32)
    room = np.full(STATE_BYTES // 4 + RESULT_ROWS * (width + 15), np.nan, np.float32)
    out = np.full((rows, size + 8), np.float32(GUARD), np.float32)
    _attend(
        run_products.address,
        int(pages.dtype == np.float16),
        queries.ctypes.data,
        each,
        rows,
        width,
        latent or width,
        int(latent > 0),
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
    assert np.all(out[:, size:] == GUARD)
    return out[:, :size].reshape(rows, each, -1)


def softmax(scores: np.ndarray, cap: float, sink: float | None) -> tuple[np.ndarray, np.float32]:
    """Exponentials of blocks of 16 scores, hidden ones being minus infinity, and their sum, lane by lane."""
    if cap > 0:
        hidden = scores == -np.inf
        _soft_cap(scores.ctypes.data, np.float32(cap), scores.size)
        scores[hidden] = -np.inf
    largest = scores.max() if sink is None else max(scores.max(), np.float32(sink))
    lanes = np.zeros(16, np.float32)
    if sink is not None:
        lanes[:] = -np.inf
        lanes[0] = np.float32(sink) - largest
        _exponentials(lanes.ctypes.data, 16)
    weights = scores - largest
    _exponentials(weights.ctypes.data, weights.size)
    for block in weights.reshape(-1, 16):
        lanes += block
    while len(lanes) > 1:
        lanes = lanes[: len(lanes) // 2] + lanes[len(lanes) // 2 :]
    return weights, lanes[0]


def keys_and_values(pages: np.ndarray, width: int) -> tuple[np.ndarray, np.ndarray]:
    """Those of all positions as floats: [positions, width]."""
    floats = pages.astype(np.float32)
    keys = floats[:, : PAGE * width].reshape(PAGES, width, PAGE).swapaxes(1, 2).reshape(-1, width)
    return keys, floats[:, PAGE * width :].reshape(len(keys), -1)[:, :width]


def expected(
    pages: np.ndarray, queries: np.ndarray, first: int, last: int, cap: float, sinks: np.ndarray
) -> np.ndarray:
    """The same position by position: one chain of fused multiply-adds for each score and output column."""
    rows, each, width = queries.shape
    keys, values = keys_and_values(pages, width)
    scores = np.zeros((rows, each, len(keys)), np.float32)
    for d in range(width):
        scores = fma(queries[:, :, d, None], keys[:, d], scores)
    scores *= np.float32(width**-0.5)
    out = np.zeros(queries.shape, np.float32)
    for row in range(rows):
        end = last + row
        scores[row, :, :first], scores[row, :, end + 1 :] = -np.inf, -np.inf
        for head in range(each):
            seen = scores[row, head, first // PAGE * PAGE : (end // PAGE + 1) * PAGE].copy()
            weights, total = softmax(seen, cap, float(sinks[head]) if cap > 0 else None)
            for position in range(first, end + 1):
                weight = weights[position - first // PAGE * PAGE]
                out[row, head] = fma(weight, values[position], out[row, head])
            out[row, head] *= np.float32(1) / total
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


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize(("each", "rows", "first", "last"), [(3, 8, 0, 130), (50, 1, 20, 70), (1, 2, 0, 0)])
def test_latents_in_keys_have_the_bits_of_stored_values(
    dtype: type[np.generic], each: int, rows: int, first: int, last: int
) -> None:
    random, rope, latent = np.random.default_rng(each), 10, 32
    width = rope + latent
    keys = random.standard_normal((PAGES, width, PAGE)).astype(dtype)
    values = np.zeros((PAGES, PAGE, 48), dtype)  # as wide as a key, padded to whole vectors
    values[:, :, :latent] = keys[:, rope:].swapaxes(1, 2)
    stored = np.concatenate((keys.reshape(PAGES, -1), values.reshape(PAGES, -1)), axis=1)
    queries = random.standard_normal((rows, each, width)).astype(np.float32)
    arguments = (queries, first, last, 0.0, np.zeros(each, np.float32))
    found = attended(keys.reshape(PAGES, -1), *arguments, latent=latent)
    assert_same_bits(found, attended(stored, *arguments)[:, :, :latent])


def test_attention_is_that_of_double_precision() -> None:
    random, width, rows = np.random.default_rng(0), 64, 3
    pages = random.standard_normal((PAGES, 2 * PAGE * width)).astype(np.float32)
    queries = random.standard_normal((rows, 2, width)).astype(np.float32)
    found = attended(pages, queries, 5, 100, 0.0, np.zeros(2, np.float32))
    keys, values = (part.astype(np.float64) for part in keys_and_values(pages, width))
    for row in range(rows):
        scores = queries[row] @ keys[5 : 101 + row].T / np.sqrt(width)
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        exact = weights / weights.sum(axis=1, keepdims=True) @ values[5 : 101 + row]
        np.testing.assert_allclose(found[row], exact, atol=1e-5)


def test_a_task_has_many_rows_if_all_threads_have_a_task() -> None:
    assert rows_of_task(1, 3, 3, 2, 2048) == 1
    assert rows_of_task(8, 3, 3, 2, 2048) == 4
    assert rows_of_task(512, 3, 3, 2, 2048) == 16
    assert rows_of_task(512, 3, 3, 2, 32768) == 8  # longer scores, fewer of them
    assert rows_of_task(512, 1, 80, 2, 2048) == 1  # more heads than a task has room for


def test_heads_that_share_keys_are_split_where_threads_would_wait() -> None:
    assert heads_of_task(3, 3, 2) == 3
    assert heads_of_task(1, 128, 2) == 64
    assert heads_of_task(2, 6, 4) == 3
    assert heads_of_task(3, 3, 16) == 1
