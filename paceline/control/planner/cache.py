"""PlanCache: the plans of the last step, reused while the same requests run.

Planning and learning take about as long as a drafted row. With well-known drafters most steps reuse the plans
of the step before, and only trim drafts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.control.acceptance.model import AcceptanceModel
from paceline.control.config import CONFIG
from paceline.control.planner.host import HostChoice
from paceline.control.planner.records import StepRecord
from paceline.control.planner.trim import FastTrim
from paceline.core.trees import DraftPlan

if TYPE_CHECKING:
    from paceline.core.request import Request


@dataclass(slots=True)
class PlanCache:
    """The plans of a step, for a number of steps after it."""

    running: Sequence[Request]
    plans: list[DraftPlan]  # [running]
    record: StepRecord  # of the steps that reuse them: without draft records, nothing is learned
    steps_left: int = 0
    fast_trim: FastTrim | None = None  # None: all drafted nodes are verified

    def fits(self, running: Sequence[Request]) -> bool:
        """Whether the next step can reuse the plans."""
        return self.steps_left > 0 and running == self.running

    def reuse_drafts(self, choice: HostChoice, acceptance: AcceptanceModel) -> None:
        """Let the next steps reuse plans that draft, if their drafters are well known."""
        config, drafters = CONFIG.planner, [*choice.drafters]
        models = {acceptance.of(name, request) for name in drafters for request in self.running}
        if max(model.drafts for model in models) < config.known_drafts:
            return
        self.steps_left = config.cached_steps
        if len(self.running) > 1:  # a single request's drafter leaves out by itself what would not pay
            lines = acceptance.lines(self.running, drafters)
            self.fast_trim = FastTrim(drafters, lines, choice.search.row_costs, choice.best.rate)
