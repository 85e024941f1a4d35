"""HostPlanner: chooses drafters for steps through the host.

A choice is searched for the requests that run (search.py) and holds for a number of steps. What each of those
steps asks of its requests is planned in step.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from paceline.control.acceptance.model import AcceptanceModel
from paceline.control.config import CONFIG
from paceline.control.cost.model import CostModel
from paceline.control.planner.forecast import make_forecast
from paceline.control.planner.records import DraftAssignment, Shortfall
from paceline.control.planner.row_costs import Batch
from paceline.control.planner.search import Choice, PlanSearch
from paceline.core.trees import DraftPlan

if TYPE_CHECKING:
    from paceline.core.request import Request

PlanKey = tuple["Request", tuple[str, ...], int, float, str]  # all that a request's plan depends on


@dataclass(slots=True)
class HostChoice:
    """What was chosen, for how long it holds, and what it has brought so far."""

    search: PlanSearch
    headroom: float  # gain of very good drafts under this load
    best: Choice
    assignments: dict[Request, DraftAssignment]
    default: DraftAssignment  # for requests that arrive while the choice holds: the most common one
    made_at: int  # step
    holds_until: int  # step
    outlasts_request: bool  # it was made well before its request ends, so it holds for the next one too
    exploration: float  # fraction of the usual share of time that the explorer earns
    drafters: frozenset[str]  # of the best candidate
    length: int  # most nodes of its drafts
    shortfall: Shortfall = field(default_factory=Shortfall)
    plans: dict[PlanKey, DraftPlan] = field(default_factory=dict)  # that were made by it


class HostPlanner:
    """Makes choices, and says when the present one ends."""

    def __init__(self, plans: Mapping[str, DraftPlan], costs: CostModel, acceptance: AcceptanceModel) -> None:
        """`plans`: by drafter, the most that it may draft."""
        self._plans = plans
        self._costs = costs
        self._acceptance = acceptance
        self._hold = CONFIG.planner.hold  # steps that the next choice holds
        self._made: HostChoice | None = None

    @property
    def has_choice(self) -> bool:
        """Whether a choice was ever made."""
        return self._made is not None

    @property
    def choice(self) -> HostChoice:
        """The present one."""
        assert self._made is not None, "nothing was chosen yet"
        return self._made

    def is_due(self, step: int, requests: Sequence[Request], rows: int, has_winner: bool) -> bool:
        """Whether to choose again: from time to time, at once if other requests run, and soon after a probe
        has won."""
        config, made = CONFIG.planner, self._made
        if made is None or step >= made.holds_until:
            return True
        if has_winner and step > made.made_at + config.arrival_hold:
            return True
        if self._takes_over(requests):
            return False
        count = max(len(requests), len(made.assignments))
        known = sum([request in made.assignments for request in requests])
        rows_then = made.search.batch.rows
        return 4 * known < 3 * count or not rows_then / 2 - 4 < rows < 2 * rows_then + 4

    def note_arrivals(self, step: int, requests: Sequence[Request]) -> None:
        """Let the choice end soon if some of these requests arrived after it was made."""
        choice = self.choice
        if any(request not in choice.assignments for request in requests) and not self._takes_over(requests):
            choice.holds_until = min(choice.holds_until, step + CONFIG.planner.arrival_hold)

    def _takes_over(self, requests: Sequence[Request]) -> bool:
        """Whether a single new request simply follows the single one that the choice was made for."""
        choice = self.choice
        is_single = len(requests) == 1 and len(choice.assignments) <= 1
        return is_single and choice.outlasts_request and requests[0] not in choice.assignments

    def choose(self, step: int, requests: Sequence[Request], batch_size: int, rows: int) -> None:
        """Search the best choice for these requests, in batches of `batch_size` requests and `rows` rows."""
        config, costs, before = CONFIG.planner, self._costs, self._made
        keys = sum(request.num_computed for request in requests) / len(requests)
        batch = Batch(float(batch_size), rows, keys, costs.per_token)
        most = max(plan.budget for plan in self._plans.values())
        present = (frozenset[str](), 0) if before is None else (before.drafters, before.length)
        search = PlanSearch(batch, len(requests), most, costs.passes, costs.drafts, bool(present[0]))
        headroom, best = search.headroom(), search.plain
        if headroom > config.min_headroom:
            best = search.best(
                {
                    name: make_forecast(name, plan, requests, costs, self._acceptance)
                    for name, plan in self._plans.items()
                }
            )
        assignments = _assignments(best, requests)
        drafts = min(self._acceptance.of(name, requests[0]).drafts for name in self._plans)
        is_young = drafts < config.young_drafts
        self._made = HostChoice(
            search,
            headroom,
            best,
            assignments,
            default=Counter(assignments.values()).most_common(1)[0][0],
            made_at=step,
            holds_until=step,
            outlasts_request=min(request.max_output - request.num_output for request in requests)
            > config.lasting_tokens,
            exploration=1.0 if is_young else min(1.0, headroom),  # known drafters are tried for their gain
            drafters=frozenset() if best.candidate is None else best.candidate.drafters,
            length=0 if best.candidate is None else best.candidate.length,
        )
        is_same = present == (self.choice.drafters, self.choice.length)
        self._hold = min(2 * self._hold, config.max_hold) if is_same else config.hold
        self.choice.holds_until += self._steps_to_hold(step, requests[0], drafts)
        costs.drafts.fade(self._plans.keys() - self.choice.drafters)

    def _steps_to_hold(self, step: int, request: Request, drafts: int) -> int:
        """Few while little is known, many where the choice stays the same."""
        config = CONFIG.planner
        if drafts < config.unknown_drafts and step < config.warm_up_steps:
            return 1
        if drafts < config.young_drafts and step < config.young_drafts * config.unknown_drafts:
            return config.hold // 2
        known = (self._acceptance.of(name, request).drafts for name in self.choice.drafters)
        is_known = max(known, default=config.known_drafts) >= config.known_drafts
        return self._hold if is_known else config.hold


def _assignments(best: Choice, requests: Sequence[Request]) -> dict[Request, DraftAssignment]:
    """Who drafts for each request by a choice."""
    candidate = best.candidate
    names = [()] * len(requests) if candidate is None else candidate.names
    enough = [0.0] * len(requests) if candidate is None or not candidate.enough else candidate.enough
    return {
        request: DraftAssignment(own_names, tokens)
        for request, own_names, tokens in zip(requests, names, enough, strict=True)
    }
