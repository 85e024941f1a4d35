"""AcceptedPaths: moves what a tree's accepted path has written to the KV indices that its tokens now have.

A tree's nodes are written one after the other, behind the committed tokens. Of nodes 0 to 4, the path 0, 2, 4
leaves gaps, so its keys and values move to the indices of 0, 1, 2. The nodes of a chain are in place.
"""

from __future__ import annotations

import torch

from paceline.backends.cuda.decode.draft_networks import DraftNetwork
from paceline.backends.cuda.decode.draft_shape import DraftShape
from paceline.backends.cuda.heads.head import HeadPool
from paceline.backends.cuda.kernels.accept import move_accepted
from paceline.backends.cuda.kernels.step_rows import DeviceRequests
from paceline.backends.cuda.passes.kv_pool import Pool


class AcceptedPaths:
    """Keys and values of the target, those of a draft model, and the features in a head's pool."""

    def __init__(
        self,
        shape: DraftShape,
        state: DeviceRequests,
        pool: Pool,
        draft: DraftNetwork | None,
        kept: HeadPool | None,
        page_size: int,
    ) -> None:
        """A draft model keeps the keys and values of drafted nodes; a head computes accepted tokens again."""
        self._state, self._page_size = state, page_size
        # keys and values, with the page tables of their KV cache group
        self._moved: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
        if shape.is_chain:
            return
        pools = [pool, draft.pool] if draft is not None and draft.always else [pool]
        for each in pools:
            for number, stack in enumerate(each.stacks):
                pages = state.window_pages if number in each.windowed else state.pages
                assert pages is not None
                self._moved.append((*stack, pages))
        if kept is not None:
            self._moved.append((*(kept.features[None, :, None],) * 2, state.pages))

    def move(self, slots: torch.Tensor, counts: torch.Tensor, accepted: torch.Tensor) -> None:
        """Move the first `counts` of the accepted nodes of the requests in `slots` [requests]."""
        for keys, values, pages in self._moved:
            move_accepted(keys, values, slots, self._state, pages, counts, accepted, self._page_size)
