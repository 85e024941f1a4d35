"""The decode loop as an engine drives it: requests join, passes begin, tokens are read later."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch

from paceline.backends.base import Int32Array, Joining
from paceline.backends.cuda.decode_loop import DecodeLoop, make_requests
from paceline.backends.cuda.graphs import bucket, buckets
from paceline.backends.cuda.model import Pool
from paceline.backends.cuda.weights import Weights

BUFFERS = 4  # more than there are passes in flight, so that none is written before it was read


@dataclass(frozen=True)
class Buffer:
    """Memory of the host through which a pass is spoken to and answers. On a GPU it is pinned."""

    tokens: torch.Tensor  # int32 [rows] what the pass chose
    pages: torch.Tensor  # int64 [changes] where in the page table, then as often which page
    done: torch.cuda.Event | None  # None where there is no GPU: then everything is done at once


class CudaAhead:
    """An AheadDecoder: see backends/base.py."""

    def __init__(self, weights: Weights, pool: Pool, slots: int, longest: int, page_size: int) -> None:
        self.device = weights.device
        self._page_size = page_size
        self._requests = make_requests(slots, longest, page_size, self.device)
        self._loop = DecodeLoop(weights, pool, self._requests, bucket(slots), page_size)
        self._pages = np.zeros(tuple(self._requests.pages.shape), dtype=np.int32)  # as the device has them
        self._lengths = np.zeros(slots, dtype=np.int32)  # [slots] tokens computed before the next pass
        self._slots: list[int] = []  # of the last pass
        self._rows = bucket(slots)
        self._free = deque(self._buffer(self._rows) for _ in range(BUFFERS))
        self._unread: deque[tuple[Buffer, int]] = deque()

    @torch.inference_mode()
    def join(self, requests: Joining) -> None:
        """Learn to know requests, or the present state of known ones."""
        state = self._requests
        slots = self._to_device(requests.slots.astype(np.int64))
        lengths = self._to_device(requests.lengths)
        state.lengths[slots] = lengths
        state.tokens[slots, lengths.long()] = self._to_device(requests.tokens)
        state.seeds[slots] = self._to_device(requests.seeds.view(np.int64))
        state.temperatures[slots] = self._to_device(requests.temperatures)
        self._lengths[requests.slots] = requests.lengths
        self._slots = []

    @torch.inference_mode()
    def launch(self, slots: Sequence[int], page_tables: Int32Array) -> None:
        """Begin a pass over the known requests in these slots."""
        own, rows = list(slots), bucket(len(slots))
        buffer = self._free[0]
        if buffer.done is not None:
            buffer.done.synchronize()  # of a pass that nobody has read; else it was waited for
        self._send_pages(own, page_tables, buffer)
        if own != self._slots:
            self._loop.begin(own, rows)
            self._slots = own
        self._loop.step(rows)
        buffer.tokens[:rows].copy_(self._loop.output[:rows].view(rows, -1)[:, 0], non_blocking=True)
        if buffer.done is not None:
            buffer.done.record()
        self._lengths[own] += 1
        self._free.rotate(-1)
        self._unread.append((buffer, len(own)))

    def read(self) -> Int32Array:
        """Waits for the oldest pass that was not read: its tokens [slots], -1 where logits gave none."""
        buffer, count = self._unread.popleft()
        if buffer.done is not None:
            buffer.done.synchronize()
        return cast(Int32Array, buffer.tokens[:count].numpy())

    def drop(self) -> None:
        """No pass that was begun until now will be read."""
        self._unread.clear()

    @torch.inference_mode()
    def prepare(self) -> None:
        """Capture a graph of every bucket, over rows that are all padding."""
        for rows in buckets(self._rows):
            self._loop.begin([], rows)
            self._loop.step(rows)
        self._slots = []

    def _send_pages(self, slots: list[int], page_tables: Int32Array, buffer: Buffer) -> None:
        """Tell the device which entries of these slots' page tables have changed."""
        used = int(self._lengths[slots].max()) // self._page_size + 2  # one token further than this pass
        wanted = page_tables[slots, :used]
        lines, columns = np.nonzero(wanted != self._pages[slots, :used])
        if not len(lines):
            return
        values = wanted[lines, columns]
        slots_of = np.array(slots)[lines]
        self._pages[slots_of, columns] = values
        places = slots_of * self._pages.shape[1] + columns
        changes = torch.from_numpy(np.concatenate((places, np.maximum(values, 0))))  # -1: nobody looks there
        if len(changes) <= len(buffer.pages):  # else many have joined, and no pass is in flight to wait for
            changes = buffer.pages[: len(changes)].copy_(changes)
        sent = changes.to(self.device, non_blocking=True)
        self._requests.pages.view(-1)[sent[: len(places)]] = sent[len(places) :].int()

    def _buffer(self, rows: int) -> Buffer:
        pinned = self.device.type == "cuda"
        return Buffer(
            torch.zeros(rows, dtype=torch.int32, pin_memory=pinned),
            torch.zeros(8 * rows, dtype=torch.int64, pin_memory=pinned),
            torch.cuda.Event() if pinned else None,  # type: ignore[no-untyped-call]
        )

    def _to_device(self, values: npt.NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(values).to(self.device)
