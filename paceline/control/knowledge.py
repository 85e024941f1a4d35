"""What the controller knows: prices of passes and of drafts, and what drafts are worth to whom."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np

from paceline.control.acceptance import AcceptanceModel, Key
from paceline.control.choice import Prospect
from paceline.control.cost import StepCosts
from paceline.control.draft_cost import DraftCosts
from paceline.control.memory import Memory
from paceline.draft.trees import DraftPlan

if TYPE_CHECKING:
    from paceline.engine.request import Request
    from paceline.engine.stats import StepStats

DRAFTS = 128  # past drafts by which a step is judged, of all its requests together
FEWEST, MOST_SCENES = 8, 48  # of one request
PER_TOKEN_RATE = 0.05  # how far one step moves the price of a token


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
        late = np.zeros(len(requests))
        per_token = self.drafts.prices(name)[-1]
        for line, request in enumerate(requests):
            left = request.max_output - request.num_output - 1
            chances[:, line, 0 if name in request.failed_drafters else left :] = 0.0
            late[line] = per_token * self.backlog(name, request) / max(1.0, 0.5 * left)
        return Prospect(chances, self.plans[name].levels, late)

    def observe_pass(self, stats: StepStats) -> None:
        """Take in what a step without prompts cost, beside its drafts."""
        seconds = stats.total_time - stats.draft_time - stats.verify_time
        self.steps.observe(stats.rows, stats.attended, seconds)
        per_token = stats.verify_time / max(1, stats.new_tokens)
        self.per_token += PER_TOKEN_RATE * (per_token - self.per_token)

    def forget_others(self, running: Sequence[Request]) -> None:
        """Let go of requests that have ended."""
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
        with suppress(KeyError, TypeError, ValueError, AttributeError):
            self.drafts.begin_with(facts.get("draft_calls", {}))
            for (name, greedy), model in self.models.items():
                own = facts.get("models", {}).get(_name(name, greedy))
                if own is not None:
                    model.begin_with(own)


def key_of(request: Request) -> Key:
    """By what a request is remembered."""
    return request.request_id, request.child


def _name(drafter: str, greedy: bool) -> str:
    return f"{drafter} greedy" if greedy else drafter
