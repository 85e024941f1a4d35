"""Attention in CUDA C++ has the bits of the kernel in Triton, on a Hopper: it has no interpreter."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from paceline.core.forward import chain_parents
from tests.backends.cuda.kernels.test_attention import PAGE_SIZE, TREE, Case
from tests.backends.cuda.native.test_fused_layer import decode, needs_hopper, random_weights


def chain(length: int) -> list[int]:
    return list(map(int, chain_parents([length])))


def some_tree(nodes: int, seed: int) -> list[int]:
    """A tree whose rows are far from their parents."""
    generator = np.random.default_rng(seed)
    return [-1, *(int(generator.integers(0, node)) for node in range(1, nodes))]


def contexts(requests: int, most: int) -> list[int]:
    return [int(number) for number in np.random.default_rng(7).integers(1, most, requests)]


def uniform_tables(case: Case, counts: list[int] | None, settled: bool, is_chain: bool) -> Any:
    """Tables of a pass whose requests have as many rows; `counts` of each request mean something."""
    from paceline.backends.cuda.kernels.attention.paged_attention import tile_height
    from paceline.backends.cuda.kernels.attention.row_tables import UniformRows
    from paceline.backends.cuda.passes.tables import DeviceTables, rows_of

    heads, kv_heads, _ = case.shape
    height, rows, requests = tile_height(heads, kv_heads), case.batch.num_rows, len(case.offsets) - 1
    tables = DeviceTables(rows, case.batch.page_tables.size, torch.device("cuda"))
    tables.send(case.batch, rows_of(case.batch, PAGE_SIZE, height))
    each = -(-(rows // requests) // height)
    whole, tiles = tables.tables(rows), requests * each
    of_tiles = [own[:tiles].clone() for own in (whole.tile_rows, whole.tile_counts, whole.tile_pages)]
    if counts is not None:
        first = torch.arange(each) * height
        limits = torch.tensor(counts)[:, None] - first[None, :]
        of_tiles[1] = torch.minimum(of_tiles[1], limits.clamp(min=0).view(-1).int().cuda())
    uniform = UniformRows(each, rows // requests, settled)
    paths = None if is_chain else whole.paths
    return replace(
        whole,
        paths=paths,
        tile_rows=of_tiles[0],
        tile_counts=of_tiles[1],
        tile_pages=of_tiles[2],
        uniform=uniform,
    )


def attended(case: Case, tables: Any, attend: Any, earliest: int) -> torch.Tensor:
    """The bits that attention writes to memory full of NaN."""
    from paceline.backends.cuda.kernels.attention.paged_attention import attention_scratch

    heads, kv_heads, dim = case.shape
    rows, device, kind = case.batch.num_rows, torch.device("cuda"), torch.bfloat16
    longest = int(case.batch.positions.max()) + 1
    scratch = attention_scratch(rows, heads, kv_heads, dim, longest, device)
    output = torch.full((rows, heads * dim + 64), math.nan, dtype=kind, device=device)
    query, keys, values = (own.to(device, kind) for own in (case.query, case.keys, case.values))
    for _ in range(2):  # a second time with counters as the first has left them
        attend(query, keys, values, tables, None, PAGE_SIZE, output, scratch, earliest=earliest)
    assert not scratch.counters.any()
    return output.view(torch.int16)


@needs_hopper
@pytest.mark.parametrize("settled", [True, False])
@pytest.mark.parametrize(
    "shape", [(8, 2, 128), (6, 2, 64), (4, 4, 128), (16, 1, 64), (12, 2, 128), (4, 2, 64)]
)
@pytest.mark.parametrize(
    ("lengths", "parents", "counts", "kv_splits"),
    [
        ([300], chain(1), None, 1),
        ([300, 1, 64], chain(6), None, 1),
        ([900], chain(6), None, 16),
        ([2700], chain(6), None, 3),
        (contexts(9, 700), chain(8), None, 1),
        (contexts(9, 700), chain(1), None, 2),
        (contexts(5, 400), chain(6), [6, 0, 1, 4, 5], 1),
        ([70 * 64, 3], chain(3), None, 4),  # more than a group of KV chunks
        ([70 * 64, 3], chain(3), None, 1),
        ([60, 3, 63, 120], TREE, None, 1),
        ([250, 1, 63, 127], some_tree(32, 1), None, 1),
        ([250, 1, 63, 127], some_tree(32, 1), [32, 20, 0, 31], 2),
        ([100, 511, 448], some_tree(64, 2), None, 2),
        ([70 * 64 + 40], some_tree(64, 3), None, 9),
        ([600, 480], [-1, *[0] * 20, *range(20, 62)], None, 2),  # paths of more than a block
    ],
)
def test_it_has_the_bits_of_triton(
    shape: tuple[int, int, int],
    lengths: list[int],
    parents: list[int],
    counts: list[int] | None,
    kv_splits: int,
    settled: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from paceline.backends.cuda.kernels.attention import paged_attention as attention
    from paceline.backends.cuda.native import decode_attention

    case = Case(lengths, [parents] * len(lengths), *shape)
    is_chain = parents == chain(len(parents))
    tables = uniform_tables(case, counts, settled, is_chain)
    expected = attended(case, tables, attention.attend, 1)
    programs = kv_splits * len(lengths) * -(-tables.uniform.tiles // 2) * shape[1]
    monkeypatch.setattr(decode_attention, "num_multiprocessors", lambda device: programs)
    monkeypatch.setattr(attention, "PROGRAMS", 1)  # else few tiles are left to Triton
    ran: list[bool] = []
    run = decode_attention._run

    def watched(*arguments: Any) -> bool:
        ran.append(run(*arguments))
        return ran[-1]

    monkeypatch.setattr(decode_attention, "_run", watched)
    assert torch.equal(attended(case, tables, decode_attention.attend, 1), expected)
    assert ran == [True, True]


@needs_hopper
@pytest.mark.parametrize(("rows", "runs"), [(6, True), (4, False)])
def test_programs_take_several_units_if_each_has_two_tiles(rows: int, runs: bool) -> None:
    from paceline.backends.cuda.kernels.attention import paged_attention as attention
    from paceline.backends.cuda.native import decode_attention

    case = Case(contexts(190, 1500), [chain(rows)] * 190, 8, 2, 128)  # 380 units
    tables = uniform_tables(case, None, True, True)
    ran: list[bool] = []
    with pytest.MonkeyPatch.context() as patch:
        run = decode_attention._run
        patch.setattr(decode_attention, "_run", lambda *arguments: ran.append(run(*arguments)) or ran[-1])
        results = attended(case, tables, decode_attention.attend, 1)
    assert ran == [runs] * 2
    assert torch.equal(results, attended(case, tables, attention.attend, 1))


def test_units_split_kv_positions_where_multiprocessors_would_wait() -> None:
    from paceline.backends.cuda.native.decode_attention import num_kv_splits

    assert num_kv_splits(8, 32, 132) == 16  # a unit for every multiprocessor
    assert num_kv_splits(8, 3, 132) == 3  # no more than there are KV chunks
    assert num_kv_splits(128, 32, 132) == num_kv_splits(512, 32, 132) == 1
    assert num_kv_splits(136, 32, 132) == 4  # five quarters instead of two
    assert num_kv_splits(136, 1, 132) == 1


@needs_hopper
@pytest.mark.parametrize(("requests", "tree"), [(11, False), (8, True)])
def test_steps_have_the_bits_of_triton(requests: int, tree: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys of earlier steps are loaded before the previous kernels have ended, those of this step after."""
    from paceline.backends.cuda.decode.draft_shape import chain_shape, tree_shape
    from paceline.backends.cuda.native import decode_attention

    shape, weights, run = (
        tree_shape(12, 3, 4) if tree else chain_shape(5),
        random_weights(),
        decode_attention._run,
    )
    ran: list[bool] = []

    def watched(*arguments: Any) -> bool:
        ran.append(run(*arguments))
        return ran[-1]

    monkeypatch.setattr(decode_attention, "_run", watched)
    results = decode(weights, requests, shape)
    assert ran
    assert all(ran)
    monkeypatch.setattr(decode_attention, "_run", lambda *arguments: False)
    assert all(map(torch.equal, results, decode(weights, requests, shape)))


@needs_hopper
def test_what_it_is_not_made_for_is_left_to_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    from paceline.backends.cuda.kernels.attention import paged_attention as attention
    from paceline.backends.cuda.native import decode_attention

    def refuse(*arguments: Any) -> Any:
        raise AssertionError("it has a kernel for this")

    monkeypatch.setattr(decode_attention, "_kernel", refuse)
    monkeypatch.setattr(attention, "PROGRAMS", 1)
    case = Case([30], [some_tree(65, 4)], 8, 2, 128)
    tables = uniform_tables(case, None, True, False)
    expected = attended(case, tables, attention.attend, 0)
    assert torch.equal(attended(case, tables, decode_attention.attend, 0), expected)
    uneven = replace(tables, uniform=None)
    assert torch.equal(attended(case, uneven, decode_attention.attend, 0), expected)
