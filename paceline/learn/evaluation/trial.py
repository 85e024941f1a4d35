"""The trial: a head gets a small share of the live steps, and its tokens per second are compared.

It takes turns with the current head, because two heads at once would need twice the memory for weights and
pages. A turn is a number of decode steps, so it takes longer on an idle server. Only steps with the same
number of requests are compared, so the load of two turns need not be the same. It is the A/B test of the
controller's guard, with another head in the place of plain decoding. Medians of step times are compared: on a
machine with other work, means of a hundred steps differ by more than two heads do.
"""

from __future__ import annotations

import math
import statistics
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

from paceline.core.request import Request
from paceline.core.stats import StepStats
from paceline.engine.output_processor import Delta

MIN_SECONDS = 1e-9  # of a step, for clocks that stand still
MAX_TURN_RATIO = 8  # a turn ends after this many times `turn_steps`, even if the head drafted in few of them
MIN_USE = 0.5  # a head that drafts in a smaller share of steps than this times the other's is worse
LITTLE_USE_SPEED = math.log(0.8)  # log of the speed ratio that such a turn counts as


@dataclass(frozen=True)
class TrialConfig:
    """How long a trial takes."""

    # of the tried head: with its drafts, or MAX_TURN_RATIO times as many in all. A pair of turns of 64 and
    # 576 steps has the same error as one of 128 and 128
    turn_steps: int = 64
    share: float = 0.1  # of the decode steps that the tried head gets
    skipped_steps: int = 8  # at the start of a turn: requests catch up with the new head
    min_pairs: int = 4  # turns of each head before anything is decided
    max_pairs: int = 24  # without a significant gain by then, the tried head has lost
    look_seconds: float = 0.25  # between two checks of whether a turn has ended

    def present_steps(self, tried: int) -> int:
        """The current head's decode steps after this many steps of the tried head."""
        return round(tried * (1 - self.share) / self.share)


@dataclass
class Sums:
    """Steps with the same number of requests."""

    tokens: int = 0
    seconds: list[float] = field(default_factory=list)  # of each step

    @property
    def speed(self) -> float:
        """Tokens per second, by the median step: a step that waited for a core says nothing about a head."""
        return self.tokens / len(self.seconds) / statistics.median(self.seconds)


@dataclass
class Turn:
    """A head's statistics in one turn of the trial."""

    by_requests: dict[int, Sums] = field(default_factory=dict)  # requests in the pass: its steps
    drafted: dict[str, list[int]] = field(default_factory=dict)  # segment: drafts, accepted tokens
    steps: int = 0  # with drafts of the head
    decodes: int = 0  # all decode steps

    @property
    def use(self) -> float:
        """The share of decode steps in which the head drafted: the controller uses it where it gains."""
        return self.steps / self.decodes if self.decodes else 0.0

    def tokens_per_draft(self, segment: str | None = None) -> float | None:
        """Accepted tokens of a draft, and the one after them; None if nothing was drafted."""
        chosen = self.drafted.values() if segment is None else [self.drafted.get(segment, [0, 0])]
        drafts, accepted = (sum(each) for each in zip(*chosen, strict=True)) if self.drafted else (0, 0)
        return 1 + accepted / drafts if drafts else None


class Meter:
    """An Observer of the engine that sums up the steps in which a drafter drafted."""

    def __init__(self, drafter: str) -> None:
        self._drafter = drafter
        self._lock = threading.Lock()
        self._turn = Turn()
        self._skip = 0
        self._accepted: dict[str, int] = {}  # drafted tokens that were right, by drafter

    def step(self, stats: StepStats, deltas: Sequence[Delta]) -> None:
        drafts, accepted = [], self._accepted
        for draft in stats.drafts:
            accepted[draft.drafter] = accepted.get(draft.drafter, 0) + draft.count * draft.accepted
            if draft.drafter == self._drafter:
                drafts.append(draft)
        if stats.failed or stats.prefill_tokens or not stats.requests:
            return
        with self._lock:
            if self._skip:
                self._skip -= 1
                return
            turn = self._turn
            turn.decodes += 1
            if not drafts:
                return
            sums = turn.by_requests.setdefault(stats.requests, Sums())
            sums.tokens += stats.new_tokens
            sums.seconds.append(max(stats.total_time, MIN_SECONDS))
            for draft in drafts:
                counts = turn.drafted.setdefault(draft.segment, [0, 0])
                counts[0] += draft.count
                counts[1] += draft.count * draft.accepted
            turn.steps += 1

    def aborted(self, requests: Sequence[Request]) -> None:
        return

    def has(self, steps: int) -> bool:
        """Whether the turn had this many steps with drafts, or MAX_TURN_RATIO times as many steps in all."""
        return self._turn.steps >= steps or self._turn.decodes >= MAX_TURN_RATIO * steps

    @property
    def decodes(self) -> int:
        """Decode steps of the turn so far."""
        return self._turn.decodes

    def accepted(self) -> dict[str, int]:
        """The accepted tokens of each drafter since the start."""
        return dict(self._accepted)

    def take(self, skip: int = 0) -> Turn:
        """The steps since the last time; the next `skip` ones are not counted. Any thread may ask."""
        with self._lock:
            turn, self._turn, self._skip = self._turn, Turn(), skip
        return turn


def log_speedup(before: Turn, after: Turn) -> float | None:
    """The logarithm of the tokens per second of `after` over those of `before`, at the same loads.

    None if no load occurred in both. A head that the controller hardly uses beside the other one loses.
    """
    least, most = sorted((before.use, after.use))
    if least < MIN_USE * most:
        return LITTLE_USE_SPEED if after.use == least else -LITTLE_USE_SPEED
    total = weight = 0.0
    for requests, old in before.by_requests.items():
        new = after.by_requests.get(requests)
        if new is None or min(old.tokens, new.tokens) == 0:
            continue
        share = min(len(old.seconds), len(new.seconds))
        total += share * math.log(new.speed / old.speed)
        weight += share
    return total / weight if weight else None


@dataclass(frozen=True)
class Outcome:
    """Whether the tried head is the faster one; None: not known yet."""

    better: bool | None
    pairs: int
    speedup: float = 1.0
    low: float = 0.0
    high: float = math.inf


def outcome(speedups: Sequence[float], config: TrialConfig) -> Outcome:
    """The outcome of a trial after these pairs of turns, given as log speedups.

    A significant gain or loss ends it, and so does the last pair: what is not significant then is no gain.
    """
    pairs = len(speedups)
    if pairs < max(2, config.min_pairs):
        return Outcome(None, pairs)
    mean = statistics.fmean(speedups)
    error = statistics.stdev(speedups) / math.sqrt(pairs)
    low, high = mean - 2 * error, mean + 2 * error
    better = True if low > 0 else False if high < 0 or pairs >= config.max_pairs else None
    return Outcome(better, pairs, math.exp(mean), math.exp(low), math.exp(high))
