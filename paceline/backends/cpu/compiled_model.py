"""What a model and a draft head have in common: packed weights, a team of threads, pages, and passes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from paceline.backends.base import Float32Array, ForwardBatch, Int32Array, KVPool
from paceline.backends.cpu import job as fields
from paceline.backends.cpu.attention import copy_key_value
from paceline.backends.cpu.attention_tiles import PAGE
from paceline.backends.cpu.compiled import compiled
from paceline.backends.cpu.forward_pass import run_passes
from paceline.backends.cpu.team import Team
from paceline.backends.cpu.tiles import GROUP
from paceline.backends.cpu.workspace import Workspace, address_of, round_up
from paceline.errors import BackendError


@dataclass(frozen=True)
class CpuPool:
    """Keys and values in one array; attention.py describes a block."""

    num_pages: int
    bytes_per_page: int
    data: npt.NDArray[np.uint8]  # [layers, pages, KV heads, bytes of a block]


class CompiledModel:
    """A workspace and a team that run passes."""

    page_size = PAGE

    def __init__(self, workspace: Workspace, beside: CompiledModel | None) -> None:
        """`beside` is another one, whose threads it shares if they are as many."""
        self.config = workspace.config
        self.max_rows = workspace.rows
        self.threads = workspace.threads
        self.workspace = workspace
        self._job = workspace.job
        self._logits = np.empty((0, 0), dtype=np.float32)
        shared = beside is not None and beside.threads == self.threads
        self._team: Team = beside._team if beside and shared else Team(self.threads, run_passes)

    def bytes_per_page(self) -> int:
        """Bytes of keys and values of 16 tokens in all layers."""
        return self.config.num_layers * self.config.num_kv_heads * self.workspace.block_bytes

    def make_pool(self, num_pages: int) -> CpuPool:
        """Storage for `num_pages` pages of keys and values."""
        shape = (self.config.num_layers, num_pages, self.config.num_kv_heads, self.workspace.block_bytes)
        try:
            return CpuPool(num_pages, self.bytes_per_page(), np.zeros(shape, dtype=np.uint8))
        except MemoryError as error:
            gigabytes = num_pages * self.bytes_per_page() / 1e9
            raise BackendError(
                f"No memory for a KV pool of {num_pages} pages ({gigabytes:.1f} GB); "
                "lower kv_cache_memory_bytes or max_model_len."
            ) from error

    def _run(self, batch: ForwardBatch) -> Float32Array:
        """Run a pass: the logits of the wanted rows, valid until the next one."""
        rows, outputs, job = batch.num_rows, len(batch.logit_rows), self._job
        assert 0 < rows <= self.max_rows, f"{rows} rows, but max_rows is {self.max_rows}"
        assert isinstance(batch.pool, CpuPool)
        assert batch.page_tables.shape[1] <= self.workspace.max_pages, "the page table outgrows the context"
        assert self._team.close.alive, "the backend is closed"
        if outputs > len(self._logits):
            self._logits = np.empty((outputs, round_up(self.config.vocab_size, GROUP)), dtype=np.float32)
        starts = batch.row_offsets[:-1].repeat(
            np.diff(batch.row_offsets)
        )  # each row's first row of its request
        self.workspace.row_requests[:rows] = np.searchsorted(batch.row_offsets, np.arange(rows), "right") - 1
        arrays = (
            (fields.TOKENS_AT, batch.tokens),
            (fields.POSITIONS_AT, batch.positions),
            (fields.PARENTS_AT, batch.parents),
            (fields.ROW_START_AT, batch.row_offsets),
            (fields.CONTEXT_AT, batch.context_lengths),
            (fields.PAGES_AT, batch.page_tables),
            (fields.CHAIN_AT, _chains(batch, starts)),
            (fields.LOGIT_ROWS_AT, batch.logit_rows),
        )
        held = [np.ascontiguousarray(array, dtype=np.int32) for _, array in arrays]
        for (index, _), array in zip(arrays, held, strict=True):
            job[index] = address_of(array)
        job[fields.ROWS], job[fields.OUTPUTS] = rows, outputs
        job[fields.MAX_PAGES] = batch.page_tables.shape[1]
        job[fields.LOGITS_AT], job[fields.LOGITS_STRIDE] = address_of(self._logits), self._logits.strides[0]
        job[fields.KV_AT], job[fields.NUM_PAGES] = address_of(batch.pool.data), batch.pool.num_pages
        self.workspace.counters.fill(0)
        run_passes(self._team.control, 0, self.threads, address_of(job))
        return self._logits[:outputs, : self.config.vocab_size]

    def move(self, pool: KVPool, source: Int32Array, destination: Int32Array) -> None:
        """Copy keys and values from KV places to others; sources are read before destinations are written."""
        assert isinstance(pool, CpuPool)
        layers, pages, heads, block = pool.data.shape
        spare = np.empty((len(source), block), dtype=np.uint8)
        places = source.astype(np.int64), destination.astype(np.int64)
        shape = layers, pages, heads, block, self.config.head_dim, int(self.workspace.half_kv)
        _move(address_of(pool.data), address_of(spare), *places, *shape)

    def close(self) -> None:
        """End the worker threads, also for backends that share them."""
        self._team.close()


def _chains(batch: ForwardBatch, starts: Int32Array) -> Int32Array:
    """For each request, whether its rows are a chain: each row's parent is the row before it."""
    broken = batch.parents != np.arange(batch.num_rows) - starts - 1
    if not broken.any():
        return np.ones(batch.num_requests, dtype=np.int32)
    return np.logical_not(np.logical_or.reduceat(broken, batch.row_offsets[:-1])).astype(np.int32)


@compiled(cached=True)
def _move(data, spare, sources, targets, layers, pages, heads, block, width, half):  # type: ignore[no-untyped-def]
    for layer in range(layers):
        for head in range(heads):
            for i in range(len(sources)):
                address = data + ((layer * pages + sources[i] // PAGE) * heads + head) * block
                copy_key_value(address, sources[i] % PAGE, spare + i * block, 0, width, half)
            for i in range(len(sources)):
                address = data + ((layer * pages + targets[i] // PAGE) * heads + head) * block
                copy_key_value(spare + i * block, 0, address, targets[i] % PAGE, width, half)
