"""The rows of a pass, as the transformer reads them: each has a position, and a view of the keys it sees."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from paceline.models.config import Reach
from paceline.models.transformer.recurrent import StateRows


@dataclass(frozen=True)
class RowView:
    """The rows of one request in a pass, and the keys that they see."""

    rows: slice
    key_slots: torch.Tensor  # int64 [keys] KV slots of the committed context, then of the rows themselves
    masks: Mapping[Reach, torch.Tensor]  # bool [rows, keys] each, True where a row sees a key
    window_slots: torch.Tensor | None = None  # the same for layers of the window group, if the cache has one

    def single_rows(self) -> Iterator[RowView]:
        """A view of each row, as the only row of its pass."""
        for row in range(self.rows.stop - self.rows.start):
            seen = torch.stack([mask[row] for mask in self.masks.values()]).any(0)
            masks = {reach: mask[row : row + 1, seen] for reach, mask in self.masks.items()}
            windows = None if self.window_slots is None else self.window_slots[seen]
            yield RowView(slice(0, 1), self.key_slots[seen], masks, windows)

    def slots_of(self, is_windowed: bool) -> torch.Tensor:
        """The KV slots of the keys for a layer in the window group, or for another."""
        return self.window_slots if is_windowed and self.window_slots is not None else self.key_slots


@dataclass(frozen=True)
class KeyValues:
    """Keys and values of every layer that has its own, addressed by KV slot (page * page_size + offset)."""

    keys: Sequence[torch.Tensor]  # [layers] [own pieces, slots, kv_heads // pieces, head_dim]
    values: Sequence[torch.Tensor]  # [layers] [own pieces, slots, kv_heads // pieces, stored_value_dim]
    windowed: Collection[int] = ()  # the layers in the window group, which have KV slots of their own


@dataclass(frozen=True)
class Rows:
    """All rows of a pass."""

    tokens: torch.Tensor  # int64 [rows]
    positions: torch.Tensor  # int64 [rows]
    slot_mapping: torch.Tensor  # int64 [rows] the KV slot of each row
    views: Sequence[RowView]  # one per request
    recurrent: StateRows | None = None  # the same rows for recurrent layers, if the model has them
    window_mapping: torch.Tensor | None = None  # slot_mapping of layers in the window group, if there is one

    def slots_of(self, is_windowed: bool) -> torch.Tensor:
        """The KV slot of each row for a layer in the window group, or for another."""
        return self.window_mapping if is_windowed and self.window_mapping is not None else self.slot_mapping

    def single_rows(self) -> list[Rows]:
        """Each row separately: it sees only the keys of its own path."""
        count = len(self.tokens)
        seen = [single for view in self.views for single in view.single_rows()]
        states = [None] * count if self.recurrent is None else [*self.recurrent.single_rows()]
        parts = [torch.split(rows, 1) for rows in (self.tokens, self.positions, self.slot_mapping)]
        mapping = self.window_mapping
        windows = [None] * count if mapping is None else [*torch.split(mapping, 1)]
        return [
            Rows(token, position, slot, [view], state, window)
            for token, position, slot, view, state, window in zip(*parts, seen, states, windows, strict=True)
        ]
