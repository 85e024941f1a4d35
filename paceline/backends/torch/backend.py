"""TorchBackend, the reference: the transformer in plain torch, on a CPU or a CUDA device.

Compiled backends are tested against this one, so it favours readability over speed: one attention call per
request, nothing cached between steps. It implements the Backend protocol of base.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import cast

import numpy as np
import numpy.typing as npt
import torch

from paceline.backends.adapter_groups import forward_by_adapter
from paceline.backends.base import Backend
from paceline.backends.torch.choosing import choose
from paceline.backends.torch.loading import find_devices, find_dtype, load_pieces
from paceline.backends.torch.parallel.calls import made_on_all_ranks, on_all_ranks
from paceline.backends.torch.parallel.ranks import Ranks, start_ranks
from paceline.backends.torch.pool import PAGE_SIZE, TorchPool, TorchStates, make_cache
from paceline.core.arrays import Int32Array
from paceline.core.forward import ForwardBatch, ForwardOutput, KVPool, StatePool, WindowGroup
from paceline.errors import BackendError
from paceline.models.checkpoint import Checkpoint
from paceline.models.config import Reach
from paceline.models.lora import Adapter
from paceline.models.transformer.adapted import with_adapter
from paceline.models.transformer.model import Transformer
from paceline.models.transformer.recurrent import StateRows, StateView
from paceline.models.transformer.rows import Rows, RowView
from paceline.models.transformer.tensor_parallel import check_size


class TorchBackend(Backend):
    """A model run by torch. Its bits depend on the batch, unless it was loaded with `row_by_row`."""

    name = "torch"
    page_size = PAGE_SIZE
    supports_features = True
    chooses = True

    def __init__(
        self,
        model: Transformer,
        max_rows: int,
        ranks: Ranks | None = None,
        weight_format: str = "",
        adapters: Sequence[Adapter] = (),
    ) -> None:
        """`ranks`: the other ranks of tensor parallelism, which repeat the calls of this one (rank 0).

        `weight_format`: the quantization of its matrices; "": they have the model's dtype.
        """
        self.model = model
        # torch's matrix products may sum in another order when the number of rows changes
        self.batch_invariant = model.row_by_row
        self.max_rows = max_rows
        self.device, self.dtype = model.device, model.dtype
        self.weight_format = weight_format or str(self.dtype).removeprefix("torch.")
        self.attention_window = model.config.widest_window
        # other ranks do not see how the page table of the window group changes
        self.window_group = model.config.window_group if ranks is None else None
        self.bytes_per_state = sum(mixer.bytes_per_state for mixer in model.recurrences)
        self.adapters: dict[str, Transformer] = {own.name: with_adapter(model, own) for own in adapters}
        self.ranks = ranks

    @classmethod
    def load(
        cls,
        checkpoint: Checkpoint,
        *,
        device: str = "cpu",
        dtype: str = "float32",
        quantization: str = "none",
        max_rows: int = 512,
        tensor_parallel_size: int = 1,
        row_by_row: bool = False,
        adapters: Sequence[Adapter] = (),
    ) -> TorchBackend:
        """A backend with the checkpoint's weights on `device`, in `dtype`; other ranks are new processes.

        `quantization`: int8, int4 or fp8 for projections, which are rounded as they are read.

        `row_by_row`, on one device: bitwise batch invariant, and as slow as one pass for each row.
        """
        if max_rows < 1:
            raise BackendError(f"max_rows is {max_rows}, but a pass needs at least 1 row; give 1 or more.")
        kind, devices = find_dtype(dtype), find_devices(device, tensor_parallel_size)
        check_size(checkpoint.config, tensor_parallel_size)
        weight_format = "" if quantization == "none" else quantization
        if tensor_parallel_size == 1:
            model = load_pieces(checkpoint, devices[0], kind, None, row_by_row, quantization)
            return cls(model, max_rows, None, weight_format, adapters)
        ranks, communicator = start_ranks(checkpoint, devices, dtype, quantization, max_rows, adapters)
        try:
            model = load_pieces(checkpoint, devices[0], kind, communicator, quantization=quantization)
            backend = cls(model, max_rows, ranks, weight_format, adapters)
            ranks.wait_for_answers()
        except BaseException:
            ranks.close()
            raise
        ranks.name(backend, 0)
        return backend

    def close(self) -> None:
        """Stop the other ranks."""
        if self.ranks is not None:
            self.ranks.close()

    def bytes_per_page(self) -> int:
        return self._page_bytes(self.model.config.kv_layers)

    def bytes_per_window_page(self) -> int:
        config = self.model.config
        return self._page_bytes([config.kv_layers[index] for index in config.window_layers])

    def _page_bytes(self, layers: Sequence[int]) -> int:
        """The bytes of a page in these layers."""
        per_token = sum(map(self.model.config.kv_values, layers)) * self.dtype.itemsize
        return per_token * PAGE_SIZE

    @made_on_all_ranks
    def make_pool(self, num_pages: int) -> TorchPool:
        """Zeroed storage for `num_pages` pages of keys and values; each rank stores its own KV heads."""
        return self._make_pool(num_pages, None)

    def make_grouped_pool(self, num_pages: int, windows: WindowGroup) -> TorchPool:
        """Zeroed storage in which layers of the window group have their keys and values in window pages."""
        return self._make_pool(num_pages, windows)

    def _make_pool(self, num_pages: int, windows: WindowGroup | None) -> TorchPool:
        config, parallel = self.model.config, self.model.parallel
        windowed = () if windows is None else tuple(config.window_layers)
        counts = [num_pages] * len(config.kv_layers)
        if windows is not None:
            counts = [windows.num_pages if index in windowed else num_pages for index in range(len(counts))]
        shapes = [
            (
                len(parallel.own_pieces),
                pages * PAGE_SIZE,
                heads.num_kv_heads // parallel.pieces,
                heads.head_dim,
            )
            for pages, heads in zip(counts, map(config.shape_of, config.kv_layers), strict=True)
        ]
        value_dims = [config.stored_value_dim(layer) for layer in config.kv_layers]
        cache = make_cache(shapes, self.dtype, self.device, value_dims, windowed)
        return TorchPool(num_pages, self.bytes_per_page(), cache, windows)

    @on_all_ranks
    @torch.inference_mode()
    def forward(self, batch: ForwardBatch) -> ForwardOutput:
        """Logits of the wanted rows; on request also features of all rows, and tokens sampled here."""
        assert batch.num_rows <= self.max_rows, f"{batch.num_rows} rows, but max_rows is {self.max_rows}"
        if batch.states is not None:
            cast(TorchStates, batch.states.pool).states.begin_pass()
        if batch.adapters:
            return forward_by_adapter(batch, lambda name, part: self._forward(self.adapters.get(name), part))
        return self._forward(None, batch)

    def _forward(self, adapted: Transformer | None, batch: ForwardBatch) -> ForwardOutput:
        """A pass of the model, or of `adapted`, the model with a LoRA adapter."""
        pool, model = cast(TorchPool, batch.pool), adapted or self.model
        hidden, wanted = model.hidden_states(self._rows(batch), pool.cache, batch.feature_layers)
        logits, chosen = self._outputs(hidden, batch)
        features = torch.cat(wanted, dim=-1).float().cpu().numpy() if wanted else None
        return ForwardOutput(logits.float().cpu().numpy(), features, chosen)

    def _outputs(self, hidden: torch.Tensor, batch: ForwardBatch) -> tuple[torch.Tensor, Int32Array | None]:
        """The logits [outputs, vocab] of the wanted rows, and the sampled tokens [choices]."""
        lm_head, choices, wanted = self.model.lm_head, batch.choices, len(batch.logit_rows)
        rows = batch.logit_rows if choices is None else np.concatenate((batch.logit_rows, choices.rows))
        parts = self.model.logit_parts(hidden[self._tensor(rows)])
        logits = lm_head.parallel.join([part[:wanted] for part in parts], lm_head.size)
        if choices is None:
            return logits, None
        positions = batch.positions[choices.rows] + 1
        return logits, choose(lm_head, [part[wanted:] for part in parts], choices, positions)

    @made_on_all_ranks
    def first_layers(self, count: int) -> TorchBackend:
        """The same model without its later layers, over the same pools."""
        return TorchBackend(self.model.first_layers(count), self.max_rows, self.ranks, self.weight_format)

    @on_all_ranks
    @torch.inference_mode()
    def move(self, pool: KVPool, source: Int32Array, destination: Int32Array) -> None:
        """Copy keys and values from KV slots to others; all sources are read first."""
        own = cast(TorchPool, pool)
        read, write = self._tensor(source), self._tensor(destination)
        read_window, write_window = map(self._optional, map(own.window_slots, (source, destination)))
        for layer, both in enumerate(zip(own.cache.keys, own.cache.values, strict=True)):
            is_windowed = layer in own.cache.windowed
            for stored in both:
                # indexing by a tensor copies, so all sources are read before any destination is written
                stored[:, write_window if is_windowed else write] = stored[
                    :, read_window if is_windowed else read
                ]

    def make_states(self, count: int) -> TorchStates:
        """Zeroed storage for `count` states of the recurrent layers."""
        return TorchStates(count, self.model.make_states(count))

    @torch.inference_mode()
    def copy_state(self, states: StatePool, source: int, destination: int) -> None:
        """Copy the state of one slot to another."""
        cast(TorchStates, states).states.copy(source, destination)

    @torch.inference_mode()
    def advance_state(
        self, states: StatePool, slot: int, rows: Sequence[int], checkpoints: Mapping[int, int]
    ) -> None:
        """Advance a request's state along its accepted rows of the last pass."""
        self.model.advance(cast(TorchStates, states).states, slot, rows, checkpoints)

    @on_all_ranks
    @torch.inference_mode()
    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """The embeddings [tokens, hidden], for heads that share them."""
        return self.model.vocabulary.embed(tokens.to(self.device))

    @on_all_ranks
    @torch.inference_mode()
    def scores(self, normed: torch.Tensor) -> torch.Tensor:
        """Logits [rows, vocab] of normed states [rows, hidden], for heads that share the output matrix."""
        return self.model.lm_head.logits(normed.to(self.device))

    def _rows(self, batch: ForwardBatch) -> Rows:
        """The batch as the model reads it: KV slots instead of pages, masks instead of parents."""
        views, new_slots, pool = [], [], cast(TorchPool, batch.pool)
        for rows, context, key_slots in request_rows(batch):
            new_slots.append(key_slots[context:])
            masks = self._masks(batch.parents[rows], batch.positions[rows], context)
            windows = self._optional(pool.window_slots(key_slots))
            views.append(RowView(rows, self._tensor(key_slots), masks, windows))
        slot_mapping = np.concatenate(new_slots)
        return Rows(
            tokens=self._tensor(batch.tokens),
            positions=self._tensor(batch.positions),
            slot_mapping=self._tensor(slot_mapping),
            views=views,
            recurrent=state_rows(batch) if self.bytes_per_state else None,
            window_mapping=self._optional(pool.window_slots(slot_mapping)),
        )

    def _masks(self, parents: Int32Array, positions: Int32Array, context: int) -> dict[Reach, torch.Tensor]:
        """By reach of a layer (all, window, chunk): the attention mask over context, then rows."""
        sees_context = np.ones((len(parents), context), dtype=np.bool_)
        visible = np.concatenate((sees_context, ancestors(parents)), axis=1)
        key_positions = np.concatenate((np.arange(context, dtype=np.int32), positions))
        config = self.model.config
        reaches = {config.reach(layer) for layer in range(config.num_layers)}
        masks = {reach: visible & within(reach, positions, key_positions) for reach in reaches}
        return {reach: torch.from_numpy(mask).to(self.device) for reach, mask in masks.items()}

    def _optional(self, array: Int32Array | None) -> torch.Tensor | None:
        return None if array is None else self._tensor(array)

    def _tensor(self, array: npt.NDArray[np.int32]) -> torch.Tensor:
        return torch.from_numpy(array.astype(np.int64)).to(self.device)


def state_rows(batch: ForwardBatch) -> StateRows:
    """The batch, or a part of it, as recurrent layers read it. They keep its rows for `advance_state`."""
    views = []
    for request in range(batch.num_requests):
        rows = slice(int(batch.row_offsets[request]), int(batch.row_offsets[request + 1]))
        slot = None if batch.states is None else int(batch.states.slots[request])
        first = slot if batch.context_lengths[request] else None
        views.append(StateView(rows, batch.parents[rows].tolist(), first))
    if batch.states is None:
        return StateRows(views, None)
    states = cast(TorchStates, batch.states.pool).states
    states.add_views(dict(zip(batch.states.slots.tolist(), views, strict=True)), batch.num_rows)
    return StateRows(views, states)


def within(reach: Reach, positions: Int32Array, keys: Int32Array) -> npt.NDArray[np.bool_]:
    """Which keys are within the reach (window or chunk) of tokens at `positions`: bool [rows, keys]."""
    visible = np.ones((len(positions), len(keys)), dtype=np.bool_)
    if reach.window is not None:
        visible &= positions[:, None] - keys[None, :] < reach.window
    if reach.chunk is not None:
        visible &= positions[:, None] // reach.chunk == keys[None, :] // reach.chunk
    return visible


def ancestors(parents: Int32Array) -> npt.NDArray[np.bool_]:
    """Which rows of a tree each row descends from, itself included (the tree mask): bool [rows, rows]."""
    table = np.eye(len(parents), dtype=np.bool_)
    for row, parent in enumerate(parents):  # parents come before their children
        if parent >= 0:
            table[row] |= table[parent]
    return table


def request_rows(batch: ForwardBatch) -> Iterator[tuple[slice, int, Int32Array]]:
    """For each request: its rows, its context length, and the KV slots of its context and rows."""
    for request in range(batch.num_requests):
        rows = slice(int(batch.row_offsets[request]), int(batch.row_offsets[request + 1]))
        context = int(batch.context_lengths[request])
        yield rows, context, kv_slots(batch.page_tables[request], context + rows.stop - rows.start)


def kv_slots(page_table: Int32Array, length: int) -> Int32Array:
    """KV slots of KV indices 0 to length - 1 of a request: int32 [length]."""
    index = np.arange(length, dtype=np.int32)
    return page_table[index // PAGE_SIZE] * PAGE_SIZE + index % PAGE_SIZE
