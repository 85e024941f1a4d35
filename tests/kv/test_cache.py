"""Pages are shared exactly when tokens are equal from the root on, and never read once freed."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.forward import DeviceMemory
from paceline.errors import ConfigError
from paceline.kv import sizing
from paceline.kv.cache import KVCache
from paceline.kv.sizing import PageBytes, available_memory, check_memory_limit, size_cache
from tests.toy import ToyBackend, ToyPool

PAGE = 4


def cache(num_pages=16, **options):
    return KVCache(num_pages, PAGE, max_sequences=8, max_length=64, **options)


def fill(kv, tokens, **options):
    """Open a slot for the tokens and commit them all; the slot and how many were found."""
    slot, found = kv.open(tokens, **options)
    kv.commit(slot, tokens, len(tokens) - found)
    return slot, found


def test_full_pages_are_found_again_after_release():
    kv = cache()
    slot, found = fill(kv, list(range(10)))
    assert found == 0
    kv.release(slot)
    _, found = fill(kv, list(range(10)))
    assert found == 8
    assert (kv.prefix_queries, kv.prefix_hits) == (20, 8)


def test_the_last_token_is_never_found_because_its_logits_are_needed():
    kv = cache()
    fill(kv, list(range(8)))
    _, found = kv.open(list(range(8)))
    assert found == 4


def test_running_sequences_share_pages():
    kv = cache()
    first, _ = fill(kv, list(range(9)))
    second, found = kv.open(list(range(9)))
    assert found == 8
    assert kv.page_tables[first, :2].tolist() == kv.page_tables[second, :2].tolist()
    assert kv.page_tables[first, 2] != kv.page_tables[second, 2]


def test_equal_tokens_after_a_different_beginning_are_not_shared():
    kv = cache()
    fill(kv, [1, 1, 1, 1, 5, 6, 7, 8, 9])
    _, found = kv.open([2, 2, 2, 2, 5, 6, 7, 8, 9])
    assert found == 0


def test_another_salt_or_reuse_off_finds_nothing():
    kv = cache()
    fill(kv, list(range(9)), salt="a")
    assert kv.open(list(range(9)), salt="b")[1] == 0
    assert kv.open(list(range(9)), salt="a", reuse=False)[1] == 0
    assert kv.open(list(range(9)), salt="a")[1] == 8
    without = cache(enable_prefix_caching=False)
    fill(without, list(range(9)))
    assert without.open(list(range(9)))[1] == 0


def test_generated_tokens_are_found_too():
    kv = cache()
    tokens = [1, 2, 3]
    slot, _ = kv.open(tokens)
    kv.commit(slot, tokens, 3)
    for token in range(10, 16):
        tokens.append(token)
        assert kv.reserve(slot, len(tokens))
        kv.commit(slot, tokens, 1)
    _, found = kv.open([*tokens, 99])
    assert found == 8


def test_equal_pages_of_two_sequences_become_one():
    kv = cache()
    first, _ = kv.open(list(range(9)))
    second, _ = kv.open(list(range(9)))
    kv.commit(first, list(range(9)), 9)
    kv.commit(second, list(range(9)), 9)
    assert kv.page_tables[first, :2].tolist() == kv.page_tables[second, :2].tolist()
    assert kv.pages.num_available == 16 - 4  # two shared pages and one partial page each


def test_pages_that_no_later_row_attends_to_are_released():
    kv, tokens = cache(), list(range(30))
    kv.add_pool(ToyBackend(), window=6)
    slot, _ = kv.open(tokens[:1])
    for end in range(1, 31):
        assert kv.reserve(slot, end)
        kv.commit(slot, tokens[:end], 1)
        assert kv.pages.num_pages - kv.pages.num_available == -(-end // PAGE) - _first_page_in(6, end)
    other, _ = kv.open(list(range(100, 152)))  # takes the pages of the beginning
    kv.release(other)
    assert kv.open(tokens)[1] == 0


def test_a_pool_without_a_window_keeps_all_pages():
    kv = cache()
    kv.add_pool(ToyBackend(), window=6)
    kv.add_pool(ToyBackend())
    fill(kv, list(range(30)))
    assert kv.pages.num_available == 16 - 8


def test_a_page_after_one_that_others_hold_by_now_is_not_indexed():
    kv = cache(num_pages=4)
    kv.add_pool(ToyBackend(), window=6)
    first, failed = [fill(kv, list(range(4)))[0] for _ in range(2)]
    kv.release(failed, forget=True)  # the index has no page any more after which those of `first` could come
    for end in range(5, 25):
        assert kv.reserve(first, end)
        kv.commit(first, list(range(end)), 1)
    kv.release(first)
    assert kv.open(list(range(25))) is None or kv.prefix_hits == 0


def test_without_room_no_page_is_taken():
    kv = cache(num_pages=4)
    slot, _ = fill(kv, list(range(9)))
    before = kv.pages.num_available
    assert kv.open([50] * 8) is None
    assert not kv.reserve(slot, 20)
    assert kv.pages.num_available == before
    assert kv.reserve(slot, 16)


def test_the_least_recently_used_pages_are_evicted_first_and_descendants_before_ancestors():
    kv = cache(num_pages=6)
    for start in (0, 100):
        slot, _ = fill(kv, list(range(start, start + 9)))  # two full pages and a partial one
        kv.release(slot)
    slot, _ = fill(kv, [200] * 9, reuse=False)  # three pages: two free ones, and the oldest cached leaf
    kv.release(slot)
    assert kv.open(list(range(9)))[1] == 4
    assert kv.open(list(range(100, 108)))[1] == 4


def test_pages_in_use_are_not_evicted():
    kv = cache(num_pages=4)
    slot, _ = fill(kv, list(range(9)))
    table = kv.page_tables[slot, :3].tolist()
    other, _ = kv.open([7])
    assert kv.page_tables[other, 0] not in table


def test_forgotten_pages_are_not_found():
    kv = cache()
    slot, _ = fill(kv, list(range(9)))
    kv.release(slot, forget=True)
    assert kv.open(list(range(9)))[1] == 0


def test_commit_moves_only_accepted_rows_that_are_not_contiguous():
    kv = cache()
    backend = ToyBackend(page_size=PAGE)
    pool = kv.add_pool(backend)
    assert isinstance(pool, ToyPool)
    slot, _ = kv.open([1, 2, 3])
    kv.commit(slot, [1, 2, 3], 3)
    kv.reserve(slot, 3 + 6)
    places = [int(kv.page_tables[slot, index // PAGE]) * PAGE + index % PAGE for index in range(9)]
    pool.tokens[places] = [1, 2, 3, 40, 50, 51, 60, 61, 70]  # last token, then five nodes
    kv.commit(slot, [1, 2, 3, 40, 50, 61, 70], 1, [1, 4, 5])
    assert pool.tokens[places[:7]].tolist() == [1, 2, 3, 40, 50, 61, 70]
    assert backend.moved == 2
    assert kv.length(slot) == 7
    kv.commit(slot, [1, 2, 3, 40, 50, 61, 70, 8, 9], 1, [1])
    assert backend.moved == 2


@pytest.mark.parametrize("window", [None, 6])
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 30), st.integers(0, 2)), min_size=1, max_size=60))
@settings(max_examples=150)
def test_no_sequence_of_operations_mixes_up_page_holders(window, operations):
    """Held, cached and free pages always make up the whole, and a found page has the right tokens."""
    kv = cache(num_pages=12)
    kv.add_pool(ToyBackend(), window)
    content: dict[int, tuple[int, ...]] = {}  # what each page was last filled with
    slots: dict[int, list[int]] = {}
    for kind, length, alphabet in operations:
        if kind <= 2:
            tokens = [(index * (alphabet + 1)) % 7 for index in range(length)]
            opened = kv.open(tokens)
            if opened is None:
                continue
            slot, found = opened
            for page in range(found // PAGE):
                assert content[int(kv.page_tables[slot, page])] == tuple(tokens[: (page + 1) * PAGE])
            for page in range(found // PAGE, -(-length // PAGE)):
                content[int(kv.page_tables[slot, page])] = tuple(tokens[: (page + 1) * PAGE])
            kv.commit(slot, tokens, length - found)
            slots[slot] = tokens
        elif slots and kind <= 4:
            slot, tokens = next(iter(slots.items()))
            if len(tokens) < 60 and kv.reserve(slot, len(tokens) + 1):
                tokens.append(alphabet)
                page = (len(tokens) - 1) // PAGE
                content[int(kv.page_tables[slot, page])] = tuple(tokens[: (page + 1) * PAGE])
                kv.commit(slot, tokens, 1)
        elif slots:
            slot, _ = slots.popitem()
            kv.release(slot, forget=alphabet == 0)
        # pages of each slot before this one are outside of its window
        seen = {slot: _first_page_in(window, len(tokens)) for slot, tokens in slots.items()}
        held = {int(page) for slot in slots for page in kv.page_tables[slot, seen[slot] :] if page >= 0}
        assert len(held) + kv.pages.num_available == 12
        assert not held & set(kv.pages.free_pages())
        for slot, tokens in slots.items():
            for page in range(seen[slot], len(tokens) // PAGE):
                assert content[int(kv.page_tables[slot, page])] == tuple(tokens[: (page + 1) * PAGE])
    for slot in slots:
        kv.release(slot)
    assert kv.pages.num_available == 12
    assert (kv.page_tables == -1).all()
    assert kv.page_tables.dtype == np.int32


def _first_page_in(window, length):
    """The first page that a row after `length` tokens attends to, or the last full one before it."""
    return 0 if window is None else max(min(length - window + 1, length - PAGE), 0) // PAGE


def size(**changes):
    given = {
        "page_size": 16,
        "page_bytes": PageBytes(16 * 46_080),
        "model_context": 8192,
        "max_model_len": None,
        "memory_bytes": None,
        "available_bytes": 16 * 2**30,
    }
    return size_cache(**(given | changes))


def test_default_cache_holds_the_context_within_half_a_gigabyte():
    default = size()
    assert default.max_model_len == 8192
    assert default.num_pages * 16 * 46_080 <= 512 * 2**20
    long = size(model_context=131_072)
    assert long.max_model_len == long.num_pages * 16 < 131_072


def test_on_a_device_the_pages_fill_what_utilization_leaves_beside_weights_and_buffers():
    gigabyte = 10**9
    device = DeviceMemory(total=80 * gigabyte, free=60 * gigabyte, needed=2 * gigabyte)
    filled = size(device=device, utilization=0.9)
    page = 16 * 46_080
    assert 0 <= (72 - 20 - 2) * gigabyte - filled.num_pages * page < page
    assert filled.max_model_len == 8192
    assert size(device=device, memory_bytes=100 * page).num_pages == 100
    with pytest.raises(
        ConfigError, match=r"0.25 of the GPU's 80,000,000,000 bytes \(20,000,000,000 are in use"
    ):
        size(device=device, utilization=0.25)
    with pytest.raises(ConfigError, match="raise gpu_memory_utilization"):
        size(device=device, utilization=0.25)


def test_layers_with_a_window_take_few_pages_so_more_tokens_fit():
    """Gemma 3's shape: 5 of 6 layers have a window of 512, and 16 requests share a gigabyte."""
    layer, gigabyte = 16 * 1024, 10**9
    pages = PageBytes.of(6 * layer, 5 * layer, 512, page_size=16, requests=16, rows=512)
    # a window, 128 rows and a page begun; two chunks and a page begun each; the null page
    assert pages.most_windows == 16 * (32 + 9) + 2 * 33 + 1
    grouped, alike = size(page_bytes=pages, memory_bytes=gigabyte), gigabyte // (6 * layer)
    assert grouped.num_window_pages == pages.most_windows
    assert grouped.num_pages == (gigabyte - 5 * layer * pages.most_windows) // layer
    assert grouped.num_pages > 5.6 * alike
    assert 0 <= gigabyte - pages.total(grouped.num_pages) < layer
    few = size(page_bytes=pages, memory_bytes=700 * 6 * layer)  # each page may be in some window
    assert (few.num_pages, few.num_window_pages) == (700, None)
    with pytest.raises(ConfigError, match=f"needs {8192 * 1024 + 5 * layer * 512:,} bytes for keys"):
        size(page_bytes=pages, memory_bytes=10**7, max_model_len=8192)


@given(memory=st.integers(1, 10**6), windowed=st.integers(0, 60), most=st.integers(1, 400))
def test_the_pages_that_fit_are_the_most_that_do(memory, windowed, most):
    pages = PageBytes(64, windowed, most)
    count = pages.fitting(memory)
    assert pages.total(count) <= memory < pages.total(count + 1)


def test_states_of_recurrent_layers_have_their_memory_before_pages_do():
    gigabyte, page = 10**9, 16 * 46_080
    device = DeviceMemory(total=80 * gigabyte, free=60 * gigabyte, needed=2 * gigabyte)
    filled = size(device=device, utilization=0.9, states_bytes=30 * gigabyte)
    assert 0 <= (72 - 20 - 2 - 30) * gigabyte - filled.num_pages * page < page
    with pytest.raises(ConfigError, match=r"requests need 51,.* Lower max_num_seqs or raise gpu_mem"):
        size(device=device, utilization=0.9, states_bytes=51 * gigabyte)
    with pytest.raises(ConfigError, match=r"but 17,179,869,184 bytes .* Lower max_num_seqs\."):
        size(states_bytes=18 * gigabyte)
    few = size(available_bytes=2 * gigabyte, states_bytes=gigabyte)
    assert 0 <= gigabyte // 4 - few.num_pages * page < page


def test_an_asked_context_gets_its_memory_or_a_refusal_with_numbers():
    assert size(model_context=131_072, max_model_len=40_000).num_pages * 16 >= 40_000
    with pytest.raises(ConfigError, match="max_model_len to"):
        size(model_context=131_072, max_model_len=130_000)
    with pytest.raises(ConfigError, match="context is 8192"):
        size(max_model_len=8193)
    with pytest.raises(ConfigError, match="kv_cache_memory_bytes"):
        size(memory_bytes=1000)
    assert size(memory_bytes=100 * 16 * 46_080).num_pages == 100


def test_a_cache_larger_than_the_memory_is_refused():
    """The system would promise it, and end the process when it is used."""
    with pytest.raises(
        ConfigError, match="kv_cache_memory_bytes is 20,000,000,000, but 17,179,869,184 bytes"
    ):
        size(memory_bytes=20 * 10**9)


def test_a_memory_limit_that_is_too_small_is_reported_before_anything_is_loaded(tmp_path, monkeypatch):
    model = tmp_path / "model.gguf"
    model.write_bytes(bytes(1000))
    check_memory_limit(model, threads=2)
    free = available_memory()
    limit = sizing.PROCESS_BYTES
    monkeypatch.setattr(sizing.resource, "getrlimit", lambda _: (limit, limit))
    assert available_memory() < min(free, limit)
    with pytest.raises(
        ConfigError, match=r"model.gguf needs about 1,207,961,552. Raise the limit \(`ulimit -v`"
    ):
        check_memory_limit(model, threads=2)
