"""PageSender: keeps the page tables on the device equal to the host's, by sending what has changed."""

from __future__ import annotations

import numpy as np
import torch

from paceline.backends.cuda.kernels.step_rows import DeviceRequests
from paceline.backends.cuda.passes.kv_pool import Pool
from paceline.backends.cuda.passes.tables import to_device
from paceline.core.arrays import Int32Array, Int64Array
from paceline.core.forward import WindowGroup


class PageSender:
    """The page tables of all slots, as they are on the device.

    `pages` int32 [slots, most pages]; -1: to be sent in any case.
    """

    def __init__(self, state: DeviceRequests, pool: Pool, page_size: int) -> None:
        self._state, self._pool, self._page_size = state, pool, page_size
        self.pages, self._window_pages = np.zeros((2, *state.pages.shape), dtype=np.int32)

    def forget(self, slots: Int32Array) -> None:
        """Note that requests have joined in these slots.

        An entry with an equal page may have had another window page."""
        if self._pool.windows is not None:
            self.pages[slots] = -1

    def send(
        self,
        slots: Int64Array,
        page_tables: Int32Array,
        lengths: Int32Array,
        unread: int,
        nodes: int,
        staging: torch.Tensor,
    ) -> None:
        """Send the entries of these slots that have changed, for a pass and the one after it.

        lengths    [slots of `slots`] upper bound of the computed tokens
        unread     most tokens of a request in the passes that were not read yet
        nodes      rows of each request in the pass
        staging    int64 pinned memory, if it is large enough
        """
        reach = 2 * nodes  # KV indices that this pass and the next can write
        windows = self._pool.windows
        if windows is not None:
            self._forget_given_again(slots, page_tables, lengths, unread, reach, windows)
        used = (int(lengths.max()) + reach) // self._page_size + 1
        wanted = page_tables[slots, :used]
        lines, columns = np.nonzero(wanted != self.pages[slots, :used])
        if not len(lines):
            return
        values = wanted[lines, columns]
        slots_of = slots[lines]
        self.pages[slots_of, columns] = values
        indices = slots_of * self.pages.shape[1] + columns
        values = np.maximum(values, 0)  # -1 is never read
        parts = [indices, values]
        if windows is not None:
            parts.append(windows.table[values])
            self._window_pages[slots_of, columns] = parts[-1]
        changes = np.concatenate(parts)
        if len(changes) <= len(staging):
            staging[: len(changes)] = torch.from_numpy(changes)
            there = staging[: len(changes)].to(self._device, non_blocking=True)
        else:  # too many for the pinned memory
            there = to_device(changes, self._device)
        where, *numbers = there.view(len(parts), -1)
        for tables, own in zip((self._state.pages, self._state.window_pages), numbers, strict=False):
            assert tables is not None
            tables.view(-1)[where] = own.int()

    def fill(self, slots: int, each: int) -> None:
        """Give the first `slots` slots `each` pages, which are separate if there are enough."""
        state, windows = self._state, self._pool.windows
        pages = np.arange(slots * each, dtype=np.int32).reshape(slots, each) % self._pool.num_pages
        self.pages[:slots, :each] = pages
        state.pages[:slots, :each] = torch.from_numpy(pages).to(self._device)
        if windows is not None and state.window_pages is not None:
            own = torch.from_numpy(pages % windows.num_pages).to(self._device)
            state.window_pages[:slots, :each] = own

    @property
    def _device(self) -> torch.device:
        return self._state.pages.device

    def _forget_given_again(
        self,
        slots: Int64Array,
        page_tables: Int32Array,
        lengths: Int32Array,
        unread: int,
        reach: int,
        windows: WindowGroup,
    ) -> None:
        """Mark pages that were released and taken again as unsent: they may have other window pages now.

        A commit releases pages after the computed tokens only, those that a rejected draft had.
        """
        first = np.maximum(lengths - unread, 0) // self._page_size
        count = (unread + reach) // self._page_size + 2
        columns = np.minimum(first[:, None] + np.arange(count), self.pages.shape[1] - 1)
        own = windows.table[np.maximum(page_tables[slots[:, None], columns], 0)]
        lines, numbers = np.nonzero(own != self._window_pages[slots[:, None], columns])
        self.pages[slots[lines], columns[lines, numbers]] = -1
