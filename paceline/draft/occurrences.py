"""An index of a token stream: where the n-grams that end it occurred before.

One hash table for each n, and from each position a link to the one before it with the same hash.
A token is indexed once and never looked at again; what is too old is overwritten, and a link that
leads there ends the walk, so forgetting costs nothing.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence

import numpy as np

from paceline.draft.matching import Int32Array, append_tokens

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
        self.table = _zeros(1 + 2 * len(self.levels), size)  # [tokens, links, heads][position or hash]
        self.oldest = 1  # the first position that is kept
        self.end = 1  # the position of the next token
        self._address = int(self.table.ctypes.data)

    def __len__(self) -> int:
        return self.end - self.oldest

    @property
    def num_bytes(self) -> int:
        """Memory of the index, once it is full."""
        return self.table.nbytes

    def append(self, tokens: Sequence[int] | Int32Array) -> None:
        """Add tokens (GAP: what comes next is another text). The oldest make room."""
        new = np.asarray(tokens, dtype=np.int32)
        if self.end + len(new) > LAST_POSITION:  # count from 1 again
            new = np.concatenate([self.kept(), new])
            self._start_afresh()
        append_tokens(self.table, self.levels, self.oldest, self.end, new)
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
        positions = np.arange(self.oldest, self.end)
        tokens: Int32Array = self.table[0, positions & (self.table.shape[1] - 1)]
        return tokens


def _zeros(rows: int, columns: int) -> Int32Array:
    """Zeros that take memory as they are written, in small pages.

    numpy asks for huge ones where there is much. A first response is strewn over all of them, and clearing
    150 MB holds a step up by 10 to 90 ms.
    """
    memory = mmap.mmap(-1, 4 * rows * columns)
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        memory.madvise(mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(memory, dtype=np.int32).reshape(rows, columns)
