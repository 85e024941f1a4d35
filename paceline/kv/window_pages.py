"""WindowPages: the second KV cache group of a model in which only some layers have a sliding window.

The layers without a window keep every page. Those with one read only the last positions, so their keys and
values are in pages of another pool, fewer ones: a page of a sequence has a window page beside it only while a
coming row may read it. Page tables have page numbers alone; `group.table` gives the window page of each.

    page table of a sequence    |  7 |  2 |  9 |  4 |  5 |
    group.table of these pages  |  0 |  0 |  3 |  8 |  1 |      0: the null page, read by masked lanes only

A window page is free, held by the sequences whose window has it, or cached: nobody's window has it, but its
page is still in the prefix cache, so a prompt with the same beginning can continue there. The least recently
used of those are taken when free ones run out.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

import numpy as np

from paceline.core.forward import WindowGroup
from paceline.kv.pages import pages_for


class WindowPages:
    """The bookkeeping of window pages, by the numbers of the pages that they are beside."""

    def __init__(self, num_pages: int, num_window_pages: int, window: int, page_size: int) -> None:
        """`num_pages`: those of the layers without a window. `window`: the last positions that a row reads,
        its own included."""
        self.window = window
        self.group = WindowGroup(num_window_pages, np.zeros(num_pages, dtype=np.int32))
        self._page_size = page_size
        self._holders = [0] * num_pages
        self._free = list(range(num_window_pages - 1, 0, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()  # oldest first

    @property
    def num_available(self) -> int:
        """The number of window pages that `give` can still use."""
        return len(self._free) + len(self._cached)

    @property
    def num_usable(self) -> int:
        """The number of window pages, without the null page."""
        return self.group.num_pages - 1

    def free_pages(self) -> list[int]:
        """The numbers of free window pages."""
        return list(self._free)

    def first_seen(self, length: int) -> int:
        """The first of a sequence's pages that a row after `length` tokens, or after its last full page,
        reads: so a sequence that has ended can be continued from its last full page."""
        return max(length // self._page_size * self._page_size - self.window + 1, 0) // self._page_size

    def seen_of(self, found: Sequence[int]) -> Sequence[int]:
        """Of the pages of a prefix, those that a row after it reads."""
        return found[self.first_seen(len(found) * self._page_size) :]

    def last_missing(self, found: Sequence[int]) -> int | None:
        """The number of the last page without a window page, of those that a row after this prefix reads."""
        first = self.first_seen(len(found) * self._page_size)
        numbers = range(len(found) - 1, first - 1, -1)
        return next((number for number in numbers if not self.group.table[found[number]]), None)

    def num_unheld(self, pages: Iterable[int]) -> int:
        """How many of these pages have a window page that no sequence holds."""
        return sum(page in self._cached for page in pages)

    def give(self, pages: Iterable[int]) -> None:
        """Give each of these pages, which are new in a sequence, a window page with undefined content."""
        for page in pages:
            if page in self._cached:  # of the page's earlier content
                del self._cached[page]
            else:
                if not self._free:
                    self._drop_oldest()
                self.group.table[page] = self._free.pop()
            self._holders[page] = 1

    def hold(self, pages: Iterable[int]) -> None:
        """Hold the window pages of pages that have one."""
        for page in pages:
            if not self._holders[page]:
                del self._cached[page]
            self._holders[page] += 1

    def drop(self, page: int, keep: bool) -> None:
        """Release the window page of a page. `keep`: the page is in the prefix cache."""
        self._holders[page] -= 1
        if self._holders[page]:
            return
        if keep:
            self._cached[page] = None
        else:
            self._take_away(page)

    def replace(self, page: int, existing: int) -> None:
        """Let the holder of `page` hold `existing`, a page with the same tokens, instead."""
        table = self.group.table
        if table[existing]:
            self.hold([existing])
            self.drop(page, keep=False)
        else:
            table[existing], table[page] = table[page], 0
            self._holders[existing], self._holders[page] = 1, 0

    def _take_away(self, page: int) -> None:
        self._free.append(int(self.group.table[page]))
        self.group.table[page] = 0

    def _drop_oldest(self) -> None:
        page, _ = self._cached.popitem(last=False)
        self._take_away(page)


def window_pages_for(window: int, rows: int, page_size: int) -> int:
    """The most window pages that a sequence holds in a pass with this number of its rows."""
    return pages_for(window - 1, page_size) + pages_for(page_size - 1 + rows, page_size)
