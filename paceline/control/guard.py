"""The guard: an A/B test of drafting against plain decoding, by measured tokens and seconds.

From time to time a few plain steps are compared with the drafted steps before them (a pair). The cost and
acceptance models can be wrong in unforeseen ways; this test cannot. If drafting loses, it is stopped, and
tried again after exponentially growing times.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from paceline.control.config import CONFIG

PAIR, STOPPED = "pair", "stopped"  # reasons for a plain step: see docs/design/control.md


@dataclass(slots=True)
class SpeedupEstimate:
    """A faded mean of log speedups, one per pair, and its standard error."""

    weight: float = 0.0
    mean: float = 0.0
    variance: float = 0.0  # of one pair, faded
    pairs: int = 0

    def add(self, value: float) -> None:
        self.weight = self.weight * CONFIG.guard.fade + 1.0
        self.pairs += 1
        step = value - self.mean
        self.mean += step / self.weight
        if self.pairs > 1:
            self.variance += (step * (value - self.mean) - self.variance) / self.weight

    @property
    def error(self) -> float:
        """Standard error of the mean; infinite while there are too few pairs."""
        if self.pairs < CONFIG.guard.min_pairs:
            return math.inf
        return math.sqrt(max(self.variance, CONFIG.guard.min_variance) / self.weight)


@dataclass(slots=True)
class Side:
    """The sums of one side of a pair."""

    worth: float = 0.0  # seconds that plain decoding would take for the same tokens
    seconds: float = 0.0


@dataclass(slots=True)
class ABGuard:
    """Says when steps must be plain. There is one for each range of load."""

    speedup: SpeedupEstimate = field(default_factory=SpeedupEstimate)
    stops: int = 0  # losses without a gain in between
    _drafted_steps: int = CONFIG.guard.min_drafted_steps  # of a pair
    _steps_left: int = CONFIG.guard.min_drafted_steps  # of this side
    _is_plain: bool = False  # which side is measured now
    _stopped_steps: int = 0  # until drafting is tried again
    _promised: float = 1.0  # speedup that the planner expected
    _drafted: Side = field(default_factory=Side)
    _plain: Side = field(default_factory=Side)

    @property
    def reason(self) -> str | None:
        """Why the next step must be plain; None if it need not be."""
        if self._stopped_steps:
            return STOPPED
        return PAIR if self._is_plain else None

    @property
    def gain(self) -> float | None:
        """Measured tokens per second with drafts over those without; None while there are too few pairs."""
        return None if math.isinf(self.speedup.error) else math.exp(self.speedup.mean)

    def expect(self, speedup: float) -> None:
        """Note what the planner promises. Much more than when it failed means that things have changed."""
        if not self._stopped_steps:
            self._promised = speedup
        elif speedup > CONFIG.guard.retry_ratio * self._promised:
            self._stopped_steps = 0

    def observe(self, worth: float, seconds: float) -> None:
        """Add a step: `worth` is the time that plain decoding would take for its tokens."""
        if self._stopped_steps:
            self._stopped_steps -= 1
            return
        side = self._plain if self._is_plain else self._drafted
        side.worth += worth
        side.seconds += seconds
        self._steps_left -= 1
        if self._steps_left > 0:
            return
        if self._is_plain:
            drafted, plain = self._drafted, self._plain
            self.speedup.add(
                math.log(drafted.worth / drafted.seconds) - math.log(plain.worth / plain.seconds)
            )
            self._drafted, self._plain = Side(), Side()
            self._decide()
        self._is_plain = not self._is_plain
        self._steps_left = CONFIG.guard.plain_steps if self._is_plain else self._drafted_steps

    def _decide(self) -> None:
        """Stop drafting, go on, or test less often."""
        config = CONFIG.guard
        mean, error = self.speedup.mean, self.speedup.error
        is_unproven = self.stops > 0 and self.speedup.pairs >= config.min_pairs and mean < 0.0
        if mean + 2.0 * error < -config.min_loss or is_unproven:
            self._stopped_steps = min(config.stop_steps << self.stops, config.max_stop_steps)
            self.stops += 1
            self.speedup = SpeedupEstimate()
            self._drafted_steps = config.trial_steps
        elif mean - 2.0 * error > config.clear_gain:
            self.stops = 0
            longer = max(2 * self._drafted_steps, config.min_drafted_steps)
            self._drafted_steps = min(longer, config.max_drafted_steps)
        elif not self.stops:
            self._drafted_steps = config.min_drafted_steps
