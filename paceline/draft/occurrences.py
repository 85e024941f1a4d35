"""An index of a token stream: where the n-grams that end it occurred before.

One hash table for each n, and from each position a link to the one before it with the same hash.
A token is indexed once and never looked at again; what is too old is overwritten, and a link that
leads there ends the walk, so forgetting costs nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from paceline.draft.matching import SHARED, Int32Array, append_tokens

PAGE = 4096  # bytes that memory comes in, at least
LAST_POSITION = 2**31 - 1  # positions are kept in 32 bits


class Occurrences:
    """The newest `capacity` tokens of a stream, and an index of their n-grams. For `matching`'s functions."""

    def __init__(self, levels: Sequence[int], capacity: int) -> None:
        """`levels` are the sizes of the n-grams to index, ascending."""
        self.levels = np.array(levels, dtype=np.int64)
        self._capacity = capacity
        self._start_afresh()

    def _start_afresh(self) -> None:
        size = 1 << self._capacity.bit_length()  # more than the capacity: position 0 stays empty
        # [tokens, links, heads, owners][position]
        self.table = np.zeros((2 + 2 * len(self.levels), size), np.int32)
        self.oldest = 1  # the first position that is kept
        self.end = 1  # the position of the next token
        self._address = int(self.table.ctypes.data)

    def __len__(self) -> int:
        return self.end - self.oldest

    def take_memory(self) -> None:
        """Have all its memory now: n-grams are strewn over it, and steps would wait for each page."""
        self.table.reshape(-1)[:: PAGE // self.table.itemsize] = 0
        self.append([])  # and the compiled code

    @property
    def num_bytes(self) -> int:
        """Memory of the index, once it is full."""
        return self.table.nbytes

    def append(self, tokens: Sequence[int] | Int32Array, owner: int = SHARED) -> None:
        """Add tokens (GAP: what comes next is another text), for this owner. The oldest make room.

        Where owners change, the text must too.
        """
        new = np.asarray(tokens, dtype=np.int32)
        if self.end + len(new) > LAST_POSITION:  # count from 1 again
            kept, owners = self.kept(), self.owners()
            self._start_afresh()
            changes = np.flatnonzero(np.diff(owners)) + 1
            for part, whose in zip(np.split(kept, changes), np.split(owners, changes), strict=True):
                self._append(part, int(whose[0]) if len(whose) else SHARED)
        self._append(new, owner)

    def _append(self, new: Int32Array, owner: int) -> None:
        append_tokens(self.table, self.levels, self.oldest, self.end, new, owner)
        self.end += len(new)
        self.keep_newest(self._capacity)

    def described(self) -> tuple[int, int, int, int, int]:
        """What `draft_trees` must know of it: where its table is, its size, its first and next position."""
        return self._address, self.table.shape[1], self._capacity, self.oldest, self.end

    def note_appended(self, count: int) -> None:
        """Take note that `draft_trees` has appended so many tokens."""
        self.end += count
        self.keep_newest(self._capacity)

    def keep_newest(self, count: int) -> None:
        """Forget all but the newest `count` tokens."""
        self.oldest = max(self.oldest, self.end - count)

    def kept(self) -> Int32Array:
        """The tokens that are kept, oldest first."""
        return self._row(0)

    def owners(self) -> Int32Array:
        """Whose they are."""
        return self._row(-1)

    def _row(self, row: int) -> Int32Array:
        positions = np.arange(self.oldest, self.end)
        values: Int32Array = self.table[row, positions & (self.table.shape[1] - 1)]
        return values
