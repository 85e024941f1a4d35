"""The controller that drafts where it pays: for each step, who drafts for whom, and what is verified of it.

plan      costs and chances -> the choice with most tokens per second, plain decoding among them
          the floor may make the step plain; a little time is kept for trying what was not chosen
trim      the drafts as they came -> the nodes that are worth their rows
observe   what the step cost and what became of its drafts -> costs, chances, floor
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from paceline.control.acceptance import Key
from paceline.control.choice import Batch, BoolArray, Choice, Market, PassPrices, worth_verifying
from paceline.control.controller import Controller, Load, StepPlan
from paceline.control.cost import StepCosts
from paceline.control.decision import Decision
from paceline.control.device import DevicePlanner
from paceline.control.floor import Floor
from paceline.control.knowledge import Knowledge, key_of
from paceline.control.memory import Memory
from paceline.control.outcome import prepare
from paceline.control.planned import Asked, Planned, Shortfall, Wish, is_open
from paceline.control.probes import Probe, Probes
from paceline.control.routine import Judge, Routine
from paceline.control.segments import SegmentGains
from paceline.core.stats import ControlFacts
from paceline.core.trees import PLAIN, DraftPlan, DraftTrees

if TYPE_CHECKING:
    from paceline.core.request import Request
    from paceline.core.schedule import Scheduled
    from paceline.core.stats import DraftFacts, StepStats

GAIN, NO_GAIN = "gain", "no gain"
HOLDS, LONGEST = 32, 128  # steps that a choice holds while about the same requests run: at first, and at most
LASTING = 24  # tokens that a request must have left for its choice to hold for the next one too
SOON = 6  # steps that a few new requests wait for theirs, and what a probe has won for its effect
WARM_UP = 16  # steps in which every one teaches much, if nothing is known
CREDIT = 2.0  # plain passes that may be spent on trying at the start
UNKNOWN, YOUNG, WELL_KNOWN = 4, 40, 100  # drafts until a drafter is known a little, more, and well
SAMPLED = 4  # steps that are looked at, of which one shows what the second of two drafters has by itself
ROUTINE = 9  # steps that are not looked at after one that is, with drafters that are well known
SELDOM = 4  # steps of which one teaches what a pass costs, while nothing is drafted
PROMISING = 0.5  # tokens that a cheap draft must promise to be tried instead of what was chosen
PROBED = 4  # nodes that a drafter which was not chosen is asked for
POSSIBLE = 0.12  # gain that very good drafts must reach: real ones reach much less
LOWEST, MOST_ASKED = 0.05, 0.63  # the chances that a node must have to be drafted lie between them


class AutoController(Controller):
    """Chooses drafters and nodes by expected tokens per second. Requests that ask for a plan keep it."""

    def __init__(
        self,
        plans: Mapping[str, DraftPlan],
        steps: StepCosts,
        *,
        log: Callable[[Decision], None] | None = None,
        backlogs: Mapping[str, Callable[[Request], int]] | None = None,
        memory: Memory | None = None,
        beginning: Mapping[str, Any] | None = None,
        device: DevicePlanner | None = None,
    ) -> None:
        """`plans` are those of the drafters that may be chosen, each with the most it may draft; `backlogs`
        say how many tokens a drafter would have to catch up with. What is learned is kept in the memory;
        `beginning` is what is thought before, in the same form. `device` plans passes on the device."""
        assert plans, "there must be something to choose from"
        prepare()
        self.plans = dict(plans)
        self.known = Knowledge(self.plans, steps, backlogs or {}, memory, beginning or {})
        self._floors: dict[int, Floor] = {}  # by the number of running requests, in powers of two
        self._probes = Probes(list(plans), CREDIT * float(steps.seconds(1, 0)))
        self._segments = SegmentGains()
        self._log = log
        self._step = self._chosen_at = self._holds_until = self._probe_at = self._looked = 0
        self._hold = HOLDS  # steps that the next choice holds
        self._reach = 1.0  # gain of very good drafts under the last choice's load
        self._earning = 1.0  # share of the usual time for trying that steps earn there
        self._names, self._length = set[str](), 0  # who drafts by the last choice, and how much
        self._wishes: dict[Request, Wish] = {}  # what was chosen
        self._routine: Routine | None = None  # what follows the last step that was looked at
        self._gained: Counter[str] = Counter()  # accepted tokens since the last choice, by segment
        self._device = device
        self.reasons: Counter[str] = Counter()  # steps, by why they were planned as they were
        self._facts: ControlFacts | None = None  # of the last step that there was something to decide in

    def close(self) -> None:
        """Keep what was learned."""
        if self._step:
            self.known.keep()

    @property
    def regret(self) -> float:
        """Seconds that were spent on trying what turned out worse."""
        return self._probes.regret + (0.0 if self._device is None else self._device.regret)

    @property
    def poor_segments(self) -> frozenset[str]:
        """Those that were said to gain little."""
        return self._segments.poor

    def facts(self) -> ControlFacts | None:
        return self._facts

    def device_plans(self) -> Sequence[DraftPlan]:
        return () if self._device is None else list(self._device.arms)

    def expect(self, plan: DraftPlan, seconds: Mapping[int, float]) -> None:
        if self._device is not None:
            self._device.expect(plan, seconds)

    def plan(self, running: Sequence[Request], load: Load) -> StepPlan:
        if load.on_device and self._device is not None and running:
            return self._plan_device(self._device, running, load)
        plans, planned = self._plan_host(running, load)
        return StepPlan(plans, planned)

    def _plan_device(self, device: DevicePlanner, running: Sequence[Request], load: Load) -> StepPlan:
        keys = sum([request.num_computed for request in running]) / len(running)
        settled = all(request.num_pending == 1 for request in running)
        plan = device.choose(len(running), keys, settled)
        self.reasons[device.reason] += 1
        facts = ControlFacts(device.reason, self.regret, device.gain, self.poor_segments)
        if self._log is not None and (self._facts is None or self._facts.reason != facts.reason):
            drafts = (("all", plan.drafter or "", plan.levels),) if plan.budget else ()
            expected, plain = self._expected_of(device, plan, load), self._expected_of(device, PLAIN, load)
            self._log(Decision(self._step, device.reason, load, drafts, expected, plain))
        self._facts = facts
        plans = [plan if own.plan is None else own.plan for own in running]
        return StepPlan(plans, plan, shadow=None if plan.budget else device.shadow)

    @staticmethod
    def _expected_of(device: DevicePlanner, plan: DraftPlan, load: Load) -> Choice:
        return Choice(None, load.running * device.tokens(plan), device.seconds(plan))

    def _plan_host(self, running: Sequence[Request], load: Load) -> tuple[list[DraftPlan], Planned | None]:
        self._step += 1
        routine = None if load.coming or self._step >= self._holds_until else self._routine
        if routine is not None and routine.goes_on(running):
            routine.left -= 1
            self.reasons[self._facts.reason if self._facts else NO_GAIN] += 1
            return routine.plans, routine.planned
        plans = [PLAIN if request.plan is None else request.plan for request in running]
        places = [place for place, request in enumerate(running) if is_open(request)]
        if not places:
            return plans, None
        requests = [running[place] for place in places]
        crowd = len(running) + load.coming  # a choice is for the steps behind their prompts
        rows = crowd + sum([plan.budget for plan in plans])
        floor = self._floors.setdefault(load.running.bit_length(), Floor())
        if self._is_due(requests, rows):
            self._choose(requests, running, crowd, rows)
        floor.expect(self._best.rate / self._market.plain.rate)
        self._looked += 1
        reason, asked, probe = self._decide(floor, requests)
        for place, request in zip(places, requests, strict=True):
            one = asked.get(request)
            if one is not None:
                one.late = self.known.backlog(one.names[-1], request)
                plans[place] = one.plan = self._plan_of(one)
        by_key = {key_of(request): one for request, one in asked.items()}
        planned = Planned(by_key, self._best, floor, probe)
        self.reasons[reason] += 1
        self._facts = ControlFacts(reason, self.regret, math.exp(floor.gain.mean), self.poor_segments)
        if self._log is not None:
            drafts = tuple(one.told() for one in asked.values())
            self._log(Decision(self._step, reason, load, drafts, self._best, self._market.plain))
        self._routine = None
        if rows == len(running) and all(request.num_pending == 1 for request in running):
            self._routine = Routine(list(running), plans, Planned({}, self._best, floor, None), 0)
            self._let_follow(self._routine, reason, running)
        return plans, planned

    def _let_follow(self, routine: Routine, reason: str, running: Sequence[Request]) -> None:
        """Say how many steps can be as this one, and how their drafts are judged."""
        if reason == NO_GAIN:
            routine.left = HOLDS
        models = {self.known.model(name, request) for name in self._names for request in running}
        if reason != GAIN or max(model.drafts for model in models) < WELL_KNOWN or self._samples():
            return
        routine.left = ROUTINE
        if len(running) > 1:  # of one, what its drafter leaves out is what would not pay
            judged = [self.known.judged(request, self._names) for request in running]
            routine.judge = Judge(judged, self._market.prices, self._best.rate)

    def _is_due(self, requests: Sequence[Request], rows: int) -> bool:
        """Whether something is to be chosen now: from time to time, and at once if other requests run."""
        if self._step >= self._holds_until or (self._probes.won and self._step > self._chosen_at + SOON):
            return True
        count, known = max(len(requests), len(self._wishes)), sum(own in self._wishes for own in requests)
        if known < len(requests) == count == 1 and self._lasts:
            return False  # who comes is thought to be as the one before
        if known < len(requests):
            self._holds_until = min(self._holds_until, self._step + SOON)
        then = self._market.batch.rows
        return 4 * known < 3 * count or not then / 2 - 4 < rows < 2 * then + 4

    def _choose(self, requests: Sequence[Request], running: Sequence[Request], crowd: int, rows: int) -> None:
        """Find the best choice for these requests among a crowd that gives so many rows."""
        self.known.forget_others(running, self._wishes)
        steps = self._step - self._chosen_at
        if self._reach > POSSIBLE:  # else it is the load that leaves nothing to gain, whatever the drafter
            for segment, count in Counter(request.segment for request in requests).items():
                self._segments.observe(segment, steps * count, self._gained[segment])
        self._gained.clear()
        keys = sum(request.num_computed for request in requests) / len(requests)
        batch = Batch(float(crowd), rows, keys, self.known.per_token)
        most = max(plan.budget for plan in self.plans.values())
        prices = self.known.steps, self.known.drafts
        self._market = Market(batch, len(requests), most, *prices, bool(self._names))
        self._reach = self._market.reach()
        self._best = self._market.plain
        if self._reach > POSSIBLE:
            prospects = {name: self.known.prospect(name, requests) for name in self.plans}
            self._best = self._market.best(prospects)
        offer = self._best.offer
        names = [()] * len(requests) if offer is None else offer.names
        enough = [0.0] * len(requests) if offer is None or not offer.enough else offer.enough
        self._names, before = {name for own in names for name in own}, (self._names, self._length)
        self._length = 0 if offer is None else offer.length
        self._hold = min(2 * self._hold, LONGEST) if before == (self._names, self._length) else HOLDS
        self._wishes = {
            request: Wish(own, tokens) for request, own, tokens in zip(requests, names, enough, strict=True)
        }
        self.known.drafts.fade(self.plans.keys() - self._names)
        self._usual = Counter(self._wishes.values()).most_common(1)[0][0]  # for those that come until then
        self._plans_made: dict[tuple[Request, tuple[str, ...], int, float, str], DraftPlan] = {}
        self._missing = Shortfall()
        self._chosen_at = self._probe_at = self._step
        self._lasts = min(request.max_output - request.num_output for request in requests) > LASTING
        drafts = min(self.known.model(name, requests[0]).drafts for name in self.plans)
        self._earning = 1.0 if drafts < YOUNG else min(1.0, self._reach)  # who is known is tried for its gain
        self._holds_until = self._step + self._holds(requests[0], drafts)

    def _holds(self, request: Request, drafts: int) -> int:
        """Steps that a choice holds: few while little is known, many where it was the same before."""
        if drafts < UNKNOWN and self._step < WARM_UP:
            return 1
        if drafts < YOUNG and self._step < YOUNG * UNKNOWN:
            return HOLDS // 2
        known = (self.known.model(name, request).drafts for name in self._names)
        return self._hold if max(known, default=WELL_KNOWN) >= WELL_KNOWN else HOLDS

    def _decide(
        self, floor: Floor, requests: Sequence[Request]
    ) -> tuple[str, dict[Request, Asked], Probe | None]:
        """Why, what requests are asked for, and which of it is a probe."""
        offer = self._best.offer
        if floor.reason == "pair" and offer is not None:
            return "pair", {}, None
        asked: dict[Request, Asked] = {}
        if offer is not None and floor.reason is None:
            asked = self._asked(requests, offer.length)
        probe = self._probe(requests, asked)
        if probe is not None:
            request = requests[probe.line]
            asked[request] = self._tried(request, probe, asked.get(request))
            return "probe", asked, probe
        reason = GAIN if asked else NO_GAIN if offer is None else "stopped"
        return reason, asked, None

    def _tried(self, request: Request, probe: Probe, own: Asked | None) -> Asked:
        """A draft that is tried: alone, or, if it is cheap, before what was chosen."""
        if own is None or not self._market.goes_before(probe.drafter, own.names):
            return Asked(request, (probe.drafter,), probe.length, tried=probe.drafter)
        return replace(own, names=(probe.drafter, *own.names), enough=PROMISING, tried=probe.drafter)

    def _asked(self, requests: Sequence[Request], length: int) -> dict[Request, Asked]:
        """What requests are asked for. A drafter that nobody knows begins with one of them, not with all."""
        asked: dict[Request, Asked] = {}
        unknown: set[str] = set()
        for request in requests:
            wish = self._wishes.get(request, self._usual)
            left = min(length, request.max_output - request.num_output - 1)
            if not wish.names or left < 1:
                continue
            new = {name for name in wish.names if self.known.model(name, request).drafts < UNKNOWN}
            if not new & unknown:
                names = wish.names[-1:] if self._samples() else wish.names
                asked[request] = Asked(request, names, left, wish.enough, tried=min(new, default=""))
                unknown |= new
        return asked

    def _samples(self) -> bool:
        """Whether this step asks second drafters alone: where first ones have nothing, they have less."""
        return self._looked % SAMPLED == 0

    def _plan_of(self, asked: Asked) -> DraftPlan:
        """The plan of one request, which holds as long as the choice."""
        place = asked.request, asked.names, asked.length, asked.enough, asked.tried
        if place not in self._plans_made:
            request, (*firsts, last) = asked.request, asked.names
            plan = self._drafting(last, request, asked.length, asked.tried)
            for first in firsts:
                left = request.max_output - request.num_output - 1
                own = self._drafting(first, request, left, asked.tried)
                plan = replace(own, otherwise=plan, enough=asked.enough)
            self._plans_made[place] = plan
        return self._plans_made[place]

    def _drafting(self, name: str, request: Request, most: int, tried: str) -> DraftPlan:
        """The plan of one drafter: it leaves out what will not pay for its row, unless it is only tried."""
        least, plan = min(MOST_ASKED, self._market.least(name, self._best)), self.plans[name]
        said = self.known.model(name, request).calibration.said_for(least)
        usual = max(said, plan.least_chance, LOWEST)
        return replace(plan, least_chance=LOWEST if name == tried else usual).shrunk(most)

    def _probe(self, requests: Sequence[Request], asked: Mapping[Request, Asked]) -> Probe | None:
        """A drafter that was not chosen for a request, if there is time to spare for it."""
        if self._step < self._probe_at or self._reach <= POSSIBLE:
            return None
        self._probe_at = self._step + HOLDS
        line, drafter = self._probes.next(self._step, requests)
        request = requests[line]
        left = min(PROBED, self.plans[drafter].budget, request.max_output - request.num_output - 1)
        own = asked.get(request)
        if left < 1 or drafter in request.failed_drafters or (own is not None and drafter in own.names):
            return None
        seconds = float(self.known.drafts.seconds(drafter, 1, left, left))
        missed = 0.0
        if own is None or not self._market.goes_before(drafter, own.names):
            missed = 0.0 if own is None else self._market.expected(own.names[-1], line)
            seconds += self._market.prices.row(self._best.rows)
        seconds += self.known.drafts.prices(drafter)[-1] * self.known.backlog(drafter, request)
        rate = self._best.rate
        probe = Probe(key_of(request), line, drafter, left, missed + rate * seconds, rate)
        return probe if self._probes.can_afford(probe) else None

    def trim(self, step: StepPlan, parts: Sequence[Scheduled], trees: DraftTrees) -> DraftTrees:
        planned = step.record
        if not isinstance(planned, Planned):
            return trees
        if self._routine is not None and planned is self._routine.planned:
            drafters = [part.plan.drafter for part in parts]
            return trees if self._routine.judge is None else self._routine.judge.trim(drafters, trees)
        candidates: list[tuple[float, int]] = []  # (-chance, node) of those that may be left out
        for index, part in enumerate(parts):
            drafter = part.plan.drafter
            first, end = int(trees.offsets[index]), int(trees.offsets[index + 1])
            key = key_of(part.request)
            asked = planned.asked.get(key)
            if asked is None or drafter is None or drafter not in asked.names or first == end:
                continue
            asked.drafted(drafter, first, trees.chances_of(index), trees.tree_lists(index)[1])
            model = self.known.model(drafter, part.request)
            if drafter == asked.names[0]:  # where another one had too little, it is not what it is elsewhere
                said = sorted(asked.said, reverse=True)
                model.offer(key, part.request.segment, said, asked.length, part.plan.least_chance)
            asked.believed = model.chances(key, part.request.segment, asked.said)
            if trees.draws_of(index) is None:  # what was drawn must not decide what is verified of it
                candidates += zip([-chance for chance in asked.believed], range(first, end), strict=True)
        keep = self._worth_keeping(planned, sum(part.num_tokens for part in parts), trees, sorted(candidates))
        if keep is None:
            return trees
        for asked in planned.asked.values():
            asked.keep_only(keep)
        return trees.kept(keep)

    def _worth_keeping(
        self, planned: Planned, rows: int, trees: DraftTrees, candidates: Sequence[tuple[float, int]]
    ) -> BoolArray | None:
        """[nodes] whether a node is verified, in a pass that has so many other rows; None if all are."""
        prices, rows = self._market.prices, rows + trees.num_nodes - len(candidates)
        if rows != self._market.batch.rows:
            prices = PassPrices(replace(self._market.batch, rows=rows), self.known.steps, len(candidates))
        count = worth_verifying([-chance for chance, _ in candidates], prices, planned.choice.rate)
        if count == len(candidates):
            return None
        keep = np.ones(trees.num_nodes, dtype=np.bool_)
        keep[[node for _, node in candidates[count:]]] = False
        lessons = [own for own in planned.asked.values() if own.size and own.drafter == own.tried]
        keep[[own.first for own in lessons]] = True
        return keep

    def observe(self, step: StepPlan, stats: StepStats) -> None:
        if stats.failed or stats.rows == 0:
            return
        if isinstance(step.record, DraftPlan):
            if self._device is not None and stats.plan is not None:
                self._device.observe(stats.plan, stats)
            return
        planned: Planned | None = step.record
        self._probes.earn(self._earning * stats.total_time)
        is_quiet = planned is not None and not planned.asked and planned.choice.offer is None
        if stats.prefill_tokens == 0 and not (is_quiet and self._step % SELDOM):
            self.known.observe_pass(stats)
        if planned is None:
            return
        for draft in stats.drafts:
            self._gained[draft.segment] += draft.accepted
        if planned.asked or (not is_quiet and self._routine and planned is self._routine.planned):
            expected = planned.choice.tokens - self._market.plain.tokens
            if not stats.prefill_tokens and self._missing.add(
                expected, sum([draft.accepted for draft in stats.drafts]), stats.requests
            ):
                self._holds_until = self._step
        if planned.asked:
            self._observe_drafts(planned, stats)
        if planned.choice.offer is not None and stats.prefill_tokens == 0:
            worth = stats.new_tokens / stats.requests * self._market.plain.seconds
            planned.floor.observe(worth, stats.total_time)
            if planned.floor.reason is not None:
                self._routine = None

    def _observe_drafts(self, planned: Planned, stats: StepStats) -> None:
        """Take in what drafts cost, and what became of them."""
        drafts = {(draft.request_id, draft.child): draft for draft in stats.drafts}
        for key, asked in planned.asked.items():
            if key not in stats.asked:
                continue  # prompts have left no rows for its draft
            accepted = self._learn(key, asked, drafts.get(key))
            if planned.probe is not None and planned.probe.request == key:
                self._probes.observe(planned.probe, accepted)
        for call in stats.draft_calls:
            if call.drafter in self.plans:
                self.known.drafts.observe(call, planned.late(call.drafter))

    def _learn(self, key: Key, asked: Asked, draft: DraftFacts | None) -> int:
        """Take in what became of a request's draft: its accepted tokens."""
        if (first := asked.names[0]) != asked.drafter:  # it had nothing, or too little
            model = self.known.model(first, asked.request)
            model.offer(key, asked.request.segment, (), asked.length, asked.least_chance(first))
        if draft is None or not asked.said:
            return 0
        tried = [node for node, depth in enumerate(asked.depths) if depth <= draft.depth]
        path = set(draft.path)
        said, right = [asked.said[node] for node in tried], [node in path for node in tried]
        self.known.model(asked.drafter, asked.request).observe(key, asked.request.segment, said, right)
        return draft.accepted
