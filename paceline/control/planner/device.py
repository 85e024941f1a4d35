"""Plans passes that draft on the device: one drafter and one length for all requests, or plain decoding.

    tokens of a pass      1 + the expected accepted tokens of a chain (acceptance/chains.py)
    seconds of a pass     by plan, requests and context (cost/device_passes.py)

The arm with most tokens per second is taken. What lookup drafts would bring beside plain passes is known from
shadow drafts (engine/shadow.py), which cost the device nothing. Other arms are tried by the explorer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from paceline.control.acceptance.chains import ChainAcceptance
from paceline.control.config import CONFIG
from paceline.control.cost.device_passes import DevicePassCosts, context_bucket, request_bucket
from paceline.control.explorer import DeviceExplorer
from paceline.core.stats import StepStats
from paceline.core.trees import PLAIN, DraftPlan


@dataclass(frozen=True)
class Arm:
    """A way to draft on the device."""

    plan: DraftPlan
    attaches: bool = False  # a head: it must compute all tokens of a request before it can draft for it


@dataclass(frozen=True, slots=True)
class ArmEstimate:
    """What a pass by an arm's plan is expected to give under the present load."""

    arm: Arm
    tokens: float  # per request
    seconds: float
    is_timed: bool  # such passes were timed, now or at start-up

    @property
    def rate(self) -> float:
        """Tokens per second of one request."""
        return self.tokens / self.seconds


def best_arm(arms: Mapping[DraftPlan, ArmEstimate], present: DraftPlan, is_trial: bool) -> DraftPlan:
    """The plan with most tokens per second. Plain decoding, and the present plan unless it was a trial, are
    left only for a gain beyond a margin."""
    config = CONFIG.device_planner
    rates = {plan: estimate.rate for plan, estimate in arms.items()}
    best = max(rates, key=lambda plan: rates[plan] * (config.start_margin if plan == PLAIN else 1))
    present_rate = rates.get(present, 0.0)
    is_small_gain = rates[best] < config.switch_margin * present_rate and not is_trial
    return present if best.budget and is_small_gain and present_rate > rates[PLAIN] else best


class DevicePlanner:
    """Chooses among a few arms, plain decoding first."""

    def __init__(self, arms: Sequence[Arm], acceptance: Mapping[str, ChainAcceptance]) -> None:
        """`acceptance`: by drafter, with its prior."""
        self.arms = {arm.plan: arm for arm in (Arm(PLAIN), *arms)}
        self._acceptance = acceptance
        self._costs = DevicePassCosts()
        lookups = [arm.plan for arm in arms if not arm.attaches]
        self.shadow = max(lookups, key=lambda plan: plan.levels, default=None)  # drafted beside plain passes
        self._explorer = DeviceExplorer(list(self.arms), self.shadow)
        per_token = CONFIG.device_passes.guess_per_token
        guesses = {plan: self.tokens(plan) / (1 + per_token * plan.levels) for plan in self.arms}
        self._plan = PLAIN if self.shadow else max(guesses, key=guesses.__getitem__)
        self._pass = self._next_choice = self._changed_at = 0  # counts passes
        self._load = (1, 0)  # buckets of requests and context that the plan was chosen for
        self._is_trial = False
        self.reason = "gain"  # of the last choice
        self.gain: float | None = None  # of the last choice; None: one of its two arms was not timed

    @property
    def regret(self) -> float:
        """Seconds that were spent on trials."""
        return self._explorer.budget.regret

    def expect(self, plan: DraftPlan, seconds: Mapping[int, float]) -> None:
        """Add the seconds of a plan's passes by their number of requests, measured at start-up."""
        for requests, each in seconds.items():
            self._costs.expect(plan, request_bucket(requests), each)

    def choose(self, requests: int, keys: float, settled: bool) -> DraftPlan:
        """The plan of the next pass, over `requests` with a mean of `keys` computed tokens.

        The plan stays while requests are not `settled`: some still have to be prefilled.
        """
        self._pass += 1
        load = request_bucket(requests), context_bucket(keys)
        if load != self._load:
            self._load, self._changed_at = load, self._pass
            self._next_choice = min(self._next_choice, self._pass + CONFIG.device_planner.settle_passes)
        if settled and self._pass >= self._next_choice:
            self._choose()
        return self._plan

    def _choose(self) -> None:
        """Choose the best arm, or one to try, and how long it holds."""
        config = CONFIG.device_planner
        arms = self._estimates()
        best = best_arm(arms, self._plan, self._is_trial)
        chosen = self._explorer.pick(best, arms)
        self._is_trial = chosen != best
        self.reason = "probe" if self._is_trial else "gain" if best.budget else "no gain"
        is_timed = arms[chosen].is_timed and arms[PLAIN].is_timed
        self.gain = arms[chosen].rate / arms[PLAIN].rate if is_timed else None
        if chosen != self._plan:
            self._plan, self._changed_at = chosen, self._pass
        hold = config.young_hold if self._pass <= config.young_passes else config.hold
        trial = CONFIG.explorer.trial_passes + config.settle_passes
        self._next_choice = self._pass + (trial if self._is_trial else hold)

    def _estimates(self) -> dict[DraftPlan, ArmEstimate]:
        """Of the arms whose buffers are large enough for the present load."""
        return {
            plan: ArmEstimate(
                arm, self.tokens(plan), self.seconds(plan), self._costs.knows(plan, *self._load)
            )
            for plan, arm in self.arms.items()
            if self._load[0] <= self._costs.max_requests(plan)
        }

    def observe(self, plan: DraftPlan, stats: StepStats) -> None:
        """Learn from a pass by a plan."""
        if plan not in self.arms:
            return
        if stats.shadow is not None and stats.shadow.drafter in self._acceptance:
            self._acceptance[stats.shadow.drafter].add_shadow(stats.shadow)
        if plan.drafter is not None:
            self._acceptance[plan.drafter].add(stats.drafts, stats.requests, plan.levels)
        # the first passes compile and capture graphs: that earns no time for trials
        usual = CONFIG.device_passes.max_outlier * self.seconds(plan)
        self._explorer.observe(plan, self._pass, min(stats.total_time, usual))
        is_settled = self._pass - self._changed_at > CONFIG.device_planner.settle_passes
        is_timed = is_settled and plan == self._plan and not stats.prefill_tokens
        if is_timed and request_bucket(stats.requests) == self._load[0]:
            self._costs.observe(plan, *self._load, stats.total_time)

    def tokens(self, plan: DraftPlan) -> float:
        """Expected new tokens of a pass by this plan, for one request."""
        return 1.0 if plan.drafter is None else 1.0 + self._acceptance[plan.drafter].accepted(plan.levels)

    def seconds(self, plan: DraftPlan) -> float:
        """Expected seconds of a pass by this plan under the present load."""
        return self._costs.seconds(plan, *self._load)
