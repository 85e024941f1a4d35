"""The attention kernel computes what three lines of torch compute, and a row's bits are its own."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from paceline.backends.cuda.kernels.attention.row_tables import RowTables
from paceline.backends.cuda.kernels.attention.scoring import LLAMA_SCORING, Scoring
from paceline.backends.torch.backend import ancestors
from paceline.core.forward import ForwardBatch, chain_parents
from paceline.models.transformer import attention as reference

PAGE_SIZE = 16
TREE = [-1, 0, 0, 1, 2, -1, 3, 4, 5]  # branches whose rows interleave: see torch/test_backend.py


class Case:
    """Requests with random keys and values, and the rows of a pass over them.

    With `rope`, keys are this many rotated numbers and a latent of `dim`, which is the value.
    """

    def __init__(
        self,
        contexts: list[int],
        parents: list[list[int]],
        heads: int,
        kv_heads: int,
        dim: int,
        rope: int = 0,
    ) -> None:
        generator = np.random.default_rng(3)
        pages_each = max(-(-(c + len(p)) // PAGE_SIZE) for c, p in zip(contexts, parents, strict=True))
        pages = generator.permutation(pages_each * len(contexts)).astype(np.int32).reshape(-1, pages_each)
        self.shape = (heads, kv_heads, dim)
        self.offsets = np.cumsum([0, *(len(p) for p in parents)], dtype=np.int32)
        positions = []
        for context, own in zip(contexts, parents, strict=True):
            depths: list[int] = []
            for parent in own:
                depths.append(0 if parent < 0 else depths[parent] + 1)
            positions += [context + depth for depth in depths]
        self.batch = ForwardBatch(
            tokens=np.zeros(self.offsets[-1], np.int32),
            positions=np.array(positions, np.int32),
            parents=np.concatenate([np.array(p, np.int32) for p in parents]),
            row_offsets=self.offsets,
            context_lengths=np.array(contexts, np.int32),
            page_tables=pages,
            logit_rows=np.zeros(0, np.int32),
            pool=None,  # type: ignore[arg-type]
        )
        torch.manual_seed(1)
        kv_slots = pages.size * PAGE_SIZE
        self.query = torch.randn(int(self.offsets[-1]), heads, rope + dim)
        self.keys, self.values = (torch.randn(kv_slots, kv_heads, rope + dim) for _ in range(2))
        if rope:
            self.values = self.keys[..., rope:]
        seen = torch.zeros(len(contexts), pages_each * PAGE_SIZE, dtype=torch.bool)
        for request, own in enumerate(zip(contexts, parents, strict=True)):
            seen[request, : own[0] + len(own[1])] = True
        by_page = torch.zeros(pages.size, PAGE_SIZE, dtype=torch.bool)
        by_page[torch.from_numpy(pages).flatten().long()] = seen.view(-1, PAGE_SIZE)
        for pool in (self.keys, self.values):
            pool[~by_page.flatten()] = math.nan  # whatever others have left there

    def run(
        self,
        device: torch.device,
        dtype: torch.dtype,
        window: int | None = None,
        longest: int = 128,
        large: list[bool] | None = None,
        scoring: Scoring = LLAMA_SCORING,
        by: Any = None,
    ) -> torch.Tensor:
        """What the kernels give: [rows, heads, head_dim]. That of prefills attends for `large` requests.

        `by` is the function to ask, if not that of the Triton kernels.
        """
        from paceline.backends.cuda.kernels.attention.paged_attention import (
            attend,
            attention_scratch,
            latent_groups,
            tile_height,
        )
        from paceline.backends.cuda.kernels.attention.prefill_attention import prefill_height
        from paceline.backends.cuda.passes.tables import DeviceTables, rows_of

        heads, kv_heads, dim = self.shape
        kv_heads = latent_groups(heads) if scoring.rope else scoring.groups or kv_heads
        rows, large = self.batch.num_rows, large or [False] * self.batch.num_requests
        tables = DeviceTables(rows + 3, self.batch.page_tables.size, device)
        heights = tile_height(heads, kv_heads), prefill_height(heads, kv_heads, scoring.rope > 0)
        own = rows_of(self.batch, PAGE_SIZE, heights[0], np.array(large), heights[1])
        tables.send(self.batch, own)
        output = torch.full((rows, heads * dim), math.nan, dtype=dtype, device=device)
        scratch = attention_scratch(rows + 3, heads, kv_heads, dim, longest, device)
        query, keys, values = (x.to(device, dtype) for x in (self.query, self.keys, self.values))
        table = tables.tables(rows + 3, own.prefill_tiles.shape[1] + 1 if any(large) else 0, not all(large))
        (by or attend)(query, keys, values, table, window, PAGE_SIZE, output, scratch, scoring=scoring)
        assert not scratch.counters.any()
        return output.view(rows, heads, dim).cpu()

    def expected(
        self, dtype: torch.dtype, window: int | None = None, scoring: Scoring = LLAMA_SCORING
    ) -> torch.Tensor:
        """The same by models/transformer/attention.py in float32."""
        parts = []
        query, keys, values = (x.to(dtype).float() for x in (self.query, self.keys, self.values))
        for request, context in enumerate(self.batch.context_lengths):
            own = slice(int(self.offsets[request]), int(self.offsets[request + 1]))
            index = np.arange(context + own.stop - own.start)
            kv_slots = self.batch.page_tables[request][index // PAGE_SIZE] * PAGE_SIZE + index % PAGE_SIZE
            visible = np.concatenate(
                (np.ones((own.stop - own.start, context), np.bool_), ancestors(self.batch.parents[own])),
                axis=1,
            )
            position = self.batch.positions[own]
            at = np.concatenate((np.arange(context), position))
            if window is not None:
                visible &= position[:, None] - at < window
            if scoring.chunk:
                visible &= at >= position[:, None] // scoring.chunk * scoring.chunk
            shown = torch.from_numpy(visible)
            how = scoring.factor, scoring.cap, None if scoring.sinks is None else scoring.sinks.cpu()
            parts.append(reference.attend(query[own], keys[kv_slots], values[kv_slots], shown, *how))
        return torch.cat(parts)


CHAINS = Case([0, 60, 30], [chain_parents([5]).tolist(), chain_parents([9]).tolist(), [-1]], 6, 2, 14)
TREES = Case([60, 3], [TREE, TREE], 6, 2, 14)
# a prefill chunk beside a decode, and a tree, for what differs from llama's attention; who is prefilled
BOTH_CHAINS = Case([60, 30], [chain_parents([9]).tolist(), [-1]], 6, 2, 14), [True, False]
ONE_TREE = Case([60], [TREE], 6, 2, 14), None


@pytest.mark.parametrize(
    ("case", "window"),
    [(CHAINS, None), (TREES, 9)],
    ids=["chains", "trees and a window"],
)
def test_it_is_the_plain_attention(
    case: Case, window: int | None, device: torch.device, dtype: torch.dtype
) -> None:
    expected = case.expected(dtype, window)
    torch.testing.assert_close(case.run(device, dtype, window).float(), expected, rtol=0, atol=1e-2)


def test_scores_may_be_scaled_capped_and_have_sinks(device: torch.device, dtype: torch.dtype) -> None:
    """As those of gemma2 and gpt-oss, in the kernels of decodes, of prefill chunks and of trees."""
    scoring = Scoring(0.4, 1.5, torch.linspace(-1, 2, 6, device=device))
    for case, large in (BOTH_CHAINS, ONE_TREE):
        got = case.run(device, dtype, 9, large=large, scoring=scoring)
        torch.testing.assert_close(got.float(), case.expected(dtype, 9, scoring), rtol=0, atol=1e-2)


def shaped_as(own: Case, heads: int, kv_heads: int, dim: int, rope: int = 0) -> Case:
    """The requests of a case with other heads."""
    parents = [own.batch.parents[begin:end].tolist() for begin, end in pairwise(own.offsets)]
    return Case(own.batch.context_lengths.tolist(), parents, heads, kv_heads, dim, rope)


@pytest.mark.parametrize("chunk", [11, 64], ids=["several in a prompt", "a block"])
def test_rows_attend_within_their_chunk(chunk: int, device: torch.device, dtype: torch.dtype) -> None:
    """As those of llama4, in the kernels of decodes, of prefill chunks and of trees."""
    scoring = Scoring(chunk=chunk)
    for case, large in (BOTH_CHAINS, ONE_TREE):
        got = case.run(device, dtype, large=large, scoring=scoring)
        torch.testing.assert_close(got.float(), case.expected(dtype, scoring=scoring), rtol=0, atol=1e-2)


@pytest.mark.parametrize(("dim", "window"), [(14, 9), (260, None)], ids=["a window", "long heads"])
def test_groups_of_query_heads_may_share_a_kv_head(
    dim: int, window: int | None, device: torch.device, dtype: torch.dtype
) -> None:
    """As in gemma4, whose layers have different numbers of KV heads, and heads of different sizes."""
    scoring = Scoring(0.3, groups=4)
    for own, large in (BOTH_CHAINS, ONE_TREE):
        case = shaped_as(own, 8, 2, dim)
        got = case.run(device, dtype, window, large=large, scoring=scoring)
        expected = case.expected(dtype, window, scoring)
        torch.testing.assert_close(got.float(), expected, rtol=1e-2, atol=1e-2)


LATENTS = Scoring(0.3, rope=10)


@pytest.mark.parametrize("heads", [6, 20], ids=["tiles of two rows", "two groups of heads"])
def test_latents_are_keys_and_values(heads: int, device: torch.device, dtype: torch.dtype) -> None:
    """In the kernels of decodes, of prefill chunks and of trees."""
    for own, large in (BOTH_CHAINS, ONE_TREE):
        case = shaped_as(own, heads, 1, 18, rope=10)
        got = case.run(device, dtype, large=large, scoring=LATENTS)
        torch.testing.assert_close(got.float(), case.expected(dtype, scoring=LATENTS), rtol=0, atol=1e-2)


@pytest.mark.parametrize("scoring", [LLAMA_SCORING, LATENTS], ids=["keys", "latents"])
def test_a_drafted_row_has_the_bits_of_its_committed_path(
    scoring: Scoring, device: torch.device, dtype: torch.dtype
) -> None:
    """Node 7 of the tree lies apart from its ancestors 0, 2, 4. Decoded after them it has the same bits."""
    shape = (6, 1, 18, 10) if scoring.rope else (6, 2, 14)
    tree = Case([60], [TREE], *shape)
    drafted = tree.run(device, dtype, scoring=scoring)[7]
    decoded = Case([63], [[-1]], *shape)
    decoded.query[0] = tree.query[7]
    index = np.arange(64)
    index[60:] = 60 + np.array([0, 2, 4, 7])  # where the path lies in the tree's pages
    for mine, theirs in ((decoded.keys, tree.keys), (decoded.values, tree.values)):
        own, other = np.arange(64), index
        kv_slot = decoded.batch.page_tables[0][own // PAGE_SIZE] * PAGE_SIZE + own % PAGE_SIZE
        source = tree.batch.page_tables[0][other // PAGE_SIZE] * PAGE_SIZE + other % PAGE_SIZE
        mine[kv_slot] = theirs[source]
    assert torch.equal(decoded.run(device, dtype, scoring=scoring)[0], drafted)


@pytest.mark.parametrize("scoring", [LLAMA_SCORING, LATENTS], ids=["keys", "latents"])
def test_split_kv_does_not_change_bits(
    scoring: Scoring, device: torch.device, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A context of 9 blocks: of each block another program, or all of them two KV chunks of one."""
    from paceline.backends.cuda.kernels.attention import paged_attention as attention

    case = Case([9 * attention.BLOCK - 1], [[-1]], 2, 1, 16, scoring.rope)
    shared = case.run(device, dtype, longest=640, scoring=scoring)
    torch.testing.assert_close(shared.float(), case.expected(dtype, scoring=scoring), rtol=0, atol=1e-2)
    monkeypatch.setattr(attention, "PROGRAMS", 4)
    assert torch.equal(case.run(device, dtype, longest=640, scoring=scoring), shared)


@pytest.mark.parametrize(
    ("contexts", "parents", "heads", "programs"),
    [
        ([0, 62], [[-1], [-1, 0, 0]], 18, 32),
        ([9 * 64 - 1], [[-1]], 9, 264),
        ([9 * 64 - 1], [[-1]], 9, 4),
    ],
    ids=["a tree, two groups of heads", "a partial for each block", "KV chunks"],
)
def test_the_next_kernel_merges_partial_results_of_few_rows_over_latents(
    contexts: list[int],
    parents: list[list[int]],
    heads: int,
    programs: int,
    device: torch.device,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its matrices are the identity here, so the values are the mixed latents of attention that merges."""
    from paceline.backends.cuda.kernels.attention import paged_attention as attention
    from paceline.backends.cuda.kernels.attention.latent import head_matrices
    from paceline.backends.cuda.kernels.attention.latent_values import can_merge, late_partials, merged_values

    monkeypatch.setattr(attention, "PROGRAMS", programs)
    case, dim = Case(contexts, parents, heads, 1, 18, LATENTS.rope), 18
    identity = head_matrices(torch.eye(dim, dtype=dtype, device=device).repeat(heads, 1, 1))
    assert can_merge(identity)

    def late(query: Any, keys: Any, values: Any, tables: Any, *where: Any, scoring: Scoring) -> None:
        window, page_size, output, scratch = where
        partials = late_partials(tables, heads, scratch, scoring)
        assert partials is not None
        partials.acc.fill_(math.nan)  # what padding leaves there
        partials.stats.fill_(math.nan)
        given = query, keys, values, tables, window, page_size, output, scratch
        attention.attend(*given, scoring=scoring, merges=False)
        assert output.isnan().all()
        wide = output.new_full((len(tables.positions), heads, dim), math.nan)  # rows that are padding, too
        merged_values(partials, identity, wide, tables.positions)
        assert not wide[len(output) :].any()
        output.view(-1, heads, dim)[:] = wide[: len(output)]

    merged = case.run(device, dtype, longest=640, scoring=LATENTS)
    assert torch.equal(case.run(device, dtype, longest=640, scoring=LATENTS, by=late), merged)


def test_attention_merges_partial_results_of_many_rows_and_of_small_heads_itself() -> None:
    from paceline.backends.cuda.kernels.attention import paged_attention as attention
    from paceline.backends.cuda.kernels.attention.latent import HeadMatrices
    from paceline.backends.cuda.kernels.attention.latent_values import can_merge, late_partials

    def late(rows: int, heads: int, scoring: Scoring = LATENTS, **more: Any) -> bool:
        none = torch.zeros(rows, dtype=torch.int32)
        tables = RowTables(none, none, none, None, *(none[:1],) * 4, **more)
        scratch = attention.attention_scratch(rows, heads, 1, 18, 400, torch.device("meta"))
        return late_partials(tables, heads, scratch, scoring) is not None

    assert late(1, 16)
    assert late(8, 128)
    assert not late(9, 16)
    assert not late(1, 8)  # a tile has two rows
    assert not late(1, 16, LLAMA_SCORING)
    assert not late(1, 16, visible=torch.zeros(1))
    assert not late(1, 16, shared_prefix=object())
    sizes = {"V2-Lite": (16, 128, 512), "V3": (128, 128, 512), "a depth of 384": (16, 128, 384)}
    matrices = {name: HeadMatrices(torch.zeros(own, device="meta"), *own[1:]) for name, own in sizes.items()}
    assert [name for name, own in matrices.items() if can_merge(own)] == ["V2-Lite"]


@pytest.mark.parametrize(
    ("contexts", "counts", "window", "scoring"),
    [
        ((0, 64 * 64 + 62, 70), (36, 3, 1), None, LLAMA_SCORING),
        ((600, 20), (5, 5), 70, LLAMA_SCORING),
        ((600, 20), (5, 50), None, Scoring(chunk=67)),
        ((0, 64 * 64 + 62, 70), (6, 3, 1), None, LATENTS),
    ],
    ids=["several groups, and a row of the other kernel", "a window", "chunks", "latents"],
)
def test_a_prefill_chunk_has_the_bits_of_single_rows(
    device: torch.device,
    dtype: torch.dtype,
    contexts: tuple[int, ...],
    counts: tuple[int, ...],
    window: int | None,
    scoring: Scoring,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from paceline.backends.cuda.kernels.attention import paged_attention as attention

    if device.type != "cuda":
        monkeypatch.setattr(attention, "PROGRAMS", 32)  # or most would have no KV chunk
    chains = [chain_parents([count]).tolist() for count in counts]
    case = Case(list(contexts), chains, 3, 1, 16, scoring.rope)
    alone = case.run(device, dtype, window, longest=4352, scoring=scoring)
    some = [count > 1 for count in counts]
    prefilled = case.run(device, dtype, window, longest=4352, large=some, scoring=scoring)
    if device.type == "cuda":
        assert torch.equal(prefilled, alone)
    torch.testing.assert_close(prefilled, alone, rtol=0, atol=1e-3)  # the interpreter sums as it likes
    expected = case.expected(dtype, window, scoring)
    torch.testing.assert_close(prefilled.float(), expected, rtol=0, atol=1e-2)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="the interpreter sums as it likes")
def test_long_heads_have_the_same_bits_in_prefill_chunks_trees_and_alone(
    device: torch.device, dtype: torch.dtype
) -> None:
    scoring = Scoring(1.0, groups=2)
    chains = [chain_parents([count]).tolist() for count in (36, 3, 1)]
    case = Case([0, 64 * 64 + 62, 70], chains, 16, 1, 512)
    alone = case.run(device, dtype, longest=4352, scoring=scoring)
    prefilled = case.run(device, dtype, longest=4352, large=[True, True, False], scoring=scoring)
    assert torch.equal(prefilled, alone)
    torch.testing.assert_close(alone.float(), case.expected(dtype, None, scoring), rtol=0, atol=3e-2)
    trees = shaped_as(TREES, 16, 1, 512)
    got = trees.run(device, dtype, scoring=scoring)
    torch.testing.assert_close(got.float(), trees.expected(dtype, None, scoring), rtol=0, atol=3e-2)


def test_requests_with_many_contiguous_rows_are_prefilled_if_they_occupy_the_device() -> None:
    from paceline.backends.cuda.passes.tables import prefill_requests

    def large(counts: list[int]) -> list[bool]:
        parents = [chain_parents([count]).tolist() if count != 9 else TREE for count in counts]
        case = Case([5] * len(counts), parents, 32, 8, 2)
        return [bool(own) for own in prefill_requests(case.batch, 32, 8)]

    assert large([256]) == [True]
    assert large([240]) == [False]  # 15 tiles of 16 rows and 8 KV heads leave multiprocessors idle
    assert large([200, 1, 9, 100, 15]) == [True, False, False, True, False]
    assert large([1, 9, 500, 3, 9]) == [False, False, True, True, False]  # there is scratch for 512 rows


def test_scratch_holds_the_partials_of_few_tiles_with_many_rows() -> None:
    """Six rows of a request are two tiles, which more programs share than six tiles of a row each."""
    from paceline.backends.cuda.kernels.attention import paged_attention as attention

    scratch = attention.attention_scratch(6, 32, 8, 128, 400, torch.device("meta"))
    parts = attention.max_partials(2, 8, scratch.blocks)
    assert parts == scratch.blocks == 7
    assert scratch.partial_acc.numel() >= 6 * 32 * parts * 128
