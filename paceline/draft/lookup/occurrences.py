"""A token stream with an index of its n-grams: where did its suffix occur before?

One hash table per n, and from each position a link to the previous one with the same hash. A token is
indexed once. Old tokens are overwritten (a ring), and a link to an overwritten position ends the walk, so
forgetting costs nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from paceline.core.arrays import Int32Array
from paceline.draft.lookup.ngram_index import SHARED_NAMESPACE, append_tokens

PAGE = 4096  # bytes, the smallest page of memory
LAST_POSITION = 2**31 - 1  # positions are int32


def touch_pages(table: Int32Array) -> None:
    """Write to every memory page of an array; its numbers stay."""
    numbers = table.reshape(-1)[:: PAGE // table.itemsize]
    numbers += 0


class Occurrences:
    """The newest `capacity` tokens of a stream and the index of their n-grams, see `ngram_index.py`."""

    def __init__(self, levels: Sequence[int], capacity: int) -> None:
        """`levels` are the n of the n-grams to index, ascending."""
        self.levels = np.array(levels, dtype=np.int64)
        self._capacity = capacity
        size = 1 << capacity.bit_length()  # more than the capacity: position 0 stays empty
        # rows: tokens, links, heads, namespaces
        self.table = np.zeros((2 + 2 * len(levels), size), np.int32)
        self.oldest = 1  # position of the oldest token
        self.end = 1  # position of the next token
        self._address = int(self.table.ctypes.data)

    def _forget_all(self) -> None:
        self.table[:] = 0
        self.oldest = self.end = 1

    def __len__(self) -> int:
        return self.end - self.oldest

    def take_memory(self) -> None:
        """Touch all memory pages now: hashes spread over them, and steps would wait for the page faults."""
        touch_pages(self.table)
        self.append([])  # loads the compiled code

    def append(self, tokens: Sequence[int] | Int32Array, namespace: int = SHARED_NAMESPACE) -> None:
        """Add tokens of this namespace; GAP separates texts. The oldest tokens make room.

        A text has one namespace: put a GAP before tokens of another.
        """
        new = np.asarray(tokens, dtype=np.int32)
        if self.end + len(new) > LAST_POSITION:  # index all tokens again, with positions from 1
            tokens_left, namespaces = self.tokens(), self.namespaces()
            self._forget_all()
            changes = np.flatnonzero(np.diff(namespaces)) + 1
            for part, part_namespaces in zip(
                np.split(tokens_left, changes), np.split(namespaces, changes), strict=True
            ):
                self._append(part, int(part_namespaces[0]) if len(part_namespaces) else SHARED_NAMESPACE)
        self._append(new, namespace)

    def _append(self, new: Int32Array, namespace: int) -> None:
        append_tokens(self.table, self.levels, self.oldest, self.end, new, namespace)
        self.end += len(new)
        self.keep_newest(self._capacity)

    def table_fields(self) -> tuple[int, int, int, int, int]:
        """The columns of a request in `draft_trees`: table address and columns, capacity, oldest, end."""
        return self._address, self.table.shape[1], self._capacity, self.oldest, self.end

    def note_appended(self, count: int) -> None:
        """Record that `draft_trees` has appended this many tokens."""
        self.end += count
        self.keep_newest(self._capacity)

    def keep_newest(self, count: int) -> None:
        """Forget all but the newest `count` tokens."""
        self.oldest = max(self.oldest, self.end - count)

    def tokens(self) -> Int32Array:
        """The stored tokens, oldest first."""
        return self._row(0)

    def namespaces(self) -> Int32Array:
        """The namespace of each stored token."""
        return self._row(-1)

    def _row(self, row: int) -> Int32Array:
        positions = np.arange(self.oldest, self.end)
        values: Int32Array = self.table[row, positions & (self.table.shape[1] - 1)]
        return values
