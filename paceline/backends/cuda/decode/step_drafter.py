"""StepDrafter: drafts the tokens of a step's rows, by all that can draft in it.

network           a head or draft model: it catches up on accepted tokens, then drafts level by level
prompt lookup     the tokens after an earlier match of a text's end; they replace the network's first path
host drafts       optimistic ones, made before the last tokens were known; used if those agree
"""

from __future__ import annotations

import torch

from paceline.backends.async_decoding import NgramLookup
from paceline.backends.cuda.decode.draft_networks import DraftNetwork
from paceline.backends.cuda.decode.draft_shape import DraftShape
from paceline.backends.cuda.decode.loop_rows import LoopRows
from paceline.backends.cuda.kernels.drafting.draft_sampling import (
    draft_candidates_for,
    score_draft_tokens,
    write_draft_tokens,
)
from paceline.backends.cuda.kernels.drafting.prompt_lookup import prompt_lookup
from paceline.backends.cuda.kernels.step_rows import LAST, POSITIONS, TOKENS, DeviceRequests


class StepDrafter:
    """Drafts in steps of at most as many requests as `found` has.

    `host_drafts` int32 [max_rows, 1 + most] start and tokens of the host's drafts; None: it drafts nothing.
    """

    def __init__(
        self,
        shape: DraftShape,
        rows: LoopRows,
        found: torch.Tensor,
        network: DraftNetwork | None = None,
        look_up: NgramLookup | None = None,
        host_drafts: int = 0,
    ) -> None:
        """`found` int32 [max_rows] gets the number of tokens drafted from text for each request.

        `host_drafts`: the most tokens of an optimistic draft; 0: the host drafts nothing.
        """
        max_rows, device = len(found), found.device
        self._rows, self._found, self._network, self._look_up = rows, found, network, look_up
        self._nodes = len(shape)
        self.host_drafts: torch.Tensor | None = None
        if host_drafts:
            self.host_drafts = torch.full((max_rows, 1 + host_drafts), -1, dtype=torch.int32, device=device)
        self._first_path = torch.tensor(shape.first_path, dtype=torch.int32, device=device)
        self._children = [torch.from_numpy(table).to(device) for table in rows.plan.children]
        if network is not None:
            most = max_rows * max(len(table) for table in self._children)
            self._candidates = draft_candidates_for(most, network.vocab_size, shape.most_children, device)
            self._chances = torch.zeros(most, device=device)

    @property
    def reads_texts(self) -> bool:
        """Whether drafts come from texts: by lookup, or from the host."""
        return self._look_up is not None or self.host_drafts is not None

    @property
    def drafts(self) -> bool:
        """Whether there is anything to draft with."""
        return self._network is not None or self.reads_texts

    def draft(
        self, slots: torch.Tensor, state: DeviceRequests, temperatures: torch.Tensor, seeds: torch.Tensor
    ) -> None:
        """Write drafts for the requests in `slots` [requests] to the step's rows.

        `temperatures` and `seeds` [max_rows] are the requests', for coupled drafting.
        """
        if self._network is not None:
            self._draft_levels(self._network, len(slots), temperatures, seeds)
        if self.reads_texts:
            prompt_lookup(
                slots,
                state,
                self._look_up,
                None if self.host_drafts is None else self.host_drafts[: len(slots)],
                self._rows.step,
                self._first_path,
                self._nodes,
                self._found,
                kept=self._rows.plan.drafted,
            )

    def _draft_levels(
        self, network: DraftNetwork, requests: int, temperatures: torch.Tensor, seeds: torch.Tensor
    ) -> None:
        """Catch up, and draft the roots' children; then draft level by level."""
        rows, lines, candidates = self._rows, self._rows.step.lines, self._candidates
        lengths = lines[POSITIONS, : requests * self._nodes : self._nodes]  # of the roots
        ids, size, at_once = network.target_ids, network.vocab_size, network.at_once
        for number, children in enumerate(self._children, start=1):
            inputs = rows.pass_rows(number, requests)
            if number == 1:
                logits = network.catch_up(inputs, lines[LAST, :requests], rows.roots(requests))
            else:
                logits = network.extend(inputs)
            count = requests * len(children)
            score_draft_tokens(
                logits, size, ids, temperatures, seeds, lengths, number, candidates, count, at_once
            )
            write_draft_tokens(
                candidates, children, lines[TOKENS], self._chances, temperatures, count, requests
            )
