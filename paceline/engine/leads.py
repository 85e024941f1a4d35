"""What the host expects of requests while passes run, further than those in flight reach.

    text      known to the host        | chosen by the pass in flight | chain of the next pass
    lead                               | . . . . . . . . . . . . . . . . . . . . . . . . . . .
                                       ^ where it starts

The pass in flight is not read yet when the next one begins. So a lead is longer than a chain, and where the
next pass runs it is held against what was chosen meanwhile; what is left of it is the chain. One that was
wrong, or comes late, costs a draft and nothing else. It is kept until the next: with many requests only some
are drafted for before each pass, so that the host is always done before the device is.
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

MOST_ASKED = 8  # requests that are drafted for before a pass: by suffix in 0.2 ms, on a slow machine
SURE_ENOUGH = 1e-9  # chance of a lead: rows of a pass are computed anyway, so what is likeliest is drafted


class Lead(NamedTuple):
    """What a drafter expects of a text."""

    start: int  # the place of its first token
    tokens: Sequence[int]


class Leads:
    """The last lead of each request, those that were asked for longest ago first."""

    def __init__(self, drafting: Drafting) -> None:
        self._drafting = drafting
        self._leads: dict[Request, Lead] = {}

    def lines(self, plan: DraftPlan, requests: Sequence[Request], length: int) -> Int32Array:
        """The leads of these requests for their next pass, as AheadDecoder.launch takes them."""
        # over the pass in flight, the next one, and those until it is asked again; more would take it longer
        passes = 1 + -(-len(requests) // MOST_ASKED)
        budget = min(passes * (1 + plan.levels), length)
        self._renew(replace(plan, budget=budget, depth=None, least_chance=SURE_ENOUGH), requests)
        lines = np.full((len(requests), 1 + length), -1, dtype=np.int32)
        for line, request in zip(lines, requests, strict=True):
            lead = self._leads.get(request)
            if lead is not None and lead.tokens:
                line[0], own = lead.start, lead.tokens[:length]
                line[1 : 1 + len(own)] = own
        return lines

    def _renew(self, plan: DraftPlan, requests: Sequence[Request]) -> None:
        """Ask for those whose leads are oldest, and who have come further since."""
        going = dict.fromkeys(requests)
        by_age = [request for request in requests if request not in self._leads]
        by_age += [request for request in self._leads if request in going]
        asked = list(islice((own for own in by_age if self._has_news(own)), MOST_ASKED))
        chains = self._drafting.chains(plan, asked) if asked else []
        for request, tokens in zip(asked, chains, strict=True):
            self._leads.pop(request, None)  # it goes to the end
            self._leads[request] = Lead(len(request.token_ids), tokens)

    def _has_news(self, request: Request) -> bool:
        """Whether a drafter could say more of a request than it has."""
        lead = self._leads.get(request)
        return not request.undrafted and (lead is None or lead.start < len(request.token_ids))

    def forget_finished(self) -> None:
        """Drop the leads of requests that have ended."""
        self._leads = {request: lead for request, lead in self._leads.items() if not request.finished}

    def clear(self) -> None:
        """Drop all: another drafter follows."""
        self._leads.clear()
