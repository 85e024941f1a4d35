"""LoopRows: the rows of a decode loop's steps on the device, and the views of them that passes read.

All rows of a step are in one table (kernels/step_rows.py), ordered by pass, then by request:

    pass 0, the target      | request 0: root, drafted nodes | request 1: ... |
    pass 1, the drafter     | request 0: tokens to catch up on | request 1: ... |
    pass 2, ...             | nodes of a level |

A step writes the next step's rows. They are written by `begin` only where a loop takes over other requests.
"""

from __future__ import annotations

import torch

from paceline.backends.cuda.decode.draft_networks import DraftNetwork, DraftRows
from paceline.backends.cuda.decode.draft_shape import DraftShape, plan_step
from paceline.backends.cuda.kernels.attention.paged_attention import MAX_PATH
from paceline.backends.cuda.kernels.attention.row_tables import RowTables, UniformRows, WindowTables
from paceline.backends.cuda.kernels.drafting.block_rows import Anchors
from paceline.backends.cuda.kernels.step_rows import (
    CONTIGUOUS_UNTIL,
    LINES,
    POSITIONS,
    ROPE_POSITIONS,
    SLOT_MAPPING,
    SOURCES,
    TILE_COUNTS,
    TILE_PAGES,
    TILE_ROWS,
    TOKENS,
    WINDOW_MAPPING,
    DeviceRequests,
    ShapeTables,
    StepRows,
    begin_rows,
)
from paceline.backends.cuda.passes.shared_prefix import SharedPrefix, SharedPrefixTables


class LoopRows:
    """The rows of steps over requests with drafts of one shape.

    plan      a request's rows and tiles of all passes
    shape     the same on the device
    step      the rows of the next step, which `accept_drafts` writes
    """

    def __init__(
        self,
        shape: DraftShape,
        state: DeviceRequests,
        max_requests: int,
        page_size: int,
        target_height: int,
        draft: DraftNetwork | None = None,
        draft_levels: int | None = None,
    ) -> None:
        """Rows of at most `max_requests` requests.

        target_height     rows of an attention tile of the target
        draft             the network that drafts, if one does
        draft_levels      levels that it drafts; None: all
        """
        device = state.tokens.device
        self._state, self._page_size, self._nodes = state, page_size, len(shape)
        catch_up_rows, always = (0, 0) if draft is None else (draft.catch_up_rows, draft.always)
        if draft is None:
            self.plan = plan_step(shape, target_height, 0, 1)
        else:
            own = draft.tile_height, draft_levels, draft.reads_own_features, draft.at_once
            self.plan = plan_step(shape, target_height, catch_up_rows, *own)
        self.shape = ShapeTables(
            torch.from_numpy(self.plan.rows).to(device),
            torch.from_numpy(self.plan.tiles).to(device),
            torch.from_numpy(self.plan.paths).to(device),
            torch.tensor(shape.parents, dtype=torch.int32, device=device),
            shape.levels,
            catch_up_rows,
            always,
            shape.is_chain,
        )
        most = self.plan.first_row(len(self.plan.passes)) * max_requests
        lines = torch.zeros((LINES, most), dtype=torch.int32, device=device)
        paths = torch.zeros((1 if shape.is_chain else most, MAX_PATH), dtype=torch.int32, device=device)
        self.step = StepRows(lines, paths)
        self._shared_prefix = SharedPrefixTables(max_requests * self._nodes, device)
        self.uses_shared_prefix = False

    def use_shared_prefix(self, shared_prefix: SharedPrefix | None) -> None:
        """Let the target read shared prefixes once; None: let it read each request's keys."""
        self.uses_shared_prefix = shared_prefix is not None
        if shared_prefix is not None:
            tiles = [self.plan.passes[0].tiles] * len(shared_prefix.shared_chunks)
            self._shared_prefix.send(shared_prefix, tiles)

    def begin(self, slots: torch.Tensor, recomputed: int) -> None:
        """Write the rows of a first step of the requests in these slots, -1 for padding.

        A head catches up on their last `recomputed` tokens.
        """
        begin_rows(slots, self._state, self.shape, self.step, self._page_size, recomputed)

    def drafted(self, requests: int) -> torch.Tensor:
        """The tokens of a step's nodes: int32 [requests, nodes]. The first is the last known token."""
        return self.step.lines[TOKENS, : requests * self._nodes].view(requests, self._nodes)

    def roots(self, requests: int) -> Anchors:
        """The last known token of each request."""
        lines, nodes, tiles = self.step.lines, self._nodes, self.plan.passes[0].tiles
        tokens, positions, slot_mapping = (
            lines[line, : requests * nodes : nodes] for line in (TOKENS, POSITIONS, SLOT_MAPPING)
        )
        pages_begin = lines[TILE_PAGES, : requests * tiles : tiles]
        return Anchors(tokens, positions, slot_mapping, pages_begin, self._state.pages.view(-1))

    def pass_rows(self, number: int, requests: int) -> DraftRows:
        """The rows of one pass; 0 is the target's."""
        own, lines, paths = self.plan.passes[number], self.step.lines, None
        first, count = self.plan.first_row(number) * requests, len(own.nodes) * requests
        row = slice(first, first + count)
        first_tile = self.plan.first_tile(number) * requests
        tile = slice(first_tile, first_tile + own.tiles * requests)
        if not self.shape.is_chain:
            paths = self.step.paths[row]
        window_pages, windows = self._state.window_pages, None
        if window_pages is not None:
            windows = WindowTables(lines[WINDOW_MAPPING, row], window_pages.view(-1))
        tables = RowTables(
            lines[POSITIONS, row],
            lines[SLOT_MAPPING, row],
            lines[CONTIGUOUS_UNTIL, row],
            paths,
            lines[TILE_ROWS, tile],
            lines[TILE_COUNTS, tile],
            lines[TILE_PAGES, tile],
            self._state.pages.view(-1),
            UniformRows(own.tiles, self._nodes, settled=number == 0),
            self._shared_prefix.rows() if self.uses_shared_prefix and number == 0 else None,
            windows=windows,
        )
        return DraftRows(lines[TOKENS, row], tables, lines[ROPE_POSITIONS, row], lines[SOURCES, row])
