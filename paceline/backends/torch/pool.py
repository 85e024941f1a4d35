"""KV pools of the torch backend."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch

from paceline.core.arrays import Int32Array
from paceline.core.forward import WindowGroup, window_slots
from paceline.errors import BackendError
from paceline.models.transformer.recurrent import States
from paceline.models.transformer.rows import KeyValues

PAGE_SIZE = 16


@dataclass(frozen=True)
class TorchPool:
    """Keys and values of `num_pages` pages in torch tensors."""

    num_pages: int
    bytes_per_page: int  # of all ranks
    cache: KeyValues  # of num_pages * PAGE_SIZE slots, in the window group of its own number of pages
    windows: WindowGroup | None = None

    def window_slots(self, slots: Int32Array) -> Int32Array | None:
        """The KV slots in the window group of these, if there is one."""
        return None if self.windows is None else window_slots(self.windows, slots, PAGE_SIZE)


@dataclass(frozen=True)
class TorchStates:
    """States of recurrent layers in torch tensors."""

    num_states: int
    states: States


def make_cache(
    shapes: Sequence[tuple[int, ...]],
    dtype: torch.dtype,
    device: torch.device,
    value_dims: Sequence[int] | None = None,
    windowed: Collection[int] = (),
) -> KeyValues:
    """Zeroed storage of the keys [..., slots, kv_heads, head_dim] and values of each layer.

    `value_dims` are the last sizes of values; None: those of keys. `windowed`: layers in the window group.
    """
    if value_dims is None:
        value_dims = [shape[-1] for shape in shapes]
    of_values = [(*shape[:-1], size) for shape, size in zip(shapes, value_dims, strict=True)]
    try:
        keys, values = (
            [torch.zeros(s, dtype=dtype, device=device) for s in kind] for kind in (shapes, of_values)
        )
        return KeyValues(keys, values, windowed)
    except RuntimeError as error:  # torch's out-of-memory errors are RuntimeErrors
        total = sum(math.prod(size) for size in (*shapes, *of_values)) * dtype.itemsize
        pages = shapes[0][-3] // PAGE_SIZE
        raise BackendError(
            f"No memory for a KV pool of {pages} pages ({total / 1e9:.1f} GB) on {device}; "
            "ask for fewer pages, shorter contexts or bfloat16."
        ) from error
