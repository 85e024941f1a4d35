"""Which segments gain little from drafts: told once, with what can be done about it."""

from __future__ import annotations

import logging
from dataclasses import dataclass

logger = logging.getLogger(__name__)

ENOUGH = 400  # steps of a segment's requests before it is judged
LITTLE = 0.1  # accepted tokens for a step
FADE = 0.995
MOST_SEGMENTS = 256


@dataclass(slots=True)
class SegmentGain:
    steps: int = 0
    accepted: float = 1.0  # faded mean of accepted tokens for a step, drafted or not


class SegmentGains:
    """What drafts give each segment."""

    def __init__(self) -> None:
        self._gains: dict[str, SegmentGain] = {}
        self.poor: frozenset[str] = frozenset()

    def observe(self, segment: str, steps: int, accepted: int) -> None:
        """Take in what so many steps of requests gave; a segment to which many gave little is told of."""
        if steps == 0:
            return
        if segment not in self._gains and len(self._gains) == MOST_SEGMENTS:
            return
        gain = self._gains.setdefault(segment, SegmentGain())
        fade = FADE**steps
        gain.steps += steps
        gain.accepted = gain.accepted * fade + accepted / steps * (1.0 - fade)
        if gain.steps >= ENOUGH and gain.accepted < LITTLE and segment not in self.poor:
            self.poor |= {segment}
            logger.warning(
                "requests of segment %r gain little from drafts: %.2f tokens for each step. Try another "
                "drafter, train a head on this traffic (paceline train), or send them with speculative off.",
                segment,
                gain.accepted,
            )
