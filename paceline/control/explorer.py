"""The explorer: tries what was not chosen, for a share of the time that is fixed beforehand.

What is not drafted is not learned about. Every step earns a little time (TimeBudget). When that pays for a
draft that is not the best choice, even if nothing of it is accepted, one is tried. Through the host that is
a single draft (a probe), and what it gains beyond its cost is paid back; on the device it is a few passes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.control.config import CONFIG
from paceline.control.planner.arms import ArmEstimate
from paceline.core.trees import PLAIN, DraftPlan

if TYPE_CHECKING:
    from paceline.core.request import Request


class TimeBudget:
    """Seconds that may be spent on exploring."""

    def __init__(self, share: float, credit: float = 0.0, max_saved: float | None = None) -> None:
        """`share` of all time, `credit` seconds in advance; at most `max_saved` steps' time is saved up."""
        self._share = share
        self._max_saved = max_saved
        self._account = credit  # seconds
        self.regret = 0.0  # seconds that were spent, less those that were gained

    def earn(self, seconds: float, wanted: float = 0.0) -> None:
        """Add the share of a step's time. Up to `wanted` seconds are saved up in any case."""
        account = self._account + self._share * seconds
        if self._max_saved is not None:
            account = min(account, max(self._account, self._max_saved * seconds, wanted))
        self._account = account

    def can_afford(self, seconds: float) -> bool:
        return self._account >= seconds

    def spend(self, seconds: float) -> None:
        """Pay; a negative amount was gained."""
        self._account -= seconds
        self.regret += seconds


@dataclass(frozen=True, slots=True)
class Probe:
    """One draft that is tried."""

    request: tuple[str, int]
    line: int  # index of the request in the batch
    drafter: str
    length: int
    needed: float  # accepted tokens that pay for it
    rate: float  # tokens per second of the best choice


class Explorer:
    """Probes of steps through the host. A probe that paid for itself is repeated at once: this is how a
    drafter that has become good is noticed within a few steps."""

    def __init__(self, drafters: Sequence[str], plain: float) -> None:
        """`plain`: seconds of a pass without drafts."""
        config = CONFIG.explorer
        self.budget = TimeBudget(config.share, config.initial_credit * plain, config.max_saved)
        self._drafters = list(drafters)
        self._turn = 0
        self._winner: tuple[tuple[str, int], str] | None = None  # request and drafter of a probe that paid

    @property
    def has_winner(self) -> bool:
        """Whether the last probe paid for itself."""
        return self._winner is not None

    def next(self, step: int, requests: Sequence[Request]) -> tuple[int, str]:
        """The index of a request, and a drafter to try for it: the last winner, or the next in turn."""
        if self._winner is not None:
            (request_id, child), drafter = self._winner
            self._winner = None
            for line, request in enumerate(requests):
                if request.request_id == request_id and request.child == child:
                    return line, drafter
        self._turn += 1
        return step % len(requests), self._drafters[self._turn % len(self._drafters)]

    def can_afford(self, probe: Probe) -> bool:
        """Whether there is time for a probe, even if it brings nothing."""
        return self.budget.can_afford(max(0.0, probe.needed) / probe.rate)

    def observe(self, probe: Probe, accepted: int) -> None:
        """Pay for a probe, less what it brought."""
        if accepted > probe.needed:
            self._winner = (probe.request, probe.drafter)
        self.budget.spend((probe.needed - accepted) / probe.rate)


class DeviceExplorer:
    """Trials of other plans for passes on the device."""

    def __init__(self, plans: Sequence[DraftPlan], shadow: DraftPlan | None) -> None:
        """`shadow`: the plan of the shadow drafts beside plain passes, which spare trials."""
        self.budget = TimeBudget(CONFIG.explorer.device_share, max_saved=CONFIG.explorer.device_saved)
        self._shadow = shadow
        self._last_used = dict.fromkeys(plans, 0)  # the last pass by each plan
        self._wanted = 0.0  # seconds of the trial that there was no time for

    def observe(self, plan: DraftPlan, number: int, seconds: float) -> None:
        """Note the pass of this number."""
        self._last_used[plan] = number
        self.budget.earn(seconds, self._wanted)

    def pick(self, best: DraftPlan, arms: Mapping[DraftPlan, ArmEstimate]) -> DraftPlan:
        """A plan whose passes were never timed under this load, the one that was not used for longest if
        there is time to try it, or `best`. Time for a trial is paid here: what it is expected to lose. If it
        loses more, the acceptance model expects less of the plan, and the next trial costs more."""
        for plan, estimate in arms.items():
            if not estimate.is_timed:
                return plan
        # of each drafter the shortest plan tells enough: what longer drafts would bring follows from it
        others = {plan.drafter: plan for plan in reversed(list(arms)) if self._would_teach(plan, best)}
        if not others:
            return best
        oldest = min(others.values(), key=self._last_used.__getitem__)
        present, other = arms[best], arms[oldest]
        lost = other.catch_up + CONFIG.device_planner.hold * max(
            0.0, other.seconds - other.tokens / present.rate
        )
        if not self.budget.can_afford(lost):
            self._wanted = lost
            return best
        self._wanted = 0.0
        self.budget.spend(lost)
        return oldest

    def _would_teach(self, plan: DraftPlan, best: DraftPlan) -> bool:
        """Whether passes by a plan say what those by the best one do not."""
        is_shadowed = self._shadow is not None and plan.drafter == self._shadow.drafter and best == PLAIN
        return plan.budget > 0 and plan.drafter != best.drafter and not is_shadowed
