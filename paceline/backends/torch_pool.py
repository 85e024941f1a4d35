"""KV pools of the torch backend."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from paceline.errors import BackendError
from paceline.models.recurrent import States
from paceline.models.rows import KeyValues

PAGE_SIZE = 16


@dataclass(frozen=True)
class TorchPool:
    """Keys and values of `num_pages` pages in torch tensors."""

    num_pages: int
    bytes_per_page: int  # of all ranks
    cache: KeyValues  # of num_pages * PAGE_SIZE slots
    number: int = 0  # by which the ranks name it


@dataclass(frozen=True)
class TorchStates:
    """States of recurrent layers in torch tensors."""

    num_states: int
    states: States


def make_cache(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, value_dim: int | None = None
) -> KeyValues:
    """Zeroed storage of keys [..., slots, kv_heads, head_dim] and values, whose last size is `value_dim`."""
    shapes = shape, (*shape[:-1], shape[-1] if value_dim is None else value_dim)
    try:
        return KeyValues(*(torch.zeros(size, dtype=dtype, device=device) for size in shapes))
    except RuntimeError as error:  # torch's out-of-memory errors are RuntimeErrors
        total = sum(math.prod(size) for size in shapes) * dtype.itemsize
        raise BackendError(
            f"No memory for a KV pool of {shape[-3] // PAGE_SIZE} pages ({total / 1e9:.1f} GB) on {device}; "
            "ask for fewer pages, shorter contexts or bfloat16."
        ) from error
