"""Plans passes that draft on the device: one plan for all requests, or plain decoding.

    tokens of a pass      1 + the expected accepted tokens of a chain (acceptance/chains.py); for a cascade
                          those of the lookup, and those of the head where the lookup finds nothing
    seconds of a pass     by plan, requests and context (cost/device_passes.py)
    catching up           of a head with prompts, spread over the tokens that requests will still get

The arm with most tokens per second is taken. What lookup drafts would bring beside plain passes is known from
shadow drafts (executors/shadow.py), which cost the device nothing. Other arms are tried by the explorer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from paceline.control.acceptance.chains import ChainAcceptance
from paceline.control.config import CONFIG
from paceline.control.controller import Load
from paceline.control.cost.device_passes import DevicePassCosts, request_bucket
from paceline.control.explorer import DeviceExplorer
from paceline.control.planner.arms import Arm, ArmEstimate, drafting_parts
from paceline.control.planner.device_load import DeviceLoad
from paceline.core.stats import StepStats
from paceline.core.trees import PLAIN, DraftPlan

if TYPE_CHECKING:
    from paceline.core.request import Request


def best_arm(arms: Mapping[DraftPlan, ArmEstimate], present: DraftPlan, is_trial: bool) -> DraftPlan:
    """The plan with most tokens per second. Plain decoding, and the present plan unless it was a trial, are
    left only for a gain beyond a margin."""
    config = CONFIG.device_planner
    rates = [(arm.rate / (config.start_margin if plan.budget else 1.0), plan) for plan, arm in arms.items()]
    _, best = max(rates, key=itemgetter(0))
    if is_trial or not best.budget or best == present or present not in arms:
        return best
    present_rate = arms[present].rate
    is_small_gain = arms[best].rate < config.switch_margin * present_rate
    return present if is_small_gain and present_rate > arms[PLAIN].rate else best


class DevicePlanner:
    """Chooses among a few arms, plain decoding first."""

    def __init__(self, arms: Sequence[Arm], acceptance: Mapping[tuple[str, bool], ChainAcceptance]) -> None:
        """`acceptance`: by drafter, with its prior; of greedy requests (True) and of others."""
        self.arms = {arm.plan: arm for arm in (Arm(PLAIN), *arms)}
        self._acceptance = acceptance
        self._costs = DevicePassCosts()
        # drafted beside plain passes; beside a head, lookups are known from its cascades
        lookups = [] if any(arm.attaches for arm in arms) else [arm.plan for arm in arms]
        self.shadow = max(lookups, key=lambda plan: plan.levels, default=None)
        self._explorer = DeviceExplorer(list(self.arms), self.shadow)
        self._load = DeviceLoad()
        per_token = CONFIG.device_passes.guess_per_token
        guesses = {plan: self.tokens(plan) / (1 + per_token * plan.levels) for plan in self.arms}
        self._plan = PLAIN if self.shadow else max(guesses, key=guesses.__getitem__)
        self._pass = self._next_choice = self._changed_at = 0  # counts passes
        self._hold = CONFIG.device_planner.hold  # passes, of the last choice
        self._is_trial = False
        self._counts = (0, 0)  # requests in the last pass, and those that still run after it
        self._expected_seconds = math.inf  # of a pass, at the last choice
        self.choices = 0  # so far
        self.reason = "gain"  # of the last choice
        self.gain: float | None = None  # of the last choice; None: one of its two arms was not timed

    @property
    def regret(self) -> float:
        """Seconds that were spent on trials."""
        return self._explorer.budget.regret

    def expect(self, plan: DraftPlan, seconds: Mapping[int, float], catch_up: float | None = None) -> None:
        """Add the seconds of a plan's passes by their number of requests, measured at start-up, and of its
        head's catching up per token."""
        for requests, each in seconds.items():
            self._costs.expect(plan, request_bucket(requests), each)
        if catch_up is not None:
            self._costs.expect_catch_up(catch_up)

    def choose(self, running: Sequence[Request], load: Load) -> DraftPlan:
        """The plan of the next pass over these requests. While some are being prefilled, it changes only with
        the load, and at the end of a batch not at all."""
        self._pass += 1
        is_due = self._pass >= self._next_choice
        if is_due or not self._load.has_only_ended(running, load):
            self.expect_requests(running, load)
        if is_due and self._load.is_settled:
            if self._load.is_ending:
                self._next_choice = self._pass + CONFIG.device_planner.hold
            else:
                self._choose()
        return self._plan

    def expect_requests(self, running: Sequence[Request], load: Load) -> DraftPlan:
        """The plan of the passes that will follow over these requests, some of which are being prefilled."""
        now = self._load
        if now.is_new(running, load):
            before, was_settled = (now.requests, now.context, now.greedy), now.is_settled
            now.note(running, load)
            if now.remaining < 1.0:
                for acceptance in self._acceptance.values():
                    acceptance.fade_recent(now.remaining)
            has_changed = (now.requests, now.context, now.greedy) != before
            if has_changed or now.starts_batch or not (was_settled and now.is_settled):
                self._changed_at = self._pass
            if now.starts_batch or (has_changed and not now.is_ending):
                if all(self._is_timed(plan) for plan in self._fitting()):
                    self._choose()
                else:  # it needs trials
                    settle = CONFIG.device_planner.settle_passes
                    self._next_choice = min(self._next_choice, self._pass + settle)
        return self._plan

    def _choose(self) -> None:
        """Choose the best arm, or one to try, and how long it holds."""
        config = CONFIG.device_planner
        arms = self._estimates()
        best = best_arm(arms, self._plan, self._is_trial)
        may_try = self._load.is_settled or self._load.starts_batch  # then a head need not be attached
        chosen = self._explorer.pick(best, arms) if may_try else best
        self._is_trial = chosen != best
        self.reason = "probe" if self._is_trial else "gain" if best.budget else "no gain"
        self.choices += 1
        self._expected_seconds = arms[chosen].seconds
        is_timed = arms[chosen].is_timed and arms[PLAIN].is_timed
        self.gain = arms[chosen].rate / arms[PLAIN].rate if is_timed else None
        stays = chosen == self._plan and not self._is_trial and not self._load.starts_batch
        if self.shadow is not None and not chosen.budget:
            stays = False  # shadow drafts can show a gain after any pass
        self._hold = min(2 * self._hold, config.max_hold) if stays else config.hold
        if chosen != self._plan:
            self._plan, self._changed_at = chosen, self._pass
        self._next_choice = self._pass + self._hold

    def _estimates(self) -> dict[DraftPlan, ArmEstimate]:
        """Of the arms that fit."""
        none, of_head = (0.0, 0.0), self._catch_up()
        return {
            plan: ArmEstimate(
                self.tokens(plan),
                self.seconds(plan),
                *(of_head if self.arms[plan].attaches else none),
                self._is_timed(plan),
            )
            for plan in self._fitting()
        }

    def _fitting(self) -> list[DraftPlan]:
        """Of the arms whose buffers are large enough for the present load."""
        return [plan for plan in self.arms if self._load.requests <= self._costs.max_requests(plan)]

    def _is_timed(self, plan: DraftPlan) -> bool:
        """Whether passes by this plan were timed under the present load."""
        return self._costs.knows(plan, self._load.requests, self._load.context)

    def _catch_up(self) -> tuple[float, float]:
        """Seconds until the head can draft for all present requests, and per token that they get.

        The host prepares it while the device prefills. If the head must be attached to requests that decode,
        passes in flight end first. In steady traffic the prompts of later requests count instead of the
        present ones: a share `replaced` of the cost.
        """
        load, each = self._load, self._costs.catch_up()
        is_attached = self.arms[self._plan].attaches or not load.is_decoding
        seconds = load.catch_up(is_attached) * each
        if not is_attached:
            seconds += CONFIG.device_planner.attach_cost * self.seconds(PLAIN)
        present, later = seconds / load.tokens_left, load.prompt_per_token * load.requests * each
        return seconds, present + load.replaced * (later - present)

    def observe(self, plan: DraftPlan, stats: StepStats) -> None:
        """Learn from a pass by a plan."""
        if plan not in self.arms:
            return
        shadow, greedy = stats.shadow, self._load.greedy
        if shadow is not None and (shadow.drafter, greedy) in self._acceptance:
            self._acceptance[shadow.drafter, greedy].add_shadow(shadow)
        asked = stats.requests
        for part in drafting_parts(plan):
            drafts = [draft for draft in stats.drafts if draft.drafter == part.drafter]
            tree = part if part.branching > 1 else None
            self._acceptance[part.drafter or "", greedy].add(drafts, asked, part.levels, tree)
            asked -= sum([draft.count for draft in drafts])
        # the first passes compile and capture graphs: that earns no time for trials
        longest = CONFIG.device_passes.max_outlier * self._expected_seconds
        self._explorer.observe(plan, self._pass, min(stats.period, longest))
        has_settled = self._pass - self._changed_at > CONFIG.device_planner.settle_passes
        before, self._counts = self._counts, (stats.requests, stats.running)
        # the device waits for the host where requests end; if others follow them, most passes are like that
        has_ended = self._counts != before and self._load.replaced < 0.5
        is_usual = (
            self._load.is_settled and not has_ended and not stats.prefill_tokens and not stats.disturbed
        )
        is_timed = has_settled and is_usual and plan == self._plan
        if is_timed and request_bucket(stats.requests) == self._load.requests:
            self._costs.observe(plan, self._load.requests, self._load.context, stats.period)

    def facts(self) -> dict[str, Any]:
        """What was learned, as JSON values."""
        chains = [[*key, acceptance.facts()] for key, acceptance in self._acceptance.items()]
        return {"costs": self._costs.facts(), "load": self._load.facts(), "chains": chains}

    def begin_with(self, facts: Mapping[str, Any]) -> None:
        """Start from these facts. KeyError, ValueError or TypeError if they make no sense."""
        self._costs.begin_with(facts["costs"], self.arms)
        self._load.begin_with(facts["load"])
        for drafter, greedy, chains in facts["chains"]:
            if (drafter, greedy) in self._acceptance:
                self._acceptance[drafter, greedy].begin_with(chains)

    def tokens(self, plan: DraftPlan) -> float:
        """Expected new tokens of a pass by this plan, for one request, as far as they shorten the time of
        all."""
        accepted, squared, share = 0.0, 0.0, 1.0  # `share` of the requests have no draft yet
        for part in drafting_parts(plan):
            acceptance = self._acceptance[part.drafter or "", self._load.greedy]
            own_accepted, own_squared = acceptance.moments(part)
            accepted += share * own_accepted
            squared += share * own_squared
            share -= share * acceptance.estimate().share
        return self._load.tokens(1.0 + accepted, squared - accepted**2)

    def seconds(self, plan: DraftPlan) -> float:
        """Expected seconds of a pass by this plan under the present load."""
        return self._costs.seconds(plan, self._load.requests, self._load.context)
