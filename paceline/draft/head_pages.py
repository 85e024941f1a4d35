"""Where a learned head keeps its keys and values, and the features that its slots have still to read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from paceline.compiling import compiled
from paceline.draft.draft_cache import Context, SharedPages, Span
from paceline.kv.cache import KVCache

if TYPE_CHECKING:
    from paceline.backends.base import HeadRunner
    from paceline.core.request import Request

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]
UInt16Array = npt.NDArray[np.uint16]
Float32Array = npt.NDArray[np.float32]


class HeadPages(SharedPages):
    """The slots of a head on the target's pages: the one that reads token j lies at KV index j.

    It also reads the feature of token j - 1. Features of all tokens are kept beside their keys and values,
    so slots can wait until somebody drafts, and whoever shares a page can compute them. An unknown feature
    reads as zeros, which makes guesses poorer and nothing wrong. A runner whose pools keep features is told
    their places instead.
    """

    def __init__(self, kv: KVCache, runner: HeadRunner, longest: int, width: int) -> None:
        """`longest` is the context of the head, `width` that of a feature."""
        super().__init__(kv, runner, longest)
        places = 0 if runner.keeps_features else kv.pages.num_pages * kv.page_size
        # [places, width] the upper halves of float32: bfloat16. Memory is taken when it is used.
        self._features = np.empty((places, width), dtype=np.uint16)
        self._known = np.full(places, -1, dtype=np.int64)  # [places] the generation of the page then
        nothing = np.empty((0, width), dtype=np.float32)
        self.put(np.empty((0, 4), dtype=np.int64), nothing, np.zeros(1, dtype=np.int64))  # compiles it,
        self.features([])  # and this

    @staticmethod
    def feature_bytes_per_page(page_size: int, width: int) -> int:
        """What is kept of features beside each page."""
        return page_size * (2 * width + 8)

    def open(self, requests: Sequence[Request], budgets: Sequence[int]) -> list[Context | None]:
        """As of any DraftCache; None also where the target has not computed all tokens but the last."""
        contexts = super().open(requests, budgets)
        return [context if _can_draft(context) else None for context in contexts]

    def open_computing(self, requests: Sequence[Request]) -> list[Context]:
        """The contexts of requests all of whose tokens the target is just computing, if they have some."""
        contexts = super().open(requests, [1] * len(requests))
        return [context for context in contexts if context is not None and len(context.tokens) > 1]

    def computed(self, contexts: Sequence[Context]) -> list[int]:
        return [max(known, 1) for known in super().computed(contexts)]  # index 0 has no slot

    def keep(self, spans: Sequence[Span]) -> None:
        # index 0 has no slot to wait for
        super().keep([(context, 0 if start == 1 else start, end) for context, start, end in spans])

    def put(self, spans: Int64Array, values: Float32Array, parts: Int64Array) -> None:
        """Keep features of a pass: see Features.committed_spans. Each has these parts of its row."""
        _put(
            spans,
            values,
            parts,
            self._kv.page_tables,
            self._kv.pages.generations,
            self._kv.page_size,
            self._longest,
            self._features,
            self._known,
        )

    def places(self, spans: Sequence[Span]) -> Int32Array:
        """Where the features of tokens of contexts are kept, one span behind the other: [tokens]."""
        size = self._kv.page_size
        every = [np.arange(start, end) for _, start, end in spans]
        owners = [context.pages[index // size] for (context, *_), index in zip(spans, every, strict=True)]
        return (np.concatenate(owners) * size + np.concatenate(every) % size).astype(np.int32)

    def features(self, spans: Sequence[Span]) -> Float32Array:
        """The features of tokens of contexts, one span behind the other: [tokens, width]."""
        asked = [(context.request.slot, start, end) for context, start, end in spans]
        return _take(
            np.array(asked, dtype=np.int64).reshape(-1, 3),
            self._kv.page_tables,
            self._kv.pages.generations,
            self._kv.page_size,
            self._features,
            self._known,
        )


@compiled
def _put(
    spans: Int64Array,
    values: Float32Array,
    parts: Int64Array,
    page_tables: Int32Array,
    generations: Int64Array,
    page_size: int,
    longest: int,
    features: UInt16Array,
    known: Int64Array,
) -> None:
    """Write the upper halves of the numbers, rounded, to the places of their tokens."""
    width = features.shape[1] // len(parts)
    for span in range(len(spans)):
        slot, start, row, count = spans[span]
        for step in range(min(count, longest - start)):  # nobody reads those beyond the head's context
            page = page_tables[slot, (start + step) // page_size]
            place = page * page_size + (start + step) % page_size
            bits = values[row + step].view(np.uint32)
            for part in range(len(parts)):
                source = bits[parts[part] * width : (parts[part] + 1) * width]
                target = features[place, part * width : (part + 1) * width]
                for column in range(width):
                    target[column] = (source[column] + np.uint32(0x8000)) >> np.uint32(16)
            known[place] = generations[page]


@compiled
def _take(
    spans: Int64Array,
    page_tables: Int32Array,
    generations: Int64Array,
    page_size: int,
    features: UInt16Array,
    known: Int64Array,
) -> Float32Array:
    """The numbers whose upper halves were put at the places of these tokens, zero where none were.

    A span is a slot, and where its tokens start and end.
    """
    values = np.zeros(((spans[:, 2] - spans[:, 1]).sum(), features.shape[1]), np.float32)
    bits = values.view(np.uint32)
    row = 0
    for span in range(len(spans)):
        slot, start, end = spans[span]
        for position in range(start, end):
            page = page_tables[slot, position // page_size]
            place = page * page_size + position % page_size
            if known[place] == generations[page]:
                for column in range(features.shape[1]):
                    bits[row, column] = np.uint32(features[place, column]) << np.uint32(16)
            row += 1
    return values


def _can_draft(context: Context | None) -> bool:
    return context is not None and context.request.num_pending == 1 and len(context.tokens) > 1
