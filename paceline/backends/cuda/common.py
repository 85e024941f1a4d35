"""Which stretches of positions many rows of a pass see alike: found in page tables, on the host.

Requests with equal pages see the same keys and values there. Sorted by their pages, those that begin alike
lie side by side, and so do those of them that go on alike:

    a   1 2 3 | 4 5 6 | 7 8 9       stretch 0: a, b and c
    b   1 2 3 | 4 5 6 | 3 2 1       stretch 1: a and b
    c   1 2 3 | 9 8 7               the rest is left to each
    d   5 5 5
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from paceline.backends.cuda.attend import TOGETHER
from paceline.backends.cuda.kernels.attention import tile_height
from paceline.backends.cuda.kernels.common import ITEM, STRETCH, CommonRows, rows_together
from paceline.backends.cuda.tables import sent
from paceline.core.arrays import Int32Array

MOST_ITEMS = 4096  # that there is room for; what lies deeper is left to each request
# Stretches of a key head that are read less often, for a pass to be worth another kernel in every layer:
# about one for each multiprocessor.
LEAST_SAVED = 128


@dataclass(frozen=True)
class PassRows:
    """The requests of a pass: what they have computed before it, where, and their rows."""

    page_tables: Int32Array  # [requests, most pages]
    begins: Int32Array  # [requests] where each table begins, where kernels read it
    contexts: Int32Array  # [requests] tokens that all rows of a request see
    counts: Int32Array  # [requests] rows
    firsts: Int32Array  # [requests] the first row of each


def even_rows(page_tables: Int32Array, begins: Int32Array, contexts: Int32Array, each: int) -> PassRows:
    """Requests that have `each` so many rows, one after the other."""
    counts = np.full(len(contexts), each, dtype=np.int32)
    firsts = np.arange(len(contexts), dtype=np.int32) * each
    return PassRows(page_tables, begins, contexts, counts, firsts)


@dataclass(frozen=True)
class Common:
    """What is to be read once for all."""

    skipped: Int32Array  # [requests] stretches, from the first on
    rows: Int32Array  # [rows that have some] in the order that items refer to
    items: Int32Array  # [items, ITEM] as CommonRows has them


def nothing_common(requests: int) -> Common:
    """Of a pass that has the kernels for it, and nothing to read once."""
    return Common(np.zeros(requests, np.int32), np.zeros(0, np.int32), np.zeros((0, ITEM), np.int32))


def find_common(own: PassRows, page_size: int, heads: int, kv_heads: int) -> Common | None:
    """What the rows of a pass have in common; None if to read it once would save too little."""
    if STRETCH % page_size or not len(own.contexts) or own.contexts.max() < STRETCH:
        return None
    depths, pages_each = own.contexts // STRETCH, STRETCH // page_size
    order = sorted(
        np.flatnonzero(depths).tolist(),
        key=lambda request: own.page_tables[request, : depths[request] * pages_each].tobytes(),
    )
    alike = [0, *map(_alike(own.page_tables, depths, pages_each), order[:-1], order[1:])]
    counts = own.counts[order]
    ends = np.concatenate(([0], np.cumsum(counts))).tolist()  # of requests, in rows
    programs = -(-counts // (TOGETHER * tile_height(heads, kv_heads)))
    together = rows_together(heads, kv_heads)
    items: list[tuple[int, int, int, int]] = []
    skipped, saved = np.zeros(len(depths), np.int32), 0
    runs, depth = list(_runs(alike, 0, 0, len(order))), 0
    while runs:
        deeper: list[tuple[int, int]] = []
        for begin, end in runs:
            first, last = ends[begin], ends[end]
            gain = int(programs[begin:end].sum()) - -(-(last - first) // together)
            chunks = range(first, last, together)
            if gain <= 0 or len(items) + len(chunks) > MOST_ITEMS:
                continue
            saved += gain
            pages = int(own.begins[order[begin]])
            items += [(at, min(together, last - at), pages, depth) for at in chunks]
            skipped[order[begin:end]] = depth + 1
            deeper += _runs(alike, depth + 1, begin, end)
        depth += 1
        runs = [run for run in deeper if depths[order[run[0]]] > depth]
    if saved * kv_heads < LEAST_SAVED:
        return None
    rows = [np.arange(own.firsts[one], own.firsts[one] + own.counts[one]) for one in order]
    return Common(skipped, np.concatenate(rows).astype(np.int32), np.array(items, np.int32))


def _alike(page_tables: Int32Array, depths: Int32Array, pages_each: int) -> Callable[[int, int], int]:
    """What tells how many stretches two requests have in common."""

    def count(one: int, other: int) -> int:
        most = min(depths[one], depths[other]) * pages_each
        same = page_tables[one, :most] == page_tables[other, :most]
        return int((len(same) if same.all() else same.argmin()) // pages_each)

    return count


def _runs(alike: Sequence[int], depth: int, begin: int, end: int) -> Iterator[tuple[int, int]]:
    """Requests from `begin` to `end`, cut where neighbours have no more than `depth` stretches in common."""
    start = begin
    for at in range(begin + 1, end):
        if alike[at] <= depth:
            yield start, at
            start = at
    yield start, end


class CommonTables:
    """What is common in a pass, on the device, at addresses that stay."""

    def __init__(self, max_rows: int, device: torch.device) -> None:
        self._max_rows = max_rows
        size = 1 + 2 * max_rows + MOST_ITEMS * ITEM
        self._numbers = torch.zeros(size, dtype=torch.int32, device=device)

    def send(self, common: Common, tiles: Sequence[int] | Int32Array) -> None:
        """Copy it to the device; `tiles` [requests] is how many each request has, one after the other."""
        most, used = self._max_rows, common.items.size
        numbers = np.zeros(1 + 2 * most + used, np.int32)
        numbers[0] = len(common.items)
        of_tiles = np.repeat(common.skipped, tiles)
        numbers[1 : 1 + len(of_tiles)] = of_tiles
        numbers[1 + most : 1 + most + len(common.rows)] = common.rows
        numbers[1 + 2 * most :] = common.items.reshape(-1)
        self._numbers[: len(numbers)].copy_(sent(numbers, self._numbers.device))

    def rows(self) -> CommonRows:
        """What the kernels read."""
        most, numbers = self._max_rows, self._numbers
        items = numbers[1 + 2 * most :].view(MOST_ITEMS, ITEM)
        return CommonRows(numbers[1 : 1 + most], numbers[:1], numbers[1 + most : 1 + 2 * most], items)
