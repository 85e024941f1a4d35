"""Optimistic drafts: what a drafter of the host expects of requests beyond the passes in flight.

    text      known to the host        | chosen by the pass in flight | chain of the next pass
    draft                              | . . . . . . . . . . . . . . . . . . . . . . . . . . .
                                       ^ where it starts

The pass in flight is not read yet when the next one is launched. So an optimistic draft is longer than a
chain, and on the device it is compared with what was chosen meanwhile; what is left of it is the chain. One
that was wrong, or comes late, costs a draft and nothing else. It is kept until the next: with many requests
only some are drafted for before each pass, so that the host is always done before the device is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from typing import NamedTuple

import numpy as np

from paceline.core.arrays import Int32Array
from paceline.core.request import Request
from paceline.core.trees import DraftPlan
from paceline.engine.drafting import Drafting

MAX_DRAFTED = 8  # requests that are drafted for before a pass: by suffix in 0.2 ms, on a slow machine
MIN_CHANCE = 1e-9  # of a draft: rows of a pass are computed anyway, so what is likeliest is drafted


class OptimisticDraft(NamedTuple):
    """What a drafter expects of a text."""

    start: int  # the place of its first token
    tokens: Sequence[int]


class OptimisticDrafts:
    """The last one of each request, those that were drafted longest ago first."""

    def __init__(self, drafting: Drafting) -> None:
        self._drafting = drafting
        self._drafts: dict[Request, OptimisticDraft] = {}

    def rows(self, plan: DraftPlan, requests: Sequence[Request], length: int) -> Int32Array:
        """The drafts of these requests for their next pass, as AsyncDecoder.launch takes them."""
        # over the pass in flight, the next one, and those until it is asked again; more would take it longer
        passes = 1 + -(-len(requests) // MAX_DRAFTED)
        budget = min(passes * (1 + plan.levels), length)
        self._renew(replace(plan, budget=budget, depth=None, least_chance=MIN_CHANCE), requests)
        rows = np.full((len(requests), 1 + length), -1, dtype=np.int32)
        for row, request in zip(rows, requests, strict=True):
            draft = self._drafts.get(request)
            if draft is not None and draft.tokens:
                row[0], own = draft.start, draft.tokens[:length]
                row[1 : 1 + len(own)] = own
        return rows

    def _renew(self, plan: DraftPlan, requests: Sequence[Request]) -> None:
        """Draft for those whose drafts are oldest, and who have come further since."""
        going = dict.fromkeys(requests)
        by_age = [request for request in requests if request not in self._drafts]
        by_age += [request for request in self._drafts if request in going]
        asked = list(islice((own for own in by_age if self._has_news(own)), MAX_DRAFTED))
        chains = self._drafting.chains(plan, asked) if asked else []
        for request, tokens in zip(asked, chains, strict=True):
            self._drafts.pop(request, None)  # it goes to the end
            self._drafts[request] = OptimisticDraft(len(request.token_ids), tokens)

    def _has_news(self, request: Request) -> bool:
        """Whether a drafter could say more of a request than it has."""
        draft = self._drafts.get(request)
        return not request.undrafted and (draft is None or draft.start < len(request.token_ids))

    def forget_finished(self) -> None:
        """Drop the drafts of requests that have ended."""
        self._drafts = {own: draft for own, draft in self._drafts.items() if not own.finished}

    def clear(self) -> None:
        """Drop all: another drafter follows."""
        self._drafts.clear()
