"""The reference backend: the transformer in plain torch, on a CPU or a CUDA device.

Every compiled path is tested against this one, so it is written to be read: one attention call per
request, no caching of intermediate work. See base.py for the contract it implements.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import cast

import numpy as np
import numpy.typing as npt
import torch

from paceline.backends.base import Backend
from paceline.core.arrays import Int32Array
from paceline.core.forward import ForwardBatch, ForwardOutput, KVPool
from paceline.errors import BackendError
from paceline.models.checkpoint import Checkpoint
from paceline.models.transformer import KeyValues, Rows, RowView, Take, Transformer

PAGE_SIZE = 16
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class TorchPool:
    """Keys and values of `num_pages` pages in torch tensors."""

    num_pages: int
    bytes_per_page: int
    cache: KeyValues  # keys and values, each [layers, num_pages * PAGE_SIZE, kv_heads, head_dim]


class TorchBackend(Backend):
    """A model run by torch: the same algebra, but not bit-identical across batch shapes."""

    name = "torch"
    page_size = PAGE_SIZE
    batch_invariant = False  # the matrix products of torch may sum in another order for other row counts
    supports_features = True

    def __init__(self, model: Transformer, max_rows: int) -> None:
        self.model = model
        self.max_rows = max_rows
        self.device = model.embedding.device
        self.dtype = model.embedding.dtype
        self.weight_format = str(self.dtype).removeprefix("torch.")

    @classmethod
    def load(
        cls, checkpoint: Checkpoint, *, device: str = "cpu", dtype: str = "float32", max_rows: int = 512
    ) -> TorchBackend:
        """A backend with the checkpoint's weights on `device`, in `dtype`."""
        if max_rows < 1:
            raise BackendError(f"max_rows is {max_rows}, but a pass needs at least 1 row; give 1 or more.")
        take = _take_from(checkpoint, _find_device(device), _find_dtype(dtype))
        try:
            return cls(Transformer(checkpoint.config, take), max_rows)
        except torch.OutOfMemoryError as error:
            raise BackendError(
                f"The model does not fit into the memory of {device} as {dtype}; "
                "choose bfloat16, a device with more memory, or a smaller model."
            ) from error

    def bytes_per_page(self) -> int:
        config = self.model.config
        per_token = 2 * config.num_layers * config.num_kv_heads * config.head_dim * self.dtype.itemsize
        return per_token * PAGE_SIZE

    def make_pool(self, num_pages: int) -> TorchPool:
        """Zeroed storage for `num_pages` pages of keys and values of this model."""
        config = self.model.config
        shape = (config.num_layers, num_pages * PAGE_SIZE, config.num_kv_heads, config.head_dim)
        return make_torch_pool(shape, self.dtype, self.device)

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch) -> ForwardOutput:
        """Logits of the wanted rows and, if asked, features of all rows."""
        assert batch.num_rows <= self.max_rows, f"{batch.num_rows} rows, but max_rows is {self.max_rows}"
        cache = cast(TorchPool, batch.pool).cache
        hidden, wanted = self.model.hidden_states(self._rows(batch), cache, batch.feature_layers)
        logits = self.model.logits(hidden[self._tensor(batch.logit_rows)])
        features = torch.cat(wanted, dim=-1).float().cpu().numpy() if wanted else None
        return ForwardOutput(logits.float().cpu().numpy(), features)

    def first_layers(self, count: int) -> TorchBackend:
        """The same model without its later layers, over the same pools."""
        return TorchBackend(self.model.first_layers(count), self.max_rows)

    @torch.inference_mode()
    def move(self, pool: KVPool, source: Int32Array, destination: Int32Array) -> None:
        """Copy keys and values from KV slots to others; all sources are read first."""
        cache = cast(TorchPool, pool).cache
        read, write = self._tensor(source), self._tensor(destination)
        for stored in (cache.keys, cache.values):
            # indexing by a tensor copies what it reads, so that no write can disturb it
            stored[:, write] = stored[:, read]

    def _rows(self, batch: ForwardBatch) -> Rows:
        """The batch as the model reads it: KV slots instead of pages, masks instead of parents."""
        views, new_slots = [], []
        for rows, context, key_slots in request_rows(batch):
            new_slots.append(key_slots[context:])
            masks = self._masks(batch.parents[rows], batch.positions[rows], context)
            views.append(RowView(rows, self._tensor(key_slots), masks))
        return Rows(
            tokens=self._tensor(batch.tokens),
            positions=self._tensor(batch.positions),
            slot_mapping=self._tensor(np.concatenate(new_slots)),
            views=views,
        )

    def _masks(
        self, parents: Int32Array, positions: Int32Array, context: int
    ) -> dict[int | None, torch.Tensor]:
        """For each window the model uses, which keys (context, then rows) each row of a request sees."""
        sees_context = np.ones((len(parents), context), dtype=np.bool_)
        visible = np.concatenate((sees_context, ancestors(parents)), axis=1)
        key_positions = np.concatenate((np.arange(context, dtype=np.int32), positions))
        distance = positions[:, None] - key_positions[None, :]
        windows = set(self.model.config.sliding_windows) or {None}
        masks = {window: visible if window is None else visible & (distance < window) for window in windows}
        return {window: torch.from_numpy(mask).to(self.device) for window, mask in masks.items()}

    def _tensor(self, array: npt.NDArray[np.int32]) -> torch.Tensor:
        return torch.from_numpy(array.astype(np.int64)).to(self.device)


def make_torch_pool(shape: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device) -> TorchPool:
    """Zeroed storage of keys and values: [layers, slots, kv_heads, head_dim]."""
    num_pages = shape[1] // PAGE_SIZE
    total = 2 * math.prod(shape) * dtype.itemsize
    try:
        cache = KeyValues(*(torch.zeros(shape, dtype=dtype, device=device) for _ in range(2)))
    except RuntimeError as error:  # torch's out-of-memory errors are RuntimeErrors
        raise BackendError(
            f"No memory for a KV pool of {num_pages} pages ({total / 1e9:.1f} GB) on {device}; "
            "ask for fewer pages, shorter contexts or bfloat16."
        ) from error
    return TorchPool(num_pages, total // num_pages, cache)


def ancestors(parents: Int32Array) -> npt.NDArray[np.bool_]:
    """Which rows of a tree each row descends from, itself included (the tree mask): bool [rows, rows]."""
    table = np.eye(len(parents), dtype=np.bool_)
    for row, parent in enumerate(parents):  # parents come before their children
        if parent >= 0:
            table[row] |= table[parent]
    return table


def request_rows(batch: ForwardBatch) -> Iterator[tuple[slice, int, Int32Array]]:
    """Of each request: its rows, its context length, and the KV slots of its context and rows."""
    for request in range(batch.num_requests):
        rows = slice(int(batch.row_offsets[request]), int(batch.row_offsets[request + 1]))
        context = int(batch.context_lengths[request])
        yield rows, context, kv_slots(batch.page_tables[request], context + rows.stop - rows.start)


def kv_slots(page_table: Int32Array, length: int) -> Int32Array:
    """KV slots of KV indices 0 to length - 1 of a request: int32 [length]."""
    index = np.arange(length, dtype=np.int32)
    return page_table[index // PAGE_SIZE] * PAGE_SIZE + index % PAGE_SIZE


def _take_from(checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype) -> Take:
    """A reader of single tensors, so that no second copy of all weights ever exists."""

    def take(name: str) -> torch.Tensor:
        return torch.from_numpy(checkpoint.tensors[name].float32()).to(device=device, dtype=dtype)

    return take


def _find_dtype(name: str) -> torch.dtype:
    if name not in DTYPES:
        raise BackendError(f"The torch backend has no dtype {name!r}; choose one of {', '.join(DTYPES)}.")
    return DTYPES[name]


def _find_device(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise BackendError(
            f"The torch backend knows no device {name!r}; choose cpu, cuda or cuda:N."
        ) from error
    if device.type not in ("cpu", "cuda"):
        raise BackendError(f"The torch backend does not run on {name!r}; choose cpu, cuda or cuda:N.")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise BackendError(
            f"Device {name!r} was asked for, but torch {torch.__version__} sees {torch.cuda.device_count()} "
            "CUDA devices; choose device cpu, or install a torch build with CUDA and its driver."
        )
    return device
