"""Times of repeated measurements."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass

OnTurn = Callable[[str], None]  # called with a description of what was just measured


@dataclass(frozen=True)
class Timing:
    """Seconds of each repetition of one job."""

    seconds: tuple[float, ...]

    @property
    def best(self) -> float:
        return min(self.seconds)

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)
