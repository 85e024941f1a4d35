"""AdapterTables: a model's LoRA adapters in the layout of the compiled pass (see low_rank.py)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from paceline.backends.cpu import job as fields
from paceline.backends.cpu.phases.low_rank import LINE
from paceline.backends.cpu.tiles.weight_tile import GROUP
from paceline.backends.cpu.weights.matrix_names import matrix_names
from paceline.backends.cpu.weights.model_weights import round_up
from paceline.backends.cpu.weights.packing import address_of, aligned_zeros
from paceline.backends.cpu.workspace import Workspace
from paceline.core.forward import ForwardBatch
from paceline.models.lora import Adapter


class AdapterTables:
    """The table of each adapter by name, and the adapter of each row of a pass."""

    def __init__(self, adapters: Sequence[Adapter], workspace: Workspace) -> None:
        self._workspace, self._job = workspace, workspace.job
        self._kept: list[npt.NDArray[np.generic]] = []  # keeps alive what tables point to
        self.tables = {adapter.name: self._table(adapter) for adapter in adapters}
        rank = max(len(own.down) for adapter in adapters for own in adapter.matrices.values())
        self._low = aligned_zeros((workspace.rows, fields.LAYER_MATRICES, rank), np.float32)
        self._rows = np.zeros(workspace.rows, dtype=np.int64)  # the table of each row's adapter
        self._job[fields.LOW_AT], self._job[fields.LOW_RANK] = address_of(self._low), rank

    def begin_pass(self, batch: ForwardBatch) -> None:
        """Set each row's adapter in the job."""
        tables = [address_of(self.tables[name]) if name else 0 for name in batch.adapters]
        self._job[fields.ROW_ADAPTERS_AT] = address_of(self._rows) if any(tables) else 0
        if tables:
            self._rows[: batch.num_rows] = np.repeat(tables, np.diff(batch.row_offsets))

    def _table(self, adapter: Adapter) -> npt.NDArray[np.int64]:
        """The table of an adapter: [layers * matrices of a layer, 3]."""
        names = matrix_names(self._workspace.config)[:-2]  # without embedding and LM head
        table = np.zeros((len(names), LINE // 8), dtype=np.int64)
        for number, name in enumerate(names):
            change = adapter.matrices.get(name.removesuffix(".weight")) if name else None
            if name and change is not None:
                matrix, rank = self._workspace.packed_matrix(name), len(change.down)
                down = self._padded(change.down, matrix.padded_depth)
                up = self._padded(change.up.T, round_up(matrix.rows, GROUP))
                table[number] = down, up, rank
        return table

    def _padded(self, lines: npt.NDArray[np.float32], width: int) -> int:
        """The address of these rows, zero-padded to `width`."""
        padded = aligned_zeros((len(lines), width), np.float32)
        padded[:, : lines.shape[1]] = lines
        self._kept.append(padded)
        return address_of(padded)
