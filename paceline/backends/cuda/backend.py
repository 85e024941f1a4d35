"""CudaBackend: the Backend protocol by Triton and CUDA C++ kernels in CUDA graphs."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

import numpy as np
import torch

from paceline.backends.base import NO_STATES, Backend
from paceline.backends.cuda.decode.async_decoder import CudaAsyncDecoder
from paceline.backends.cuda.layers.recurrent import CudaStates, copy_state
from paceline.backends.cuda.passes.compiling import compile_only
from paceline.backends.cuda.passes.graphs import buckets
from paceline.backends.cuda.passes.host_passes import FIRST_ROWS, LATE_ROWS, HostPasses
from paceline.backends.cuda.passes.kv_pool import (
    Pool,
    make_pool,
    move_slots,
    page_bytes,
    window_page_bytes,
)
from paceline.backends.cuda.passes.shared_prefix import (
    PassRows,
    find_shared_prefixes,
    no_shared_prefix,
)
from paceline.backends.cuda.passes.tables import (
    prefill_requests,
)
from paceline.backends.cuda.passes.warm_up import warm_up_pass
from paceline.backends.cuda.passes.workspace import Room, workspace_bytes
from paceline.backends.cuda.weights.adapters import check_adapters, with_adapters
from paceline.backends.cuda.weights.loading import DTYPES, check_model, find_device, load_checkpoint_weights
from paceline.backends.cuda.weights.model_weights import Weights
from paceline.backends.cuda.weights.shard import WHOLE, Shard, check_size
from paceline.backends.torch.loading import find_devices
from paceline.backends.torch.parallel.calls import made_on_all_ranks, on_all_ranks
from paceline.backends.torch.parallel.ranks import Ranks, start_ranks
from paceline.core.arrays import Int32Array
from paceline.core.forward import (
    DeviceMemory,
    ForwardBatch,
    ForwardOutput,
    KeptFeatures,
    KVPool,
    StatePool,
    WindowGroup,
)
from paceline.errors import BackendError
from paceline.models.checkpoint import Checkpoint
from paceline.models.config import ModelConfig
from paceline.models.lora import Adapter
from paceline.models.needs import state_bytes
from paceline.models.registry import load_checkpoint

PAGE_SIZE = 16
COUNTED_LOOPS = 3  # decode loops, one for each length of drafts, that the plan of memory counts


class CudaBackend(Backend):
    """A model on one GPU, or this rank's part of it. Batch-invariant."""

    name = "cuda"
    page_size = PAGE_SIZE
    batch_invariant = True
    chooses = drafts_on_device = True
    supports_features = True

    def __init__(
        self, weights: Weights, max_rows: int, quantization: str = "none", ranks: Ranks | None = None
    ) -> None:
        """`ranks`: the other ranks of tensor parallelism, which repeat the calls of this one (rank 0)."""
        self.weights, self.ranks = weights, ranks
        dtype = str(weights.dtype).removeprefix("torch.")
        self.weight_format = dtype if quantization == "none" else quantization
        self.config, self.adapters = weights.config, weights.adapters
        self.attention_window = self.config.widest_window
        # other ranks do not see how the page table of the window group changes
        self.window_group = self.config.window_group if ranks is None and weights.shard.size == 1 else None
        self.max_rows = max_rows
        self.device = weights.device
        self.dtype = weights.dtype
        self._passes = HostPasses(weights, max_rows, PAGE_SIZE)
        if weights.recurrent is not None:
            self.bytes_per_state = state_bytes(self.config)

    @classmethod
    def load(
        cls,
        checkpoint: Checkpoint,
        *,
        device: str = "cuda",
        dtype: str = "bfloat16",
        quantization: str = "none",
        max_rows: int = 512,
        tensor_parallel_size: int = 1,
        adapters: Sequence[Adapter] = (),
    ) -> CudaBackend:
        """A backend with the checkpoint's weights on `device`, in `dtype` or quantized.

        Other ranks are new processes, each with a GPU of its own.
        """
        check_model(checkpoint.config)
        check_size(checkpoint.config, tensor_parallel_size)
        check_adapters(checkpoint.config, adapters)
        if dtype not in DTYPES:
            raise BackendError(f"The cuda backend has no dtype {dtype!r}; choose one of {', '.join(DTYPES)}.")
        target = find_device(device)
        if tensor_parallel_size == 1:
            return cls.load_part(checkpoint, target, dtype, quantization, max_rows, adapters=adapters)
        devices = find_devices(device, tensor_parallel_size)
        ranks, communicator = start_ranks(
            checkpoint, devices, dtype, quantization, max_rows, adapters, backend=cls.name
        )
        try:
            part = devices[0], dtype, quantization, max_rows, Shard(communicator), ranks, adapters
            backend = cls.load_part(checkpoint, *part)
            ranks.wait_for_answers()
        except BaseException:
            ranks.close()
            raise
        ranks.name(backend, 0)
        return backend

    @classmethod
    def load_beside(
        cls,
        beside: CudaBackend,
        checkpoint: Checkpoint,
        dtype: str,
        quantization: str,
        max_rows: int,
        is_shared: bool,
    ) -> CudaBackend:
        """A draft model on the ranks of its target: sharded, or with `is_shared` False replicated."""
        shard = beside.weights.shard if is_shared else WHOLE
        part = beside.device, dtype, quantization, max_rows, shard, beside.ranks
        if beside.ranks is None:
            return cls.load_part(checkpoint, *part)
        where = beside, checkpoint.source, checkpoint.config, dtype, quantization, max_rows, is_shared
        return beside.ranks.call(_load_beside, where, lambda: cls.load_part(checkpoint, *part), makes=True)

    @classmethod
    def load_part(
        cls,
        checkpoint: Checkpoint,
        device: torch.device,
        dtype: str,
        quantization: str,
        max_rows: int,
        shard: Shard = WHOLE,
        ranks: Ranks | None = None,
        adapters: Sequence[Adapter] = (),
    ) -> CudaBackend:
        """A model, or a rank's part of it."""
        weights = load_checkpoint_weights(checkpoint, device, dtype, quantization, shard)
        return cls(with_adapters(weights, adapters) if adapters else weights, max_rows, quantization, ranks)

    def close(self) -> None:
        """Stop the other ranks."""
        if self.ranks is not None:
            self.ranks.close()

    def bytes_per_page(self) -> int:
        return page_bytes(self.weights, PAGE_SIZE)

    def bytes_per_window_page(self) -> int:
        return window_page_bytes(self.weights, PAGE_SIZE)

    @made_on_all_ranks
    def make_pool(self, num_pages: int) -> Pool:
        """Zeroed storage for `num_pages` pages of keys and values of this model."""
        return make_pool(self.weights, num_pages, PAGE_SIZE)

    def make_grouped_pool(self, num_pages: int, windows: WindowGroup) -> Pool:
        """Zeroed storage in which layers of the window group have their keys and values in window pages."""
        return make_pool(self.weights, num_pages, PAGE_SIZE, windows)

    def forward(self, batch: ForwardBatch) -> ForwardOutput:
        """Logits of the wanted rows and, if asked, sampled tokens and features."""
        return self.begin(batch)()

    def begin(self, batch: ForwardBatch) -> Callable[[], ForwardOutput]:
        """Launch a pass; the returned function waits for its output."""
        wait, ranks = self._launch(batch), self.ranks
        if ranks is None:
            return wait

        def checked() -> ForwardOutput:
            output = wait()
            ranks.check()
            return output

        return checked

    @on_all_ranks
    def _launch(self, batch: ForwardBatch) -> Callable[[], ForwardOutput]:
        sizes = self.weights.head_groups
        large = prefill_requests(batch, *sizes, self.config.latent is not None)
        # the prefill kernel and latent attention have no shared-prefix attention
        if large.all() or self.config.latent is not None:
            return self._passes.begin(batch, large, None)
        counts, begins = np.diff(batch.row_offsets), np.arange(batch.num_requests, dtype=np.int32)
        begins *= batch.page_tables.shape[1]
        contexts = np.where(large, 0, batch.context_lengths)  # large ones read their context in prefill tiles
        pass_rows = PassRows(batch.page_tables, begins, contexts, counts, batch.row_offsets[:-1])
        return self._passes.begin(batch, large, find_shared_prefixes(pass_rows, PAGE_SIZE, *sizes))

    def device_memory(self, rows: int, longest: int) -> DeviceMemory:
        """The GPU's memory, and the bytes of workspaces for `longest` tokens still to be allocated."""
        gc.collect()  # frees the KV cache of an engine that was closed
        free, total = torch.cuda.mem_get_info(self.device)
        free += torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
        room = self._passes.room
        here = workspace_bytes(self.weights, replace(room, longest=longest))
        now = workspace_bytes(self.weights, room)
        loops = workspace_bytes(self.weights, Room.of(COUNTED_LOOPS * rows, longest))
        raw_logits = 4 * rows * self.config.vocab_size  # which loops share
        return DeviceMemory(total, free, max(0, here - now) + loops + raw_logits)

    def compile_ahead(self, warm_up: Callable[[], object]) -> None:
        """Compile the kernels that this warm-up launches, on all cores.

        Not with several ranks: the others would run the passes, and wait for gathers that this one skips.
        """
        if self.device.type == "cuda" and self.ranks is None:
            with compile_only(self.device):
                warm_up()

    @on_all_ranks
    def prepare(
        self,
        pool: KVPool,
        longest: int,
        feature_layers: tuple[int, ...],
        kept: tuple[KeptFeatures, ...] = (),
    ) -> None:
        """Allocate buffers for contexts of `longest` tokens, compile kernels and capture all graphs."""
        try:
            if longest > self._passes.room.longest:
                self._passes.set_room(replace(self._passes.room, longest=longest))
            for rows in buckets(min(self.max_rows, longest, pool.num_pages * PAGE_SIZE)):
                batch = warm_up_pass(pool, rows, PAGE_SIZE, FIRST_ROWS, feature_layers, kept)
                self.forward(batch)
                for name in list(self.adapters)[:1]:
                    self.forward(replace(batch, adapters=(name,)))
            for outputs in buckets(min(LATE_ROWS, rows)) if rows >= LATE_ROWS else ():
                self.forward(warm_up_pass(pool, LATE_ROWS, PAGE_SIZE, outputs, feature_layers, kept))
            # compiles the shared-prefix kernels; their graphs are captured when first needed
            none_large = np.zeros(1, np.bool_)
            self._passes.begin(batch, none_large, no_shared_prefix(1))()
        except torch.OutOfMemoryError as error:
            raise BackendError(
                f"The buffers for contexts of {longest} tokens do not fit into the memory of {self.device} "
                f"beside {pool.num_pages * pool.bytes_per_page / 1e9:.1f} GB of keys and values: {error} "
                "Lower gpu_memory_utilization, max_model_len or max_num_batched_tokens."
            ) from error

    @made_on_all_ranks
    def make_async_decoder(
        self,
        pool: KVPool,
        slots: int,
        longest: int,
        feature_layers: tuple[int, ...],
        kept: tuple[KeptFeatures, ...] = (),
        states: StatePool | None = None,
    ) -> CudaAsyncDecoder | None:
        """A decoder with `slots` slots for requests of at most `longest` tokens.

        None if both the host and a head's pool need features: only host passes support that.
        """
        if len(kept) + bool(feature_layers) > 1:
            return None
        own = None if states is None else cast(CudaStates, states).tensors
        sizes = slots, longest, PAGE_SIZE
        return CudaAsyncDecoder(self.weights, cast(Pool, pool), *sizes, feature_layers, kept, self.ranks, own)

    @made_on_all_ranks
    def first_layers(self, count: int) -> CudaBackend:
        """The same model without its later layers, over the same pools."""
        config = replace(self.config, num_layers=count)
        early = replace(self.weights, config=config, layers=self.weights.layers[:count])
        return CudaBackend(early, self.max_rows, ranks=self.ranks)

    @on_all_ranks
    @torch.inference_mode()
    def move(self, pool: KVPool, source: Int32Array, destination: Int32Array) -> None:
        """Copy keys and values from KV slots to others; all sources are read first."""
        move_slots(cast(Pool, pool), source, destination, PAGE_SIZE)

    def make_states(self, count: int) -> CudaStates:
        """Zeroed storage for `count` states of the recurrent layers."""
        assert self._passes.recurrences is not None, NO_STATES
        return self._passes.recurrences.make_states(count)

    @torch.inference_mode()
    def copy_state(self, states: StatePool, source: int, destination: int) -> None:
        """Copy the state of one slot to another."""
        copy_state(cast(CudaStates, states).tensors, source, destination)

    @torch.inference_mode()
    def advance_state(
        self, states: StatePool, slot: int, rows: Sequence[int], checkpoints: Mapping[int, int]
    ) -> None:
        """Advance a request's state along its accepted rows of the last pass."""
        assert self._passes.recurrences is not None, NO_STATES
        buffers, tensors = self._passes.workspace.recurrent, cast(CudaStates, states).tensors
        assert buffers is not None
        self._passes.recurrences.advance(buffers, tensors, slot, rows, checkpoints)


def _load_beside(
    beside: CudaBackend,
    source: Path,
    config: ModelConfig,
    dtype: str,
    quantization: str,
    max_rows: int,
    is_shared: bool,
) -> CudaBackend:
    """`CudaBackend.load_beside` on another rank, which reads the checkpoint itself."""
    checkpoint = replace(load_checkpoint(source), config=config)
    return CudaBackend.load_beside(beside, checkpoint, dtype, quantization, max_rows, is_shared)
