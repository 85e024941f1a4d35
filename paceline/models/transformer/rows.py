"""The rows of a pass, as the transformer reads them: each has a position, and a view of the keys it sees."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
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

    def single_rows(self) -> Iterator[RowView]:
        """A view of each row, as the only row of its pass."""
        for row in range(self.rows.stop - self.rows.start):
            seen = torch.stack([mask[row] for mask in self.masks.values()]).any(0)
            masks = {reach: mask[row : row + 1, seen] for reach, mask in self.masks.items()}
            yield RowView(slice(0, 1), self.key_slots[seen], masks)


@dataclass(frozen=True)
class KeyValues:
    """Keys and values of every layer that has its own, addressed by KV slot (page * page_size + offset)."""

    keys: Sequence[torch.Tensor]  # [layers] [own pieces, slots, kv_heads // pieces, head_dim]
    values: Sequence[torch.Tensor]  # [layers] [own pieces, slots, kv_heads // pieces, stored_value_dim]


@dataclass(frozen=True)
class Rows:
    """All rows of a pass."""

    tokens: torch.Tensor  # int64 [rows]
    positions: torch.Tensor  # int64 [rows]
    slot_mapping: torch.Tensor  # int64 [rows] the KV slot of each row
    views: Sequence[RowView]  # one per request
    recurrent: StateRows | None = None  # the same rows for recurrent layers, if the model has them

    def single_rows(self) -> list[Rows]:
        """Each row separately: it sees only the keys of its own path."""
        count = len(self.tokens)
        seen = [single for view in self.views for single in view.single_rows()]
        states = [None] * count if self.recurrent is None else [*self.recurrent.single_rows()]
        parts = [torch.split(rows, 1) for rows in (self.tokens, self.positions, self.slot_mapping)]
        return [
            Rows(token, position, slot, [view], state)
            for token, position, slot, view, state in zip(*parts, seen, states, strict=True)
        ]
