"""The KV cache of a learned head, and the target's features that its slots still have to read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from paceline.compiling import compiled
from paceline.core.arrays import Float32Array, Int32Array, Int64Array
from paceline.draft.model.draft_cache import Context, SharedPages, Span, slot_spans
from paceline.kv.cache import KVCache

if TYPE_CHECKING:
    from paceline.backends.heads import HeadStorage
    from paceline.core.request import Request

UInt16Array = npt.NDArray[np.uint16]


class HeadPages(SharedPages):
    """The slots of a head on the target's pages: the slot that reads token j is at KV index j.

    It also reads the feature of token j - 1, so the first slot is at KV index 1; the slots of a parallel head
    read the feature of token j, and the first is at 0. The features of all tokens are stored beside their
    pages, so slots are computed only when a request is drafted for, and any request that shares a page can
    compute them. A missing feature reads as zeros: worse guesses, nothing wrong. Where the runner's pool
    stores the features itself, it gets their KV slots instead.
    """

    def __init__(
        self, kv: KVCache, runner: HeadStorage, longest: int, width: int, first_index: int = 1
    ) -> None:
        """`longest` is the head's context in tokens, `width` the numbers of a token's feature."""
        self._first_index = first_index  # KV index of the first slot; what is before counts as computed
        super().__init__(kv, runner, longest)
        num_slots = 0 if runner.keeps_features else kv.pages.num_pages * kv.page_size
        # [KV slots, width] bfloat16, the upper halves of float32; memory is allocated on first use
        self._features = np.empty((num_slots, width), dtype=np.uint16)
        self._written_in = np.full(num_slots, -1, dtype=np.int64)  # [KV slots] the page's generation
        nothing = np.empty((0, width), dtype=np.float32)
        self.put(np.empty((0, 4), dtype=np.int64), nothing, np.zeros(1, dtype=np.int64))  # compile now,
        self.features([])  # and not in the first draft
        self.kv_slots([])

    @staticmethod
    def feature_bytes_per_page(page_size: int, width: int) -> int:
        """Bytes of the stored features beside each page."""
        return page_size * (2 * width + 8)

    def open(self, requests: Sequence[Request], budgets: Sequence[int]) -> list[Context | None]:
        """As for any DraftCache; None also where the target has not computed all tokens but the last."""
        contexts = super().open(requests, budgets)
        return [context if _can_draft(context) else None for context in contexts]

    def open_computing(self, requests: Sequence[Request]) -> list[Context]:
        """The contexts of requests whose last prefill pass is in flight, if they can be drafted for."""
        contexts = super().open(requests, [1] * len(requests))
        return [context for context in contexts if context is not None and len(context.tokens) > 1]

    def _num_computed(self, pages: Int32Array, length: int) -> int:
        return max(super()._num_computed(pages, length), self._first_index)

    def keep(self, spans: Sequence[Span]) -> None:
        first = self._first_index
        super().keep([(context, 0 if start == first else start, end) for context, start, end in spans])

    def put(self, spans: Int64Array, values: Float32Array, parts: Int64Array) -> None:
        """Store features of a pass: `spans` as of Features.committed_spans, `parts` the layers of a row."""
        _put(
            spans,
            values,
            parts,
            self._kv.page_tables,
            self._kv.pages.generations,
            self._kv.page_size,
            self._longest,
            self._features,
            self._written_in,
        )

    def kv_slots(self, spans: Sequence[Span]) -> Int32Array:
        """The KV slots of the tokens of the spans, span after span: [tokens]."""
        return _kv_slots(slot_spans(spans), self._kv.page_tables, self._kv.page_size)

    def features(self, spans: Sequence[Span]) -> Float32Array:
        """The features of the tokens of the spans, span after span: [tokens, width]."""
        return _take(
            slot_spans(spans),
            self._kv.page_tables,
            self._kv.pages.generations,
            self._kv.page_size,
            self._features,
            self._written_in,
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
    written_in: Int64Array,
) -> None:
    """Store features as bfloat16, rounded, at the KV slots of their tokens."""
    width = features.shape[1] // len(parts)
    for span in range(len(spans)):
        slot, start, row, count = spans[span]
        for step in range(min(count, longest - start)):  # beyond the head's context nothing is read
            page = page_tables[slot, (start + step) // page_size]
            kv_slot = page * page_size + (start + step) % page_size
            bits = values[row + step].view(np.uint32)
            for part in range(len(parts)):
                source = bits[parts[part] * width : (parts[part] + 1) * width]
                target = features[kv_slot, part * width : (part + 1) * width]
                for column in range(width):
                    target[column] = (source[column] + np.uint32(0x8000)) >> np.uint32(16)
            written_in[kv_slot] = generations[page]


@compiled
def _take(
    spans: Int64Array,
    page_tables: Int32Array,
    generations: Int64Array,
    page_size: int,
    features: UInt16Array,
    written_in: Int64Array,
) -> Float32Array:
    """The stored features of these tokens as float32, zeros where none are stored.

    A span is a slot of the page table, and tokens start to end - 1 of it.
    """
    values = np.zeros(((spans[:, 2] - spans[:, 1]).sum(), features.shape[1]), np.float32)
    bits = values.view(np.uint32)
    row = 0
    for span in range(len(spans)):
        slot, start, end = spans[span]
        for position in range(start, end):
            page = page_tables[slot, position // page_size]
            kv_slot = page * page_size + position % page_size
            if written_in[kv_slot] == generations[page]:
                for column in range(features.shape[1]):
                    bits[row, column] = np.uint32(features[kv_slot, column]) << np.uint32(16)
            row += 1
    return values


@compiled
def _kv_slots(spans: Int64Array, page_tables: Int32Array, page_size: int) -> Int32Array:
    """The KV slots of these tokens; a span is a slot of the page table, and tokens start to end - 1 of it."""
    slots = np.empty((spans[:, 2] - spans[:, 1]).sum(), np.int32)
    count = 0
    for span in range(len(spans)):
        slot, start, end = spans[span]
        for position in range(start, end):
            page = page_tables[slot, position // page_size]
            slots[count] = page * page_size + position % page_size
            count += 1
    return slots


def _can_draft(context: Context | None) -> bool:
    return context is not None and context.request.num_pending == 1 and len(context.tokens) > 1
