"""LoopStates: recurrent layers in a decode loop, the scans of its steps and the advance of states.

Draft trees are static, so the scans are written once when requests join, and a step needs nothing from the
host. After verification the accepted nodes are scanned again, in all layers at once: their inputs are still
in the buffers of the pass. Without a draft there is nothing to verify, and the pass itself replaces states.
"""

from __future__ import annotations

import numpy as np
import torch

from paceline.backends.cuda.decode.draft_shape import DraftShape
from paceline.backends.cuda.kernels.recurrent.scan import scan_states, store_conv_states
from paceline.backends.cuda.kernels.recurrent.types import (
    CONTINUES,
    FIRST,
    RecurrentBuffers,
    RecurrentParameters,
    RecurrentShape,
    Scans,
    StateTensors,
)
from paceline.backends.cuda.layers.recurrent import RecurrentRows, order_scan
from paceline.core.arrays import Int32Array


class LoopStates:
    """The recurrent states of a decode loop's requests, for drafts of one shape."""

    def __init__(
        self,
        shape: RecurrentShape,
        parameters: RecurrentParameters,
        states: StateTensors,
        draft: DraftShape,
        max_rows: int,
    ) -> None:
        self._shape, self._parameters, self._states = shape, parameters, states
        self._nodes, length = len(draft), draft.levels + 1
        device = states.conv.device
        parents = np.array(draft.parents, dtype=np.int32)
        order = order_scan(parents, has_state=True)
        self.nodes = max_rows * order.nodes  # states that the buffers must hold

        def each(lines: list[Int32Array]) -> torch.Tensor:
            return torch.from_numpy(np.concatenate(lines).astype(np.int32)).to(device)

        def number(part: Int32Array, by: int) -> torch.Tensor:
            """The numbers of a request, for all requests one after the other; those below 0 stay."""
            return each([np.where(part >= 0, part + row * by, part) for row in range(max_rows)])

        def integers(*sizes: int) -> torch.Tensor:
            return torch.zeros(sizes, dtype=torch.int32, device=device)

        self._parents, self._rows = (
            number(parents, self._nodes),
            number(np.arange(self._nodes, dtype=np.int32), self._nodes),
        )
        self._before, self._after = number(order.before, order.nodes), number(order.after, order.nodes)
        self._begins = number(np.zeros(1, np.int32), self._nodes)
        self._row_slots, self._counts, self._slots = integers(max_rows, self._nodes), *integers(2, max_rows)
        # of the accepted nodes
        self._path_begins = number(np.zeros(1, np.int32), length)
        self._path_before = each([np.array([FIRST] + [CONTINUES] * (length - 1))] * max_rows)

    def begin(self, slots: torch.Tensor) -> None:
        """Continue the states in these slots in the next steps: int32 [requests]; -1: padding."""
        rows = len(slots)
        self._row_slots[:rows] = slots[:, None]
        self._slots[:rows] = slots.clamp(min=0)
        self._counts[:rows] = (slots >= 0).int() * self._nodes

    @property
    def replaces(self) -> bool:
        """Whether passes replace states themselves: without a draft, every row counts."""
        return self._nodes == 1

    def rows(self, requests: int, slot_mapping: torch.Tensor) -> RecurrentRows:
        """The rows of a step of this many requests. `slot_mapping` [rows]: -1 for rows that do not count."""
        count = requests * self._nodes
        scans = Scans(
            self._rows[:count],
            self._before[:count],
            self._after[:count],
            self._begins[:requests],
            self._counts[:requests],
            self._slots[:requests],
        )
        parents, slots = self._parents[:count], self._row_slots.view(-1)[:count]
        advances = slot_mapping if self.replaces else None
        return RecurrentRows(self._states, parents, slots, scans, advances)

    def advance(
        self, buffers: RecurrentBuffers, slots: torch.Tensor, counts: torch.Tensor, accepted: torch.Tensor
    ) -> None:
        """Advance the states in `slots` [requests] along the first `counts` of the accepted nodes.

        `accepted` is int32 [requests, levels + 1]; a count of 0 leaves the state as it is.
        """
        if self.replaces:
            return  # they have been
        requests, shape, states = len(slots), self._shape, self._states
        counts, begins = counts[:requests], self._path_begins[:requests]
        rows, to_each = accepted[:requests].view(-1), slots[:, None]
        if shape.rate >= 0:
            own = self._slots[:requests]
            scans = Scans(rows, self._path_before, None, begins, counts, own, self._nodes)
            scan = buffers, states, states.ssm, scans
            scan_states(shape, self._parameters, slice(None), *scan, writes=False)
        store_conv_states(shape, buffers, states, rows, begins, slots, counts[:, None], to_each, self._nodes)
