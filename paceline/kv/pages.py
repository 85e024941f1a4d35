"""The page pool: reference counts, and the prefix cache's index of pages by their tokens.

A page is in exactly one of three states:

    free     no sequence holds it, and its content is never read
    held     one or more sequences have it in their page table (`_holders` counts them)
    cached   no sequence holds it, but it is full and indexed by its tokens; evicted, least recently
             released first, when free pages run out

The index is exact. Each indexed page has a unique serial number, and its key is its parent's serial number
with its own tokens: equal keys mean equal tokens all the way to the root, without trusting a hash. A page's
holders hold its ancestors too and release them last, so an ancestor is never evicted before its descendants.
Sliding windows are the exception: a sequence releases ancestors first. Then descendants of an evicted page
are not found any more, until they are evicted in their turn.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Protocol

import numpy as np

Key = tuple[int | str, tuple[int, ...]]  # parent's serial number (at the root: the salt), the page's tokens


class PrefixCacheObserver(Protocol):
    """Told of every page that enters or leaves the index, in order."""

    def stored(self, serial: int, parent: int | str, tokens: tuple[int, ...]) -> None:
        """A page was indexed under this serial number, after this parent."""

    def removed(self, serial: int) -> None:
        """The page with this serial number has left the index."""


class PagePool:
    """The bookkeeping of `num_pages` page numbers."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        # [pages] how often a page was taken: what others store beside a page is stale if this has changed
        self.generations = np.zeros(num_pages, dtype=np.int64)
        self._holders = [0] * num_pages
        self._free = list(range(num_pages - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()  # oldest first
        self._index: dict[Key, int] = {}
        self._keys: dict[int, Key] = {}  # of indexed pages
        self._serials: dict[int, int] = {}  # of indexed pages
        self._next_serial = 0
        self._observer: PrefixCacheObserver | None = None

    @property
    def num_available(self) -> int:
        """The number of pages that `take` can still return."""
        return len(self._free) + len(self._cached)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    def observe(self, observer: PrefixCacheObserver) -> None:
        """Tell an observer of all changes of the index, which is still empty."""
        assert not self._index
        assert self._observer is None
        self._observer = observer

    def free_pages(self) -> list[int]:
        """The page numbers of free pages."""
        return list(self._free)

    def take(self, count: int) -> list[int]:
        """Pages that only the caller holds, with undefined content. At least `count` must be available."""
        pages = self._free[: -count - 1 : -1]  # the last first
        del self._free[len(self._free) - len(pages) :]
        while len(pages) < count:
            page, _ = self._cached.popitem(last=False)
            self._unindex(page)
            pages.append(page)
        for page in pages:
            self._holders[page] = 1
        self.generations[pages] += 1
        return pages

    def hold(self, page: int) -> None:
        """Hold a page that `find` returned."""
        if self._holders[page] == 0:
            del self._cached[page]
        self._holders[page] += 1

    def drop(self, page: int, forget: bool = False) -> None:
        """Release a page. `forget`: its content is not trusted, so remove it from the index."""
        self._holders[page] -= 1
        if forget and page in self._keys:
            self._unindex(page)
        if self._holders[page] > 0:
            return
        if page in self._keys:
            self._cached[page] = None
        else:
            self._free.append(page)

    def is_cached(self, page: int) -> bool:
        """Whether a page is indexed and no sequence holds it."""
        return page in self._cached

    def find(self, parent: int | str, tokens: tuple[int, ...]) -> int | None:
        """The indexed page with these tokens after this parent."""
        return self._index.get((parent, tokens))

    def add(self, page: int, parent: int | str, tokens: tuple[int, ...]) -> None:
        """Index a full page, so that `find` returns it."""
        key = (parent, tokens)
        assert key not in self._index
        assert page not in self._keys, "a page of two sequences"
        self._index[key] = page
        self._keys[page] = key
        self._serials[page] = self._next_serial
        self._next_serial += 1
        if self._observer is not None:
            self._observer.stored(self._serials[page], parent, tokens)

    def serial(self, page: int) -> int | None:
        """The serial number of an indexed page; None if it is not indexed."""
        return self._serials.get(page)

    def _unindex(self, page: int) -> None:
        del self._index[self._keys.pop(page)]
        serial = self._serials.pop(page)
        if self._observer is not None:
            self._observer.removed(serial)


def pages_for(num_tokens: int, page_size: int) -> int:
    """The number of pages that this many tokens take."""
    return -(-num_tokens // page_size)


def page_tokens(token_ids: Sequence[int], page: int, page_size: int) -> tuple[int, ...]:
    """The tokens of page number `page` of a sequence."""
    return tuple(token_ids[page * page_size : (page + 1) * page_size])
