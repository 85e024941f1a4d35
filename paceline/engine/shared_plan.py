"""The shared plan: what each request of the device's next pass drafts, and for which ones the host drafts.

All requests of a pass on the device share its plan. In a pass by `suffix 5`, for example:

    a request wants                      | what it gets
    suffix, a chain of 5 or fewer tokens | these drafts
    no drafts, by its options ("off")    | one token
    no drafts, by the controller         | the drafts of the pass
    a chain of ngram, which reads texts  | the host's drafts: this pass takes optimistic drafts
    a head, or a tree                    | it is left out: it decodes in host passes between the device's

A pass by a head takes no drafts of the host, so it leaves out all requests that want another drafter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from paceline.core.request import Request
from paceline.core.trees import PLAIN, DraftPlan
from paceline.engine.drafting import Drafting
from paceline.engine.executors.device_executor import DeviceExecutor


@dataclass(frozen=True, slots=True)
class SharedPlan:
    """What the requests of a pass draft."""

    plan: DraftPlan  # of the pass
    requests: Sequence[Request]  # of the pass
    # the requests that the host drafts for, because they name another drafter, and their plans
    by_host: Mapping[Request, DraftPlan] = field(default_factory=dict)
    left_out: Sequence[Request] = ()  # those that the pass cannot draft for as they want


class SharedPlanner:
    """Chooses the shared plan of passes on the device."""

    def __init__(self, device: DeviceExecutor, drafting: Drafting) -> None:
        self._device = device
        self._drafting = drafting

    def choose(self, requests: Sequence[Request], plans: Sequence[DraftPlan]) -> SharedPlan | None:
        """The shared plan of a pass over these requests, which want these plans; None if the device offers
        none of them."""
        device = self._device
        pairs = zip(requests, plans, strict=True)
        wanted = [(request, plan) for request, plan in pairs if device.plans.has_vote(request)]
        # most often there is one, which all requests want
        distinct = list(dict.fromkeys({id(plan): plan for _, plan in wanted}.values())) or [PLAIN]
        offered = [plan for plan in distinct if device.plans.offers(plan)]
        if not offered:
            return None
        if len(distinct) == 1:
            return self._fitted(SharedPlan(distinct[0], requests))
        shared = [self._shared(plan, requests, wanted) for plan in offered]
        return self._fitted(max(shared, key=lambda each: self._votes(each, wanted)))

    def _shared(
        self, plan: DraftPlan, requests: Sequence[Request], wanted: Sequence[tuple[Request, DraftPlan]]
    ) -> SharedPlan:
        """What these requests draft in a pass by this plan."""
        draft = self._device.plans.draft(plan)
        takes_drafts = draft is not None and draft.host_tokens > 0
        by_host, left_out = {}, []
        for request, asked in wanted:
            if asked.begins(plan) or (not asked.budget and not request.failed_drafters):
                continue
            if takes_drafts and self._is_text_chain(asked):
                by_host[request] = asked.shrunk(plan.levels)
            else:
                left_out.append(request)
        gone = set(left_out)
        return SharedPlan(plan, [request for request in requests if request not in gone], by_host, left_out)

    def _is_text_chain(self, plan: DraftPlan) -> bool:
        """Whether a plan drafts chains, and from texts only: the host can draft them while passes run."""
        return plan.budget > 0 and plan == plan.as_chain() and self._drafting.only_reads_texts(plan)

    def _votes(self, shared: SharedPlan, wanted: Sequence[tuple[Request, DraftPlan]]) -> tuple[int, int, int]:
        """How good a shared plan is: the requests that get what they want; those of them that get it from the
        device; all that share the pass."""
        from_device = sum([asked.begins(shared.plan) for _, asked in wanted])
        return from_device + len(shared.by_host), from_device, len(shared.requests)

    def _fitted(self, shared: SharedPlan) -> SharedPlan:
        """The shared plan with buffers for this many requests; forced tokens, if it is plain."""
        device, plan, requests = self._device, shared.plan, shared.requests
        plan = device.plans.fitting(plan, len(requests)) if plan.budget else device.forced_plan(requests)
        if plan == shared.plan:
            return shared
        return SharedPlan(plan, requests, left_out=shared.left_out)

    def part_plan(self, request: Request, shared: SharedPlan) -> DraftPlan:
        """What a request takes of the drafts of a pass."""
        plan, asked = shared.plan, request.plan
        if request in shared.by_host:
            return shared.by_host[request]
        if self._drafting.only_forced(plan):
            return PLAIN if request.undrafted else plan
        if not self._device.plans.has_vote(request):
            return PLAIN
        return asked if asked is not None and asked.begins(plan) else plan
