"""Shared prefixes are read once for all rows, and no row's result changes."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.forward import ForwardBatch, chain_parents
from paceline.core.params import SamplingParams
from tests.backends.cuda.decode.test_decode_loop import CONFIG, random_weights
from tests.backends.cuda.kernels.test_attention import PAGE_SIZE, Case
from tests.backends.cuda.native.test_decode_attention import chain, some_tree, uniform_tables
from tests.backends.cuda.native.test_fused_layer import needs_hopper
from tests.backends.cuda.test_backend import needs_gpu
from tests.engines import new_engine
from tests.toy import ToyTokenizer, drain

KV_CHUNK = 512
PAGES = KV_CHUNK // PAGE_SIZE  # of a KV chunk
FAR = replace(CONFIG, max_position=1024)


def find(tables: list[list[int]], rest: list[int], counts: list[int]) -> Any:
    """The shared prefixes of requests whose KV chunks have these names, and `rest` tokens after them."""
    from paceline.backends.cuda.passes.shared_prefix import PassRows, find_shared_prefixes

    most = max(map(len, tables)) * PAGES + 1
    pages = np.full((len(tables), most), -1, np.int32)
    for request, names in enumerate(tables):
        for depth, name in enumerate(names):
            pages[request, depth * PAGES : (depth + 1) * PAGES] = np.arange(PAGES) + 100 * name
    contexts = np.array([len(names) * KV_CHUNK for names in tables], np.int32) + np.array(rest, np.int32)
    firsts = np.cumsum([0, *counts[:-1]], dtype=np.int32)
    begins = np.arange(len(tables), dtype=np.int32) * most
    own = PassRows(pages, begins, contexts, np.array(counts, np.int32), firsts)
    return find_shared_prefixes(own, PAGE_SIZE, heads=32, kv_heads=8), own


@pytest.fixture
def anything(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prefixes are shared however little it saves; interpreted by few programs, one by one."""
    from paceline.backends.cuda.kernels.attention import paged_attention as attention
    from paceline.backends.cuda.kernels.attention import shared_prefix as kernels
    from paceline.backends.cuda.passes import shared_prefix

    monkeypatch.setattr(shared_prefix, "MIN_SAVED", 0)
    if not torch.cuda.is_available():
        for module in (kernels, attention):
            monkeypatch.setattr(module, "PROGRAMS", 3)


def test_only_shared_kv_chunks_are_work_items(anything: None) -> None:
    shared_prefix, _ = find([[1, 2, 3], [5], [1, 2], [1, 4, 3], [1, 2, 4]], [3, 3, 0, 9, 511], [1] * 5)
    assert shared_prefix.shared_chunks.tolist() == [2, 0, 2, 1, 2]
    by_depth = [
        (depth, sorted(shared_prefix.rows[first : first + count].tolist()))
        for first, count, _, depth in shared_prefix.items.tolist()
    ]
    assert by_depth == [(0, [0, 2, 3, 4]), (1, [0, 2, 4])]


def test_many_rows_of_one_request_share_its_context(anything: None) -> None:
    alone, _ = find([[1, 2]], [100], [8])  # two tiles, which have one program without this
    assert alone.shared_chunks.tolist() == [0]
    shared_prefix, _ = find([[1, 2]], [100], [40])
    assert shared_prefix.shared_chunks.tolist() == [2]
    assert [(first, count, depth) for first, count, _, depth in shared_prefix.items.tolist()] == [
        (first, count, depth) for depth in (0, 1) for first, count in ((0, 16), (16, 16), (32, 8))
    ]


def test_short_shared_prefixes_are_not_worth_a_kernel() -> None:
    assert find([[1]] * 16, [0] * 16, [6] * 16)[0] is None
    assert find([[1, 2]] * 16, [0] * 16, [6] * 16)[0] is not None
    assert find([[1] * 40, [2] * 40], [0, 0], [6, 6])[0] is None
    assert find([[]], [511], [1])[0] is None


def test_work_items_beyond_the_limit_are_left_to_each_request(
    anything: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from paceline.backends.cuda.passes import shared_prefix

    monkeypatch.setattr(shared_prefix, "MAX_ITEMS", 5)
    found, _ = find([[1, 2, 3, 4]] * 20, [0] * 20, [1] * 20)
    assert found.shared_chunks.tolist() == [2] * 20
    assert len(found.items) == 4


@settings(max_examples=200)
@given(
    st.lists(st.tuples(st.lists(st.integers(1, 2), max_size=4), st.integers(1, 40)), min_size=1, max_size=7)
)
def test_each_row_has_each_kv_chunk_once_at_its_own_pages(
    requests: list[tuple[list[int], int]],
) -> None:
    from paceline.backends.cuda.passes import shared_prefix

    tables, counts = [names for names, _ in requests], [count for _, count in requests]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared_prefix, "MIN_SAVED", 0)
        found, own = find(tables, [7] * len(tables), counts)
    if found is None:
        assert not any(tables)
        return
    seen: dict[tuple[int, int], int] = {}
    for first, count, begin, depth in found.items.tolist():
        assert 0 < count <= 16
        for row in found.rows[first : first + count].tolist():
            assert (row, depth) not in seen
            seen[row, depth] = begin
    flat, most = own.page_tables.reshape(-1), own.page_tables.shape[1]
    for request, names in enumerate(tables):
        assert found.shared_chunks[request] <= len(names)
        for row in range(own.firsts[request], own.firsts[request] + counts[request]):
            depths = [depth for one, depth in seen if one == row]
            assert sorted(depths) == list(range(found.shared_chunks[request]))
            for depth in depths:
                at, mine = seen[row, depth] + depth * PAGES, request * most + depth * PAGES
                assert (flat[at : at + PAGES] == flat[mine : mine + PAGES]).all()
    for depth in range(4):  # requests with equal KV chunks up to here share this one
        for request, names in enumerate(tables):
            others = [other for one, other in enumerate(tables) if one != request]
            if len(names) > depth and any(other[: depth + 1] == names[: depth + 1] for other in others):
                assert found.shared_chunks[request] > depth


class SharedPrefixCase(Case):
    """Requests whose first KV chunks are in the same pages; of more than two, not those of the first."""

    def __init__(self, kv_chunks: int, contexts: list[int], parents: list[list[int]], *shape: int) -> None:
        super().__init__(contexts, parents, *shape)
        self.alike = slice(int(len(contexts) > 2), None)
        tables = self.batch.page_tables[self.alike]
        tables[:, : kv_chunks * PAGES] = tables[0, : kv_chunks * PAGES]

    def shared_prefix(self, device: torch.device) -> Any:
        """What is read once for all, on the device."""
        from paceline.backends.cuda.kernels.attention.paged_attention import tile_height
        from paceline.backends.cuda.passes.shared_prefix import (
            PassRows,
            SharedPrefixTables,
            find_shared_prefixes,
        )

        heads, kv_heads, _ = self.shape
        batch, counts = self.batch, np.diff(self.offsets)
        begins = np.arange(len(counts), dtype=np.int32) * batch.page_tables.shape[1]
        own = PassRows(batch.page_tables, begins, batch.context_lengths, counts, self.offsets[:-1])
        found = find_shared_prefixes(own, PAGE_SIZE, heads, kv_heads)
        assert found is not None
        assert found.shared_chunks[self.alike].all()
        tables = SharedPrefixTables(batch.num_rows + 3, device)
        tables.send(found, -(-counts // tile_height(heads, kv_heads)))
        return tables.rows()

    def attended(self, attend: Any, tables: Any, earliest: int = 0) -> torch.Tensor:
        """The bits that attention writes to memory full of NaN, with partials of NaN."""
        from paceline.backends.cuda.kernels.attention.paged_attention import attention_scratch

        heads, kv_heads, dim = self.shape
        device, kind = tables.positions.device, self.kind
        rows, longest = self.batch.num_rows, int(self.batch.positions.max()) + 1
        scratch = attention_scratch(len(tables.positions), heads, kv_heads, dim, longest, device)
        scratch.partial_acc.fill_(math.nan)
        scratch.partial_stats.fill_(math.nan)
        output = torch.full((rows, heads * dim), math.nan, dtype=kind, device=device)
        query, keys, values = (x.to(device, kind) for x in (self.query, self.keys, self.values))
        attend(query, keys, values, tables, None, PAGE_SIZE, output, scratch, earliest=earliest)
        assert not scratch.counters.any()
        return output.view(rows, heads, dim)

    kind = torch.bfloat16


CHAINS = (1, [515, 600, 530, 512], [chain(1), chain(2), chain(1), chain(2)])
CHUNK = (1, [540], [chain(18)])
LONG = (9, [9 * KV_CHUNK + 3, 10 * KV_CHUNK], [chain(6), chain(6)])  # more KV chunks than a group has


@pytest.mark.parametrize("case", [CHAINS, CHUNK, LONG] if torch.cuda.is_available() else [CHAINS])
@pytest.mark.parametrize("shape", [(4, 1, 16), (6, 2, 14)] if torch.cuda.is_available() else [(3, 1, 14)])
def test_attention_is_the_same(
    case: Any, shape: tuple[int, int, int], anything: None, device: torch.device, dtype: torch.dtype
) -> None:
    from paceline.backends.cuda.kernels.attention.paged_attention import attend, tile_height
    from paceline.backends.cuda.passes.tables import DeviceTables, rows_of

    own = SharedPrefixCase(*case, *shape)
    own.kind, rows = dtype, own.batch.num_rows
    tables = DeviceTables(rows + 3, own.batch.page_tables.size, device)
    tables.send(own.batch, rows_of(own.batch, PAGE_SIZE, tile_height(*shape[:2])))
    plain = tables.tables(rows + 3)
    shared = replace(plain, shared_prefix=own.shared_prefix(device))
    once = own.attended(attend, shared)
    torch.testing.assert_close(once.float().cpu(), own.expected(dtype), rtol=0, atol=1e-2)
    if device.type == "cuda":
        assert torch.equal(once, own.attended(attend, plain))
    assert shared.shared_prefix is not None
    shared.shared_prefix.count.zero_()  # shared KV chunks are not read again by each request
    rows = slice(int(own.offsets[:-1][own.alike][0]), None)
    assert own.attended(attend, shared)[rows].isnan().all()


@needs_hopper
@pytest.mark.parametrize("shape", [(8, 2, 128), (6, 2, 64), (4, 4, 128), (16, 1, 64), (12, 2, 128)])
@pytest.mark.parametrize("rows", [chain(1), chain(6), some_tree(32, 1)])
@pytest.mark.parametrize("kv_splits", [1, 3])
def test_attention_in_cuda_has_the_bits_of_triton(
    shape: tuple[int, int, int],
    rows: list[int],
    kv_splits: int,
    anything: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from paceline.backends.cuda.kernels.attention import paged_attention as attention
    from paceline.backends.cuda.native import decode_attention

    contexts = [1100, 1024, 2600, 1530, 1536] * 2
    own = SharedPrefixCase(2, contexts, [rows] * len(contexts), *shape)
    plain = uniform_tables(own, None, True, rows == chain(len(rows)))
    shared = replace(plain, shared_prefix=own.shared_prefix(torch.device("cuda")))
    expected = own.attended(attention.attend, plain, 1)
    assert torch.equal(own.attended(attention.attend, shared, 1), expected)
    programs = kv_splits * len(contexts) * -(-plain.uniform.tiles // 2) * shape[1]
    monkeypatch.setattr(decode_attention, "num_multiprocessors", lambda device: programs)
    monkeypatch.setattr(attention, "PROGRAMS", 1)  # else few tiles are left to Triton
    assert torch.equal(own.attended(decode_attention.attend, shared, 1), expected)


def test_steps_give_the_same_tokens(anything: None, device: torch.device, dtype: torch.dtype) -> None:
    """Chains of three requests, two of which begin alike."""
    from paceline.backends.cuda.decode.decode_loop import DecodeLoop, make_requests
    from paceline.backends.cuda.decode.draft_shape import chain_shape
    from paceline.backends.cuda.passes.kv_pool import Pool
    from paceline.backends.cuda.passes.shared_prefix import find_shared_prefixes, uniform_rows

    longest, weights = KV_CHUNK + 40, random_weights(device, dtype, config=FAR)
    most = -(-longest // PAGE_SIZE)
    pages = np.random.default_rng(4).permutation(3 * most).astype(np.int32).reshape(3, most)
    pages[2, :PAGES] = pages[0, :PAGES]
    lengths = np.array([KV_CHUNK + 3, KV_CHUNK + 9, KV_CHUNK], np.int32)
    generator = torch.Generator().manual_seed(9)
    shape = (1, 3 * most * PAGE_SIZE, 1, 16)
    stored = [torch.randn(shape, generator=generator).to(device, dtype) for _ in range(2)]
    begins = np.arange(3, dtype=np.int32) * most
    found = find_shared_prefixes(uniform_rows(pages, begins, lengths, 2), PAGE_SIZE, CONFIG.num_heads, 1)
    assert found is not None
    assert found.shared_chunks.tolist() == [1, 0, 1]
    results = []
    for shared_prefix in (found, None):
        state = make_requests(3, longest, PAGE_SIZE, device)
        state.pages.copy_(torch.from_numpy(pages))
        state.lengths.copy_(torch.from_numpy(lengths))
        state.tokens.copy_(torch.from_numpy(np.random.default_rng(3).integers(0, 60, state.tokens.shape)))
        pool = Pool(3 * most, 0, *(own.clone() for own in stored))
        loop = DecodeLoop(weights, pool, state, 3, PAGE_SIZE, given=chain_shape(1))
        loop.begin([0, 1, 2], 3)
        loop.use_shared_prefix(shared_prefix)
        tokens = []
        for _ in range(2 if device.type == "cuda" else 1):
            loop.drafted(3)[:, 1:] = 7
            loop.step(3)
            tokens.append(loop.output.tolist())
        results.append((tokens, pool.keys.clone()))
    assert results[0][0] == results[1][0]
    if device.type == "cuda":
        assert torch.equal(results[0][1], results[1][1])


def test_a_prefill_chunk_reads_its_context_once(
    anything: None, device: torch.device, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two requests continue after a shared KV chunk, each with its own prefill chunk."""
    from paceline.backends.cuda import backend as backends
    from paceline.backends.cuda.backend import CudaBackend
    from paceline.backends.cuda.passes.graphs import Graphs

    backend = CudaBackend(random_weights(device, dtype, config=FAR), max_rows=8)
    pool, ran = backend.make_pool(2 * PAGES), []
    generator = torch.Generator().manual_seed(2)
    for own in (pool.keys, pool.values):
        own.copy_(torch.randn(own.shape, generator=generator))
    pages = np.stack([np.arange(PAGES + 1), np.append(np.arange(PAGES), PAGES + 1)]).astype(np.int32)
    batch = ForwardBatch(
        tokens=np.arange(7, dtype=np.int32),
        positions=np.array([*range(KV_CHUNK, KV_CHUNK + 5), *range(KV_CHUNK, KV_CHUNK + 2)], np.int32),
        parents=chain_parents([5, 2]),
        row_offsets=np.array([0, 5, 7], np.int32),
        context_lengths=np.array([KV_CHUNK, KV_CHUNK], np.int32),
        page_tables=pages,
        logit_rows=np.array([4, 6], np.int32),
        pool=pool,
    )

    def watched(*arguments: Any) -> Any:
        ran.append(found(*arguments))
        return ran[-1]

    found, logits, names = backends.find_shared_prefixes, [], []
    run = Graphs.run
    monkeypatch.setattr(Graphs, "run", lambda own, name, work: names.append(name) or run(own, name, work))
    with pytest.MonkeyPatch.context() as patch:
        for find in (watched, lambda *arguments: None):
            patch.setattr(backends, "find_shared_prefixes", find)
            logits.append(backend.forward(batch).logits.copy())
    assert ran[0].shared_chunks.tolist() == [1, 1]
    assert names[0] != names[2]  # each has a graph of its own
    assert names[1] == names[3]  # but for the logits
    if device.type == "cuda":
        assert (logits[0] == logits[1]).all()
    np.testing.assert_allclose(logits[0], logits[1], rtol=0, atol=2e-2)


@needs_gpu
def test_requests_with_a_common_prefix_get_the_tokens_that_each_gets_alone(
    anything: None, device: torch.device, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In an engine with prefix caching: two texts of one KV chunk, and two requests after each."""
    from paceline.backends.cuda.backend import CudaBackend
    from paceline.backends.cuda.decode.decode_loop import DecodeLoop
    from paceline.engine.admission import Limits

    shared: list[Any] = []
    share = DecodeLoop.use_shared_prefix

    def watched(loop: DecodeLoop, shared_prefix: Any) -> None:
        shared.append(shared_prefix)
        share(loop, shared_prefix)

    monkeypatch.setattr(DecodeLoop, "use_shared_prefix", watched)
    texts = np.random.default_rng(5).integers(2, 60, (2, KV_CHUNK + 2)).tolist()
    prompts = [[*texts[number % 2], 2 + number] for number in range(5)]

    def outputs(tiles_each: bool) -> list[list[int]]:
        backend = CudaBackend(random_weights(device, dtype, config=FAR), max_rows=512)
        engine = new_engine(backend, ToyTokenizer(), Limits(60, 640, 4, 512), num_pages=160)
        results = []
        for number, prompt in enumerate(prompts):
            options = SamplingParams(temperature=number % 2, seed=number, max_tokens=5, ignore_eos=True)
            results.append(engine.add_request(prompt, options)[0])
            if not tiles_each or number < 1:  # the first leaves its pages
                drain(engine, scribble=False)
        drain(engine, scribble=False)
        assert all(request.error is None for request in results)
        return [request.output_token_ids for request in results]

    alone = outputs(tiles_each=False)
    assert not any(own is not None and len(own.items) for own in shared)
    assert outputs(tiles_each=True) == alone
    found = [own.shared_chunks.tolist() for own in shared if own is not None and len(own.items)]
    assert any(sum(shared_chunks) >= 2 for shared_chunks in found)
