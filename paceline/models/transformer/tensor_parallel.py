"""Tensor parallelism that keeps every bit: the columns of a product are computed in fixed pieces.

A matrix product over fewer columns may add in another order (measured: docs/design/tensor-parallel.md). So
the model is cut into as many pieces for one device as for eight: each piece of a product, of the attention
and of the MLP is one call on tensors of its own, and a rank of N computes pieces/N of them. No sum crosses a
piece; what follows needs whole rows, so ranks gather activations instead of adding partial sums.

    pieces    0  1 | 2  3 | 4  5 | 6  7        8 pieces, 4 ranks
    rank         0 |    1 |    2 |    3
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import gcd
from typing import Protocol

import torch
import torch.nn.functional as F

from paceline.errors import ConfigError
from paceline.models.config import ModelConfig

MAX_PIECES = 8  # of models with more KV heads: more pieces would be more, smaller products on one device


class Communicator(Protocol):
    """The ranks that run one model together, as one of them sees them."""

    @property
    def size(self) -> int: ...

    @property
    def rank(self) -> int: ...

    def gather(self, own: torch.Tensor) -> list[torch.Tensor]:
        """The tensors of all ranks, in the order of ranks; every rank gives one of the same shape."""
        ...


class SingleRank:
    """The communicator of a model on one device."""

    size = 1
    rank = 0

    def gather(self, own: torch.Tensor) -> list[torch.Tensor]:
        return [own]


@dataclass(frozen=True)
class TensorParallel:
    """Which pieces of a model this rank computes, and how it gets those of the others."""

    pieces: int = 1  # of the whole model, the same for every number of ranks
    ranks: Communicator = field(default_factory=SingleRank)

    @property
    def own_pieces(self) -> range:
        each = self.pieces // self.ranks.size
        return range(self.ranks.rank * each, (self.ranks.rank + 1) * each)

    def rows(self, size: int) -> list[slice]:
        """The rows of each piece that this rank has of a matrix [size, in]; they differ by at most one."""
        return [slice(self._bound(piece, size), self._bound(piece + 1, size)) for piece in self.own_pieces]

    def rank_bounds(self, size: int) -> list[int]:
        """Where the rows of each rank begin, and where the last one's end: [ranks + 1]."""
        each = self.pieces // self.ranks.size
        return [self._bound(rank * each, size) for rank in range(self.ranks.size + 1)]

    def join(self, parts: Sequence[torch.Tensor], size: int) -> torch.Tensor:
        """Whole rows [..., size] from the columns [..., piece] that each rank has of them."""
        own = parts[0] if len(parts) == 1 else torch.cat(list(parts), dim=-1)
        if self.ranks.size == 1:
            return own
        bounds = self.rank_bounds(size)
        widths = [end - begin for begin, end in pairwise(bounds)]
        padded = F.pad(own, (0, max(widths) - own.shape[-1]))  # collectives want equal shapes
        gathered = self.ranks.gather(padded)
        return torch.cat([part[..., :width] for part, width in zip(gathered, widths, strict=True)], dim=-1)

    def _bound(self, piece: int, size: int) -> int:
        return piece * size // self.pieces


WHOLE = TensorParallel()


def count_pieces(num_kv_heads: int) -> int:
    """The pieces of a model: a rank has whole pieces, and a piece has whole KV heads."""
    if num_kv_heads <= MAX_PIECES or num_kv_heads % 2:
        return num_kv_heads
    return gcd(num_kv_heads, MAX_PIECES)


def check_size(config: ModelConfig, size: int) -> None:
    """ConfigError if a model cannot be shared by this number of ranks."""
    if config.recurrent is not None and size > 1:
        raise ConfigError(
            f"tensor_parallel_size is {size}, but this {config.family} model has recurrent layers, "
            "which only one device can run. Use 1."
        )
    pieces = count_pieces(config.shared_heads)
    if pieces % size:
        possible = ", ".join(str(count) for count in range(1, pieces + 1) if pieces % count == 0)
        raise ConfigError(
            f"tensor_parallel_size is {size}, but this model has {config.num_heads} heads that share "
            f"{config.shared_heads} KV heads, and each rank needs as many whole ones of them. "
            f"Use one of {possible}."
        )
