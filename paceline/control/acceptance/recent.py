"""Recent history of a drafter's drafts: accepted over predicted tokens, and the confidences of the drafts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from paceline.compiling import compiled
from paceline.control.config import CONFIG
from paceline.control.cost import Float64Array

GOLDEN_RATIO = 0.618034  # its multiples modulo 1 are spread evenly without a period


@dataclass(slots=True)
class AcceptanceEstimate:
    """Accepted tokens over predicted ones, with older drafts fading."""

    fade: float  # factor per draft
    prior: float  # tokens that the estimate of the level above counts for
    accepted: float = 0.0
    predicted: float = 0.0

    def add(self, accepted: float, predicted: float) -> None:
        self.accepted = self.fade * self.accepted + accepted
        self.predicted = self.fade * self.predicted + predicted

    def fade_idle(self) -> None:
        """Fade the counts of an unused drafter, so that a bad streak does not exclude it forever."""
        self.accepted *= CONFIG.acceptance.idle_fade
        self.predicted *= CONFIG.acceptance.idle_fade

    def ratio(self, above: float) -> float:
        """The estimate; `above` is that of the level above, the prior."""
        ratio = (self.accepted + self.prior * above) / (self.predicted + self.prior)
        return max(CONFIG.acceptance.min_ratio, ratio)


class RecentDrafts:
    """The confidences of the last drafts, in a ring."""

    def __init__(self, kept: int, depth: int) -> None:
        """Keeps this many drafts of `depth` nodes each."""
        self._ring = np.zeros((kept, depth))
        self._newest = 0
        self.count = 0

    def add(self, confidences: Sequence[float] | Float64Array) -> None:
        """Add the newest draft: `depth` confidences."""
        self._newest = (self._newest or len(self._ring)) - 1
        self._ring[self._newest] = confidences
        self.count = min(self.count + 1, len(self._ring))

    def sample(self, count: int, newest: int) -> Float64Array:
        """[count, nodes] drafts out of the `newest` ones, half of them from the newest quarter."""
        return _sample(self._ring, self._newest, min(self.count, newest), count)

    def listed(self) -> list[list[float]]:
        """All of them, newest first."""
        return [self._ring[(self._newest + age) % len(self._ring)].tolist() for age in range(self.count)]


@dataclass(slots=True)
class History:
    """The draft history of a request or of a segment."""

    estimate: AcceptanceEstimate
    recent: RecentDrafts
    idle: int = 0  # choices since the newest draft


@compiled
def _sample(ring: Float64Array, first: int, known: int, count: int) -> Float64Array:
    """[count, nodes] drafts out of the `known` ones that begin at `first`, newest first.

    Irregularly spaced, because drafts may alternate with a period.
    """
    sampled = np.empty((count, ring.shape[1]))
    for part in range(count):
        age = known * ((part + part * GOLDEN_RATIO % 1.0) / count) ** 2
        for node in range(ring.shape[1]):
            sampled[part, node] = ring[(first + int(age)) % len(ring), node]
    return sampled
