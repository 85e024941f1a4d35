"""RowTables: attention metadata of a pass (positions, slot mapping, tiles, page tables)."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from paceline.backends.cuda.kernels.attention.prefill_attention import PrefillTiles
from paceline.backends.cuda.kernels.attention.shared_prefix import SharedPrefixRows


@dataclass(frozen=True)
class UniformRows:
    """The constants of a pass in which every request has the same number of rows."""

    tiles: int  # tiles of each request
    span: int  # KV indices of a request that the step computes, at most
    settled: bool  # the context before a request's rows was written before the step


@dataclass(frozen=True)
class WindowTables:
    """What differs in RowTables for layers of the window group."""

    slot_mapping: torch.Tensor  # int32 [rows] -1: the row is padding
    pages: torch.Tensor  # int32 [pages of all requests] window pages; 0: none, it is masked


@dataclass(frozen=True)
class RowTables:
    """The attention metadata of a pass: positions, KV slots, paths, tiles. All int32, on the device."""

    positions: torch.Tensor  # [rows]
    slot_mapping: torch.Tensor  # [rows] KV slot of its key and value; -1: the row is padding
    contiguous_until: torch.Tensor  # [rows] positions below it are their own KV index
    paths: torch.Tensor | None  # [rows, MAX_PATH] KV indices from `contiguous_until` on; None: no trees
    tile_rows: torch.Tensor  # [tiles] the first row of each tile; empty: all rows are prefilled
    tile_counts: torch.Tensor  # [tiles] its number of rows; 0: the tile is padding
    tile_pages: torch.Tensor  # [tiles] offset of its request's page table in `pages`
    pages: torch.Tensor  # [pages of all requests] page numbers
    uniform: UniformRows | None = None  # None: requests have different numbers of rows
    shared_prefix: SharedPrefixRows | None = None  # KV chunks that the shared-prefix kernel computes
    prefill: PrefillTiles | None = None  # tiles of the rows that the prefill kernel computes
    visible: torch.Tensor | None = None  # [rows] last position that each row attends to; None: its own
    adapters: torch.Tensor | None = None  # [rows] number of each row's adapter, -1: none; None: no adapters
    windows: WindowTables | None = None  # of the window group; None: the pool has none

    def in_windows(self) -> RowTables:
        """The tables for layers of the window group: their rows see no shared prefixes."""
        if self.windows is None:
            return self
        own = self.windows
        return replace(self, slot_mapping=own.slot_mapping, pages=own.pages, shared_prefix=None)
