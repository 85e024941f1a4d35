"""The decode loop as an engine drives it: requests join, passes begin, tokens are read later."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch

from paceline.backends.base import AheadOutput, Float32Array, Int32Array, Joining
from paceline.backends.cuda.decode_loop import DecodeLoop, make_requests
from paceline.backends.cuda.draft_networks import DraftNetwork
from paceline.backends.cuda.graphs import bucket, buckets
from paceline.backends.cuda.model import Pool
from paceline.backends.cuda.weights import Weights

TIMED = 5  # steps by which the time of one is measured
BUFFERS = 4  # more than there are passes in flight, so that none is written before it was read


@dataclass(frozen=True)
class Buffer:
    """Memory of the host through which a pass is spoken to and answers. On a GPU it is pinned."""

    tokens: torch.Tensor  # int32 [rows, 1 + length of drafts] what the pass chose
    counts: torch.Tensor  # int32 [rows]
    features: torch.Tensor | None  # float32 [rows, width]
    pages: torch.Tensor  # int64 [changes] where in the page table, then as often which page
    done: torch.cuda.Event | None  # None where there is no GPU: then everything is done at once


class CudaAhead:
    """An AheadDecoder: see backends/base.py."""

    def __init__(
        self,
        weights: Weights,
        pool: Pool,
        slots: int,
        longest: int,
        page_size: int,
        draft: DraftNetwork | None = None,
        feature_layers: tuple[int, ...] = (),
    ) -> None:
        """Without a draft it gives the features of these layers."""
        self.device = weights.device
        self._page_size = page_size
        self._drafts = draft is not None
        self._rows = bucket(slots)
        self._requests = make_requests(slots, longest, page_size, self.device)
        self._loop = DecodeLoop(
            weights, pool, self._requests, self._rows, page_size, draft, feature_layers=feature_layers
        )
        self._pages = np.zeros(tuple(self._requests.pages.shape), dtype=np.int32)  # as the device has them
        self._lengths = np.zeros(
            slots, dtype=np.int32
        )  # [slots] tokens computed before the next pass, at most
        self._slots: list[int] = []  # of the last pass
        self._begun = False  # whether another pass over the same slots needs nothing new
        self._joined: dict[int, Float32Array] = {}  # features [width] of slots that no pass has seen
        self._free = deque(self._buffer() for _ in range(BUFFERS))
        self._unread: deque[tuple[Buffer, list[int]]] = deque()

    @torch.inference_mode()
    def join(self, requests: Joining) -> None:
        """Learn to know requests, or the present state of known ones."""
        state, slots = self._requests, self._to_device(requests.slots.astype(np.int64))
        lengths = self._to_device(requests.lengths)
        tokens = self._to_device(requests.tokens)
        state.lengths[slots] = lengths
        state.limits[slots] = self._to_device(requests.limits)
        state.tokens[slots, (lengths.long() - 1).clamp(min=0)] = tokens[:, 0]
        state.tokens[slots, lengths.long()] = tokens[:, 1]
        state.seeds[slots] = self._to_device(requests.seeds.view(np.int64))
        state.temperatures[slots] = self._to_device(requests.temperatures)
        self._lengths[requests.slots] = requests.lengths
        self._begun = False
        if requests.features is not None:
            self._joined.update(zip(requests.slots.tolist(), requests.features, strict=True))

    @torch.inference_mode()
    def launch(self, slots: Sequence[int], page_tables: Int32Array) -> None:
        """Begin a pass over the known requests in these slots."""
        own, rows, loop = list(slots), bucket(len(slots)), self._loop
        buffer = self._free[0]
        if buffer.done is not None:
            buffer.done.synchronize()  # of a pass that nobody has read; else it was waited for
        self._send_pages(own, page_tables, buffer)
        if own != self._slots or not self._begun:
            loop.begin(own, rows, self._features_of(own) if self._drafts else None)
            self._slots, self._joined, self._begun = own, {}, True
        loop.step(rows)
        buffer.tokens[:rows].copy_(loop.output[:rows], non_blocking=True)
        buffer.counts[:rows].copy_(loop.counts[:rows], non_blocking=True)
        if buffer.features is not None:
            assert loop.features is not None
            buffer.features[:rows].copy_(loop.features[:rows], non_blocking=True)
        if buffer.done is not None:
            buffer.done.record()
        self._lengths[own] += buffer.tokens.shape[1]
        self._free.rotate(-1)
        self._unread.append((buffer, own))

    def read(self) -> AheadOutput:
        """What the oldest pass that was not read gave. Waits for it."""
        buffer, slots = self._unread.popleft()
        if buffer.done is not None:
            buffer.done.synchronize()
        count = len(slots)
        counts = cast(Int32Array, buffer.counts[:count].numpy())
        self._lengths[slots] -= buffer.tokens.shape[1] - counts
        features = None if buffer.features is None else cast(Float32Array, buffer.features[:count].numpy())
        return AheadOutput(cast(Int32Array, buffer.tokens[:count].numpy()), counts, features)

    def drop(self) -> None:
        """No pass that was begun until now will be read."""
        self._unread.clear()

    @torch.inference_mode()
    def prepare(self) -> dict[int, float]:
        """Capture a graph of every bucket, over rows that are all padding, and time it on a GPU."""
        seconds = {}
        for rows in buckets(self._rows):
            self._loop.begin([], rows)
            self._loop.step(rows)
            if self.device.type == "cuda":
                seconds[rows] = self._time(rows)
        self._begun = False
        return seconds

    def _time(self, rows: int) -> float:
        """Seconds of a step, of several that follow each other."""
        torch.cuda.synchronize(self.device)
        start = time.perf_counter()
        for _ in range(TIMED):
            self._loop.step(rows)
        torch.cuda.synchronize(self.device)
        return (time.perf_counter() - start) / TIMED

    def _features_of(self, slots: Sequence[int]) -> torch.Tensor:
        """The features [slots, width] of the last computed tokens, with which drafting begins."""
        assert self._loop.features is not None
        features = np.zeros((len(slots), self._loop.features.shape[1]), dtype=np.float32)
        for row, slot in enumerate(slots):
            if slot in self._joined:
                features[row] = self._joined[slot]
        sent = self._to_device(features)
        old = [row for row, slot in enumerate(slots) if slot not in self._joined]
        if old:
            last = self._loop.last_features(bucket(len(self._slots)))
            sent[old] = last[[self._slots.index(slots[row]) for row in old]]
        return sent

    def _send_pages(self, slots: list[int], page_tables: Int32Array, buffer: Buffer) -> None:
        """Tell the device which entries of these slots' page tables have changed."""
        reach = 2 * buffer.tokens.shape[1]  # what this pass and the next write
        used = (int(self._lengths[slots].max()) + reach) // self._page_size + 1
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

    def _buffer(self) -> Buffer:
        pinned, loop = self.device.type == "cuda", self._loop

        def like(values: torch.Tensor) -> torch.Tensor:
            return torch.zeros(values.shape, dtype=values.dtype, pin_memory=pinned)

        return Buffer(
            like(loop.output),
            like(loop.counts),
            None if self._drafts or loop.features is None else like(loop.features),
            torch.zeros(8 * self._rows * loop.output.shape[1], dtype=torch.int64, pin_memory=pinned),
            torch.cuda.Event() if pinned else None,  # type: ignore[no-untyped-call]
        )

    def _to_device(self, values: npt.NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(values).to(self.device)
