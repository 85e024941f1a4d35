"""StepPlanner: what one step through the host asks of its requests, by the present choice.

The guard may make the step plain, and the explorer may replace one draft by a probe.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from paceline.control.acceptance.model import AcceptanceModel, key_of
from paceline.control.config import CONFIG
from paceline.control.cost.model import CostModel
from paceline.control.explorer import Explorer, Probe
from paceline.control.guard import PAIR, STOPPED
from paceline.control.planner.host import HostChoice
from paceline.control.planner.records import DraftRecord
from paceline.core.trees import DraftPlan

if TYPE_CHECKING:
    from paceline.core.request import Request

GAIN, NO_GAIN, PROBE = "gain", "no gain", "probe"  # reasons, beside the guard's: see docs/design/control.md


class StepPlanner:
    """Turns a choice into the plans of one step after the other."""

    def __init__(
        self,
        plans: Mapping[str, DraftPlan],
        costs: CostModel,
        acceptance: AcceptanceModel,
        explorer: Explorer,
    ) -> None:
        """`plans`: by drafter, the most that it may draft."""
        self._plans = plans
        self._costs = costs
        self._acceptance = acceptance
        self._explorer = explorer
        self._probed_at = -1  # step at which a probe was last considered
        self._planned = 0  # steps

    @property
    def asks_last(self) -> bool:
        """Whether this step asks only the last of two drafters: in other steps it is asked only where the
        first has little, which is a biased sample."""
        return self._planned % CONFIG.planner.cascade_sample == 0

    def plan(
        self, choice: HostChoice, step: int, requests: Sequence[Request], guard: str | None
    ) -> tuple[str, dict[Request, DraftRecord], Probe | None]:
        """The reason, what requests are asked for, and which of it is a probe. `guard`: why the step must be
        plain, None if it need not be."""
        self._planned += 1
        is_plain = choice.best.candidate is None
        if guard == PAIR and not is_plain:
            return PAIR, {}, None
        records = self._records(choice, requests) if guard is None and not is_plain else {}
        probe = self._probe(choice, step, requests, records)
        if probe is not None:
            request = requests[probe.line]
            records[request] = self._probe_record(choice, request, probe, records.get(request))
        for request, record in records.items():
            record.catch_up = self._costs.backlog(record.names[-1], request)
            record.plan = self._plan_of(choice, record)
        if probe is not None:
            return PROBE, records, probe
        return GAIN if records else NO_GAIN if is_plain else STOPPED, records, None

    def _probe(
        self,
        choice: HostChoice,
        step: int,
        requests: Sequence[Request],
        records: Mapping[Request, DraftRecord],
    ) -> Probe | None:
        """A draft that was not chosen, if it is time to try one and the budget pays for it."""
        is_due = self._probed_at < choice.made_at or step >= self._probed_at + CONFIG.planner.hold
        if not is_due or choice.headroom <= CONFIG.planner.min_headroom:
            return None
        self._probed_at = step
        line, drafter = self._explorer.next(step, requests)
        request = requests[line]
        probe = self._make_probe(choice, line, drafter, request, records.get(request))
        return probe if probe is not None and self._explorer.can_afford(probe) else None

    def _records(self, choice: HostChoice, requests: Sequence[Request]) -> dict[Request, DraftRecord]:
        """What a choice asks of these requests. An unknown drafter starts with one of them, not with all."""
        records: dict[Request, DraftRecord] = {}
        unknown: set[str] = set()
        for request in requests:
            assigned = choice.assignments.get(request, choice.default)
            left = min(choice.length, request.max_output - request.num_output - 1)
            if not assigned.names or left < 1:
                continue
            new = {name for name in assigned.names if self._is_unknown(name, request)}
            if not new & unknown:
                names = assigned.names[-1:] if self.asks_last else assigned.names
                explored = min(new, default="")
                records[request] = DraftRecord(request, names, left, assigned.enough, explored)
                unknown |= new
        return records

    def _is_unknown(self, name: str, request: Request) -> bool:
        return self._acceptance.of(name, request).drafts < CONFIG.planner.unknown_drafts

    def _plan_of(self, choice: HostChoice, record: DraftRecord) -> DraftPlan:
        """The plan of one request, which is made once for a choice."""
        key = record.request, record.names, record.length, record.enough, record.explored
        plans = choice.plans
        if key not in plans:
            request, (*firsts, last) = record.request, record.names
            plan = self._drafter_plan(choice, last, request, record.length, record.explored)
            for first in firsts:
                left = request.max_output - request.num_output - 1
                first_plan = self._drafter_plan(choice, first, request, left, record.explored)
                plan = replace(first_plan, otherwise=plan, enough=record.enough)
            plans[key] = plan
        return plans[key]

    def _drafter_plan(
        self, choice: HostChoice, name: str, request: Request, most: int, explored: str
    ) -> DraftPlan:
        """The plan of one drafter: it leaves out nodes that will not pay, unless it is explored."""
        config, plan = CONFIG.planner, self._plans[name]
        least = min(config.max_threshold, choice.search.min_chance(name, choice.best))
        pays = self._acceptance.of(name, request).calibration.confidence_for(least)
        asked = max(0.0 if name == explored else pays, plan.least_chance, config.min_threshold)
        return replace(plan, budget=min(plan.budget, most), least_chance=asked)

    def _probe_record(
        self, choice: HostChoice, request: Request, probe: Probe, chosen: DraftRecord | None
    ) -> DraftRecord:
        """What a request is asked for by a probe: alone, or, if it is cheap, before what was chosen."""
        if chosen is None or not choice.search.goes_before(probe.drafter, chosen.names):
            return DraftRecord(request, (probe.drafter,), probe.length, explored=probe.drafter)
        names, enough = (probe.drafter, *chosen.names), CONFIG.explorer.cheap_promise
        return replace(chosen, names=names, enough=enough, explored=probe.drafter)

    def _make_probe(
        self, choice: HostChoice, line: int, drafter: str, request: Request, chosen: DraftRecord | None
    ) -> Probe | None:
        """A probe of a drafter for the request at index `line`, with its cost; None if it makes no sense."""
        costs = self._costs
        left = request.max_output - request.num_output - 1
        length = min(CONFIG.explorer.max_nodes, self._plans[drafter].budget, left)
        is_chosen = chosen is not None and drafter in chosen.names
        if length < 1 or drafter in request.failed_drafters or is_chosen:
            return None
        seconds = costs.drafts.seconds(drafter, 1, length, length)
        missed = 0.0  # tokens of the chosen draft that it replaces
        if chosen is None or not choice.search.goes_before(drafter, chosen.names):
            missed = 0.0 if chosen is None else choice.search.expected(chosen.names[-1], line)
            seconds += choice.search.row_costs.row(choice.best.rows)
        seconds += costs.drafts.terms(drafter)[-1] * costs.backlog(drafter, request)
        rate = choice.best.rate
        return Probe(key_of(request), line, drafter, length, missed + rate * seconds, rate)
