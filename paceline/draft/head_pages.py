"""Where a learned head keeps its keys and values, and the features that its slots have still to read."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from paceline.draft.draft_cache import Context, SharedPages
from paceline.kv.cache import KVCache

if TYPE_CHECKING:
    from paceline.backends.base import HeadRunner, KVPool
    from paceline.engine.request import Request

Int32Array = npt.NDArray[np.int32]
Float32Array = npt.NDArray[np.float32]

WAITING_PAGES = 8  # for each sequence there may be: pages whose features are kept until they are read


@dataclass(frozen=True)
class _Unmoved:
    """Makes the head's pool. Guesses are computed again when the target's features of them are known, so
    where the engine moves them to does not matter."""

    runner: HeadRunner

    def make_pool(self, num_pages: int) -> KVPool:
        return self.runner.make_pool(num_pages)

    def move(self, pool: KVPool, source: Int32Array, destination: Int32Array) -> None:
        return


@dataclass(frozen=True, slots=True)
class _Waiting:
    """The features of one page's tokens."""

    generation: int  # of the page
    values: Float32Array  # [page size, width] zero where it is unknown


class HeadPages(SharedPages):
    """The slots of a head on the target's pages: the one that reads token j lies at KV index j.

    It also reads the feature of token j - 1. Features are kept by page, so whoever shares a page can
    compute its slots; when all of them are, only the feature of the page's last token is kept, for the
    slot behind it. An unknown feature reads as zeros, which makes guesses poorer and nothing wrong.
    """

    def __init__(self, kv: KVCache, runner: HeadRunner, longest: int, width: int) -> None:
        """`longest` is the context of the head, `width` that of a feature."""
        super().__init__(kv, _Unmoved(runner), longest)
        self._width = width
        self._waiting: OrderedDict[int, _Waiting] = OrderedDict()  # by page, oldest first
        self._most_waiting = WAITING_PAGES * len(kv.page_tables)
        # [pages, width] of each page's last token, good for one generation of the page
        self._last = np.empty((kv.pages.num_pages, width), dtype=np.float32)
        self._last_generations = np.full(kv.pages.num_pages, -1, dtype=np.int64)  # [pages]

    @staticmethod
    def feature_bytes_per_page(width: int) -> int:
        """What is kept of features beside each page, for good."""
        return 4 * width

    def open(self, requests: Sequence[Request], budgets: Sequence[int]) -> list[Context | None]:
        """As of any DraftCache; None also where the target has not computed all tokens but the last."""
        contexts = super().open(requests, budgets)
        return [context if _can_draft(context) else None for context in contexts]

    def computed(self, context: Context) -> int:
        return max(super().computed(context), 1)  # index 0 has no slot

    def keep(self, context: Context, start: int, end: int) -> None:
        super().keep(context, 0 if start == 1 else start, end)  # index 0 has no slot to wait for
        page_size = self._kv.page_size
        for page in context.pages[start // page_size : end // page_size].tolist():  # all their slots are done
            self._waiting.pop(page, None)

    def put(self, line: Int32Array, start: int, values: Float32Array) -> None:
        """Keep the features of tokens start, start + 1, ... in a line of pages: [tokens, width]."""
        page_size = self._kv.page_size
        values = values[: max(self._longest - start, 0)]  # nobody reads those beyond the head's context
        for page, place, rows in self._spans(line, start, start + len(values)):
            generation = int(self._kv.pages.generations[page])
            if place + rows.stop - rows.start == page_size:
                self._last[page] = values[rows.stop - 1]
                self._last_generations[page] = generation
            if self._generations[page] == generation and self._counts[page] == page_size:
                continue  # an equal page took the place of this one, and its slots are computed
            waiting = self._waiting.get(page)
            if waiting is None or waiting.generation != generation:
                waiting = _Waiting(generation, np.zeros((page_size, self._width), dtype=np.float32))
                self._waiting[page] = waiting
            waiting.values[place : place + rows.stop - rows.start] = values[rows]
        while len(self._waiting) > self._most_waiting:
            self._waiting.popitem(last=False)

    def features(self, line: Int32Array, start: int, end: int) -> Float32Array:
        """The features of tokens start to end - 1 in a line of pages: [tokens, width]."""
        values = np.zeros((end - start, self._width), dtype=np.float32)
        for page, place, rows in self._spans(line, start, end):
            generation = self._kv.pages.generations[page]
            waiting = self._waiting.get(page)
            if waiting is not None and waiting.generation == generation:
                values[rows] = waiting.values[place : place + rows.stop - rows.start]
            elif (
                place + rows.stop - rows.start == self._kv.page_size
                and self._last_generations[page] == generation
            ):
                values[rows.stop - 1] = self._last[page]
        return values

    def _spans(self, line: Int32Array, start: int, end: int) -> list[tuple[int, int, slice]]:
        """Tokens start to end - 1 by page: the page, the place of the first in it, and which they are."""
        page_size = self._kv.page_size
        spans = []
        at = start
        while at < end:
            stop = min(end, (at // page_size + 1) * page_size)
            spans.append((int(line[at // page_size]), at % page_size, slice(at - start, stop - start)))
            at = stop
        return spans


def _can_draft(context: Context | None) -> bool:
    return context is not None and context.request.num_pending == 1 and len(context.tokens) > 1
