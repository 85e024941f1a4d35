"""KV pools on the device: keys and values by layer and KV slot."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from paceline.backends.cuda.weights.model_weights import Weights
from paceline.core.arrays import Int32Array
from paceline.core.forward import WindowGroup, window_slots
from paceline.errors import BackendError


@dataclass(frozen=True)
class Pool:
    """Keys and values of `num_pages` pages on the device."""

    num_pages: int
    bytes_per_page: int
    keys: torch.Tensor  # [layers, slots, KV heads, head_dim] of layers alike the first, in its KV cache group
    values: torch.Tensor  # [layers, slots, KV heads, head_dim; 0 for latents]
    others: tuple[tuple[torch.Tensor, torch.Tensor], ...] = field(default=(), kw_only=True)  # others
    # for each layer: the stack (of layers with equal head shapes), and its index there; (): all in the first
    places: tuple[tuple[int, int], ...] = field(default=(), kw_only=True)
    windows: WindowGroup | None = field(default=None, kw_only=True)
    windowed: tuple[int, ...] = field(default=(), kw_only=True)  # the stacks in the window group

    @property
    def stacks(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """The keys and values of each stack of layers with equal head shapes, in one KV cache group."""
        return [(self.keys, self.values), *self.others]

    def layer(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The keys and values [slots, KV heads, head_dim] of a layer."""
        stack, place = self.places[number] if self.places else (0, number)
        keys, values = self.stacks[stack]
        return keys[place], values[place]

    def is_windowed(self, number: int) -> bool:
        """Whether a layer is in the window group."""
        return bool(self.windowed) and self.places[number][0] in self.windowed

    @property
    def addresses(self) -> tuple[int, ...]:
        """The addresses that a captured graph depends on."""
        return (self.num_pages, *(stored.data_ptr() for stack in self.stacks for stored in stack))


def page_bytes(weights: Weights, page_size: int) -> int:
    """The bytes of a page of keys and values of this model, or of a rank's part of it."""
    numbers = sum(heads * (key + value) for heads, key, value in _kv_sizes(weights))
    return numbers * weights.dtype.itemsize * page_size


def window_page_bytes(weights: Weights, page_size: int) -> int:
    """Of the bytes of a page, those of the layers in the window group."""
    sizes = _kv_sizes(weights)
    numbers = sum(
        heads * (key + value) for heads, key, value in map(sizes.__getitem__, weights.config.window_layers)
    )
    return numbers * weights.dtype.itemsize * page_size


def make_pool(weights: Weights, num_pages: int, page_size: int, windows: WindowGroup | None = None) -> Pool:
    """Zeroed storage for `num_pages` pages of keys and values of this model."""
    windowed = () if windows is None else weights.config.window_layers
    sizes = [(*size, number in windowed) for number, size in enumerate(_kv_sizes(weights))]
    kinds = list(dict.fromkeys(sizes))
    places = tuple((kinds.index(own), sizes[:number].count(own)) for number, own in enumerate(sizes))
    page = page_bytes(weights, page_size)

    def zeros(kind: tuple[int, int, int, bool], size: int) -> torch.Tensor:
        pages = num_pages if windows is None or not kind[3] else windows.num_pages
        shape = sizes.count(kind), pages * page_size, kind[0], size
        return torch.zeros(shape, dtype=weights.dtype, device=weights.device)

    try:
        first, *others = [(zeros(kind, kind[1]), zeros(kind, kind[2])) for kind in kinds]
    except RuntimeError as error:  # torch's out-of-memory errors are RuntimeErrors
        raise BackendError(
            f"No memory for a KV pool of {num_pages} pages ({num_pages * page / 1e9:.1f} GB) on "
            f"{weights.device}; ask for fewer pages or shorter contexts."
        ) from error
    own = tuple(number for number, kind in enumerate(kinds) if kind[3])
    return Pool(num_pages, page, *first, others=tuple(others), places=places, windows=windows, windowed=own)


def _kv_sizes(weights: Weights) -> list[tuple[int, int, int]]:
    """For each layer with keys and values: KV heads of this rank, size of a key, size of a value."""
    config, ranks = weights.config, weights.shard.size
    return [
        (max(1, shape.num_kv_heads // ranks), shape.head_dim, config.stored_value_dim(layer))
        for layer, shape in ((layer, config.shape_of(layer)) for layer in config.kv_layers)
    ]


def move_slots(pool: Pool, source: Int32Array, destination: Int32Array, page_size: int) -> None:
    """Copy keys and values from KV slots to others; all sources are read first."""

    def on_device(pairs: Int32Array) -> torch.Tensor:
        return torch.from_numpy(pairs.astype(np.int64)).to(pool.keys.device)

    pairs = np.stack((source, destination))
    slots = windowed = on_device(pairs)
    if pool.windows is not None:
        windowed = on_device(window_slots(pool.windows, pairs, page_size))
    for number, stack in enumerate(pool.stacks):
        read, write = windowed if number in pool.windowed else slots
        for stored in stack:
            # indexing by a tensor copies, so all sources are read before any destination is written
            stored[:, write] = stored[:, read]
