"""Where a draft model keeps the keys and values of requests, and how far it has computed them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

from paceline.compiling import compiled
from paceline.kv.cache import KVCache, PoolOwner

if TYPE_CHECKING:
    from paceline.backends.base import Backend
    from paceline.core.forward import KVPool
    from paceline.core.request import Request

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Context:
    """One request as the draft model sees it while it proposes."""

    request: Request
    tokens: Sequence[int]  # all known ones; not a copy
    pages: Int32Array  # [pages] its line of the page table, a view
    room: int  # rows that can be written after its tokens


Span = tuple[Context, int, int]  # tokens start to end - 1 of a context


class DraftCache(Protocol):
    """The keys and values of a draft model. Token i of a context lies at KV index i of its pages."""

    pool: KVPool

    def open(self, requests: Sequence[Request], budgets: Sequence[int]) -> list[Context | None]:
        """One context for each request, with room for at most `budget` rows; None if it can have none."""
        ...

    def computed(self, contexts: Sequence[Context]) -> list[int]:
        """How many leading tokens of each context have keys and values."""
        ...

    def backlog(self, request: Request) -> int:
        """How many tokens of a request, the last left out, have no keys and values yet. At once."""
        ...

    def keep(self, spans: Sequence[Span]) -> None:
        """Take note that tokens start to end - 1 of contexts were computed, and all before them."""
        ...

    def keep_drafted(self, context: Context, tokens: Sequence[int]) -> None:
        """Take note that these guesses were computed after the context; `settle` tells which were right."""
        ...

    def settle(self, request: Request, in_place: bool) -> None:
        """Keep the drafted tokens that became the request's; `in_place`: the engine has not moved them."""
        ...

    def forget(self, request: Request) -> None:
        """Drop what is kept for a request that has ended."""
        ...


@dataclass(frozen=True, slots=True)
class _Drafted:
    """Guesses whose keys and values are in the pool."""

    pages: Int32Array  # [pages] where they were written; an equal page may take a page's place later
    start: int
    tokens: Sequence[int]


class SharedPages:
    """Keys and values beside the target's, on the same pages at the same indices.

    Each page has a count of its leading places that hold those of committed tokens, good for one
    generation of the page. So what is computed is found again after a prefix hit, and what is not is
    noticed after a preemption, when an equal page takes a page's place, and when a request begins to
    draft late.
    """

    def __init__(self, kv: KVCache, owner: PoolOwner, longest: int) -> None:
        """`longest` is the context of the draft model, which makes the pool."""
        self._kv = kv
        self.pool = kv.add_pool(owner)
        self._longest = longest
        self._counts = np.zeros(kv.pages.num_pages, dtype=np.int64)  # [pages]
        self._generations = np.full(kv.pages.num_pages, -1, dtype=np.int64)  # [pages]
        self._drafted: dict[Request, _Drafted] = {}
        self.computed([])  # compiles it,
        self.keep([])  # and this: no draft should wait for it

    def open(self, requests: Sequence[Request], budgets: Sequence[int]) -> list[Context | None]:
        contexts: list[Context | None] = []
        for request, budget in zip(requests, budgets, strict=True):
            self._drafted.pop(request, None)
            room = min(budget, self._longest - len(request.token_ids))
            pages = self._kv.page_tables[request.slot]
            contexts.append(Context(request, request.token_ids, pages, room) if room > 0 else None)
        return contexts

    def computed(self, contexts: Sequence[Context]) -> list[int]:
        asked = [(context.request.slot, len(context.tokens)) for context in contexts]
        lines, counts = self._kv.page_tables, (self._counts, self._generations, self._kv.pages.generations)
        wanted = np.array(asked, dtype=np.int64).reshape(-1, 2)
        known: list[int] = _count_leading(lines, wanted, self._kv.page_size, *counts).tolist()
        return known

    def backlog(self, request: Request) -> int:
        known = 0
        if request.slot >= 0:
            pages = self._kv.page_tables[request.slot]
            (known,) = self.computed([Context(request, request.token_ids, pages, 0)])
        return max(len(request.token_ids) - 1 - known, 0)

    def keep(self, spans: Sequence[Span]) -> None:
        computed = [(context.request.slot, start, end) for context, start, end in spans]
        lines, counts = self._kv.page_tables, (self._counts, self._generations, self._kv.pages.generations)
        kept = np.array(computed, dtype=np.int64).reshape(-1, 3)
        _count_spans_in(lines, kept, self._kv.page_size, *counts)

    def keep_drafted(self, context: Context, tokens: Sequence[int]) -> None:
        self._drafted[context.request] = _Drafted(context.pages.copy(), len(context.tokens), tokens)

    def settle(self, request: Request, in_place: bool) -> None:
        drafted = self._drafted.pop(request, None)
        if drafted is None or not in_place:
            return
        right = equal_prefix(drafted.tokens, request.token_ids[drafted.start :])
        self._mark(drafted.pages, drafted.start, drafted.start + right)

    def forget(self, request: Request) -> None:
        self._drafted.pop(request, None)

    def _mark(self, line: Int32Array, start: int, end: int) -> None:
        """Count tokens start to end - 1 of a line of pages, given that all before them count already."""
        counts = self._counts, self._generations, self._kv.pages.generations
        _count_in(line, start, end, self._kv.page_size, *counts)


@compiled
def _count_leading(
    lines: Int32Array,
    asked: Int64Array,
    page_size: int,
    counts: Int64Array,
    generations: Int64Array,
    current: Int64Array,
) -> Int64Array:
    """How many of the first tokens of lines of pages count, up to the first that does not: [asked].

    What is asked for: the number of a line, and how many tokens it has.
    """
    found = np.zeros(len(asked), np.int64)
    for number in range(len(asked)):
        slot, length = asked[number]
        known = 0
        while known < length:
            page = lines[slot, known // page_size]
            count = counts[page] if generations[page] == current[page] else 0
            known += count
            if count < page_size:
                break
        found[number] = min(known, length)
    return found


@compiled
def _count_spans_in(
    lines: Int32Array,
    spans: Int64Array,
    page_size: int,
    counts: Int64Array,
    generations: Int64Array,
    current: Int64Array,
) -> None:
    """Count tokens start to end - 1 of some lines; a span is the number of a line, start and end."""
    for number in range(len(spans)):
        slot, start, end = spans[number]
        _count_in(lines[slot], start, end, page_size, counts, generations, current)


@compiled
def _count_in(
    line: Int32Array,
    start: int,
    end: int,
    page_size: int,
    counts: Int64Array,
    generations: Int64Array,
    current: Int64Array,
) -> None:
    """Count tokens start to end - 1 of a line of pages."""
    while start < end:
        page, stop = line[start // page_size], (start // page_size + 1) * page_size
        known = counts[page] if generations[page] == current[page] else 0
        counts[page] = max(known, page_size - max(stop - end, 0))
        generations[page] = current[page]
        start = stop


class TargetPages:
    """The target's own keys and values, for a draft model that is the first layers of the target.

    What the target has computed is computed. Rows of drafts lie behind that, where nothing is committed
    and no other request looks, and the pass that verifies them writes all of them again before it reads
    any. So there is nothing to keep account of.
    """

    def __init__(self, kv: KVCache, backend: Backend, target: Backend) -> None:
        """`backend` runs the first layers of `target`."""
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
    """How many leading guesses are the tokens."""
    pairs = enumerate(zip(guesses, tokens, strict=False))
    return next((at for at, (guess, token) in pairs if guess != token), min(len(guesses), len(tokens)))
