"""DeviceTables: builds the attention metadata of a ForwardBatch, and sends it to the device in one copy."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from paceline.backends.cuda.kernels.attention.paged_attention import MAX_PATH
from paceline.backends.cuda.kernels.attention.prefill_attention import PrefillTiles, prefill_height
from paceline.backends.cuda.kernels.attention.row_tables import RowTables, WindowTables
from paceline.core.arrays import BoolArray, Int32Array
from paceline.core.forward import Choices, ForwardBatch, WindowGroup, window_slots
from paceline.errors import BackendError

# lines of max_rows numbers before the pages: 8 by row, 5 by output, sources, adapters, 3 by prefill tile
LINES = 18
SEEDS, TEMPERATURES, POSITIONS = 8, 10, 12  # lines of outputs; the first two are 64-bit: two lines each
SOURCES, ADAPTERS, PREFILL = 13, 14, 15
FEW_ROWS = 512  # leading rows that need not be in prefill tiles: other kernels have scratch for them
SHORT_PREFILL_TILES = 128  # most prefill tiles of requests with fewer rows than a tile has
MIN_PREFILL_PROGRAMS = 128  # about one per multiprocessor; with fewer, split-KV attention is faster
# A copy waits on the device for earlier passes. With one buffer, the host would have to wait for them too
# before it could write the next batch.
STAGING_BUFFERS = 4


@dataclass(frozen=True)
class Rows:
    """The rows of a pass as arrays."""

    slot_mapping: Int32Array  # [rows] KV slots of keys and values
    contiguous_until: Int32Array  # [rows] positions below it are their own KV index
    paths: Int32Array | None  # [rows, MAX_PATH] KV indices from `contiguous_until` on; None: no trees
    tiles: Int32Array  # [3, tiles] first row, number of rows, offset of its request's pages
    prefill_tiles: Int32Array  # [3, tiles] likewise, of the prefill kernel
    pages: Int32Array  # [pages of all requests]
    windows: tuple[Int32Array, Int32Array] | None = None  # slot_mapping and pages of the window group


def to_device(values: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    """A copy of an array on the device, made asynchronously."""
    there = torch.from_numpy(values)
    return there.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else there.clone()


def prefill_requests(batch: ForwardBatch, heads: int, kv_heads: int, has_latents: bool = False) -> BoolArray:
    """Which requests' attention the prefill kernel computes: [requests].

    Those with at least a tile of contiguous rows, if together they occupy the device, and those with
    contiguous rows after the first FEW_ROWS, for which other kernels have no scratch.
    """
    counts, height = np.diff(batch.row_offsets), prefill_height(heads, kv_heads, has_latents)
    tiles, late = -(-counts // height), batch.row_offsets[1:] > FEW_ROWS
    large = counts >= height
    if late.any() or large.any():
        branching = batch.row_requests[batch.kv_indices != batch.positions]
        late[branching] = large[branching] = False
    if int(tiles[large].sum()) * kv_heads < MIN_PREFILL_PROGRAMS:
        large = np.zeros_like(large)
    fits = int(tiles[large | late].sum()) <= max_prefill_tiles(batch.num_rows, height)
    return large | late if fits else large


def max_prefill_tiles(rows: int, height: int) -> int:
    """The most prefill tiles of a pass: the tiles of a request with at least a tile of rows are half full."""
    return min(rows, 2 * rows // height + SHORT_PREFILL_TILES)


def rows_of(
    batch: ForwardBatch,
    page_size: int,
    height: int,
    large: BoolArray | None = None,
    large_height: int = 1,
    large_tiles: int = 0,
    windows: WindowGroup | None = None,
) -> Rows:
    """The rows of a batch, in tiles of at most `height` rows of one request. `windows`: of its pool.

    Rows of the requests in `large` [requests] are in prefill tiles of at most `large_height` rows. These are
    padded to `large_tiles`, padding first: the kernels start with the last tile, which sees most.
    """
    page, offset = np.divmod(batch.kv_indices, page_size)
    slot_mapping = batch.page_tables[batch.row_requests, page] * page_size + offset
    large = np.zeros(batch.num_requests, np.bool_) if large is None else large
    contiguous_until, paths = _paths(batch)
    pages = np.maximum(batch.page_tables.reshape(-1), 0)  # -1 is never read
    own = None
    if windows is not None:
        own = window_slots(windows, slot_mapping, page_size), windows.table[pages]
    return Rows(
        slot_mapping.astype(np.int32),
        contiguous_until,
        paths,
        _tiles(batch, np.flatnonzero(~large), height),
        _tiles(batch, np.flatnonzero(large), large_height, large_tiles),
        pages,
        own,
    )


def _tiles(
    batch: ForwardBatch, requests: npt.NDArray[np.int64], height: int, at_least: int = 0
) -> Int32Array:
    """Tiles of at most `height` rows of these requests: first rows, numbers of rows, offsets of pages.

    Empty ones come before them if there are fewer than `at_least`.
    """
    if not len(requests):
        return np.zeros((3, at_least), dtype=np.int32)
    per_request = -(-np.diff(batch.row_offsets)[requests] // height)
    owner = np.repeat(requests, per_request)
    number = np.arange(len(owner)) - np.repeat(np.cumsum(per_request) - per_request, per_request)
    tiles = np.zeros((3, max(len(owner), at_least)), dtype=np.int32)
    begin, counts, pages = tiles[:, tiles.shape[1] - len(owner) :]
    begin[:] = batch.row_offsets[owner] + number * height
    np.minimum(batch.row_offsets[owner + 1] - begin, height, out=counts)
    pages[:] = owner * batch.page_tables.shape[1]
    return tiles


def _paths(batch: ForwardBatch) -> tuple[Int32Array, Int32Array | None]:
    """The first non-contiguous position of each row, and the KV indices of its path from there on."""
    contiguous_until = batch.positions + 1
    in_trees = np.flatnonzero(batch.kv_indices != batch.positions)
    if not len(in_trees):
        return contiguous_until.astype(np.int32), None
    paths = np.zeros((batch.num_rows, MAX_PATH), dtype=np.int32)
    for row in in_trees:
        request = batch.row_requests[row]
        first, context = batch.row_offsets[request], batch.context_lengths[request]
        path: list[int] = []
        node = int(row - first)
        while node >= 0:
            path.append(node)
            node = int(batch.parents[first + node])
        path.reverse()
        kept = next(depth for depth, node in enumerate(path) if node != depth)
        if len(path) - kept > MAX_PATH:
            raise BackendError(
                f"a branch of a draft has {len(path) - kept} tokens apart from the first branch, but the "
                f"cuda backend takes at most {MAX_PATH}; draft less deep trees."
            )
        contiguous_until[row] = context + kept
        paths[row, : len(path) - kept] = context + np.array(path[kept:], dtype=np.int32)
    return contiguous_until.astype(np.int32), paths


class _Staging:
    """Pinned memory of the host, from which a batch is copied to the device."""

    def __init__(self, size: int, pinned: bool) -> None:
        self._host = torch.zeros(size, dtype=torch.int32, pin_memory=pinned)
        self._sent = torch.cuda.Event() if pinned else None  # type: ignore[no-untyped-call]

    def free_numbers(self) -> Int32Array:
        """The memory, once its last copy has ended."""
        if self._sent is not None:
            self._sent.synchronize()
        numbers: Int32Array = self._host.numpy()
        return numbers

    def send(self, to: torch.Tensor) -> None:
        """Copy the first numbers to the device, asynchronously."""
        to.copy_(self._host[: len(to)], non_blocking=True)
        if self._sent is not None:
            self._sent.record()


class DeviceTables:
    """The inputs of a pass on the device, at fixed addresses."""

    def __init__(self, max_rows: int, max_pages: int, device: torch.device) -> None:
        self.max_rows = max_rows
        self.max_pages = max_pages
        pinned = device.type == "cuda"
        size = LINES * max_rows + max_pages
        self._staging = deque(_Staging(size, pinned) for _ in range(STAGING_BUFFERS))
        self._device = torch.zeros(size, dtype=torch.int32, device=device)
        self._paths = torch.zeros((max_rows, MAX_PATH), dtype=torch.int32, device=device)
        # KV slots by row, then pages, of the window group; made for the first pool that has one
        self._windows: torch.Tensor | None = None
        self._window_staging: deque[_Staging] = deque()

    def send(
        self,
        batch: ForwardBatch,
        rows: Rows,
        sources: Int32Array | None = None,
        adapters: Int32Array | None = None,
    ) -> None:
        """Copy a batch to the device; rows and tiles after its last are padding.

        `sources` [rows] are then available as `sources()`, `adapters` [requests], by row, as `adapters()`.
        """
        if len(rows.pages) > self.max_pages:
            raise BackendError(
                f"a pass has {len(rows.pages)} pages in its page tables, but the cuda backend has room for "
                f"{self.max_pages}; lower max_num_seqs or max_model_len."
            )
        staging = self._staging[0]
        self._staging.rotate(-1)
        numbers = staging.free_numbers()
        lines = numbers[: LINES * self.max_rows].reshape(LINES, self.max_rows)
        lines[:] = 0
        lines[2] = -1
        values = (
            batch.tokens,
            batch.positions,
            rows.slot_mapping,
            rows.contiguous_until,
            *rows.tiles,
            batch.logit_rows,
        )
        for line, value in zip(lines, values, strict=False):
            line[: len(value)] = value
        for line, value in zip(lines[PREFILL:], rows.prefill_tiles, strict=True):
            line[: len(value)] = value
        if sources is not None:
            lines[SOURCES, : len(sources)] = sources
        if adapters is not None:
            lines[ADAPTERS] = -1
            lines[ADAPTERS, : batch.num_rows] = np.repeat(adapters, np.diff(batch.row_offsets))
        if batch.choices is not None:
            self._add_choices(lines, batch, batch.choices)
        used = LINES * self.max_rows + len(rows.pages)
        numbers[LINES * self.max_rows : used] = rows.pages
        staging.send(self._device[:used])
        if rows.windows is not None:
            self._send_windows(*rows.windows)
        if rows.paths is not None:
            self._paths[: len(rows.paths)].copy_(torch.from_numpy(rows.paths))

    def _send_windows(self, slot_mapping: Int32Array, pages: Int32Array) -> None:
        """Copy the tables of the window group to the device."""
        if self._windows is None:
            size, pinned = self.max_rows + self.max_pages, self._device.device.type == "cuda"
            self._windows = torch.zeros(size, dtype=torch.int32, device=self._device.device)
            self._window_staging.extend(_Staging(size, pinned) for _ in range(STAGING_BUFFERS))
        staging = self._window_staging[0]
        self._window_staging.rotate(-1)
        numbers, used = staging.free_numbers(), self.max_rows + len(pages)
        numbers[: self.max_rows] = -1
        numbers[: len(slot_mapping)] = slot_mapping
        numbers[self.max_rows : used] = pages
        staging.send(self._windows[:used])

    def windows(self, rows: int) -> WindowTables | None:
        """The tables of the window group for the first rows, if the pool of the last batch has one."""
        if self._windows is None:
            return None
        return WindowTables(self._windows[:rows], self._windows[self.max_rows :])

    def _add_choices(self, lines: Int32Array, batch: ForwardBatch, choices: Choices) -> None:
        """Write the rows whose tokens are sampled on the device after those whose logits are wanted."""
        some = slice(len(batch.logit_rows), len(batch.logit_rows) + len(choices.rows))
        lines[SEEDS - 1, some] = choices.rows
        lines[SEEDS : SEEDS + 2].reshape(-1).view(np.uint64)[some] = choices.seeds
        lines[TEMPERATURES : TEMPERATURES + 2].reshape(-1).view(np.float64)[some] = choices.temperatures
        lines[POSITIONS, some] = batch.positions[choices.rows]

    def tokens(self, rows: int) -> torch.Tensor:
        """The tokens of the first rows: int32 [rows]."""
        return self._line(0, rows)

    def sources(self, rows: int) -> torch.Tensor:
        """The `sources` of the first rows: int32 [rows]."""
        return self._line(SOURCES, rows)

    def adapters(self, rows: int) -> torch.Tensor:
        """The number of each row's adapter, of the first rows: int32 [rows]; -1: none."""
        return self._line(ADAPTERS, rows)

    def output_rows(self, outputs: int) -> torch.Tensor:
        """Indices of the rows with requested logits, then of the sampled rows: int32 [outputs]."""
        return self._line(7, outputs)

    def options(self, outputs: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Temperatures float64, seeds int64 and positions int32 of outputs: [outputs] each."""
        seeds = self._line(SEEDS, 2 * outputs).view(torch.int64)
        return (
            self._line(TEMPERATURES, 2 * outputs).view(torch.float64),
            seeds,
            self._line(POSITIONS, outputs),
        )

    def tables(self, rows: int, prefill_tiles: int = 0, others: bool = True) -> RowTables:
        """The attention metadata of the first rows, with the first prefill tiles.

        Without `others`, all rows are in prefill tiles.
        """
        tiles = rows if others else 0
        prefill = [self._line(PREFILL + number, prefill_tiles) for number in range(3)]
        return RowTables(
            self._line(1, rows),
            self._line(2, rows),
            self._line(3, rows),
            self._paths[:rows],
            self._line(4, tiles),
            self._line(5, tiles),
            self._line(6, tiles),
            self._device[LINES * self.max_rows :],
            prefill=PrefillTiles(*prefill) if prefill_tiles else None,
            windows=self.windows(rows),
        )

    def _line(self, number: int, length: int) -> torch.Tensor:
        return self._device[number * self.max_rows : number * self.max_rows + length]
