"""The controller that drafts where it pays: for each step, who drafts for whom, and how much.

plan      costs and chances -> the choice with most tokens per second, plain decoding among them
          the floor may make the step plain; a little time is kept for trying what was not chosen
observe   what the step cost and what became of its drafts -> costs, chances, floor
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from paceline.control.acceptance import AcceptanceModel
from paceline.control.choice import Batch, Choice, Prospect, choose, priced
from paceline.control.controller import Controller, Load
from paceline.control.cost import Call, DraftCosts, StepCosts
from paceline.control.decision import Decision
from paceline.control.floor import Floor
from paceline.control.probes import Probe, Probes
from paceline.control.segments import SegmentGains
from paceline.draft.trees import PLAIN, DraftPlan

if TYPE_CHECKING:
    from paceline.engine.request import Request
    from paceline.engine.stats import DraftFacts, StepStats

HOLDS = 16  # steps that a choice holds while the same requests run
PROBE = 1  # tokens that another drafter than the chosen one is tried with: the cheapest that can be right
UNKNOWN = 4  # drafts until a drafter is known a little
WARM_UP = 16  # steps in which every one teaches much
SHORT = 3  # tokens that a request may still have: below, a draft has nothing to save


@dataclass(frozen=True, slots=True)
class Planned:
    """What was decided for the step that runs now."""

    asked: dict[tuple[str, int], tuple[str, str, int]]  # request: its segment, drafter and length
    plain_seconds: float  # what each of its tokens would take without drafts, times the requests
    floor: Floor
    counts: bool  # whether drafting was promised to pay, so that the floor has something to judge
    probe: Probe | None


class AutoController(Controller):
    """Chooses drafters and lengths by expected tokens per second. Requests that ask for a plan keep it."""

    def __init__(
        self,
        plans: Mapping[str, DraftPlan],
        steps: StepCosts,
        *,
        max_rows: int,
        log: Callable[[Decision], None] | None = None,
    ) -> None:
        """`plans` are those of the drafters that may be chosen, each with the most it may draft."""
        assert plans, "there must be something to choose from"
        self._plans = {name: replace(plan, branching=1, depth=None) for name, plan in plans.items()}
        self._steps = steps
        self._drafts = DraftCosts(list(plans))
        self._depth = max(plan.budget for plan in plans.values())
        self._models = {name: AcceptanceModel(plan.levels) for name, plan in self._plans.items()}
        self._max_rows = max_rows
        self._floors: dict[int, Floor] = {}  # by the number of running requests, in powers of two
        self._probes = Probes(list(plans))
        self._segments = SegmentGains()
        self._log = log
        self._step = 0
        self._chosen_at = self._holds_until = 0
        self._chosen_for: list[Request] = []
        self._planned: Planned | None = None
        self.reasons: Counter[str] = Counter()  # steps, by why they were planned as they were

    @property
    def regret(self) -> float:
        """Seconds that were spent on trying what turned out worse."""
        return self._probes.regret

    @property
    def poor_segments(self) -> frozenset[str]:
        """Those that were said to gain little."""
        return self._segments.poor

    def plan(self, running: Sequence[Request], load: Load) -> list[DraftPlan]:
        self._step += 1
        self._planned = None
        plans = [PLAIN if request.plan is None else request.plan for request in running]
        places = [place for place, request in enumerate(running) if _is_open(request)]
        if not places:
            return plans
        requests = [running[place] for place in places]
        if requests != self._chosen_for or self._step >= self._holds_until or self._probes.won:
            self._choose(requests, running, plans)
        floor = self._floors.setdefault(load.running.bit_length(), Floor())
        floor.expect(self._best.rate / self._plain.rate)
        reason, lengths, probe = self._decide(floor)
        asked: dict[tuple[str, int], tuple[str, str, int]] = {}
        for place, request, (name, most) in zip(places, requests, lengths, strict=True):
            length = min(most, request.max_output - request.num_output - 1)
            if length:
                plans[place] = self._plans[name].shrunk(length)
                asked[_key(request)] = (request.segment, name, length)
        self._planned = Planned(asked, self._plain.seconds, floor, self._best is not self._plain, probe)
        self.reasons[reason] += 1
        if self._log is not None:
            self._log(self._decision(reason, load, asked))
        return plans

    def _choose(
        self, requests: list[Request], running: Sequence[Request], plans: Sequence[DraftPlan]
    ) -> None:
        """Find the best choice for these requests."""
        if requests != self._chosen_for:
            self._forget_others(running)
        self._chosen_for, self._chosen_at = requests, self._step
        self._chosen_segments = Counter(request.segment for request in requests)
        rows = sum(request.num_pending for request in running) + sum(plan.budget for plan in plans)
        decoding = sum(request.num_pending == 1 for request in running)
        keys = sum(request.num_computed for request in requests) / len(requests)
        self._batch = Batch(float(decoding), float(min(rows, self._max_rows)), keys)
        self._prospects = {name: self._prospect(name, requests) for name in self._plans}
        self._best, self._plain = choose(self._batch, self._prospects, self._steps, self._drafts)
        self._holds_until = self._step + (1 if self._step < WARM_UP else HOLDS)

    def _prospect(self, name: str, requests: Sequence[Request]) -> Prospect:
        """What a drafter is expected to do for these requests; nothing for those it failed for."""
        known = [(_key(request), request.segment) for request in requests]
        found = self._models[name].expected(known)
        tokens = np.zeros((len(requests), self._depth))
        rows = np.zeros((len(requests), self._depth))
        depth = self._models[name].depth
        tokens[:, :depth], rows[:, :depth] = found
        for line, request in enumerate(requests):
            useful = request.max_output - request.num_output - 1
            if name in request.failed_drafters:
                useful = 0
            tokens[line, useful:] = rows[line, useful:] = 0.0
        return Prospect(tokens, rows)

    def _decide(self, floor: Floor) -> tuple[str, list[tuple[str, int]], Probe | None]:
        """Why, what each request drafts, and what of it is a probe."""
        plain = [("", 0)] * len(self._chosen_for)
        if floor.reason == "pair" and self._best is not self._plain:
            return "pair", plain, None
        best = self._plain if floor.reason else self._best
        lengths = self._without_unknown(best)
        probe = self._probe(best, lengths)
        if probe is not None:
            lengths[probe.line] = (probe.drafter, probe.length)
            return "probe", lengths, probe
        drafts = any(best.lengths)
        reason = "gain" if drafts else "no gain" if self._best is self._plain else "stopped"
        return reason, lengths if drafts else plain, None

    def _without_unknown(self, best: Choice) -> list[tuple[str, int]]:
        """What each request drafts. A drafter that nobody knows begins with one request, not with all."""
        lengths = list(zip(best.drafters, best.lengths, strict=True))
        for name, model in self._models.items():
            if model.drafts < UNKNOWN:
                own = [line for line, (who, length) in enumerate(lengths) if length and who == name]
                for line in own[1:]:
                    lengths[line] = ("", 0)
        return lengths

    def _probe(self, best: Choice, lengths: Sequence[tuple[str, int]]) -> Probe | None:
        """Another drafter or a longer draft than the best choice, if there is time to spare for it."""
        if self._chosen_at != self._step:
            return None
        line, drafter = self._probes.next(self._step, self._chosen_for)
        tried, (name, length) = list(lengths), lengths[line]
        most = int(np.count_nonzero(self._prospects[drafter].rows[line]))  # 0: it must not draft for this one
        longer = min(most, 2 * length + 1 if name == drafter else PROBE)
        if longer == 0 or (name == drafter and longer <= length):
            return None
        tried[line] = (drafter, longer)
        step = priced(tried, self._batch, self._prospects, self._steps, self._drafts)
        missed = float(self._prospects[name].tokens[line, :length].sum()) if length else 0.0
        needed = missed + (step.seconds - best.seconds) * best.rate
        probe = Probe(_key(self._chosen_for[line]), line, drafter, longer, needed, best.rate)
        return probe if self._probes.can_afford(probe) else None

    def observe(self, stats: StepStats) -> None:
        planned, self._planned = self._planned, None
        if stats.failed or stats.rows == 0:
            return
        drafts = {(draft.request_id, draft.child): draft for draft in stats.drafts}
        if stats.prefill_tokens == 0:
            self._steps.observe(stats.rows, stats.attended, stats.total_time - stats.draft_time)
        if planned is None:
            return
        gained = dict.fromkeys(self._chosen_segments, 0)
        for key, (segment, name, length) in planned.asked.items():
            draft = drafts.get(key)
            given = 0 if draft is None else min(draft.depth, length)
            accepted = 0 if draft is None else min(draft.accepted, given)
            self._models[name].observe(key, segment, length, given, accepted)
            gained[segment] += accepted
            if planned.probe is not None and planned.probe.request == key:
                self._probes.observe(planned.probe, accepted)
        for segment, requests in self._chosen_segments.items():
            self._segments.observe(segment, requests, gained[segment])
        self._probes.earn(stats.total_time)
        if planned.asked and drafts.keys() <= planned.asked.keys():  # else some of the time is of others
            self._drafts.observe(_calls(planned, drafts), stats.draft_time)
        if planned.counts and stats.prefill_tokens == 0:
            worth = stats.new_tokens / stats.requests * planned.plain_seconds
            planned.floor.observe(worth, stats.total_time)

    def _forget_others(self, running: Sequence[Request]) -> None:
        """Let go of requests that have ended."""
        keys = {_key(request) for request in running}
        for model in self._models.values():
            model.keep_only(keys)

    def _decision(
        self, reason: str, load: Load, asked: Mapping[tuple[str, int], tuple[str, str, int]]
    ) -> Decision:
        step = self._best if reason in ("gain", "probe") else self._plain
        return Decision(
            step=self._step,
            reason=reason,
            running=load.running,
            waiting=load.waiting,
            drafts=tuple((f"{key[0]}#{key[1]}", name, length) for key, (_, name, length) in asked.items()),
            tokens=step.tokens,
            seconds=step.seconds,
            plain_tokens=self._plain.tokens,
            plain_seconds=self._plain.seconds,
        )


def _key(request: Request) -> tuple[str, int]:
    return request.request_id, request.child


def _is_open(request: Request) -> bool:
    """Whether it is for the controller to say what a request drafts in this step."""
    if request.plan is not None or request.num_pending != 1:
        return False
    return request.max_output - request.num_output >= SHORT


def _calls(planned: Planned, drafts: Mapping[tuple[str, int], DraftFacts]) -> list[Call]:
    """The calls of drafters in a step."""
    sizes: dict[str, list[tuple[int, int]]] = {}
    for key, (_, name, _) in planned.asked.items():
        draft = drafts.get(key)
        sizes.setdefault(name, []).append((0, 0) if draft is None else (draft.depth, draft.nodes))
    return [
        Call(name, len(own), max(depth for depth, _ in own), sum(nodes for _, nodes in own))
        for name, own in sizes.items()
    ]
