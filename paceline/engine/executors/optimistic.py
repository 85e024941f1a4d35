"""Optimistic host drafts: the host drafts beyond the passes in flight.

    text      known to the host        | sampled by the pass in flight | chain of the next pass
    draft                              | . . . . . . . . . . . . . . . . . . . . . . . . . . .
                                       ^ its start

When a pass is launched, the one before it has not been read yet. So an optimistic draft covers both: the
device compares its start with the tokens sampled meanwhile, and the rest is the chain. A wrong or late draft
costs only the time to draft it. Each draft is used until the request's next one. With many requests the host
drafts for only 8 of them per pass, so that it finishes before the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from typing import NamedTuple

import numpy as np

from paceline.core.arrays import Int32Array
from paceline.core.request import Request
from paceline.core.schedule import Scheduled
from paceline.core.trees import DraftPlan
from paceline.engine.drafting import Drafting

MAX_DRAFTED = 8  # requests drafted for before a pass; suffix takes 0.2 ms for them on a slow machine
MIN_CHANCE = 1e-9  # the rows of a pass are computed anyway, so even unlikely tokens are drafted


class OptimisticDraft(NamedTuple):
    """A draft of one request."""

    start: int  # position of its first token
    tokens: Sequence[int]


class OptimisticDrafts:
    """The last optimistic draft of each request, oldest first."""

    def __init__(self, drafting: Drafting) -> None:
        self._drafting = drafting
        self._drafts: dict[Request, OptimisticDraft] = {}

    def rows(self, plan: DraftPlan, parts: Sequence[Scheduled], length: int) -> Int32Array:
        """The drafts of these parts of the next pass, which is by this plan, as AsyncDecoder.launch takes
        them. Each part's own plan names its drafter."""
        # enough tokens for the pass in flight, the next pass, and the passes until the request's next draft
        passes = 1 + -(-len(parts) // MAX_DRAFTED)
        # forced tokens are known already
        most = len(parts) if self._drafting.only_forced(plan) else MAX_DRAFTED
        self._renew(parts, min(passes * (1 + plan.levels), length), most)
        rows = np.full((len(parts), 1 + length), -1, dtype=np.int32)
        for row, part in zip(rows, parts, strict=True):
            draft = self._drafts.get(part.request)
            if draft is not None and draft.tokens:
                row[0], tokens = draft.start, draft.tokens[:length]
                row[1 : 1 + len(tokens)] = tokens
        return rows

    def _renew(self, parts: Sequence[Scheduled], budget: int, most: int) -> None:
        """Draft again for the requests with the oldest drafts, `most` of them, if they have new tokens."""
        plans = {part.request: part.plan for part in parts if part.plan.budget}
        by_age = [request for request in plans if request not in self._drafts]
        by_age += [request for request in self._drafts if request in plans]
        outdated = list(islice((request for request in by_age if self._is_outdated(request)), most))
        if not outdated:
            return
        longer = [
            replace(plans[request], budget=budget, depth=None, least_chance=MIN_CHANCE)
            for request in outdated
        ]
        for request, tokens in zip(outdated, self._drafting.chains(longer, outdated), strict=True):
            self._drafts.pop(request, None)  # so that it moves to the end
            self._drafts[request] = OptimisticDraft(len(request.token_ids), tokens)

    def _is_outdated(self, request: Request) -> bool:
        """Whether a request has new tokens since its draft was made."""
        draft = self._drafts.get(request)
        return draft is None or draft.start < len(request.token_ids)

    def forget_finished(self) -> None:
        """Drop the drafts of requests that have ended."""
        self._drafts = {request: draft for request, draft in self._drafts.items() if not request.finished}

    def clear(self) -> None:
        """Drop all drafts: another drafter is used next."""
        self._drafts.clear()
