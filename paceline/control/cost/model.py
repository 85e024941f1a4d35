"""CostModel: what passes, drafter calls, new tokens and catching up cost in this engine."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

from paceline.control.config import CONFIG
from paceline.control.cost.draft_calls import DraftCosts
from paceline.control.cost.passes import StepCosts

if TYPE_CHECKING:
    from paceline.core.request import Request
    from paceline.core.stats import StepStats

Backlog = Callable[["Request"], int]  # tokens that a drafter must catch up with


class CostModel:
    """Costs in seconds, updated by every step."""

    def __init__(self, drafters: Iterable[str], passes: StepCosts, backlogs: Mapping[str, Backlog]) -> None:
        names = list(drafters)
        self.passes = passes
        self.drafts = DraftCosts(names, float(passes.seconds(1, 0)))
        self.per_token = 0.0  # seconds on the host for a new token, drafted or not
        self._backlogs = backlogs
        # the largest backlog of each drafter, as a fraction of a request's tokens
        self._max_behind = dict.fromkeys(names, 0.0)
        self._segment_steps: dict[str, float] = {}  # mean steps of a request, by segment

    def backlog(self, drafter: str, request: Request) -> int:
        """Tokens that a drafter must catch up with before it drafts for this request."""
        return self._backlogs[drafter](request) if drafter in self._backlogs else 0

    def catch_up_seconds(self, drafter: str, request: Request) -> float:
        """Seconds of catching up, per step that the request still takes. Remembers how far behind the drafter
        was.

        A choice also holds for requests to come. So a request that the drafter has caught up with is charged
        what its prompt cost at first, spread over the steps of a usual request of its segment.
        """
        if drafter not in self._backlogs:
            return 0.0
        backlog = self.backlog(drafter, request)
        behind = max(self._max_behind[drafter], backlog / max(1, request.num_computed))
        self._max_behind[drafter] = behind
        steps_left = max(1.0, 0.5 * (request.max_output - request.num_output - 1))
        usual_steps = max(1.0, self._segment_steps.get(request.segment, math.inf))
        at_first = behind * (request.num_computed - request.num_output)
        return self.drafts.terms(drafter)[-1] * max(
            backlog / min(usual_steps, steps_left), at_first / usual_steps
        )

    def observe_ended(self, requests: Iterable[Request]) -> None:
        """Update the steps per request of a segment from those of these requests that have ended."""
        for request in requests:
            if not request.finished:
                continue
            steps = float(request.num_output - request.speculative.num_accepted_draft_tokens)
            segment, known = request.segment, self._segment_steps
            if segment in known or len(known) < CONFIG.acceptance.max_segments:
                before = known.get(segment, steps)
                known[segment] = before + CONFIG.draft_calls.length_rate * (steps - before)

    def observe_pass(self, stats: StepStats) -> None:
        """Update from a step without prefill, apart from its drafts."""
        seconds = stats.plan_time + stats.build_time + stats.forward_time + stats.commit_time
        self.passes.observe(stats.rows, stats.attended, seconds)
        per_token = stats.verify_time / max(1, stats.new_tokens)
        self.per_token += CONFIG.passes.per_token_rate * (per_token - self.per_token)
