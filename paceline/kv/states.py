"""States of recurrent layers: one for each slot of the KV cache, and checkpoints at page borders.

A state cannot be cut like keys and values. So a prefix can be used again only up to a page border at which
the state was stored. Slot i of the pool is the state of the sequence in slot i; those after them are
checkpoints; a new one replaces the least recently used one. A checkpoint is stored

    after the last full page of every prompt chunk
    after the pages that a request shared with an earlier one, but had to compute again: others may share them
    after the last full page of what is generated, so that the next turn of a chat begins there
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Protocol

from paceline.core.forward import StatePool

MAX_CHECKPOINTS = 64
NO_PAGE = -1  # no serial number
CHECKPOINT_BYTES = 512 * 1024 * 1024  # of all checkpoints, at most


class StateOwner(Protocol):
    """The part of a backend with recurrent layers that the cache needs."""

    bytes_per_state: int

    def make_states(self, count: int) -> StatePool: ...

    def copy_state(self, states: StatePool, source: int, destination: int) -> None: ...

    def advance_state(
        self, states: StatePool, slot: int, rows: Sequence[int], checkpoints: Mapping[int, int]
    ) -> None: ...


def count_checkpoints(bytes_per_state: int) -> int:
    """The number of checkpoints that are kept of states of this size."""
    return min(MAX_CHECKPOINTS, CHECKPOINT_BYTES // bytes_per_state)


def states_memory(bytes_per_state: int, max_sequences: int, spare_states: int = 0) -> int:
    """Bytes of all states, including the backend's spare ones; 0 for a model without recurrent layers."""
    if not bytes_per_state:
        return 0
    return bytes_per_state * (max_sequences + count_checkpoints(bytes_per_state) + spare_states)


class SequenceStates:
    """The states of all sequences, and the checkpoints by the serial number of the page that they follow."""

    def __init__(self, owner: StateOwner, max_sequences: int) -> None:
        checkpoints = count_checkpoints(owner.bytes_per_state)
        self.pool = owner.make_states(max_sequences + checkpoints)
        self._owner = owner
        self._free = list(range(max_sequences, max_sequences + checkpoints))
        # serial number -> slot, least recently used first; a number is never given to another page, so
        # the checkpoint of an evicted page is no longer found, and is replaced later
        self._checkpoints: OrderedDict[int, int] = OrderedDict()
        self._running: dict[int, int] = {}  # sequence -> serial number of the checkpoint that follows it

    def __contains__(self, serial: int | None) -> bool:
        return serial in self._checkpoints

    def restore(self, slot: int, serial: int) -> None:
        """Give a sequence the state after the page with this serial number."""
        self._checkpoints.move_to_end(serial)
        self._owner.copy_state(self.pool, self._checkpoints[serial], slot)

    def advance(self, slot: int, rows: Sequence[int], borders: Mapping[int, int], is_running: bool) -> None:
        """Move a sequence's state along the accepted rows of its last pass.

        `borders`: a number of rows after which the state is kept, and the serial number of the page that is
        full then. `is_running`: it is kept only until this sequence fills another page.
        """
        missing = {count: serial for count, serial in borders.items() if serial not in self}
        if missing and (last := self._checkpoints.pop(self._running.pop(slot, NO_PAGE), None)) is not None:
            self._free.append(last)
        checkpoints = {count: self._take(serial) for count, serial in missing.items() if self._room}
        if checkpoints and is_running:
            self._running[slot] = missing[max(checkpoints)]
        self._owner.advance_state(self.pool, slot, rows, checkpoints)

    def release(self, slot: int) -> None:
        """The sequence has ended; what it has stored stays."""
        self._running.pop(slot, None)

    @property
    def _room(self) -> int:
        return len(self._free) + len(self._checkpoints)

    def _take(self, serial: int) -> int:
        """The slot for a new checkpoint."""
        slot = self._free.pop() if self._free else self._checkpoints.popitem(last=False)[1]
        self._checkpoints[serial] = slot
        return slot
