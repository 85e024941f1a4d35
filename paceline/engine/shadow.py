"""Shadow drafts: what a drafter would have drafted beside plain passes, compared with what these chose.

The device computes nothing for them, and the host drafts while a pass runs. So the controller knows what
drafts from texts would bring before it asks for any. A shadow draft ends where it was wrong, or at its
length, and the next one begins behind the token that follows, as it would if drafts were verified.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.core.request import Request
from paceline.core.stats import ShadowFacts
from paceline.core.trees import DraftPlan
from paceline.engine.drafting import Drafting

MAX_FOLLOWED = 8  # requests: a draft of each takes the host about 20 us


@dataclass(slots=True)
class _Shadow:
    """A draft that nobody verifies."""

    start: int  # place in the text of its first token
    tokens: Sequence[int]
    depth: int = 0  # of them, those that were right


class ShadowDrafts:
    """The shadow drafts of a few requests, and how they fared."""

    def __init__(self, drafting: Drafting) -> None:
        self._drafting = drafting
        self._shadows: dict[Request, _Shadow] = {}
        self._plan: DraftPlan | None = None
        self._tries: list[int] = []
        self._hits: list[int] = []

    def follow(self, plan: DraftPlan, requests: Sequence[Request]) -> None:
        """Compare what requests have gained with their drafts, and draft again where those have ended."""
        if plan != self._plan:
            self.clear()
            self._plan, self._tries, self._hits = plan, [0] * plan.levels, [0] * plan.levels
        ended = [own for own in requests if own in self._shadows and self._ends(own, self._shadows[own])]
        followed = sum([own in self._shadows for own in requests])
        wanted = [own for own in requests if own not in self._shadows and not own.undrafted]
        ended += wanted[: MAX_FOLLOWED - followed]
        if ended:
            self._shadows = {own: shadow for own, shadow in self._shadows.items() if not own.finished}
            for request, tokens in zip(ended, self._drafting.chains(plan, ended), strict=True):
                self._shadows[request] = _Shadow(len(request.token_ids), tokens)

    def _ends(self, request: Request, shadow: _Shadow) -> bool:
        """Count the tokens that a request has gained; whether one of them ended its draft."""
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

    def take(self) -> ShadowFacts | None:
        """What was counted since the last time; None if nothing was."""
        if self._plan is None or not any(self._tries):
            return None
        facts = ShadowFacts(self._plan.drafter or "", tuple(self._tries), tuple(self._hits))
        self._tries, self._hits = [0] * len(self._tries), [0] * len(self._hits)
        return facts

    def clear(self) -> None:
        """Drop all: passes that draft follow, or passes of the host."""
        self._shadows.clear()
