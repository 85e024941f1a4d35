"""Shadow drafts: drafts that are not verified, but compared with the tokens that plain device passes sample.

They cost the device nothing, and the host makes them while a pass runs. So the controller learns what drafts
from texts would gain before it uses any. A shadow draft ends at its first wrong token or at its length. The
next one starts after the token that follows, as it would if drafts were verified.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.core.request import Request
from paceline.core.stats import ShadowStats
from paceline.core.trees import DraftPlan
from paceline.engine.drafting import Drafting

MAX_FOLLOWED = 8  # requests; a draft takes the host about 20 us


@dataclass(slots=True)
class _Shadow:
    """A draft that is not verified."""

    start: int  # position of its first token
    tokens: Sequence[int]
    depth: int = 0  # leading tokens that were right so far


class ShadowDrafts:
    """The shadow drafts of at most 8 requests, and how often they were right."""

    def __init__(self, drafting: Drafting) -> None:
        self._drafting = drafting
        self._shadows: dict[Request, _Shadow] = {}
        self._plan: DraftPlan | None = None
        self._tries: list[int] = []
        self._hits: list[int] = []

    def follow(self, plan: DraftPlan, requests: Sequence[Request]) -> None:
        """Compare the requests' new tokens with their shadow drafts, and draft again where one has ended."""
        if plan != self._plan:
            self.clear()
            self._plan, self._tries, self._hits = plan, [0] * plan.levels, [0] * plan.levels
        ended = [
            request
            for request in requests
            if request in self._shadows and self._advance(request, self._shadows[request])
        ]
        followed = sum([request in self._shadows for request in requests])
        wanted = [request for request in requests if request not in self._shadows and not request.undrafted]
        ended += wanted[: MAX_FOLLOWED - followed]
        if ended:
            self._shadows = {
                request: shadow for request, shadow in self._shadows.items() if not request.finished
            }
            chains = self._drafting.chains([plan] * len(ended), ended)
            for request, tokens in zip(ended, chains, strict=True):
                self._shadows[request] = _Shadow(len(request.token_ids), tokens)

    def _advance(self, request: Request, shadow: _Shadow) -> bool:
        """Whether a shadow draft has ended, after counting the request's new tokens."""
        for token in request.token_ids[shadow.start + shadow.depth :]:
            depth, left = shadow.depth, len(shadow.tokens) - shadow.depth
            if depth == len(self._tries):
                return True
            self._tries[depth] += 1
            if not left or shadow.tokens[depth] != token:
                return True
            self._hits[depth] += 1
            shadow.depth += 1
        return False

    def take(self) -> ShadowStats | None:
        """The counts since the last call; None if there are none."""
        if self._plan is None or not any(self._tries):
            return None
        stats = ShadowStats(self._plan.drafter or "", tuple(self._tries), tuple(self._hits))
        self._tries, self._hits = [0] * len(self._tries), [0] * len(self._hits)
        return stats

    def clear(self) -> None:
        """Drop all shadow drafts: drafted passes or host passes follow."""
        self._shadows.clear()
