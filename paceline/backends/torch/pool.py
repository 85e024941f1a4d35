"""KV pools of the torch backend."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from paceline.errors import BackendError
from paceline.models.transformer.recurrent import States
from paceline.models.transformer.rows import KeyValues

PAGE_SIZE = 16


@dataclass(frozen=True)
class TorchPool:
    """Keys and values of `num_pages` pages in torch tensors."""

    num_pages: int
    bytes_per_page: int  # of all ranks
    cache: KeyValues  # of num_pages * PAGE_SIZE slots


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
) -> KeyValues:
    """Zeroed storage of the keys [..., slots, kv_heads, head_dim] and values of each layer.

    `value_dims` are the last sizes of values; None: those of keys.
    """
    if value_dims is None:
        value_dims = [shape[-1] for shape in shapes]
    of_values = [(*shape[:-1], size) for shape, size in zip(shapes, value_dims, strict=True)]
    try:
        stored = ([torch.zeros(s, dtype=dtype, device=device) for s in kind] for kind in (shapes, of_values))
        return KeyValues(*stored)
    except RuntimeError as error:  # torch's out-of-memory errors are RuntimeErrors
        total = sum(math.prod(size) for size in (*shapes, *of_values)) * dtype.itemsize
        pages = shapes[0][-3] // PAGE_SIZE
        raise BackendError(
            f"No memory for a KV pool of {pages} pages ({total / 1e9:.1f} GB) on {device}; "
            "ask for fewer pages, shorter contexts or bfloat16."
        ) from error
