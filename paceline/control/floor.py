"""Whether drafting really gains here: measured, not computed.

Every so often a few steps are plain, and what they gave is held against the drafted steps around them. The
costs and chances that plans are made from can be wrong in ways that nobody thought of; this cannot. Where
drafting loses it stops, and is tried again after ever longer times.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

PLAIN_STEPS = 2  # of a pair
SHORT, LONG = 80, 1280  # drafted steps of a pair: at first, and where the gain is beyond doubt
TRIAL = 20  # drafted steps of a pair while it is tried whether to come back
PAIRS = 6  # that are needed to stop, and to come back
FADE = 0.93  # what is left of a pair's weight after another one
LEAST_SPREAD = 4e-4  # variance of a pair: a few that agree by chance prove nothing
STOP, LONGEST_STOP = 256, 8192  # steps without drafts after the first loss; twice as many after another
LOSS = 0.005  # that drafting must have, beyond twice its error, to stop
MORE = 1.15  # times the gain that was expected when it stopped: then it is tried again at once


@dataclass(slots=True)
class Gain:
    """A faded mean of logarithms of speedups, and how far it can be trusted."""

    weight: float = 0.0
    mean: float = 0.0
    spread: float = 0.0  # faded variance of one pair
    pairs: int = 0

    def add(self, value: float) -> None:
        self.weight = self.weight * FADE + 1.0
        self.pairs += 1
        step = value - self.mean
        self.mean += step / self.weight
        if self.pairs > 1:
            self.spread += (step * (value - self.mean) - self.spread) / self.weight

    @property
    def error(self) -> float:
        """Of the mean; endless while there are not enough pairs."""
        if self.pairs < PAIRS:
            return math.inf
        return math.sqrt(max(self.spread, LEAST_SPREAD) / self.weight)


@dataclass(slots=True)
class Floor:
    """Says when steps are to be plain, for engines under about the same load."""

    gain: Gain = field(default_factory=Gain)
    stops: int = 0  # losses without a gain between them
    _drafted_steps: int = SHORT
    _left: int = SHORT  # steps of this part of the pair
    _plain: bool = False  # whether it is the plain part
    _stopped: int = 0  # steps until drafting is tried again
    _expected: float = 1.0  # speedup, by costs and chances
    _sums: list[float] = field(default_factory=lambda: [0.0] * 4)  # worth and seconds: drafted, plain

    @property
    def reason(self) -> str | None:
        """Why the next step must be plain; None if it need not be."""
        if self._stopped:
            return "stopped"
        return "pair" if self._plain else None

    def expect(self, speedup: float) -> None:
        """Hear what plans promise. If that is much more than when they failed, things have changed."""
        if not self._stopped:
            self._expected = speedup
        elif speedup > MORE * self._expected:
            self._stopped = 0

    def observe(self, worth: float, seconds: float) -> None:
        """Take in a step: `worth` is the time that plain decoding is thought to need for what it gave."""
        if self._stopped:
            self._stopped -= 1
            return
        place = 2 if self._plain else 0
        self._sums[place] += worth
        self._sums[place + 1] += seconds
        self._left -= 1
        if self._left > 0:
            return
        if self._plain:
            drafted, drafted_seconds, plain, plain_seconds = self._sums
            self.gain.add(math.log(drafted / drafted_seconds) - math.log(plain / plain_seconds))
            self._sums = [0.0] * 4
            self._judge()
        self._plain = not self._plain
        self._left = PLAIN_STEPS if self._plain else self._drafted_steps

    def _judge(self) -> None:
        """Stop, go on, or look less often."""
        gain, error = self.gain.mean, self.gain.error
        unproven = self.stops > 0 and self.gain.pairs >= PAIRS and gain < 0.0
        if gain + 2.0 * error < -LOSS or unproven:
            self._stopped = min(STOP << self.stops, LONGEST_STOP)
            self.stops += 1
            self.gain = Gain()
            self._drafted_steps = TRIAL
        elif gain - 2.0 * error > 0.02:
            self.stops = 0
            self._drafted_steps = min(max(2 * self._drafted_steps, SHORT), LONG)
        elif not self.stops:
            self._drafted_steps = SHORT
