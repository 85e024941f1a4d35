"""Attention in CUDA C++, compiled for the host: what it computes is the plain attention. See emulated.h."""

from __future__ import annotations

import struct
import subprocess
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from paceline.backends.cuda.kernels.attention.paged_attention import tile_height
from paceline.backends.cuda.kernels.attention.scoring import LLAMA_SCORING
from paceline.backends.cuda.native import decode_attention
from paceline.backends.cuda.passes.tables import rows_of
from tests.backends.cuda.emulating import compiled, needs_compiler
from tests.backends.cuda.kernels.test_attention import PAGE_SIZE, Case
from tests.backends.cuda.native.test_decode_attention import chain, some_tree


@dataclass(frozen=True)
class Built:
    """The kernel for these heads, key heads and head size."""

    shape: tuple[int, int, int]
    tiles_each: int
    has_trees: bool

    def program(self) -> Path:
        sizes, scale = (*self.shape, PAGE_SIZE), LLAMA_SCORING.scale(self.shape[2])
        numbers = decode_attention.kernel_numbers(sizes, self.tiles_each, self.has_trees, scale)
        numbers["THREADS_OF_PROGRAM"] = threads = decode_attention.threads(self.shape[2])
        numbers["WAITING_THREADS"] = threads - 128  # the warp that loads may wait later
        return compiled(decode_attention.SOURCES[1:], "emulated_decode_attention.h", numbers)


def emulate(
    program: Path, folder: Path, case: Case, built: Built, settled: bool, kv_splits: int, shared_chunks: int
) -> torch.Tensor:
    """What the kernel gives [rows, heads, dim]; keys of this pass come when it has waited for them.

    With shared KV chunks, it gives the same again when only their partials are there. `folder` is for files.
    """
    heads, kv_heads, dim = case.shape
    batch, rows, requests = case.batch, case.batch.num_rows, len(case.offsets) - 1
    own = rows_of(batch, PAGE_SIZE, tile_height(heads, kv_heads))
    query, keys, values = (x.to(torch.bfloat16) for x in (case.query, case.keys, case.values))
    late = torch.from_numpy(own.slot_mapping).long()
    fresh = keys[late], values[late]
    paths = own.paths if own.paths is not None else np.zeros((rows, 64), np.int32)
    tiles = own.tiles.shape[1] // requests
    longest = int(batch.positions.max()) + 1
    groups = requests * -(-tiles // built.tiles_each)
    sizes = (
        rows // requests,
        tiles,
        -(-longest // 512),
        0,
        int(settled),
        kv_splits,
        rows,
        groups,
        shared_chunks,
        max(1, groups * kv_heads * kv_splits * 2 // 3),  # programs: some have several units
    )
    of_tiles = own.tiles[1], own.tiles[2]
    arrays = [batch.positions, own.contiguous_until, paths, *of_tiles, own.pages, np.zeros(0)]
    tensors = [x.contiguous().view(torch.int16).numpy() for x in (query, keys, values)]
    parts = [*tensors, *arrays, *(x.contiguous().view(torch.int16).numpy() for x in fresh), own.slot_mapping]
    parts.append(np.array(sizes, np.int32))
    with (folder / "in").open("wb") as file:
        for part in parts:
            data = np.ascontiguousarray(part).tobytes()
            file.write(struct.pack("<Q", len(data)) + data)
    subprocess.run([program, folder / "in", folder / "out"], check=True, timeout=120)
    given = np.fromfile(folder / "out", np.int16)
    return torch.from_numpy(given).view(torch.bfloat16).view(rows, heads, dim)


@needs_compiler
@pytest.mark.parametrize(
    ("built", "cases"),
    [
        (
            Built((4, 2, 64), 1, False),
            [([70, 3], chain(3), 1, 0), ([1540, 1024], chain(1), 2, 2), ([1100], chain(2), 1, 0)],
        ),
        (Built((12, 2, 128), 2, False), [([520], chain(4), 2, 1), ([520], chain(4), 1, 0)]),
        (Built((4, 1, 64), 2, True), [([60, 1], some_tree(12, 1), 1, 0), ([505], some_tree(14, 2), 1, 0)]),
    ],
    ids=["plain", "six heads of a key head, two KV chunks", "trees"],
)
def test_it_is_the_plain_attention(
    built: Built, cases: list[tuple[list[int], list[int], int, int]], tmp_path: Path
) -> None:
    program = built.program()
    for contexts, parents, kv_splits, shared_chunks in cases:
        case = Case(contexts, [parents] * len(contexts), *built.shape)
        expected = case.expected(torch.bfloat16)
        for settled in (True, False):
            given = emulate(program, tmp_path, case, built, settled, kv_splits, shared_chunks)
            torch.testing.assert_close(given.float(), expected, rtol=0, atol=1e-2)
