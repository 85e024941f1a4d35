"""Plans shared-prefix (cascade) attention: finds, on the host, the leading KV chunks that requests share.

Requests with equal leading page numbers share a prefix. Sorted by page numbers, requests with a common prefix
are adjacent, and so are requests with a longer common prefix:

    a   1 2 3 | 4 5 6 | 7 8 9       KV chunk 0: shared by a, b and c
    b   1 2 3 | 4 5 6 | 3 2 1       KV chunk 1: shared by a and b
    c   1 2 3 | 9 8 7               every other KV chunk is read by its own request
    d   5 5 5
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from paceline.backends.cuda.kernels.attention.paged_attention import tile_height
from paceline.backends.cuda.kernels.attention.shared_prefix import (
    ITEM,
    KV_CHUNK,
    SharedPrefixRows,
    rows_per_program,
)
from paceline.backends.cuda.native.decode_attention import TILES_PER_UNIT
from paceline.backends.cuda.passes.tables import to_device
from paceline.core.arrays import Int32Array

MAX_ITEMS = 4096  # most work items of a pass; deeper KV chunks are then read by each request
# KV chunks (times KV heads) whose reading must be saved for the additional kernel in every layer to pay off:
# about one per multiprocessor
MIN_SAVED = 128


@dataclass(frozen=True)
class PassRows:
    """The requests of a pass: contexts, page tables and rows."""

    page_tables: Int32Array  # [requests, most pages]
    begins: Int32Array  # [requests] offset of each table in the kernels' flat page table
    contexts: Int32Array  # [requests] tokens that all rows of a request attend to
    counts: Int32Array  # [requests] rows
    firsts: Int32Array  # [requests] the first row of each


def uniform_rows(page_tables: Int32Array, begins: Int32Array, contexts: Int32Array, each: int) -> PassRows:
    """The requests of a uniform pass, with `each` rows per request."""
    counts = np.full(len(contexts), each, dtype=np.int32)
    firsts = np.arange(len(contexts), dtype=np.int32) * each
    return PassRows(page_tables, begins, contexts, counts, firsts)


@dataclass(frozen=True)
class SharedPrefix:
    """The KV chunks that the shared-prefix kernel computes."""

    shared_chunks: Int32Array  # [requests] number of leading KV chunks that the kernel computes
    rows: Int32Array  # [rows with shared KV chunks] in the order that items refer to
    items: Int32Array  # [items, ITEM] work items, see SharedPrefixRows


def no_shared_prefix(requests: int) -> SharedPrefix:
    """An empty plan, for which the shared-prefix kernel has no work: to compile it."""
    return SharedPrefix(np.zeros(requests, np.int32), np.zeros(0, np.int32), np.zeros((0, ITEM), np.int32))


def find_shared_prefixes(own: PassRows, page_size: int, heads: int, kv_heads: int) -> SharedPrefix | None:
    """The shared KV chunks of a pass; None if sharing them would save too little."""
    if KV_CHUNK % page_size or not len(own.contexts) or own.contexts.max() < KV_CHUNK:
        return None
    depths, pages_each = own.contexts // KV_CHUNK, KV_CHUNK // page_size
    order = sorted(
        np.flatnonzero(depths).tolist(),
        key=lambda request: own.page_tables[request, : depths[request] * pages_each].tobytes(),
    )
    alike = [0, *map(_alike(own.page_tables, depths, pages_each), order[:-1], order[1:])]
    counts = own.counts[order]
    ends = np.concatenate(([0], np.cumsum(counts))).tolist()  # the end of each request's rows
    programs = -(-counts // (TILES_PER_UNIT * tile_height(heads, kv_heads)))
    together = rows_per_program(heads, kv_heads)
    items: list[tuple[int, int, int, int]] = []
    shared_chunks, saved = np.zeros(len(depths), np.int32), 0
    runs, depth = list(_runs(alike, 0, 0, len(order))), 0
    while runs:
        deeper: list[tuple[int, int]] = []
        for begin, end in runs:
            first, last = ends[begin], ends[end]
            gain = int(programs[begin:end].sum()) - -(-(last - first) // together)
            chunks = range(first, last, together)
            if gain <= 0 or len(items) + len(chunks) > MAX_ITEMS:
                continue
            saved += gain
            pages = int(own.begins[order[begin]])
            items += [(at, min(together, last - at), pages, depth) for at in chunks]
            shared_chunks[order[begin:end]] = depth + 1
            deeper += _runs(alike, depth + 1, begin, end)
        depth += 1
        runs = [run for run in deeper if depths[order[run[0]]] > depth]
    if saved * kv_heads < MIN_SAVED:
        return None
    rows = [np.arange(own.firsts[one], own.firsts[one] + own.counts[one]) for one in order]
    return SharedPrefix(shared_chunks, np.concatenate(rows).astype(np.int32), np.array(items, np.int32))


def _alike(page_tables: Int32Array, depths: Int32Array, pages_each: int) -> Callable[[int, int], int]:
    """A function that counts the leading KV chunks that two requests share."""

    def count(one: int, other: int) -> int:
        most = min(depths[one], depths[other]) * pages_each
        equal = page_tables[one, :most] == page_tables[other, :most]
        return int((len(equal) if equal.all() else equal.argmin()) // pages_each)

    return count


def _runs(alike: Sequence[int], depth: int, begin: int, end: int) -> Iterator[tuple[int, int]]:
    """Runs of adjacent requests, from `begin` to `end`, that share more than `depth` KV chunks."""
    start = begin
    for at in range(begin + 1, end):
        if alike[at] <= depth:
            yield start, at
            start = at
    yield start, end


class SharedPrefixTables:
    """The shared prefixes of a pass on the device, at fixed addresses."""

    def __init__(self, max_rows: int, device: torch.device) -> None:
        self._max_rows = max_rows
        size = 1 + 2 * max_rows + MAX_ITEMS * ITEM
        self._numbers = torch.zeros(size, dtype=torch.int32, device=device)

    def send(self, shared_prefix: SharedPrefix, tiles: Sequence[int] | Int32Array) -> None:
        """Copy it to the device; `tiles` [requests] are the tiles of each request, one after the other."""
        most, used = self._max_rows, shared_prefix.items.size
        numbers = np.zeros(1 + 2 * most + used, np.int32)
        numbers[0] = len(shared_prefix.items)
        of_tiles = np.repeat(shared_prefix.shared_chunks, tiles)
        numbers[1 : 1 + len(of_tiles)] = of_tiles
        numbers[1 + most : 1 + most + len(shared_prefix.rows)] = shared_prefix.rows
        numbers[1 + 2 * most :] = shared_prefix.items.reshape(-1)
        self._numbers[: len(numbers)].copy_(to_device(numbers, self._numbers.device))

    def rows(self) -> SharedPrefixRows:
        """The tables that kernels read."""
        most, numbers = self._max_rows, self._numbers
        items = numbers[1 + 2 * most :].view(MAX_ITEMS, ITEM)
        return SharedPrefixRows(numbers[1 : 1 + most], numbers[:1], numbers[1 + most : 1 + 2 * most], items)
