"""KVCache: one page table (vLLM's block table) over several pools of keys and values.

A sequence has a slot: a row of the page table and a committed length. A step reserves room for its rows, and
commit keeps the accepted ones, compacted if they are not contiguous:

    committed            rows of the step, as the pass wrote them
    0 ... context - 1  | last token | node 0 | node 1 | node 2 |      accepted: nodes 0 and 2
                       | last token | node 0 | node 2 |               after commit

If every layer of every pool has a sliding window, commit also releases the pages that no later row attends
to. Their entries of the page table stay: kernels may load what is there, and mask it. If some layers of the
target have one, these are a KV cache group of their own, and commit releases its pages: see window_pages.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from paceline.core.arrays import Int32Array
from paceline.core.forward import KVPool, WindowGroup
from paceline.kv.pages import PagePool, page_tokens, pages_for
from paceline.kv.states import SequenceStates, StateOwner
from paceline.kv.window_pages import WindowPages, window_pages_for


class PoolOwner(Protocol):
    """The part of a backend that the cache needs."""

    def make_pool(self, num_pages: int) -> KVPool: ...

    def move(self, pool: KVPool, source: Int32Array, destination: Int32Array) -> None: ...


class GroupedPoolOwner(Protocol):
    """A backend that can keep layers with a sliding window in a KV cache group of their own."""

    window_group: int | None

    def make_pool(self, num_pages: int) -> KVPool: ...

    def make_grouped_pool(self, num_pages: int, windows: WindowGroup) -> KVPool: ...

    def move(self, pool: KVPool, source: Int32Array, destination: Int32Array) -> None: ...


@dataclass
class _Sequence:
    """The state of one slot."""

    salt: str
    pages: list[int] = field(default_factory=list)
    released: int = 0  # leading pages that are outside of every window, and not held any more
    # the pages with a held window page: from the first in the window to the last that has room for rows
    window_start: int = 0
    window_end: int = 0
    length: int = 0  # committed tokens
    indexed: int = 0  # full pages already in the prefix cache
    matched: int = 0  # pages of the prompt that were in the prefix cache, with a state after them or not


class KVCache:
    """The keys and values of all sequences: `open`, `reserve`, `commit`, `release`."""

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        max_sequences: int,
        max_length: int,
        enable_prefix_caching: bool = True,
    ) -> None:
        self.page_size = page_size
        self.enable_prefix_caching = enable_prefix_caching
        self.pages = PagePool(num_pages)
        # [slots, max pages] page numbers, -1: no page
        self.page_tables = np.full((max_sequences, pages_for(max_length, page_size)), -1, dtype=np.int32)
        # [slots] tokens that the pages of each have room for
        self.rooms = np.zeros(max_sequences, dtype=np.int64)
        self.prefix_queries = 0  # tokens looked up in the prefix cache
        self.prefix_hits = 0  # tokens found there
        self.states: SequenceStates | None = None  # of recurrent layers
        self.windows: WindowPages | None = None  # of a model in which some layers have a sliding window
        self._pools: list[tuple[PoolOwner, KVPool]] = []
        # the last positions that a row attends to in any layer of any pool; None: all, in some layer
        self._window: int | None = None
        self._sequences: dict[int, _Sequence] = {}
        self._free_slots = list(range(max_sequences - 1, -1, -1))

    def add_pool(self, owner: PoolOwner, window: int | None = None) -> KVPool:
        """A new pool, made by its owner, that shares this page table.

        `window`: the last positions that a row attends to in any layer, its own included; None: all.
        """
        pool = owner.make_pool(self.pages.num_pages)
        self._pools.append((owner, pool))
        if len(self._pools) == 1:
            self._window = window
        elif self._window is not None:
            self._window = None if window is None else max(window, self._window)
        return pool

    def add_grouped_pool(self, owner: GroupedPoolOwner, num_window_pages: int, most_rows: int) -> KVPool:
        """A pool of a target in which some layers have a sliding window, as two KV cache groups.

        There are enough window pages for `most_rows` rows of one sequence: it can always advance.
        """
        assert self.windows is None
        assert owner.window_group is not None
        assert num_window_pages > window_pages_for(owner.window_group, most_rows, self.page_size)
        num_pages = self.pages.num_pages
        self.windows = WindowPages(num_pages, num_window_pages, owner.window_group, self.page_size)
        pool = owner.make_grouped_pool(num_pages, self.windows.group)
        self._pools.append((owner, pool))
        self._window = None  # the other layers need all pages
        return pool

    def add_states(self, owner: StateOwner) -> None:
        """Keep the states of a model with recurrent layers, which limit what of a prefix is used again."""
        self.states = SequenceStates(owner, len(self.page_tables))

    def pool_of(self, owner: PoolOwner) -> KVPool:
        """The pool that an owner has added."""
        return next(pool for pool_owner, pool in self._pools if pool_owner is owner)

    def replace_owner(self, owner: PoolOwner, successor: PoolOwner) -> None:
        """Let `successor` move the rows of the pool that `owner` has added, from now on."""
        self._pools = [(successor if each is owner else each, pool) for each, pool in self._pools]

    @property
    def usage(self) -> float:
        """The fraction of pages that sequences hold, in the KV cache group that has fewer left."""
        held = 1.0 - self.pages.num_available / self.pages.num_pages
        if self.windows is None:
            return held
        return max(held, 1.0 - self.windows.num_available / self.windows.num_usable)

    def can_spare(self, tokens: int) -> bool:
        """Whether half of the pages are available, and window pages for so many more tokens of each slot."""
        is_roomy = 2 * self.pages.num_available > self.pages.num_pages
        if self.windows is None:
            return is_roomy
        more = len(self._sequences) * pages_for(tokens, self.page_size)
        return is_roomy and more < self.windows.num_available

    def length(self, slot: int) -> int:
        """The number of committed tokens of a slot."""
        return self._sequences[slot].length

    def num_pages(self, slot: int) -> int:
        """The number of pages of a slot's tokens, with those outside of its window."""
        return len(self._sequences[slot].pages)

    def open(
        self, token_ids: Sequence[int], salt: str = "", reuse: bool = True, first_rows: int | None = None
    ) -> tuple[int, int] | None:
        """A slot with room for the tokens, and how many are cached already; None if there is no room.

        The last token never counts as cached: its logits are needed. Only sequences with the same salt share
        pages. Window pages are reserved for the rows of the first pass only: at most `first_rows`.
        """
        if not self._free_slots:
            return None
        reuse = reuse and self.enable_prefix_caching
        found = self._find_prefix(token_ids, salt) if reuse else []
        matched = len(found)
        del found[self._num_continuable(found) :]
        cached = len(found) * self.page_size
        fresh = pages_for(len(token_ids), self.page_size) - len(found)
        if fresh > self.pages.num_available - sum(self.pages.is_cached(page) for page in found):
            return None
        first_end = min(len(token_ids), cached + (len(token_ids) if first_rows is None else first_rows))
        seen = [] if self.windows is None else self.windows.seen_of(found)
        if self.windows is not None:
            fresh_windows = pages_for(first_end, self.page_size) - len(found)
            if fresh_windows > self.windows.num_available - self.windows.num_unheld(seen):
                return None
            self.windows.hold(seen)
        for page in found:
            self.pages.hold(page)
        slot = self._free_slots.pop()
        sequence = _Sequence(salt, found, length=cached, indexed=len(found), matched=matched)
        sequence.window_start, sequence.window_end = len(found) - len(seen), len(found)
        self._sequences[slot] = sequence
        self.page_tables[slot, : len(found)] = found
        if self.states is not None and found:
            self.states.restore(slot, self._serial(found[-1]))
        wanted = pages_for(len(token_ids), self.page_size)
        self._take_pages(slot, sequence, wanted, pages_for(first_end, self.page_size))
        self._release_outside_windows(sequence)
        if reuse:
            self.prefix_queries += len(token_ids)
            self.prefix_hits += cached
        return slot, cached

    def reserve(self, slot: int, length: int) -> bool:
        """Whether the slot has room for `length` tokens now. Takes no page if it cannot have all."""
        sequence = self._sequences[slot]
        wanted = pages_for(length, self.page_size)
        if length <= self.rooms[slot]:
            return True
        if self.windows is not None and wanted - sequence.window_end > self.windows.num_available:
            return False
        if wanted - len(sequence.pages) > self.pages.num_available:
            return False
        self._take_pages(slot, sequence, wanted, wanted)
        return True

    def _take_pages(self, slot: int, sequence: _Sequence, count: int, with_windows: int) -> None:
        """Take the pages that a slot lacks of its first `count`, and the window pages of the first
        `with_windows`. They must be available."""
        pages = sequence.pages
        missing = count - len(pages)
        if missing > 0:
            self.page_tables[slot, len(pages) : len(pages) + missing] = taken = self.pages.take(missing)
            pages += taken
        if self.windows is not None:
            self.windows.give(pages[sequence.window_end : with_windows])
            sequence.window_end = max(sequence.window_end, with_windows)
        self._set_room(slot, sequence)

    def _set_room(self, slot: int, sequence: _Sequence) -> None:
        count = len(sequence.pages) if self.windows is None else sequence.window_end
        self.rooms[slot] = count * self.page_size

    def commit(
        self,
        slot: int,
        token_ids: Sequence[int],
        in_place: int,
        accepted_rows: Sequence[int] = (),
        room: int = 0,
        states_advanced: bool = False,
    ) -> None:
        """Keep the first `in_place` rows of the pass, then the accepted ones, given as local rows.

        `token_ids` are the sequence's tokens, at least as many as are committed now. Pages that a draft
        reserved beyond them and `room` more tokens are released. `states_advanced`: the pass has advanced the
        recurrent states itself; then none is kept for the prefix cache.
        """
        sequence = self._sequences[slot]
        if accepted_rows:
            self._compact(sequence, in_place, accepted_rows)
        sequence.length += in_place + len(accepted_rows)
        pages, last = sequence.pages, len(token_ids) + room + self.page_size - 1
        while len(pages) * self.page_size > last:
            if self.windows is not None and sequence.window_end == len(pages):
                sequence.window_end -= 1
                self.windows.drop(pages[-1], keep=False)
            self.pages.drop(pages.pop())
            self.page_tables[slot, len(pages)] = -1
            self._set_room(slot, sequence)
        if self.enable_prefix_caching and sequence.length >= (sequence.indexed + 1) * self.page_size:
            self._index_full_pages(slot, sequence, token_ids)
        self._release_outside_windows(sequence)
        if self.states is not None and not states_advanced:
            rows = [*range(in_place), *accepted_rows]
            borders = self._new_borders(sequence, len(rows))
            self.states.advance(slot, rows, borders, is_running=len(rows) < self.page_size)

    def release(self, slot: int, forget: bool = False) -> None:
        """Free a slot. Its full pages stay in the prefix cache, unless `forget` (after an error)."""
        sequence = self._sequences.pop(slot)
        if self.states is not None:
            self.states.release(slot)
        if self.windows is not None:
            for page in reversed(sequence.pages[sequence.window_start : sequence.window_end]):
                self.windows.drop(page, keep=not forget and self.pages.serial(page) is not None)
        held = sequence.pages[sequence.released :]
        for page in reversed(held):  # last first: descendants are evicted before their ancestors
            self.pages.drop(page, forget)
        self.page_tables[slot, : len(sequence.pages)] = -1
        self.rooms[slot] = 0
        self._free_slots.append(slot)

    def _find_prefix(self, token_ids: Sequence[int], salt: str) -> list[int]:
        """The cached pages of the longest prefix of these tokens, the last token excluded."""
        found: list[int] = []
        parent: int | str | None = salt
        for number in range((len(token_ids) - 1) // self.page_size):
            assert parent is not None
            page = self.pages.find(parent, page_tokens(token_ids, number, self.page_size))
            if page is None:
                break
            found.append(page)
            parent = self.pages.serial(page)
        return found

    def _num_continuable(self, found: Sequence[int]) -> int:
        """The number of leading pages after which a sequence can continue: there is a state of the recurrent
        layers, and all window pages that the next row reads."""
        count = len(found)
        while count:
            if self.states is not None and self.pages.serial(found[count - 1]) not in self.states:
                count -= 1
                continue
            missing = None if self.windows is None else self.windows.last_missing(found[:count])
            if missing is None:
                break
            count = missing  # between the two, every window has the missing page
        return count

    def _index_full_pages(self, slot: int, sequence: _Sequence, token_ids: Sequence[int]) -> None:
        """Add the pages that are full now to the prefix cache; where an equal page is cached, use that one.

        This frees the duplicate, and keeps every indexed page's parent indexed and held.
        """
        for number in range(sequence.indexed, sequence.length // self.page_size):
            if 0 < number <= sequence.released:  # its parent is not held, and may be another's page
                return
            parent = self.pages.serial(sequence.pages[number - 1]) if number else sequence.salt
            if parent is None:  # the parent was dropped from the index when another sequence failed
                return
            tokens = page_tokens(token_ids, number, self.page_size)
            page = sequence.pages[number]
            existing = self.pages.find(parent, tokens)
            if existing is None:
                self.pages.add(page, parent, tokens)
            else:
                if self.windows is not None and number >= sequence.window_start:
                    self.windows.replace(page, existing)
                self.pages.hold(existing)
                self.pages.drop(page)
                sequence.pages[number] = existing
                self.page_tables[slot, number] = existing
            sequence.indexed = number + 1

    def _release_outside_windows(self, sequence: _Sequence) -> None:
        """Release the leading pages that no row after the committed tokens attends to.

        They stay in the prefix cache until other pages are needed. The last full page is kept: the next one
        is indexed after it. Of a model with two KV cache groups, these are the window pages.
        """
        if self.windows is not None:
            first = min(self.windows.first_seen(sequence.length), sequence.window_end)
            for number in range(sequence.window_start, first):
                page = sequence.pages[number]
                self.windows.drop(page, keep=self.pages.serial(page) is not None)
            sequence.window_start = max(sequence.window_start, first)
        if self._window is None:
            return
        first_seen = sequence.length - self._window + 1
        end = min(first_seen, sequence.length - self.page_size) // self.page_size
        for number in range(sequence.released, end):
            self.pages.drop(sequence.pages[number])
        sequence.released = max(sequence.released, end)

    def _new_borders(self, sequence: _Sequence, count: int) -> dict[int, int]:
        """After how many of the last `count` tokens a state is worth keeping, and the serial number of the
        page that ends there: where pages of others were matched, and after the last full page."""
        before = sequence.length - count
        pages = {sequence.matched, sequence.length // self.page_size}
        ends = [end for end in sorted(pages) if before < end * self.page_size <= sequence.length]
        return {
            end * self.page_size - before: self._serial(sequence.pages[end - 1])
            for end in ends
            if end <= sequence.indexed and self.pages.serial(sequence.pages[end - 1]) is not None
        }

    def _serial(self, page: int) -> int:
        """The serial number of an indexed page."""
        serial = self.pages.serial(page)
        assert serial is not None
        return serial

    def _compact(self, sequence: _Sequence, in_place: int, accepted_rows: Sequence[int]) -> None:
        """Copy the accepted rows to where the committed sequence continues, in all pools."""
        first = sequence.length + in_place
        moves = [
            (sequence.length + row, first + offset)
            for offset, row in enumerate(accepted_rows)
            if row != in_place + offset
        ]
        if not moves:
            return
        slots = np.array(
            [[self._kv_slot(sequence, index) for index in move] for move in moves], dtype=np.int32
        )
        source, destination = np.ascontiguousarray(slots.T)
        for owner, pool in self._pools:
            owner.move(pool, source, destination)

    def _kv_slot(self, sequence: _Sequence, index: int) -> int:
        return sequence.pages[index // self.page_size] * self.page_size + index % self.page_size
