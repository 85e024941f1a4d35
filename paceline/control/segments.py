"""SegmentGains: warns once about segments that gain little from drafts."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from paceline.control.config import CONFIG

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class SegmentGain:
    """The gain of one segment."""

    steps: int = 0
    accepted: float = 1.0  # faded mean of accepted tokens per step, drafted or not


class SegmentGains:
    """The accepted tokens per step of each segment."""

    def __init__(self) -> None:
        self._gains: dict[str, SegmentGain] = {}
        self.poor: frozenset[str] = frozenset()

    def observe(self, segment: str, steps: int, accepted: int) -> None:
        """Add the accepted tokens of this many steps; warn if the segment gains little after many."""
        config = CONFIG.segments
        if steps == 0:
            return
        if segment not in self._gains and len(self._gains) == config.max_segments:
            return
        gain = self._gains.setdefault(segment, SegmentGain())
        fade = config.fade**steps
        gain.steps += steps
        gain.accepted = gain.accepted * fade + accepted / steps * (1.0 - fade)
        is_poor = gain.steps >= config.min_steps and gain.accepted < config.min_accepted
        if is_poor and segment not in self.poor:
            self.poor |= {segment}
            logger.warning(
                "requests of segment %r gain little from drafts: %.2f tokens for each step. Try another "
                "drafter, train a head on this traffic (paceline train), or send them with speculative off.",
                segment,
                gain.accepted,
            )
