"""Scheduled: one request's rows in a pass, as the scheduler assigns them."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.core.request import Request
from paceline.core.trees import PLAIN, DraftPlan


@dataclass(slots=True)
class Scheduled:
    """One request's part of a pass: known tokens to compute, then a draft below the last of them."""

    request: Request
    num_tokens: int  # known tokens: 1 in a decode, more in a prefill chunk
    plan: DraftPlan = PLAIN
    # tokens before these, computed or in flight; -1 on the device, where passes in flight decide it
    start: int = -1

    @property
    def reaches_end(self) -> bool:
        """Whether the pass computes all known tokens, so that a new one can be sampled."""
        return self.start + self.num_tokens == len(self.request.token_ids)
