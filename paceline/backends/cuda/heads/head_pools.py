"""HeadPools: the base of the device's head runners, with their KV and feature pools."""

from __future__ import annotations

from typing import Any, Self, cast

import numpy as np
import torch

from paceline.backends.cuda.backend import PAGE_SIZE
from paceline.backends.cuda.heads.head import HeadPool
from paceline.backends.cuda.heads.head_weights import check_same_shapes, copy_head_weights
from paceline.backends.cuda.passes.kv_pool import Pool
from paceline.backends.cuda.passes.tables import to_device
from paceline.backends.torch.parallel.calls import made_on_all_ranks, on_all_ranks
from paceline.backends.torch.parallel.ranks import Ranks
from paceline.core.arrays import Int32Array
from paceline.core.forward import KVPool
from paceline.models.heads.config import HeadConfig


class HeadPools:
    """The pools of a head, and the replacement of its weights. Runners derive from it."""

    page_size = PAGE_SIZE
    least_chance = 0.0  # rows cost next to nothing on a GPU
    keeps_features = True
    catch_up_seconds: float | None = None

    def __init__(
        self, weights: Any, device: torch.device, dtype: torch.dtype, ranks: Ranks | None, layers: int = 1
    ) -> None:
        """`weights` are dataclasses of head_weights.py or block_weights.py."""
        self.weights, self.device, self.dtype, self.ranks = weights, device, dtype, ranks
        self.config: HeadConfig = weights.config
        self._layers = layers
        self._spare_pages = 0  # after the requests' pages, for data that no other pass reads

    def replaced_by(self, other: Self) -> Self:
        """This runner, with the weights of `other` copied in: captured graphs hold the addresses of its own.

        The copies run on the device after the passes in flight, before later ones. ConfigError, before any
        change, if the heads differ in more than their values.
        """
        check_same_shapes(other.weights, self.weights)
        self._copy(other)
        return self

    @on_all_ranks
    @torch.inference_mode()
    def _copy(self, other: Self) -> None:
        copy_head_weights(other.weights, self.weights)

    @made_on_all_ranks
    def make_pool(self, num_pages: int) -> Pool:
        config, dtype, device = self.config, self.dtype, self.device
        slots = (num_pages + self._spare_pages) * PAGE_SIZE
        shape = (self._layers, slots, config.num_kv_heads)
        keys, values = (torch.zeros((*shape, size), dtype=dtype, device=device) for size in self._kv_sizes)
        width = config.feature_width
        features = torch.zeros((num_pages * PAGE_SIZE + 1, width), dtype=dtype, device=device)
        parts = torch.arange(width // config.target_hidden_size, dtype=torch.int32, device=device)
        return HeadPool(num_pages, self.bytes_per_page(), keys, values, features, parts)

    @property
    def _kv_sizes(self) -> tuple[int, int]:
        """The sizes of a key and of a value; for latents, of the latent and 0."""
        layer, size = self.config.layer, self.config.head_dim
        return size, 0 if layer is not None and layer.latent is not None else size

    def bytes_per_page(self) -> int:
        config = self.config
        numbers = self._layers * config.num_kv_heads * sum(self._kv_sizes) + config.feature_width
        return PAGE_SIZE * numbers * self.dtype.itemsize

    @on_all_ranks
    @torch.inference_mode()
    def move(self, pool: KVPool, source: Int32Array, destination: Int32Array) -> None:
        """Copy features from KV slots to others; all sources are read first."""
        features, slot_mapping = (
            cast(HeadPool, pool).features,
            to_device(np.stack((source, destination)), self.device),
        )
        features[slot_mapping[1].long()] = features[slot_mapping[0].long()]
