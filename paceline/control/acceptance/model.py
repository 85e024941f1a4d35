"""AcceptanceModel: the acceptance of every drafter, separately for greedy and for sampled requests."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from paceline.control.acceptance.drafter import DrafterAcceptance, Key
from paceline.control.config import CONFIG
from paceline.control.cost import Float64Array
from paceline.core.trees import DraftPlan

if TYPE_CHECKING:
    from paceline.core.request import Request


class CalibrationLines(NamedTuple):
    """How the confidences of some drafters are mapped to chances."""

    lines: Float64Array  # [requests, drafters, points] of the drafters' calibrations
    ratios: Float64Array  # [requests, drafters] see DrafterAcceptance.ratio


class AcceptanceModel:
    """Chances of drafted nodes, by drafter and request."""

    def __init__(self, plans: Mapping[str, DraftPlan]) -> None:
        """`plans`: by drafter, the most that it may draft."""
        self._plans = plans
        self.drafters: dict[tuple[str, bool], DrafterAcceptance] = {  # by drafter, and whether greedy
            (name, greedy): DrafterAcceptance(plan.budget)
            for name, plan in plans.items()
            for greedy in (True, False)
        }

    def of(self, drafter: str, request: Request) -> DrafterAcceptance:
        """The model of a drafter for requests like this one."""
        return self.drafters[drafter, request.sampling.greedy]

    def sample_scenarios(self, drafter: str, requests: Sequence[Request]) -> Float64Array:
        """[scenarios, requests, nodes] chances of the drafts that requests may get next; 0 where there is no
        such node, because a request ends before it or the drafter has failed for the request."""
        config, plan = CONFIG.acceptance, self._plans[drafter]
        count = min(max(config.total_scenarios // len(requests), config.min_scenarios), config.max_scenarios)
        chances = np.zeros((count, len(requests), plan.budget))
        for greedy in (True, False):
            lines = [line for line, request in enumerate(requests) if request.sampling.greedy is greedy]
            if lines:
                known = [(key_of(requests[line]), requests[line].segment) for line in lines]
                model = self.drafters[drafter, greedy]
                sampled = model.sample_scenarios(known, count, plan.least_chance)
                for place, line in enumerate(lines):
                    chances[:, line] = sampled[:, place]
        for line, request in enumerate(requests):
            left = request.max_output - request.num_output - 1
            chances[:, line, 0 if drafter in request.failed_drafters else left :] = 0.0
        return chances

    def lines(self, requests: Sequence[Request], drafters: Sequence[str]) -> CalibrationLines:
        """The lines of these drafters' calibrations, and the requests' acceptance ratios."""
        models = [[self.of(name, request) for name in drafters] for request in requests]
        keys = [(key_of(request), request.segment) for request in requests]
        return CalibrationLines(
            np.array([[model.calibration.line for model in row] for row in models]),
            np.array([[model.ratio(*key) for model in row] for key, row in zip(keys, models, strict=True)]),
        )

    def keep_only(self, requests: Iterable[Request]) -> None:
        """Forget the other requests."""
        keys = {key_of(request) for request in requests}
        for model in self.drafters.values():
            model.keep_only(keys)


def key_of(request: Request) -> Key:
    """Identifies a request in the model."""
    return request.request_id, request.child
