"""AutoController: decides for each step who drafts for whom, and which drafted nodes are verified.

plan      cost model, acceptance model -> planner: the plans with most tokens per second
          the guard may make the step plain, the explorer may try another drafter
trim      the drafted nodes that are worth their rows
observe   seconds and accepted tokens -> cost model, acceptance model, guard, explorer
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from paceline.control.acceptance.model import AcceptanceModel, key_of
from paceline.control.config import CONFIG
from paceline.control.controller import Controller, Load, StepPlan
from paceline.control.cost import StepCosts
from paceline.control.cost.model import Backlog, CostModel
from paceline.control.decision import Decision
from paceline.control.explorer import Explorer
from paceline.control.guard import ABGuard
from paceline.control.memory import Memory, restore, save
from paceline.control.planner.arms import drafting_parts
from paceline.control.planner.cache import PlanCache
from paceline.control.planner.device import DevicePlanner
from paceline.control.planner.host import HostPlanner
from paceline.control.planner.learning import learn_drafts
from paceline.control.planner.records import StepRecord, is_open
from paceline.control.planner.search import Choice
from paceline.control.planner.step import GAIN, NO_GAIN, StepPlanner
from paceline.control.planner.trim import trim_drafts
from paceline.control.segments import SegmentGains
from paceline.control.warm_up import warm_up
from paceline.core.stats import ControlStats
from paceline.core.trees import PLAIN, DraftPlan, DraftTrees

if TYPE_CHECKING:
    from paceline.core.request import Request
    from paceline.core.schedule import Scheduled
    from paceline.core.stats import StepStats


class AutoController(Controller):
    """Chooses drafters and nodes by expected tokens per second. Requests that ask for a plan keep it."""

    def __init__(
        self,
        plans: Mapping[str, DraftPlan],
        steps: StepCosts,
        *,
        log: Callable[[Decision], None] | None = None,
        backlogs: Mapping[str, Backlog] | None = None,
        memory: Memory | None = None,
        beginning: Mapping[str, Any] | None = None,
        device: DevicePlanner | None = None,
    ) -> None:
        """`plans`: by drafter, the most that it may draft. `backlogs`: by drafter, the tokens that it would
        have to catch up with. What is learned is kept in `memory`; `beginning` is the prior where the memory
        is empty, in the same form. `device` plans passes on the device."""
        assert plans, "there must be a drafter to choose from"
        warm_up(steps)
        self.plans = dict(plans)
        self.costs = CostModel(plans, steps, backlogs or {})
        self.acceptance = AcceptanceModel(self.plans)
        self._memory = memory
        restore(beginning or {}, self.costs, self.acceptance)
        if memory is not None:
            restore(memory.read(), self.costs, self.acceptance, device)
        self._planner = HostPlanner(self.plans, self.costs, self.acceptance)
        self._device = device
        self._explorer = Explorer(list(plans), float(steps.seconds(1, 0)))
        self._steps = StepPlanner(self.plans, self.costs, self.acceptance, self._explorer)
        self._guards: dict[int, ABGuard] = {}  # by the number of running requests, in powers of two
        self._segments = SegmentGains()
        self._accepted: Counter[str] = Counter()  # tokens since the last choice, by segment
        self._log = log
        self._step = 0  # steps through the host
        self._cache: PlanCache | None = None  # the plans of the last step that was planned in full
        self.reasons: Counter[str] = Counter()  # steps by reason
        self._choices = -1  # of the device planner, at the last plan
        self._stats: ControlStats | None = None  # of the last step in which there was something to decide

    def close(self) -> None:
        """Keep what was learned."""
        if (self._step or self.reasons) and self._memory is not None:
            save(self._memory, self.costs, self.acceptance, self._device)

    @property
    def regret(self) -> float:
        """Seconds that were spent on exploring, less what was gained by it."""
        return self._explorer.budget.regret + (0.0 if self._device is None else self._device.regret)

    @property
    def poor_segments(self) -> frozenset[str]:
        """Segments that gain little."""
        return self._segments.poor

    def stats(self) -> ControlStats | None:
        return self._stats

    def device_plans(self) -> Sequence[DraftPlan]:
        return () if self._device is None else list(self._device.arms)

    def expect(self, plan: DraftPlan, seconds: Mapping[int, float], catch_up: float | None = None) -> None:
        if self._device is not None:
            self._device.expect(plan, seconds, catch_up)

    def coming_plan(self, running: Sequence[Request], load: Load) -> DraftPlan:
        return PLAIN if self._device is None else self._device.expect_requests(running, load)

    def plan(self, running: Sequence[Request], load: Load) -> StepPlan:
        if load.on_device and self._device is not None and running:
            return self._plan_device(self._device, running, load)
        self._step += 1
        if (cache := self._reusable(running, load)) is not None:
            cache.steps_left -= 1
            self.reasons[self._stats.reason if self._stats else NO_GAIN] += 1
            return StepPlan(cache.plans, cache.record)
        return self._plan_host(running, load)

    def _plan_device(self, device: DevicePlanner, running: Sequence[Request], load: Load) -> StepPlan:
        plan = device.choose(running, load)
        self.reasons[device.reason] += 1
        if device.choices != self._choices:
            self._choices = device.choices
            self._note_choice(device, plan, load)
        plans = [plan if request.plan is None else request.plan for request in running]
        return StepPlan(plans, plan, shadow=None if plan.budget else device.shadow)

    def _note_choice(self, device: DevicePlanner, plan: DraftPlan, load: Load) -> None:
        """Tell what the device planner has chosen."""
        stats = ControlStats(device.reason, self.regret, device.gain, self.poor_segments)
        if self._log is not None and (self._stats is None or self._stats.reason != stats.reason):
            names = "+".join([part.drafter or "" for part in drafting_parts(plan)])
            drafts = (("all", names, plan.levels),) if plan.budget else ()
            best, plain = (
                Choice(None, load.running * device.tokens(own), device.seconds(own)) for own in (plan, PLAIN)
            )
            self._log(Decision(self._step, device.reason, load, drafts, best, plain))
        self._stats = stats

    def _reusable(self, running: Sequence[Request], load: Load) -> PlanCache | None:
        """The cached plans, if this step can reuse them."""
        if self._cache is None or load.coming or self._step >= self._planner.choice.holds_until:
            return None
        return self._cache if self._cache.fits(running) else None

    def _plan_host(self, running: Sequence[Request], load: Load) -> StepPlan:
        plans = [PLAIN if request.plan is None else request.plan for request in running]
        places = [place for place, request in enumerate(running) if is_open(request)]
        if not places:
            return StepPlan(plans)
        requests = [running[place] for place in places]
        batch_size = (
            len(running) + load.coming
        )  # the choice is for the steps after the prefill of new requests
        rows = batch_size + sum([plan.budget for plan in plans])
        if (guard := self._guards.get(load.running.bit_length())) is None:
            guard = self._guards[load.running.bit_length()] = ABGuard()
        if self._planner.is_due(self._step, requests, rows, self._explorer.has_winner):
            self._choose(requests, running, batch_size, rows)
        else:
            self._planner.note_arrivals(self._step, requests)
        choice = self._planner.choice
        guard.expect(choice.best.rate / choice.search.plain.rate)
        reason, records, probe = self._steps.plan(choice, self._step, requests, guard.reason)
        for place, request in zip(places, requests, strict=True):
            if request in records:
                plans[place] = records[request].plan
        self.reasons[reason] += 1
        self._stats = ControlStats(reason, self.regret, guard.gain, self.poor_segments)
        if self._log is not None:
            drafts = tuple(record.logged() for record in records.values())
            self._log(Decision(self._step, reason, load, drafts, choice.best, choice.search.plain))
        self._cache = None
        if rows == len(running) and all(request.num_pending == 1 for request in running):
            cached_record = StepRecord({}, choice.best, guard, None)
            self._cache = PlanCache(list(running), plans, cached_record)
            if reason == NO_GAIN:
                self._cache.steps_left = CONFIG.planner.hold
            elif reason == GAIN and not self._steps.asks_last:
                self._cache.reuse_drafts(choice, self.acceptance)
        by_key = {key_of(request): record for request, record in records.items()}
        return StepPlan(plans, StepRecord(by_key, choice.best, guard, probe))

    def _choose(
        self, requests: Sequence[Request], running: Sequence[Request], batch_size: int, rows: int
    ) -> None:
        """Close the accounts of the last choice, and make another."""
        before = self._planner.choice if self._planner.has_choice else None
        self.costs.observe_ended([] if before is None else before.assignments)
        self.acceptance.keep_only(running)
        if before is None or before.headroom > CONFIG.planner.min_headroom:  # else the load leaves no gain
            steps = self._step - (0 if before is None else before.made_at)
            for segment, count in Counter(request.segment for request in requests).items():
                self._segments.observe(segment, steps * count, self._accepted[segment])
        self._accepted.clear()
        self._planner.choose(self._step, requests, batch_size, rows)

    def trim(self, step: StepPlan, parts: Sequence[Scheduled], trees: DraftTrees) -> DraftTrees:
        record = step.record
        if not isinstance(record, StepRecord):
            return trees
        if self._cache is not None and record is self._cache.record:
            drafters = [part.plan.drafter for part in parts]
            return trees if self._cache.fast_trim is None else self._cache.fast_trim.trim(drafters, trees)
        return trim_drafts(record, parts, trees, self._planner.choice.search, self.costs, self.acceptance)

    def observe(self, step: StepPlan, stats: StepStats) -> None:
        if stats.failed or stats.rows == 0:
            return
        if isinstance(step.record, DraftPlan):
            # a pass by another plan is what its requests have asked for
            if self._device is not None and stats.plan == step.record:
                self._device.observe(step.record, stats)
            return
        record: StepRecord | None = step.record
        choice = self._planner.choice if self._planner.has_choice else None
        seconds, is_decode = stats.total_time, stats.prefill_tokens == 0
        self._explorer.budget.earn(seconds if choice is None else choice.exploration * seconds)
        is_quiet = record is not None and not record.drafts and record.choice.candidate is None
        is_skipped = is_quiet and self._step % CONFIG.planner.quiet_sample
        if is_decode and not is_skipped and not stats.disturbed:
            self.costs.observe_pass(stats)
        if record is None or choice is None:
            return
        accepted = 0
        for draft in stats.drafts:
            self._accepted[draft.segment] += draft.count * draft.accepted
            accepted += draft.accepted
        is_cached = self._cache is not None and record is self._cache.record
        if is_decode and (record.drafts or (is_cached and not is_quiet)):
            promised = record.choice.tokens - choice.search.plain.tokens
            if choice.shortfall.add(promised, accepted, stats.requests):  # drafts bring much less than that
                choice.holds_until = self._step
        if record.drafts:
            by_request = learn_drafts(record, stats, self.costs, self.acceptance)
            if record.probe is not None and record.probe.request in by_request:
                self._explorer.observe(record.probe, by_request[record.probe.request])
        if record.choice.candidate is not None and is_decode:
            worth = stats.new_tokens / stats.requests * choice.search.plain.seconds
            record.guard.observe(worth, seconds)
            if record.guard.reason is not None:
                self._cache = None
