"""States of recurrent layers on the CPU, and the scans of a pass: see phases/recurrent.py."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from paceline.backends.cpu import job as fields
from paceline.backends.cpu.attention.paged_attention import PAGE
from paceline.backends.cpu.phases.recurrent import CONTINUES, FIRST, NOT_STORED, STORED
from paceline.backends.cpu.phases.recurrent_memory import BLOCK
from paceline.backends.cpu.primitives.compiled import compiled
from paceline.backends.cpu.weights.model_weights import round_up
from paceline.backends.cpu.weights.packing import address_of, aligned_zeros
from paceline.backends.cpu.workspace import Workspace
from paceline.core.arrays import Float32Array, Int32Array
from paceline.core.forward import ForwardBatch

SPARE_STATES = 16  # places for states after chains; without one, accepted rows are scanned again
# Tables by row of a scan: the row of the pass, the index in the scan of the row before it, the place of its
# request's state, where the state before it is (BEFORE), where the state after it goes (AFTER). By scan: its
# first row and its number of rows
ROWS, PREVIOUS, SLOTS, BEFORE, AFTER, BEGINS, COUNTS, NUM_TABLES = range(8)
ADDRESSES = (
    fields.SCAN_ROWS_AT,
    fields.SCAN_PREVIOUS_AT,
    fields.SCAN_SLOTS_AT,
    fields.SCAN_BEFORE_AT,
    fields.SCAN_AFTER_AT,
    fields.SCAN_BEGINS_AT,
    fields.SCAN_COUNTS_AT,
)


class CpuStates:
    """The states of recurrent layers; recurrent.py describes a layer's part.

    Every slot is mapped to a place in memory, and some places are spare. A state that a pass stored in a
    spare place becomes a slot's state by changing the map, without a copy.
    """

    def __init__(self, count: int, layers: int, floats: int) -> None:
        self.num_states = count
        # [places, recurrent layers, floats]
        self.data: Float32Array = aligned_zeros((count + SPARE_STATES, layers, floats), np.float32)
        self.places = np.arange(count, dtype=np.int32)  # [slots]
        self.spares = [*range(count + SPARE_STATES - 1, count - 1, -1)]

    def copy(self, source: int, destination: int) -> None:
        """Copy the state of one slot to another."""
        self.data[self.places[destination]] = self.data[self.places[source]]

    def take_place(self, slot: int, place: int) -> None:
        """Map a slot to a place that was spare; its old place becomes spare."""
        self.spares.append(int(self.places[slot]))
        self.places[slot] = place


class RecurrentRows:
    """Plans the scans of passes over a workspace with recurrent layers."""

    def __init__(self, workspace: Workspace) -> None:
        self._job, self._threads = workspace.job, workspace.threads
        self._layers = len(workspace.config.recurrent_layers)
        own = workspace.config.recurrent
        assert own is not None
        self._block = BLOCK * own.key_dim  # floats of the memory of BLOCK columns
        memory = own.value_heads * round_up(own.value_dim, BLOCK) * own.key_dim
        self._floats = (own.conv_kernel - 1) * int(self._job[fields.CHANNELS]) + memory
        self._tables = np.zeros((NUM_TABLES, workspace.rows), dtype=np.int32)
        self._nodes = np.empty((self._threads, 0), dtype=np.float32)
        self._firsts: dict[
            int, tuple[int, bool]
        ] = {}  # slot: its request's first row, whether it had a state
        # slot: the pool, and {number of rows: place of the state after them that the last pass stored}
        self._stored: dict[int, tuple[CpuStates, dict[int, int]]] = {}
        for table, place in zip(self._tables, ADDRESSES, strict=False):
            self._job[place] = address_of(table)
        self._job[fields.STATE_LAYER_BYTES] = 4 * self._floats
        self._job[fields.STATE_BYTES] = self.bytes_per_state

    @property
    def bytes_per_state(self) -> int:
        return 4 * self._layers * self._floats

    def make_states(self, count: int) -> CpuStates:
        """Zeroed storage for `count` states."""
        return CpuStates(count, self._layers, self._floats)

    def begin_pass(self, batch: ForwardBatch) -> None:
        """Set the scans of a pass in the job: a row continues from its parent."""
        states, job = None if batch.states is None else batch.states.pool, self._job
        slots = np.full(batch.num_requests, -1) if batch.states is None else batch.states.slots
        self._begin(slots, batch)
        read = np.full(batch.num_requests, -1, dtype=np.int32)
        if states is not None:
            assert isinstance(states, CpuStates)
            read[:] = np.where(batch.context_lengths > 0, states.places[slots], -1)
            job[fields.POOL_AT] = address_of(states.data)
        nodes = int(_plan_scans(self._tables, batch.parents, batch.row_offsets, read))
        if states is not None:
            self._store_chains(states, batch)
        if nodes * self._block > self._nodes.shape[1]:
            self._nodes = aligned_zeros((self._threads, nodes * self._block), np.float32)
        job[fields.NODES_AT], job[fields.NODES_BYTES] = address_of(self._nodes), self._nodes.strides[0]
        job[fields.SCANS], job[fields.SCAN_LENGTH] = batch.num_requests, batch.num_rows

    def _begin(self, slots: Int32Array, batch: ForwardBatch) -> None:
        """Release the stored states of the last pass, and note this one's requests."""
        for states, places in self._stored.values():
            states.spares += places.values()
        self._stored = {}
        has_state = (batch.context_lengths > 0).tolist()
        firsts = zip(slots.tolist(), batch.row_offsets.tolist(), has_state, strict=False)
        self._firsts = {slot: (first, known) for slot, first, known in firsts}

    def _store_chains(self, states: CpuStates, batch: ForwardBatch) -> None:
        """Let the pass store the state after each chain, and at the last page boundary within it."""
        assert batch.states is not None
        for request, slot in enumerate(batch.states.slots.tolist()):
            first, end = int(batch.row_offsets[request]), int(batch.row_offsets[request + 1])
            if (batch.parents[first:end] != np.arange(end - first) - 1).any():
                continue
            context = int(batch.context_lengths[request])
            border = (context + end - first) // PAGE * PAGE - context
            places = dict[int, int]()  # number of rows: place
            for count in {end - first, border}:
                if count > 0 and states.spares:
                    places[count] = states.spares.pop()
                    self._tables[AFTER, first + count - 1] = STORED - places[count]
            self._stored[slot] = states, places

    def take_stored(self, states: CpuStates, slot: int, rows: Sequence[int], kept: Mapping[int, int]) -> bool:
        """Use the states that the last pass stored; False, with nothing changed, if one of them is missing.

        Needed are the state after these rows, for `slot`, and for each {number of rows: slot} of `kept` the
        state after that number of rows.
        """
        _, places = self._stored.pop(slot, (states, {}))
        is_stored = {len(rows), *kept} <= places.keys() and list(rows) == [*range(len(rows))]
        if is_stored:
            states.take_place(slot, places.pop(len(rows)))
            for count in kept.keys() & places.keys():
                states.take_place(kept[count], places.pop(count))
        states.spares += places.values()
        return is_stored

    def begin_advance(
        self, states: CpuStates, slot: int, rows: Sequence[int], checkpoints: Mapping[int, int]
    ) -> None:
        """Set one scan in the job: along these rows of a slot's request in the last pass."""
        (first, has_state), count, tables = self._firsts[slot], len(rows), self._tables
        tables[ROWS, :count] = first + np.asarray(rows)
        tables[PREVIOUS, :count] = np.arange(count) - 1
        tables[SLOTS, :count] = states.places[slot] if has_state else -1
        tables[BEFORE, :count], tables[AFTER, :count] = CONTINUES, NOT_STORED
        tables[BEFORE, 0] = FIRST
        for number, kept in {**checkpoints, count: slot}.items():
            tables[AFTER, number - 1] = STORED - states.places[kept]
        tables[BEGINS, 0], tables[COUNTS, 0] = 0, count
        job = self._job
        job[fields.POOL_AT], job[fields.SCANS], job[fields.SCAN_LENGTH] = address_of(states.data), 1, count


@compiled(cached=True)
def _plan_scans(tables, parents, offsets, slots):  # type: ignore[no-untyped-def]
    """Fill the tables for a pass. Returns the most stored states of a request: those of tree nodes from which
    a row other than the next continues."""
    most = 0
    for request in range(len(slots)):
        first, end, nodes = offsets[request], offsets[request + 1], 0
        tables[BEGINS, request], tables[COUNTS, request] = first, end - first
        for row in range(first, end):
            parent = parents[row]
            tables[ROWS, row], tables[SLOTS, row], tables[AFTER, row] = row, slots[request], NOT_STORED
            tables[PREVIOUS, row] = first + parent if parent >= 0 else -1
            tables[BEFORE, row] = CONTINUES if parent >= 0 else FIRST
            if parent >= 0 and first + parent != row - 1:
                if tables[AFTER, first + parent] == NOT_STORED:
                    tables[AFTER, first + parent] = nodes
                    nodes += 1
                tables[BEFORE, row] = tables[AFTER, first + parent]
        most = max(most, nodes)
    return most
