"""The controller of chains that a decoder drafts where it runs: one length for all requests, 0 among them.

    tokens of a pass      1 + the chances that chains are right down to each depth, counted lately
    seconds of a pass     by length and number of requests: measured at the start, then as passes pass

The length with most tokens per second is taken. What was not taken is tried again now and then, for a share
of the time that is fixed beforehand.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from paceline.control.choice import Choice
from paceline.control.controller import Controller, Load
from paceline.control.decision import Decision
from paceline.core.stats import ControlFacts
from paceline.core.trees import PLAIN, DraftPlan

if TYPE_CHECKING:
    from paceline.core.request import Request
    from paceline.core.stats import DraftFacts, StepStats

LENGTHS = (2, 3, 5, 7)  # of chains that are offered beside plain decoding
USUAL_CHANCE = 0.7  # of a guess whose like was never seen, given those before it
BELIEVED = 12.0  # drafts that count for what is thought before the first
MEMORY = 0.97  # of counts, from step to step
PER_TOKEN = 0.1  # plain passes that a drafted token adds to one, as long as nobody has seen it
TIME_RATE = 0.05  # how far a pass moves the time of its like, in the long run
EXPECTED = 3  # passes that a time counts for which was measured at the start
MARGIN = 1.04  # times plain decoding that drafts must promise to begin
BETTER = 1.02  # times: for less no other length is taken
HOLDS, YOUNG, YOUNG_HOLDS = 16, 48, 4  # steps that a choice holds; in the first steps fewer
SETTLES = 2  # steps after a change whose times tell nothing: passes before it are read
SHARE = 0.005  # of all time, for trying
TRIED, SWITCH = 6, 4  # steps of a trial, and plain passes that it takes to get there and back


class LengthController(Controller):
    """Gives all requests that leave it to the controller chains of one length by one drafter."""

    def __init__(
        self,
        drafter: str,
        most: int,
        chances: Sequence[float] = (),
        log: Callable[[Decision], None] | None = None,
    ) -> None:
        """At most so many tokens. `chances` are what is thought at first: each guess, given those before."""
        lengths = sorted({min(length, most) for length in LENGTHS})
        self._plans = {0: PLAIN, **{length: DraftPlan(drafter, length) for length in lengths}}
        self._times = PassTimes()
        self._chances = ChainChances(lengths[-1], chances)
        self._log = log
        self._length = max(
            lengths, key=lambda length: self._chances.tokens(length) / (1 + PER_TOKEN * length)
        )
        self._step = self._next_choice = self._changed = 0
        self._load = 1  # bucket of requests that the length was chosen for
        self._ahead = True  # whether the last step ran ahead
        self._tried = dict.fromkeys(self._plans, 0)  # the last step of each length
        self._trial = False
        self._account = self._regret = 0.0  # seconds: for trials, and lost by them
        self._reason, self._gain = "gain", 1.0  # of the last choice

    def plans_ahead(self) -> Sequence[DraftPlan]:
        return list(self._plans.values())

    def expect(self, plan: DraftPlan, seconds: Mapping[int, float]) -> None:
        for requests, each in seconds.items():
            self._times.expect((True, plan.levels, _bucket(requests)), each)

    def plan(self, running: Sequence[Request], load: Load) -> list[DraftPlan]:
        if not running:
            return []
        self._step += 1
        bucket = _bucket(len(running))
        if bucket != self._load:
            self._load, self._changed = bucket, self._step
            self._next_choice = min(self._next_choice, self._step + SETTLES)
        if self._step >= self._next_choice and all(request.num_pending == 1 for request in running):
            self._choose(load)
        plan = self._plans[self._length]
        return [plan if request.plan is None else request.plan for request in running]

    def _choose(self, load: Load) -> None:
        rates = {length: self._tokens(length) / self._seconds(length) for length in self._plans}
        best = max(rates, key=lambda length: rates[length] * (MARGIN if length == 0 else 1))
        if best and rates[best] < BETTER * rates.get(self._length, 0) and not self._trial:
            best = self._length if rates[self._length] > rates[0] else best
        chosen = self._to_try(best)
        self._trial = chosen != best
        self._reason = "probe" if self._trial else "gain" if best else "no gain"
        self._gain = rates[chosen] / rates[0]
        if chosen != self._length:
            self._length, self._changed = chosen, self._step
        young = self._step <= YOUNG
        self._next_choice = self._step + (TRIED + SETTLES if self._trial else YOUNG_HOLDS if young else HOLDS)
        if self._log is not None:
            drafts = (("all", self._plans[chosen].drafter or "", chosen),) if chosen else ()
            expected, plain = self._expected(chosen, load), self._expected(0, load)
            self._log(Decision(self._step, self._reason, load, drafts, expected, plain))

    def _to_try(self, best: int) -> int:
        """A length that was never timed under this load, or one that there is time to try; else the best."""
        for length in self._plans:
            if not self._times.knows((self._ahead, length, self._load)):
                return length
        others = [length for length in self._plans if length != best]
        if best == 0:
            others = others[:1]  # what becomes of short chains tells enough
        oldest = min(others, key=self._tried.__getitem__)
        token = self._seconds(best) / self._tokens(best)
        lost = TRIED * max(0.0, self._seconds(oldest) - token)  # if it brings nothing
        lost += SWITCH * self._seconds(0)
        if self._account < lost:
            return best
        self._account -= lost
        self._regret += lost
        return oldest

    def observe(self, stats: StepStats) -> None:
        self._chances.fade()
        drafted = max([draft.nodes for draft in stats.drafts], default=0)
        if stats.drafts:
            self._chances.add(stats.drafts)
        self._tried[self._length] = self._step
        self._account += SHARE * stats.total_time
        # a prompt that nobody decodes beside has a step of its own: those behind it run ahead again
        if stats.ahead != self._ahead and not stats.prefill_tokens:
            self._ahead, self._changed = stats.ahead, self._step
        settled = self._step - self._changed > SETTLES and drafted == self._length
        if settled and not stats.prefill_tokens and _bucket(stats.requests) == self._load:
            self._times.observe((self._ahead, self._length, self._load), stats.total_time)

    def facts(self) -> ControlFacts:
        return ControlFacts(self._reason, self._regret, self._gain, frozenset())

    def _tokens(self, length: int) -> float:
        return self._chances.tokens(length)

    def _seconds(self, length: int) -> float:
        return self._times.seconds((self._ahead, length, self._load))

    def _expected(self, length: int, load: Load) -> Choice:
        return Choice(None, load.running * self._tokens(length), self._seconds(length))


class ChainChances:
    """How often chains were right at each depth, given that they were right before it, lately."""

    def __init__(self, longest: int, thought: Sequence[float] = ()) -> None:
        known = [*thought[:longest]] or [USUAL_CHANCE]
        chances = np.array(known + known[-1:] * (longest - len(known)))
        self._tries = BELIEVED * np.cumprod([1.0, *chances[:-1]])  # [longest]
        self._hits = self._tries * chances  # [longest]

    def fade(self) -> None:
        """A step has passed."""
        kept = np.where(self._tries > 1, MEMORY, 1.0)  # what is known does not fade to nothing
        self._tries *= kept
        self._hits *= kept

    def add(self, drafts: Sequence[DraftFacts]) -> None:
        """Count what became of chains."""
        longest = len(self._tries)
        accepted = np.bincount([draft.accepted for draft in drafts], minlength=longest + 1)
        ends = np.bincount([min(draft.accepted + 1, draft.depth) for draft in drafts], minlength=longest + 1)
        self._hits += accepted[::-1].cumsum()[::-1][1 : longest + 1]
        self._tries += ends[::-1].cumsum()[::-1][1 : longest + 1]

    def tokens(self, length: int) -> float:
        """Expected of a pass with chains of this length, for one request."""
        chances = self._hits / np.maximum(self._tries, 1e-9)
        return float(1.0 + np.cumprod(chances[:length]).sum())


Kind = tuple[bool, int, int]  # of a pass: whether it ran ahead, the length of chains, the bucket of requests


class PassTimes:
    """Seconds of passes. What was never seen is thought to be like what was."""

    def __init__(self) -> None:
        self._known: dict[Kind, tuple[float, int]] = {}  # and how many passes that is from

    def knows(self, kind: Kind) -> bool:
        """Whether such a pass was ever timed."""
        return kind in self._known

    def expect(self, kind: Kind, seconds: float) -> None:
        """Take in what was measured when nothing else ran."""
        self._known[kind] = seconds, EXPECTED

    def observe(self, kind: Kind, seconds: float) -> None:
        """Take in a pass. One that took much longer than usual was held up."""
        usual, count = self._known.get(kind, (seconds, 0))
        rate = max(TIME_RATE, 1 / (1 + count))
        self._known[kind] = usual + rate * (min(seconds, 2 * usual) - usual), count + 1

    def seconds(self, kind: Kind) -> float:
        """Of a pass of this kind."""
        ahead, length, bucket = kind
        if kind in self._known:
            return self._known[kind][0]
        if not self._known:
            return 1 + PER_TOKEN * length

        def distance(other: Kind) -> tuple[bool, float, int]:
            return other[0] != ahead, abs(math.log2(other[2] / bucket)), abs(other[1] - length)

        nearest = min(self._known, key=distance)
        return self._known[nearest][0] * (1 + PER_TOKEN * length) / (1 + PER_TOKEN * nearest[1])


def chances_of(known: Mapping[str, Any], drafter: str) -> list[float]:
    """What is known of a drafter's guesses for greedy requests: each one's chance, given those before it."""
    model = known.get("models", {}).get(f"{drafter} greedy", {"said": []})
    if not model["said"]:
        return []
    reached = np.mean(model["said"], axis=0)  # [depth] that a chain is right down to it
    return [min(1.0, float(chance)) for chance in reached / np.array([1.0, *reached[:-1]])]


def _bucket(requests: int) -> int:
    """The power of two that holds them."""
    return 1 << (requests - 1).bit_length()
