"""KV pools on the device: keys and values by layer and KV slot."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from paceline.backends.cuda.weights.model_weights import Weights
from paceline.core.arrays import Int32Array
from paceline.errors import BackendError


@dataclass(frozen=True)
class Pool:
    """Keys and values of `num_pages` pages on the device."""

    num_pages: int
    bytes_per_page: int
    keys: torch.Tensor  # [layers, slots, KV heads, head_dim] of layers with the first layer's head shape
    values: torch.Tensor  # [layers, slots, KV heads, head_dim; 0 for latents]
    others: tuple[tuple[torch.Tensor, torch.Tensor], ...] = field(default=(), kw_only=True)  # other shapes
    # for each layer: the stack (of layers with equal head shapes), and its index there; (): all in the first
    places: tuple[tuple[int, int], ...] = field(default=(), kw_only=True)

    @property
    def stacks(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """The keys and values of each stack of layers with equal head shapes."""
        return [(self.keys, self.values), *self.others]

    def layer(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The keys and values [slots, KV heads, head_dim] of a layer."""
        stack, place = self.places[number] if self.places else (0, number)
        keys, values = self.stacks[stack]
        return keys[place], values[place]

    @property
    def addresses(self) -> tuple[int, ...]:
        """The addresses that a captured graph depends on."""
        return (self.num_pages, *(stored.data_ptr() for stack in self.stacks for stored in stack))


def page_bytes(weights: Weights, page_size: int) -> int:
    """The bytes of a page of keys and values of this model, or of a rank's part of it."""
    numbers = sum(heads * (key + value) for heads, key, value in _kv_sizes(weights))
    return numbers * weights.dtype.itemsize * page_size


def make_pool(weights: Weights, num_pages: int, page_size: int) -> Pool:
    """Zeroed storage for `num_pages` pages of keys and values of this model."""
    sizes = _kv_sizes(weights)
    kinds = list(dict.fromkeys(sizes))
    places = tuple((kinds.index(own), sizes[:number].count(own)) for number, own in enumerate(sizes))
    page = page_bytes(weights, page_size)

    def zeros(kind: tuple[int, int, int], size: int) -> torch.Tensor:
        shape = sizes.count(kind), num_pages * page_size, kind[0], size
        return torch.zeros(shape, dtype=weights.dtype, device=weights.device)

    try:
        first, *others = [(zeros(kind, kind[1]), zeros(kind, kind[2])) for kind in kinds]
    except RuntimeError as error:  # torch's out-of-memory errors are RuntimeErrors
        raise BackendError(
            f"No memory for a KV pool of {num_pages} pages ({num_pages * page / 1e9:.1f} GB) on "
            f"{weights.device}; ask for fewer pages or shorter contexts."
        ) from error
    return Pool(num_pages, page, *first, others=tuple(others), places=places)


def _kv_sizes(weights: Weights) -> list[tuple[int, int, int]]:
    """For each layer with keys and values: KV heads of this rank, size of a key, size of a value."""
    config, ranks = weights.config, weights.shard.size
    return [
        (max(1, shape.num_kv_heads // ranks), shape.head_dim, config.stored_value_dim(layer))
        for layer, shape in ((layer, config.shape_of(layer)) for layer in config.kv_layers)
    ]


def move_slots(pool: Pool, source: Int32Array, destination: Int32Array) -> None:
    """Copy keys and values from KV slots to others; all sources are read first."""
    slots = torch.from_numpy(np.stack((source, destination)).astype(np.int64)).to(pool.keys.device)
    for stack in pool.stacks:
        for stored in stack:
            # indexing by a tensor copies, so all sources are read before any destination is written
            stored[:, slots[1]] = stored[:, slots[0]]
