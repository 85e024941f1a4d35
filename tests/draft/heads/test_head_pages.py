"""Features stored beside pages: what is stored, for how long, and that nothing stale is read."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from paceline.draft.heads.head_pages import HeadPages
from paceline.draft.model.draft_cache import Context
from paceline.kv.cache import KVCache
from tests.models.heads.toy_head import ToyHeadRunner
from tests.toy import ToyBackend

SIZE = 4  # of a page
WIDTH = 3
ONE_PART = np.array([0])


@pytest.fixture
def kv() -> KVCache:
    return KVCache(64, SIZE, max_sequences=2, max_length=128)


@pytest.fixture
def pages(kv) -> HeadPages:
    return HeadPages(kv, ToyHeadRunner(ToyBackend(), np.arange(5)), longest=128, width=WIDTH)


def features(start: int, end: int) -> np.ndarray:
    return (np.arange(start, end, dtype=np.float32)[:, None] + 1) * 2.0 ** np.arange(WIDTH, dtype=np.float32)


def put(pages: HeadPages, slot: int, start: int, end: int) -> None:
    pages.put(np.array([[slot, start, 0, end - start]]), features(start, end), ONE_PART)


def opened(kv: KVCache, count: int) -> tuple[int, Context]:
    tokens = list(range(count))
    slot, _ = kv.open(tokens)
    return slot, Context(SimpleNamespace(slot=slot), tokens, kv.page_tables[slot], room=0)


def test_stored_features_are_read_across_pages_and_missing_ones_are_zero(kv, pages):
    slot, context = opened(kv, 14)
    put(pages, slot, 2, 5)
    put(pages, slot, 5, 11)
    np.testing.assert_array_equal(pages.features([(context, 2, 11)]), features(2, 11))
    np.testing.assert_array_equal(pages.features([(context, 3, 7)]), features(3, 7))
    assert not pages.features([(context, 0, 2)]).any()
    assert not pages.features([(context, 11, 14)]).any()


def test_runs_of_several_sequences_are_put_at_once(kv, pages):
    (first, one), (second, other) = opened(kv, 14), opened(kv, 9)
    spans = np.array([[first, 3, 5, 2], [first, 5, 0, 1], [second, 0, 1, 4]])  # slot, position, row, count
    pages.put(spans, features(50, 57), ONE_PART)
    np.testing.assert_array_equal(pages.features([(one, 3, 6)]), features(50, 57)[[5, 6, 0]])
    np.testing.assert_array_equal(pages.features([(other, 0, 5)])[:4], features(50, 57)[1:5])


def test_features_of_several_sequences_are_read_at_once(kv, pages):
    (first, one), (second, other) = opened(kv, 14), opened(kv, 9)
    put(pages, first, 0, 14)
    put(pages, second, 2, 9)
    read = pages.features([(other, 1, 4), (one, 3, 6)])
    np.testing.assert_array_equal(read, [np.zeros(WIDTH), *features(2, 4), *features(3, 6)])


def test_a_feature_is_the_parts_of_a_row_that_are_asked_for(kv, pages):
    slot, context = opened(kv, 2)
    row = np.arange(1, 7, dtype=np.float32)[None]  # of six layers
    pages.put(np.array([[slot, 0, 0, 1]]), row, np.array([4, 0, 2]))
    assert pages.features([(context, 0, 1)]).tolist() == [[5.0, 1.0, 3.0]]


def test_slots_can_be_computed_at_any_time_and_their_features_stay(kv, pages):
    slot, context = opened(kv, 14)
    put(pages, slot, 0, 14)
    assert pages.computed([context]) == [1]
    pages.keep([(context, 1, 10)])
    assert pages.computed([context]) == [10]
    np.testing.assert_array_equal(pages.features([(context, 0, 14)]), features(0, 14))


def test_features_of_a_reused_page_are_forgotten(kv, pages):
    slot, context = opened(kv, 14)
    put(pages, slot, 0, 14)
    pages.keep([(context, 1, 5)])
    used = context.pages[:4].tolist()
    kv.release(slot, forget=True)
    _, again = opened(kv, 14)
    assert sorted(again.pages[:4].tolist()) == sorted(used)
    assert pages.computed([again]) == [1]
    assert not pages.features([(again, 0, 14)]).any()


def test_nothing_is_kept_beyond_the_heads_context(kv):
    pages = HeadPages(kv, ToyHeadRunner(ToyBackend(), np.arange(5)), longest=6, width=WIDTH)
    slot, context = opened(kv, 14)
    for start in range(0, 14, 7):
        put(pages, slot, start, start + 7)
    np.testing.assert_array_equal(pages.features([(context, 0, 6)]), features(0, 6))
    assert not pages.features([(context, 6, 14)]).any()


def test_features_of_any_size_are_rounded_to_eight_bits(kv):
    values = np.array([[0.0, -1.0, 1 + 2**-8, 1 + 3 * 2**-9, 3.0e38, -1e-30, 6.6e7]], dtype=np.float32)
    pages = HeadPages(kv, ToyHeadRunner(ToyBackend(), np.arange(5)), longest=6, width=7)
    slot, context = opened(kv, 2)
    pages.put(np.array([[slot, 0, 0, 1]]), values, ONE_PART)
    (rounded,) = pages.features([(context, 0, 1)])
    assert rounded[:4].tolist() == [0.0, -1.0, 1 + 2**-7, 1 + 2**-7]
    np.testing.assert_allclose(rounded, values[0], rtol=2**-8)
