"""AdapterTables: a model's LoRA adapters in the layout of the compiled pass (see low_rank.py)."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from paceline.backends.cpu import job as fields
from paceline.backends.cpu.phases.low_rank import LINE, LOW_SLOTS
from paceline.backends.cpu.tiles.weight_tile import GROUP
from paceline.backends.cpu.weights.latent_weights import latent_names
from paceline.backends.cpu.weights.matrix_names import expert_names, matrix_names
from paceline.backends.cpu.weights.model_weights import round_up
from paceline.backends.cpu.weights.packing import address_of, aligned_zeros
from paceline.backends.cpu.workspace import Workspace
from paceline.core.forward import ForwardBatch
from paceline.models.config import ModelConfig
from paceline.models.lora import Adapter, LoraMatrix

HEADS_OF_BOTH = re.compile(r"to_(latents|values)\.weight")  # matrices that are made of kv_b_proj


class AdapterTables:
    """The table of each adapter by name, and the adapter of each row of a pass."""

    def __init__(self, adapters: Sequence[Adapter], workspace: Workspace) -> None:
        self._workspace, self._job = workspace, workspace.job
        self._kept: list[npt.NDArray[np.generic]] = []  # keeps alive what tables point to
        self._lines = _line_names(workspace.config)
        self._job[fields.LAYER_LINES] = len(self._lines) // workspace.config.num_layers
        self.tables = {adapter.name: self._table(adapter) for adapter in adapters}
        rank = max(len(own.down) for adapter in adapters for own in adapter.matrices.values())
        moe, rows = workspace.config.moe, workspace.rows
        pairs = rows * (moe.experts_per_token if moe else 1)
        self._low = aligned_zeros((pairs, LOW_SLOTS, rank), np.float32)
        self._pairs = np.zeros(pairs, dtype=np.int64)  # the table of the adapter of each row of experts
        self._job[fields.PAIR_ADAPTERS_AT] = address_of(self._pairs)
        self._rows = np.zeros(workspace.rows, dtype=np.int64)  # the table of each row's adapter
        self._job[fields.LOW_AT], self._job[fields.LOW_RANK] = address_of(self._low), rank

    def begin_pass(self, batch: ForwardBatch) -> None:
        """Set each row's adapter in the job."""
        tables = [address_of(self.tables[name]) if name else 0 for name in batch.adapters]
        self._job[fields.ROW_ADAPTERS_AT] = address_of(self._rows) if any(tables) else 0
        if tables:
            self._rows[: batch.num_rows] = np.repeat(tables, np.diff(batch.row_offsets))

    def _table(self, adapter: Adapter) -> npt.NDArray[np.int64]:
        """The lines of an adapter: [layers * lines of a layer, 5]."""
        table = np.zeros((len(self._lines), LINE // 8), dtype=np.int64)
        for number, name in enumerate(self._lines):
            source = HEADS_OF_BOTH.sub("kv_b_proj.weight", name or "")
            change = adapter.matrices.get(source.removesuffix(".weight"))
            if name and change is not None and name != source:
                table[number] = self._heads_line(name, change)
            elif name and change is not None:
                matrix, rank = self._workspace.packed_matrix(name), len(change.down)
                down = self._padded(change.down, matrix.padded_depth)
                up = self._padded(change.up.T, round_up(matrix.rows, GROUP))
                table[number, :3] = down, up, rank
        return table

    def _heads_line(self, name: str, change: LoraMatrix) -> tuple[int, int, int, int, int]:
        """The line of a matrix for each head, of what changes W_uk and W_uv of all heads: see latent.py."""
        latent, heads, rank = (
            self._workspace.config.latent,
            self._workspace.config.num_heads,
            len(change.down),
        )
        assert latent is not None
        both = change.up.reshape(heads, -1, rank).swapaxes(1, 2)  # [heads, rank, nope + value]
        own = both[..., : latent.nope_dim] if "to_latents" in name else both[..., latent.nope_dim :]
        width, shared_width = round_up(own.shape[2], GROUP), round_up(latent.rank, GROUP)
        each = self._padded(own.reshape(heads * rank, -1), width)
        shared = self._padded(change.down, shared_width)
        step = 4 * rank * width  # bytes from a head to the next
        return (each, shared, rank, step, 0) if "to_latents" in name else (shared, each, rank, 0, step)

    def _padded(self, lines: npt.NDArray[np.float32], width: int) -> int:
        """The address of these rows, zero-padded to `width`."""
        padded = aligned_zeros((len(lines), width), np.float32)
        padded[:, : lines.shape[1]] = lines
        self._kept.append(padded)
        return address_of(padded)


def _line_names(config: ModelConfig) -> list[str | None]:
    """The matrices of an adapter's lines, in the order of job.py."""
    names = matrix_names(config)[:-2]  # without embedding and LM head
    latents = latent_names(config) if config.latent else [None] * fields.LATENT_MATRICES * config.num_layers
    found: list[str | None] = []
    for layer in range(config.num_layers):
        for own, count in ((names, fields.LAYER_MATRICES), (latents, fields.LATENT_MATRICES)):
            found += own[layer * count : (layer + 1) * count]
        if config.moe is not None:
            experts = expert_names(config, config.moe, layer)
            found += experts if layer in config.moe.layers else [None] * len(experts)
    return found
