"""Whatever an engine does, the device has the window pages that the rows of a pass read and write.

The decoder of the cuda backend sends entries of page tables that changed. Here it sends those of an engine
over the toy model, whose own decoder computes the tokens, and each pass compares what the device would read.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.backends.async_decoding import DecodeOutput, DeviceDraft, SlotInits
from paceline.core.arrays import Int32Array
from tests.engine.test_window_groups import (
    MAX_LENGTH,
    PAGE,
    REQUESTS,
    Grouped,
    expected,
    least_windows,
    serve,
)
from tests.toy import toy_engine
from tests.toy_decoder import ToyDecoder
from tests.toy_drafter import ScriptedDrafter

CPU = torch.device("cpu")


class SendingDecoder(ToyDecoder):
    """Decodes as the toy does; `requests` has the device's page tables."""

    def __init__(self, backend: Grouped, pool: object, slots: int, layers: int, longest: int) -> None:
        from paceline.backends.cuda.decode.page_sender import PageSender
        from paceline.backends.cuda.kernels.step_rows import make_requests

        super().__init__(backend, pool, slots, layers)  # type: ignore[arg-type]
        self.requests = make_requests(slots, longest, backend.page_size, CPU, has_windows=True)
        self.sender = PageSender(self.requests, pool, backend.page_size)  # type: ignore[arg-type]
        self.most_computed = np.zeros(slots, dtype=np.int32)  # upper bound of the computed tokens
        self.in_flight: deque[tuple[Int32Array, int]] = deque()  # slots and rows of a request, by pass
        self.window, self.num_compared, self.num_wrong = backend.window, 0, 0
        if not backend.forgets:
            self.sender._forget_given_again = _nothing  # type: ignore[method-assign]

    def join(self, requests: SlotInits) -> None:
        super().join(requests)
        self.sender.forget(requests.slots)
        self.most_computed[requests.slots] = requests.lengths

    def launch(
        self,
        slots: Sequence[int],
        page_tables: Int32Array,
        draft: DeviceDraft | None,
        host_drafts: Int32Array | None = None,
    ) -> None:
        rows, index = 1 + (0 if draft is None else draft.length), np.array(slots)
        before, unread = self._lengths.copy(), sum(width for _, width in self.in_flight)
        self.sender.send(index, page_tables, self.most_computed[index], unread, rows, torch.zeros(0))
        table, requests = self._pool.windows.table, self.requests  # type: ignore[attr-defined]
        assert requests.window_pages is not None
        for slot in slots:
            first = max(int(before[slot]) - self.window + 1, 0)
            end = min(int(before[slot]) + rows, int(self._limits[slot]))
            columns = np.arange(first, max(end, first + 1)) // PAGE
            pages = page_tables[slot, columns]
            assert requests.pages[slot, columns].tolist() == pages.tolist()
            self.num_wrong += requests.window_pages[slot, columns].tolist() != table[pages].tolist()
            self.num_compared += 1
        super().launch(slots, page_tables, draft, host_drafts)
        self.most_computed[index] += rows
        self.in_flight.append((index, rows))

    def read(self) -> DecodeOutput:
        output = super().read()
        slots, rows = self.in_flight.popleft()
        self.most_computed[slots] -= rows - output.counts
        return output

    def skip(self) -> None:
        super().skip()
        self.in_flight.popleft()

    def drop(self) -> None:
        super().drop()
        self.in_flight.clear()


def _nothing(
    slots: object, page_tables: object, lengths: object, unread: int, reach: int, windows: object
) -> None:
    """In place of `_forget_given_again`."""


class Sending(Grouped):
    """The toy with two layers, whose decode passes are checked. `forgets`: pages given again are sent."""

    decoder: SendingDecoder
    forgets = True

    def make_async_decoder(self, pool, slots, longest, feature_layers, kept=(), states=None):  # type: ignore[no-untyped-def]
        self.decoder = SendingDecoder(self, pool, slots, len(feature_layers), longest)
        return self.decoder


def run(  # type: ignore[no-untyped-def]
    window, rows, num_pages, more_windows, style, caching, numbers, forgets=True
) -> SendingDecoder:
    """The decoder, after all requests had their tokens."""
    truth = {tuple(REQUESTS[number][0]): expected(window, number) for number in numbers}
    backend = Sending(window, max_rows=rows, on_device=True)
    backend.forgets = forgets
    engine = toy_engine(
        backend,
        max_model_len=MAX_LENGTH,
        max_num_seqs=4,
        max_num_batched_tokens=rows,
        num_pages=num_pages,
        num_window_pages=least_windows(window, rows) + more_windows,
        enable_prefix_caching=caching,
        drafter=ScriptedDrafter(truth, style) if style else None,
        budget=5,
        branching=1,
    )
    assert serve(engine, numbers, rows) == [expected(window, number) for number in numbers]
    return backend.decoder


@settings(max_examples=25)
@given(
    window=st.integers(1, 30),
    rows=st.integers(6, 32),
    num_pages=st.integers(MAX_LENGTH // PAGE, 60),
    more_windows=st.integers(0, 20),
    style=st.sampled_from([None, "right", "wrong", "partly"]),
    caching=st.booleans(),
    numbers=st.lists(st.integers(0, len(REQUESTS) - 1), min_size=1, max_size=8),
)
def test_the_device_has_the_window_pages_that_a_pass_reads(  # type: ignore[no-untyped-def]
    window, rows, num_pages, more_windows, style, caching, numbers
) -> None:
    assert run(window, rows, num_pages, more_windows, style, caching, numbers).num_wrong == 0


@pytest.mark.parametrize("forgets", [True, False])
def test_a_page_that_was_released_and_taken_again_is_sent_again(forgets: bool) -> None:
    """Its number in the page table is the same, and its window page another."""
    decoder = run(25, 20, 55, 17, "right", False, [5, 1, 6, 3], forgets)
    assert decoder.num_compared > 10
    assert (decoder.num_wrong == 0) == forgets
