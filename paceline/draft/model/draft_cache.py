"""The KV cache of a draft model: where its keys and values are, and which tokens have them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from paceline.compiling import compiled
from paceline.core.arrays import Int32Array, Int64Array
from paceline.kv.cache import KVCache, PoolOwner

if TYPE_CHECKING:
    from paceline.backends.base import Backend
    from paceline.core.forward import KVPool
    from paceline.core.request import Request


@dataclass(slots=True, eq=False)  # not frozen: there is one for each request of every pass
class Context:
    """One request as the draft model sees it while it proposes. Immutable by convention."""

    request: Request
    tokens: Sequence[int]  # prompt and output so far, in the draft model's ids; not a copy
    pages: Int32Array  # [pages] its row of the page table, a view
    room: int  # rows that can be written after its tokens


Span = tuple[Context, int, int]  # tokens start to end - 1 of a context


class DraftCache(Protocol):
    """The keys and values of a draft model. Token i of a context is at KV index i of its pages."""

    pool: KVPool

    def open(self, requests: Sequence[Request], budgets: Sequence[int]) -> list[Context | None]:
        """One context per request, with room for at most `budget` rows; None if it cannot be drafted for."""
        ...

    def computed(self, contexts: Sequence[Context]) -> list[int]:
        """The number of leading tokens of each context that have keys and values."""
        ...

    def backlog(self, request: Request) -> int:
        """The number of tokens of a request, without the last, that have no keys and values yet."""
        ...

    def keep(self, spans: Sequence[Span]) -> None:
        """Record that tokens start to end - 1 of contexts were computed, and all before them."""
        ...

    def keep_drafted(self, context: Context, tokens: Sequence[int]) -> None:
        """Record that these drafted tokens were computed after the context; see `settle`."""
        ...

    def settle(self, request: Request, in_place: bool) -> None:
        """Keep the drafted tokens that were accepted; `in_place`: commit has not moved their rows."""
        ...

    def forget(self, request: Request) -> None:
        """Drop the state of a request that has ended."""
        ...


@dataclass(frozen=True, slots=True)
class _Drafted:
    """Drafted tokens whose keys and values are in the pool."""

    pages: Int32Array  # [pages] where they were written; prefix caching may replace pages of the table later
    start: int  # KV index of the first
    tokens: Sequence[int]


class SharedPages:
    """A DraftCache on the target's pages: a second pool, with the same page tables and KV indices.

    Each page counts its leading slots that hold keys and values of committed tokens; the count is valid for
    one generation of the page. So computed tokens are found after a prefix hit, and missing ones are noticed
    after a preemption, after prefix caching replaced a page, and when a request starts to draft late.
    """

    def __init__(self, kv: KVCache, owner: PoolOwner, longest: int) -> None:
        """`owner` makes the pool; `longest` is the context of the draft model, in tokens."""
        self._kv = kv
        self.pool = kv.add_pool(owner)
        self._longest = longest
        self._counts = np.zeros(kv.pages.num_pages, dtype=np.int64)  # [pages] computed leading slots
        self._generations = np.full(kv.pages.num_pages, -1, dtype=np.int64)  # [pages] that the counts are of
        self._drafted: dict[Request, _Drafted] = {}
        self._num_computed(kv.page_tables[0], 0)  # compile now,
        self.keep([])  # and not in the first draft

    def open(self, requests: Sequence[Request], budgets: Sequence[int]) -> list[Context | None]:
        contexts: list[Context | None] = []
        for request, budget in zip(requests, budgets, strict=True):
            self._drafted.pop(request, None)
            room = min(budget, self._longest - len(request.token_ids))
            pages = self._kv.page_tables[request.slot]
            contexts.append(Context(request, request.token_ids, pages, room) if room > 0 else None)
        return contexts

    def computed(self, contexts: Sequence[Context]) -> list[int]:
        return [self._num_computed(context.pages, len(context.tokens)) for context in contexts]

    def _num_computed(self, pages: Int32Array, length: int) -> int:
        """The number of computed tokens at the start of a context of `length` tokens on these pages."""
        counts = self._counts, self._generations, self._kv.pages.generations
        return _count_leading(pages, length, self._kv.page_size, *counts)

    def backlog(self, request: Request) -> int:
        if request.slot < 0:
            return max(len(request.token_ids) - 1, 0)
        computed = self._num_computed(self._kv.page_tables[request.slot], len(request.token_ids))
        return max(len(request.token_ids) - 1 - computed, 0)

    def keep(self, spans: Sequence[Span]) -> None:
        tables, counts = self._kv.page_tables, (self._counts, self._generations, self._kv.pages.generations)
        _count_spans_in(tables, slot_spans(spans), self._kv.page_size, *counts)

    def keep_drafted(self, context: Context, tokens: Sequence[int]) -> None:
        self._drafted[context.request] = _Drafted(context.pages.copy(), len(context.tokens), tokens)

    def settle(self, request: Request, in_place: bool) -> None:
        drafted = self._drafted.pop(request, None)
        if drafted is None or not in_place:
            return
        accepted = equal_prefix(drafted.tokens, request.token_ids[drafted.start :])
        self._mark(drafted.pages, drafted.start, drafted.start + accepted)

    def forget(self, request: Request) -> None:
        self._drafted.pop(request, None)

    def replace_owner(self, owner: PoolOwner, successor: PoolOwner) -> None:
        """Give the pool to another draft model of the same sizes: nothing in it counts as computed."""
        self._kv.replace_owner(owner, successor)
        self._generations[:] = -1
        self._drafted.clear()

    def _mark(self, pages: Int32Array, start: int, end: int) -> None:
        """Record that tokens start to end - 1 of these pages are computed, as all before them are."""
        counts = self._counts, self._generations, self._kv.pages.generations
        _count_in(pages, start, end, self._kv.page_size, *counts)


def slot_spans(spans: Sequence[Span]) -> Int64Array:
    """[spans, 3] The slot in the page table of each span, its start and its end."""
    rows = [(context.request.slot, start, end) for context, start, end in spans]
    return np.array(rows, dtype=np.int64).reshape(-1, 3)


@compiled
def _count_leading(
    pages: Int32Array,
    length: int,
    page_size: int,
    counts: Int64Array,
    generations: Int64Array,
    current: Int64Array,
) -> int:
    """The number of computed tokens at the start of a context of `length` tokens on these pages."""
    computed = 0
    while computed < length:
        page = pages[computed // page_size]
        count = counts[page] if generations[page] == current[page] else 0
        computed += count
        if count < page_size:
            break
    return min(computed, length)


@compiled
def _count_spans_in(
    page_tables: Int32Array,
    spans: Int64Array,
    page_size: int,
    counts: Int64Array,
    generations: Int64Array,
    current: Int64Array,
) -> None:
    """Record computed tokens; a span is a slot, and tokens start to end - 1 of it."""
    for span in range(len(spans)):
        slot, start, end = spans[span]
        _count_in(page_tables[slot], start, end, page_size, counts, generations, current)


@compiled
def _count_in(
    pages: Int32Array,
    start: int,
    end: int,
    page_size: int,
    counts: Int64Array,
    generations: Int64Array,
    current: Int64Array,
) -> None:
    """Record that tokens start to end - 1 of a request's pages are computed."""
    while start < end:
        page, stop = pages[start // page_size], (start // page_size + 1) * page_size
        computed = counts[page] if generations[page] == current[page] else 0
        counts[page] = max(computed, page_size - max(stop - end, 0))
        generations[page] = current[page]
        start = stop


class TargetPages:
    """A DraftCache that is the target's own pool, for a draft model that is the target's first layers.

    What the target has computed is computed. Drafted rows are written after the committed tokens, where no
    other request reads, and the pass that verifies them writes all of them again before it reads any. So
    there is nothing to record.
    """

    def __init__(self, kv: KVCache, target: Backend) -> None:
        self._kv = kv
        self.pool = kv.pool_of(target)

    def open(self, requests: Sequence[Request], budgets: Sequence[int]) -> list[Context | None]:
        return [
            Context(request, request.token_ids, self._kv.page_tables[request.slot], budget)
            if request.num_pending == 1 and budget > 0
            else None
            for request, budget in zip(requests, budgets, strict=True)
        ]

    def computed(self, contexts: Sequence[Context]) -> list[int]:
        return [context.request.num_computed for context in contexts]

    def backlog(self, request: Request) -> int:
        return 0

    def keep(self, spans: Sequence[Span]) -> None:
        return

    def keep_drafted(self, context: Context, tokens: Sequence[int]) -> None:
        return

    def settle(self, request: Request, in_place: bool) -> None:
        return

    def forget(self, request: Request) -> None:
        return


def equal_prefix(guesses: Sequence[int], tokens: Sequence[int]) -> int:
    """The number of leading guesses that equal the tokens."""
    pairs = enumerate(zip(guesses, tokens, strict=False))
    return next((index for index, (guess, token) in pairs if guess != token), min(len(guesses), len(tokens)))
