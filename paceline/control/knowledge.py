"""What the controller knows: prices of passes and of drafts, and what drafts are worth to whom."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from paceline.control.acceptance import MOST_SEGMENTS, AcceptanceModel, Key
from paceline.control.choice import Prospect
from paceline.control.cost import StepCosts
from paceline.control.draft_cost import DraftCosts
from paceline.control.memory import Memory
from paceline.core.trees import DraftPlan

if TYPE_CHECKING:
    from paceline.core.request import Request
    from paceline.core.stats import StepStats

logger = logging.getLogger(__name__)

DRAFTS = 128  # past drafts by which a step is judged, of all its requests together
FEWEST, MOST_SCENES = 8, 48  # of one request
PER_TOKEN_RATE = 0.05  # how far one step moves the price of a token
ENDED_RATE = 0.2  # how far one request moves what is thought of how long they last


class Knowledge:
    """Prices and chances, learned from every step and kept in a memory."""

    def __init__(
        self,
        plans: Mapping[str, DraftPlan],
        steps: StepCosts,
        backlogs: Mapping[str, Callable[[Request], int]],
        memory: Memory | None,
        beginning: Mapping[str, Any],
    ) -> None:
        """Of these drafters, whose backlogs say how many tokens they would have to catch up with.

        `beginning` is what is thought of them where the memory knows nothing.
        """
        self.plans = plans
        self.steps = steps
        self.drafts = DraftCosts(plans, float(steps.seconds(1, 0)))
        self.per_token = 0.0  # seconds that a new token takes, drafted or not
        self.models: dict[tuple[str, bool], AcceptanceModel] = {  # by drafter, and whether sampling is greedy
            (name, greedy): AcceptanceModel(plan.budget)
            for name, plan in plans.items()
            for greedy in (True, False)
        }
        self._backlogs = backlogs
        self._behind = dict.fromkeys(plans, 0.0)  # of a request's tokens those that a drafter begins behind
        self._lasting: dict[str, float] = {}  # steps that requests take, by segment
        self._memory = memory
        self._begin_with(beginning)
        if memory is not None:
            self._begin_with(memory.read())

    def model(self, drafter: str, request: Request) -> AcceptanceModel:
        """What is known of a drafter's drafts for requests like this one."""
        return self.models[drafter, request.sampler.greedy]

    def judged(self, request: Request, drafters: Iterable[str]) -> dict[str, tuple[Sequence[float], float]]:
        """By drafter, the line of its calibration and the luck that this request has with it."""
        models = {name: self.model(name, request) for name in drafters}
        key, segment = key_of(request), request.segment
        return {name: (model.calibration.line, model.luck(key, segment)) for name, model in models.items()}

    def backlog(self, drafter: str, request: Request) -> int:
        """Tokens that a drafter would have to catch up with."""
        return self._backlogs[drafter](request) if drafter in self._backlogs else 0

    def prospect(self, name: str, requests: Sequence[Request]) -> Prospect:
        """What a drafter is expected to do for these requests; nothing for those it failed for."""
        scenes = min(max(DRAFTS // len(requests), FEWEST), MOST_SCENES)
        chances = np.zeros((scenes, len(requests), self.plans[name].budget))
        least = self.plans[name].least_chance
        for greedy in (True, False):
            own = [line for line, request in enumerate(requests) if request.sampler.greedy is greedy]
            if own:
                known = [(key_of(requests[line]), requests[line].segment) for line in own]
                chances[:, own] = self.models[name, greedy].scenes(known, scenes, least)
        for line, request in enumerate(requests):
            left = request.max_output - request.num_output - 1
            chances[:, line, 0 if name in request.failed_drafters else left :] = 0.0
        late = self.drafts.prices(name)[-1] * np.array([self._late(name, request) for request in requests])
        return Prospect(chances, self.plans[name].levels, late)

    def _late(self, name: str, request: Request) -> float:
        """Tokens that a drafter has to catch up with, for each of the steps that a request has left.

        A choice holds for requests to come, so who has caught up with this one counts as if it had not.
        """
        backlog = self.backlog(name, request)
        self._behind[name] = max(self._behind[name], backlog / max(1, request.num_computed))
        left = max(1.0, 0.5 * (request.max_output - request.num_output - 1))
        usual = max(1.0, self._lasting.get(request.segment, math.inf))
        at_first = self._behind[name] * (request.num_computed - request.num_output)
        return max(backlog / min(usual, left), at_first / usual)

    def _observe_ended(self, request: Request) -> None:
        """Take in how many steps a request took."""
        steps = float(request.num_output - request.speculative.num_accepted_draft_tokens)
        before = self._lasting.get(request.segment, steps)
        if request.segment in self._lasting or len(self._lasting) < MOST_SEGMENTS:
            self._lasting[request.segment] = before + ENDED_RATE * (steps - before)

    def observe_pass(self, stats: StepStats) -> None:
        """Take in what a step without prompts cost, beside its drafts."""
        seconds = stats.total_time - stats.draft_time - stats.verify_time
        self.steps.observe(stats.rows, stats.attended, seconds)
        per_token = stats.verify_time / max(1, stats.new_tokens)
        self.per_token += PER_TOKEN_RATE * (per_token - self.per_token)

    def forget_others(self, running: Sequence[Request], before: Iterable[Request]) -> None:
        """Let go of requests that have ended, of which some ran before."""
        for request in before:
            if request.finished:
                self._observe_ended(request)
        keys = {key_of(request) for request in running}
        for model in self.models.values():
            model.keep_only(keys)

    def keep(self) -> None:
        """Write down what was learned."""
        if self._memory is None:
            return
        models = {_name(*key): model.facts() for key, model in self.models.items() if model.drafts}
        before = self._memory.read()  # other drafters may have drafted then
        self._memory.write(
            {
                "steps": self.steps.facts(),
                "draft_calls": {**before.get("draft_calls", {}), **self.drafts.facts()},
                "models": {**before.get("models", {}), **models},
            }
        )

    def _begin_with(self, facts: Mapping[str, Any]) -> None:
        """Take in what was learned before, as far as it makes sense."""
        try:
            self.drafts.begin_with(facts.get("draft_calls", {}))
            for (name, greedy), model in self.models.items():
                own = facts.get("models", {}).get(_name(name, greedy))
                if own is not None:
                    model.begin_with(own)
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            logger.warning(
                "part of what the controller had learned makes no sense: %r. It learns anew.", error
            )


def key_of(request: Request) -> Key:
    """By what a request is remembered."""
    return request.request_id, request.child


def _name(drafter: str, greedy: bool) -> str:
    return f"{drafter} greedy" if greedy else drafter
