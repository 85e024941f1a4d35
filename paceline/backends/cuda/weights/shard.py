"""Tensor parallelism with the bits of one GPU: every matrix is column-parallel, by whole column tiles.

The summation order of a column depends only on the shape of the whole matrix (tiled.tiling_for). So a rank
with some of the tiles computes the bits of one GPU, and no sum crosses ranks: there is no all-reduce. The
input of every product is all-gathered instead. The residual stream stays sharded, because only the output of
the next norm is needed complete.

    normed [rows, hidden], equal on all ranks
       │
    QKV of own heads ─ attention ── gather ── output, own columns ─ + own hidden ─ norm ── gather
       │
    gate, up, own columns ───────── gather ── down, own columns ─── + own hidden ─ norm ── gather

Every rank has the same number of columns; the last rank's are zero-padded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from paceline.errors import ConfigError
from paceline.models.config import ModelConfig

TILE = 64  # columns: ranks have whole tiles


class Collective(Protocol):
    """The ranks that run one model together, as one of them sees them."""

    @property
    def size(self) -> int: ...

    @property
    def rank(self) -> int: ...

    def gather_into(self, full: Sequence[torch.Tensor], local: Sequence[torch.Tensor]) -> None:
        """All-gather: write the tensors of all ranks, in rank order, to `full` [ranks, ...] of each.

        All ranks have tensors of the same shapes. A CUDA graph can capture it.
        """
        ...


class OneRank:
    """A model on one GPU."""

    size = 1
    rank = 0

    def gather_into(self, full: Sequence[torch.Tensor], local: Sequence[torch.Tensor]) -> None:
        for to, part in zip(full, local, strict=True):
            to[0].copy_(part)


@dataclass(frozen=True)
class Shard:
    """The part of a model that a rank has."""

    ranks: Collective = field(default_factory=OneRank)

    @property
    def size(self) -> int:
        return self.ranks.size

    def width(self, size: int) -> int:
        """The columns of each rank, of `size` in all, padded to whole tiles."""
        return -(-size // (TILE * self.size)) * TILE

    def padded(self, size: int) -> int:
        """The columns of all ranks together."""
        return self.width(size) * self.size

    def rows(self, size: int) -> slice:
        """This rank's rows of a matrix [size, in], or of a vector; the last rank may have fewer."""
        begin = min(self.ranks.rank * self.width(size), size)
        return slice(begin, min(begin + self.width(size), size))

    def local(self, line: torch.Tensor) -> torch.Tensor:
        """This rank's values of a line [columns of all ranks]."""
        each = len(line) // self.size
        return line[self.ranks.rank * each : (self.ranks.rank + 1) * each]

    def heads(self, config: ModelConfig) -> tuple[int, int]:
        """The query heads and the KV heads of a rank."""
        return config.num_heads // self.size, max(1, config.num_kv_heads // self.size)

    def head_rows(self, config: ModelConfig) -> tuple[slice, slice]:
        """The rows of this rank's query heads, and of its KV heads; ranks may replicate a KV head."""
        queries, kv_heads = self.heads(config)
        first = self.ranks.rank * queries * config.num_kv_heads // config.num_heads
        return _rows(self.ranks.rank * queries, queries, config), _rows(first, kv_heads, config)

    def gather(
        self, local: Sequence[torch.Tensor | None], full: Sequence[torch.Tensor | None], rows: int
    ) -> None:
        """All-gather columns: `local` [rows, own columns, ...] of all ranks to `full` [rows, columns, ...].

        Scales have one line for several rows. On one GPU `local` is `full`, and nothing is done.
        """
        if self.size == 1:
            return
        parts = [part for part in local if part is not None]
        goals = [goal for goal in full if goal is not None]
        lines = [part[: -(-rows * len(part) // len(parts[0]))] for part in parts]
        gathered = [part.new_empty((self.size, *part.shape)) for part in lines]
        self.ranks.gather_into(gathered, lines)
        for part, goal in zip(gathered, goals, strict=True):
            _put_side_by_side(part, goal[: part.shape[1]])


def _rows(first: int, count: int, config: ModelConfig) -> slice:
    return slice(first * config.head_dim, (first + count) * config.head_dim)


def _put_side_by_side(parts: torch.Tensor, full: torch.Tensor) -> None:
    """Copy parts [ranks, lines, columns of a rank, ...] to `full` [lines, columns, ...], without padding."""
    each = parts.shape[2]
    ranks, rest = divmod(min(full.shape[1], len(parts) * each), each)
    if ranks:
        filled = full[:, : ranks * each]
        filled.view(len(full), ranks, *parts.shape[2:]).copy_(parts[:ranks].transpose(0, 1))
    if rest:
        full[:, ranks * each : ranks * each + rest].copy_(parts[ranks, :, :rest])


WHOLE = Shard()


def check_size(config: ModelConfig, size: int) -> None:
    """ConfigError if this number of GPUs cannot share a model."""
    if size == 1:
        return
    blocks = config.beyond_llama() + ["experts"] * (config.moe is not None)
    if blocks:
        raise ConfigError(
            f"tensor_parallel_size is {size}, but this {config.family} model has {', '.join(blocks)}, which "
            "the cuda backend runs on one GPU only. Leave it out, or use --backend torch --device cuda."
        )
    heads, kv_heads = config.num_heads, config.num_kv_heads
    possible = [
        count
        for count in range(1, heads + 1)
        if not heads % count and (not kv_heads % count or not count % kv_heads)
    ]
    if size not in possible:
        raise ConfigError(
            f"tensor_parallel_size is {size}, but this model has {heads} heads that share {kv_heads} KV "
            f"heads, and ranks need equal numbers of whole heads. Use one of {', '.join(map(str, possible))}."
        )
