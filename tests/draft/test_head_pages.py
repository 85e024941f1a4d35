"""Features beside pages: what is kept, for how long, and that nothing stale is ever read."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from paceline.draft.draft_cache import Context
from paceline.draft.head_pages import WAITING_PAGES, HeadPages
from paceline.kv.cache import KVCache
from tests.draft.heads.toy_head import ToyHeadRunner
from tests.toy import ToyBackend

SIZE = 4  # of a page
WIDTH = 3


@pytest.fixture
def kv() -> KVCache:
    return KVCache(64, SIZE, max_sequences=2, max_length=128)


@pytest.fixture
def pages(kv) -> HeadPages:
    return HeadPages(kv, ToyHeadRunner(ToyBackend(), np.arange(5)), longest=128, width=WIDTH)


def features(start: int, end: int) -> np.ndarray:
    return np.arange(start, end, dtype=np.float32)[:, None] + 1 + np.arange(WIDTH, dtype=np.float32) / 8


def opened(kv: KVCache, count: int) -> tuple[int, Context]:
    tokens = list(range(count))
    slot, _ = kv.open(tokens)
    return slot, Context(SimpleNamespace(), tokens, kv.page_tables[slot], room=0)


def test_what_was_put_is_read_across_pages_and_the_rest_is_zero(kv, pages):
    _, context = opened(kv, 14)
    pages.put(context.pages, 2, features(2, 5))
    pages.put(context.pages, 5, features(5, 11))
    np.testing.assert_array_equal(pages.features(context.pages, 2, 11), features(2, 11))
    np.testing.assert_array_equal(pages.features(context.pages, 3, 7), features(3, 7))
    assert not pages.features(context.pages, 0, 2).any()
    assert not pages.features(context.pages, 11, 14).any()


def test_of_a_page_whose_slots_are_computed_only_the_last_feature_stays(kv, pages):
    _, context = opened(kv, 14)
    pages.put(context.pages, 0, features(0, 14))
    assert pages.computed(context) == 1
    pages.keep(context, 1, 10)
    assert pages.computed(context) == 10
    kept = pages.features(context.pages, 0, 14)
    expected = features(0, 14)
    expected[[0, 1, 2, 4, 5, 6]] = 0  # of the first two pages all but the last tokens
    np.testing.assert_array_equal(kept, expected)


def test_a_page_that_was_taken_again_has_forgotten_all(kv, pages):
    slot, context = opened(kv, 14)
    pages.put(context.pages, 0, features(0, 14))
    pages.keep(context, 1, 5)
    used = context.pages[:4].tolist()
    kv.release(slot, forget=True)
    _, again = opened(kv, 14)
    assert sorted(again.pages[:4].tolist()) == sorted(used)
    assert pages.computed(again) == 1
    assert not pages.features(again.pages, 0, 14).any()


def test_features_that_nobody_reads_do_not_pile_up(kv, pages):
    _, context = opened(kv, 120)
    pages.put(context.pages, 0, features(0, 120))
    most = 2 * WAITING_PAGES * SIZE
    kept = pages.features(context.pages, 0, 120)
    np.testing.assert_array_equal(kept[-most:], features(120 - most, 120))
    assert (kept[: 120 - most].any(axis=1).reshape(-1, SIZE) == [False, False, False, True]).all()


def test_nothing_is_kept_beyond_the_heads_context(kv):
    pages = HeadPages(kv, ToyHeadRunner(ToyBackend(), np.arange(5)), longest=6, width=WIDTH)
    _, context = opened(kv, 14)
    for start in range(0, 14, 7):
        pages.put(context.pages, start, features(start, start + 7))
    np.testing.assert_array_equal(pages.features(context.pages, 0, 6), features(0, 6))
    assert not pages.features(context.pages, 6, 14).any()
