"""CompiledModel: the base of the CPU's models and draft heads, with threads, KV pools and passes."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from paceline.backends.cpu import job as fields
from paceline.backends.cpu.attention.paged_attention import PAGE, copy_key_value
from paceline.backends.cpu.forward_pass import run_passes
from paceline.backends.cpu.job import KV_LINE
from paceline.backends.cpu.primitives.compiled import compiled
from paceline.backends.cpu.primitives.simd import load_int32
from paceline.backends.cpu.team import Team
from paceline.backends.cpu.tiles.weight_tile import GROUP
from paceline.backends.cpu.weights.model_weights import round_up
from paceline.backends.cpu.weights.packing import address_of, aligned_zeros
from paceline.backends.cpu.workspace import Workspace
from paceline.core.arrays import Float32Array, Int32Array, Int64Array
from paceline.core.forward import ForwardBatch, KVPool, WindowGroup
from paceline.errors import BackendError

SMALLEST_PAGE = 4096  # bytes of the smallest memory page of a system


@dataclass(frozen=True)
class CpuPool:
    """Keys and values in one array of blocks, which paged_attention.py describes."""

    num_pages: int
    bytes_per_page: int
    data: npt.NDArray[np.uint8]  # layer after layer [pages or window pages, KV heads, bytes of a block]
    layers: Int64Array  # [layers, 2] a line of KV_LAYERS in job.py for each
    # [slots, parts, width] the target's features in a head's pool: bfloat16, as the upper halves of float32
    features: npt.NDArray[np.uint16] = field(default_factory=lambda: np.empty((0, 0, 0), dtype=np.uint16))
    windows: WindowGroup | None = None  # kept alive: kernels read its table

    def take_memory(self) -> None:
        """Touch all memory pages now: page faults of huge pages would stall the first passes for 90 ms."""
        for array in (self.data, self.features):
            array.reshape(-1).view(np.uint8)[::SMALLEST_PAGE] = 0


class CompiledModel:
    """A workspace (weights and buffers) and a team of threads that run passes."""

    page_size = PAGE

    def __init__(self, workspace: Workspace, beside: CompiledModel | None) -> None:
        """`beside`: another model, whose threads it shares if it wants the same number of them."""
        self.config = workspace.config
        self.max_rows = workspace.rows
        self.threads = workspace.threads
        self.workspace = workspace
        self._job, self._job_at = workspace.job, address_of(workspace.job)
        self._logits = np.empty((0, round_up(self.config.vocab_size, GROUP)), dtype=np.float32)
        shared = beside is not None and beside.threads == self.threads
        self._team: Team = beside._team if beside and shared else Team(self.threads, run_passes)

    def bytes_per_page(self) -> int:
        """Bytes of keys and values of 16 tokens in all layers."""
        return sum(self._layer_bytes())

    def _layer_bytes(self) -> list[int]:
        """Bytes of a page in each layer of the KV pool."""
        return [heads * block for heads, _, block in self.workspace.kv_shapes()]

    def bytes_per_window_page(self) -> int:
        """Of these, the bytes in layers of the window group."""
        sizes = self._layer_bytes()
        return sum(sizes[layer] for layer in self.config.window_layers)

    def make_pool(self, num_pages: int) -> CpuPool:
        """Storage for `num_pages` pages of keys and values."""
        return self._make_pool(num_pages, None)

    def make_grouped_pool(self, num_pages: int, windows: WindowGroup) -> CpuPool:
        """Storage in which layers of the window group have their keys and values in window pages."""
        return self._make_pool(num_pages, windows)

    def _make_pool(self, num_pages: int, windows: WindowGroup | None) -> CpuPool:
        sizes, counts = self._layer_bytes(), [num_pages] * len(self._layer_bytes())
        layers = np.zeros((len(sizes), KV_LINE // 8), dtype=np.int64)
        if windows is not None:
            for layer in self.config.window_layers:
                counts[layer], layers[layer, 1] = windows.num_pages, address_of(windows.table)
        ends = np.cumsum([count * size for count, size in zip(counts, sizes, strict=True)], dtype=np.int64)
        try:
            data = aligned_zeros((int(ends[-1]),))
            layers[:, 0] = address_of(data) + np.concatenate(([0], ends[:-1]))
            return CpuPool(num_pages, self.bytes_per_page(), data, layers, windows=windows)
        except MemoryError as error:
            gigabytes = num_pages * self.bytes_per_page() / 1e9
            raise BackendError(
                f"No memory for a KV pool of {num_pages} pages ({gigabytes:.1f} GB); "
                "lower kv_cache_memory_bytes or max_model_len."
            ) from error

    def _run(self, batch: ForwardBatch, logit_rows: Int32Array) -> Float32Array:
        """The logits of these rows, after running a pass; valid until the next pass."""
        rows, outputs, job = batch.num_rows, len(logit_rows), self._job
        assert 0 < rows <= self.max_rows, f"{rows} rows, but max_rows is {self.max_rows}"
        assert batch.num_requests <= rows, "a request without rows"
        assert isinstance(batch.pool, CpuPool)
        assert batch.page_tables.shape[1] <= self.workspace.max_pages, "the page table outgrows the context"
        assert self._team.close.alive, "the backend is closed"
        if outputs > len(self._logits):
            self._logits = np.empty((outputs, self._logits.shape[1]), dtype=np.float32)
            job[fields.LOGITS_AT], job[fields.LOGITS_STRIDE] = (
                address_of(self._logits),
                self._logits.strides[0],
            )
        given = (
            batch.tokens,
            batch.positions,
            batch.parents,
            batch.row_offsets,
            batch.context_lengths,
            batch.page_tables,
            logit_rows,
        )
        arrays = [np.ascontiguousarray(array, dtype=np.int32) for array in given]  # alive during the pass
        workspace = self.workspace
        _describe(job, *arrays, workspace.row_requests, workspace.chains, workspace.counters)
        job[fields.KV_LAYERS_AT] = address_of(batch.pool.layers)
        run_passes(self._team.control, 0, self.threads, self._job_at)
        return self._logits[:outputs, : self.config.vocab_size]

    def _run_advance(self) -> None:
        """Run the job's state advance: recurrent layers only, no pass."""
        self._job[fields.ADVANCING], self.workspace.counters[:] = 1, 0
        run_passes(self._team.control, 0, self.threads, self._job_at)
        self._job[fields.ADVANCING] = 0

    def move(self, pool: KVPool, source: Int32Array, destination: Int32Array) -> None:
        """Copy keys and values between KV slots; sources are read before destinations are written."""
        assert isinstance(pool, CpuPool)
        shapes = np.array(self.workspace.kv_shapes(), dtype=np.int64)
        spare = np.empty((len(source), shapes[:, 2].max()), dtype=np.uint8)
        places = source.astype(np.int64), destination.astype(np.int64)
        in_keys, half = self.config.latent is not None, self.workspace.half_kv
        _move(pool.layers, address_of(spare), *places, shapes, int(in_keys), int(half))

    def progress(self) -> tuple[int, int]:
        """For profilers: the index of the running phase's task counter, and the number of waiting threads.

        Each phase has its own counter, in the order of forward_pass.py.
        """
        taken = np.flatnonzero(self.workspace.counters.any(axis=(1, 2)))
        return int(taken[-1]) if len(taken) else 0, self._team.waiting

    def close(self) -> None:
        """End the worker threads, also for backends that share them."""
        self._team.close()


@compiled(cached=True)
def _describe(  # type: ignore[no-untyped-def]
    job, tokens, positions, parents, offsets, contexts, pages, logit_rows, requests, chains, counters
):
    """Write a batch into the job, with each row's request and whether each request's rows form a chain.

    In a chain each row's parent is the row before it. Resets the task counters.
    """
    counters[:] = 0
    job[fields.ROWS], job[fields.OUTPUTS], job[fields.MAX_PAGES] = (
        len(tokens),
        len(logit_rows),
        pages.shape[1],
    )
    job[fields.TOKENS_AT], job[fields.POSITIONS_AT] = tokens.ctypes.data, positions.ctypes.data
    job[fields.PARENTS_AT], job[fields.ROW_START_AT] = parents.ctypes.data, offsets.ctypes.data
    job[fields.CONTEXT_AT], job[fields.PAGES_AT] = contexts.ctypes.data, pages.ctypes.data
    job[fields.LOGIT_ROWS_AT] = logit_rows.ctypes.data
    for request in range(len(contexts)):
        chains[request] = 1
        for row in range(offsets[request], offsets[request + 1]):
            requests[row] = request
            if parents[row] != row - offsets[request] - 1:
                chains[request] = 0


@compiled(cached=True)
def _move(layers, spare, sources, targets, shapes, in_keys, half):  # type: ignore[no-untyped-def]
    for layer in range(len(shapes)):
        heads, width, block = shapes[layer]
        first, window_pages = layers[layer]
        for head in range(heads):
            for i in range(len(sources)):
                page = _page_in(window_pages, sources[i] // PAGE)
                address = first + (page * heads + head) * block
                copy_key_value(address, sources[i] % PAGE, spare + i * block, 0, width, in_keys, half)
            for i in range(len(sources)):
                page = _page_in(window_pages, targets[i] // PAGE)
                address = first + (page * heads + head) * block
                copy_key_value(spare + i * block, 0, address, targets[i] % PAGE, width, in_keys, half)


@compiled
def _page_in(window_pages, page):  # type: ignore[no-untyped-def]
    """The page in a layer's group: `window_pages` is the address of its table, or 0."""
    return load_int32(window_pages + 4 * page) if window_pages != 0 else page
