"""States of recurrent layers on the CPU, and the walks of a pass along its rows (see recurrent.py)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from paceline.backends.cpu import job as fields
from paceline.backends.cpu.compiled import compiled
from paceline.backends.cpu.model_weights import round_up
from paceline.backends.cpu.packing import address_of, aligned_zeros
from paceline.backends.cpu.recurrent import BLOCK, CONTINUES, FIRST
from paceline.backends.cpu.workspace import Workspace
from paceline.core.arrays import Float32Array
from paceline.core.forward import ForwardBatch

NOT_STORED = -1
# tables of walks, [rows] each: the row of the pass, the number in the walk of the one before it, the slot of
# its request's state, where the state before it is, where that after it goes; then of each walk
ROWS, PREVIOUS, SLOTS, BEFORE, AFTER, BEGINS, COUNTS, NUM_TABLES = range(8)
ADDRESSES = (
    fields.WALK_ROWS_AT,
    fields.WALK_PREVIOUS_AT,
    fields.WALK_SLOTS_AT,
    fields.WALK_BEFORE_AT,
    fields.WALK_AFTER_AT,
    fields.WALK_BEGINS_AT,
    fields.WALK_COUNTS_AT,
)


@dataclass(frozen=True)
class CpuStates:
    """States of recurrent layers; recurrent.py describes one layer's part."""

    num_states: int
    data: Float32Array  # [slots, recurrent layers, floats]


class RecurrentRows:
    """The walks of passes over a workspace with recurrent layers."""

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
        for table, place in zip(self._tables, ADDRESSES, strict=False):
            self._job[place] = address_of(table)
        self._job[fields.STATE_LAYER_BYTES] = 4 * self._floats
        self._job[fields.STATE_BYTES] = self.bytes_per_state

    @property
    def bytes_per_state(self) -> int:
        return 4 * self._layers * self._floats

    def make_states(self, count: int) -> CpuStates:
        """Zeroed storage for `count` states."""
        return CpuStates(count, aligned_zeros((count, self._layers, self._floats), np.float32))

    def begin_pass(self, batch: ForwardBatch) -> None:
        """Tell the job the walks of a pass: a row continues from its parent."""
        slots, job = np.full(batch.num_requests, -1, dtype=np.int32), self._job
        if batch.states is not None:
            assert isinstance(batch.states.pool, CpuStates)
            slots[:] = batch.states.slots
            job[fields.POOL_AT] = address_of(batch.states.pool.data)
        has_state = (batch.context_lengths > 0) & (slots >= 0)
        self._firsts = {
            slot: (first, known)
            for slot, first, known in zip(
                slots.tolist(), batch.row_offsets.tolist(), has_state.tolist(), strict=False
            )
        }
        read = np.where(has_state, slots, -1).astype(np.int32)
        nodes = int(_plan_walks(self._tables, batch.parents, batch.row_offsets, read))
        if nodes * self._block > self._nodes.shape[1]:
            self._nodes = aligned_zeros((self._threads, nodes * self._block), np.float32)
        job[fields.NODES_AT], job[fields.NODES_BYTES] = address_of(self._nodes), self._nodes.strides[0]
        job[fields.WALKS], job[fields.WALK_LENGTH] = batch.num_requests, batch.num_rows

    def begin_advance(
        self, states: CpuStates, slot: int, rows: Sequence[int], checkpoints: Mapping[int, int]
    ) -> None:
        """Tell the job one walk: along these rows of a slot's request in the last pass."""
        (first, has_state), count, tables = self._firsts[slot], len(rows), self._tables
        tables[ROWS, :count] = first + np.asarray(rows)
        tables[PREVIOUS, :count] = np.arange(count) - 1
        tables[SLOTS, :count] = slot if has_state else -1
        tables[BEFORE, :count], tables[AFTER, :count] = CONTINUES, NOT_STORED
        tables[BEFORE, 0] = FIRST
        for number, kept in checkpoints.items():
            tables[AFTER, number - 1] = kept
        tables[AFTER, count - 1], tables[BEGINS, 0], tables[COUNTS, 0] = slot, 0, count
        job = self._job
        job[fields.POOL_AT], job[fields.WALKS], job[fields.WALK_LENGTH] = address_of(states.data), 1, count


@compiled(cached=True)
def _plan_walks(tables, parents, offsets, slots):  # type: ignore[no-untyped-def]
    """Fill the tables for a pass; returns the most states of one request that are stored aside: those that
    another row than the next continues."""
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


def copy_state(states: CpuStates, source: int, destination: int) -> None:
    """Give a slot the state of another one."""
    states.data[destination] = states.data[source]
