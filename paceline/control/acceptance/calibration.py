"""Calibration: maps a drafter's confidence to the observed acceptance rate of nodes with that confidence.

A piecewise linear map through a few points. Each starts at the drafter's own confidence (the identity) and
follows observations, so an overconfident drafter is soon corrected. A drafter that reports no confidence gets
one that depends on depth alone, so the map learns acceptance by depth.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence

import numpy as np

from paceline.compiling import compiled
from paceline.control.config import CONFIG
from paceline.control.cost import Float64Array

POINTS = CONFIG.acceptance.points  # confidences at which the line has a value
POINTS_ARRAY = np.array(POINTS)


class Calibration:
    """The chance that a node is accepted, by its drafter's confidence."""

    def __init__(self) -> None:
        self._tried = [0.0] * len(POINTS)  # nodes near each point; a node is split between its two neighbours
        self._accepted = [0.0] * len(POINTS)
        self.line = self._fit()  # [points] chances at POINTS, ascending, as of the last fit

    def add(self, confidences: Sequence[float], accepted: Sequence[bool]) -> None:
        """Count the verified nodes of one draft."""
        fade = CONFIG.acceptance.calibration_fade
        self._tried = [fade * count for count in self._tried]
        self._accepted = [fade * count for count in self._accepted]
        for confidence, is_accepted in zip(confidences, accepted, strict=True):
            point, share = _place(confidence)
            self._tried[point] += 1.0 - share
            self._tried[point + 1] += share
            if is_accepted:
                self._accepted[point] += 1.0 - share
                self._accepted[point + 1] += share

    def fit(self) -> None:
        """Refit the line to the counts."""
        self.line = self._fit()

    def chances(self, confidences: Sequence[float]) -> list[float]:
        """The calibrated chances."""
        line = self.line
        chances = []
        for confidence in confidences:
            point, share = _place(confidence)
            chances.append(line[point] + share * (line[point + 1] - line[point]))
        return chances

    def confidence_for(self, chance: float) -> float:
        """The inverse: the lowest confidence of nodes with this chance."""
        line = self.line
        point = bisect_left(line, chance)
        if point == 0:
            return 0.0
        if point == len(line):
            return 1.0
        share = (chance - line[point - 1]) / (line[point] - line[point - 1])
        return POINTS[point - 1] + share * (POINTS[point] - POINTS[point - 1])

    def _fit(self) -> list[float]:
        """Isotonic regression: adjacent points that would make the line decrease are pooled."""
        prior = CONFIG.acceptance.prior_nodes
        pools: list[tuple[float, float, int]] = []  # accepted, tried, points; the prior included
        for point, accepted, tried in zip(POINTS, self._accepted, self._tried, strict=True):
            pools.append((accepted + prior * point, tried + prior, 1))
            while len(pools) > 1 and pools[-2][0] * pools[-1][1] > pools[-1][0] * pools[-2][1]:
                last, before = pools.pop(), pools.pop()
                pools.append((before[0] + last[0], before[1] + last[1], before[2] + last[2]))
        most = CONFIG.acceptance.max_chance
        return [min(most, accepted / tried) for accepted, tried, points in pools for _ in range(points)]

    def counts(self) -> list[list[float]]:
        """The counts as JSON values, to start another calibration from."""
        return [self._tried, self._accepted]

    @classmethod
    def of_counts(cls, counts: Sequence[Sequence[float]]) -> Calibration:
        """The calibration with these counts; ValueError if they are not valid."""
        tried, accepted = ([float(count) for count in line] for line in counts)
        is_sound = all(0.0 <= few <= many < 1e9 for few, many in zip(accepted, tried, strict=True))
        if len(tried) != len(POINTS) or not is_sound:
            raise ValueError("these are not counts of a calibration")
        calibration = cls()
        calibration._tried, calibration._accepted = tried, accepted
        calibration.fit()
        return calibration


def _place(confidence: float) -> tuple[int, float]:
    """The point at or below a confidence, and how far it lies on the way to the next point."""
    point = min(bisect_right(POINTS, confidence) - 1, len(POINTS) - 2)
    return point, (confidence - POINTS[point]) / (POINTS[point + 1] - POINTS[point])


@compiled
def chance_at(confidence: float, points: Float64Array, line: Float64Array) -> float:
    """The calibrated chance of one node, as `Calibration.chances` gives it."""
    point = 0
    while point < len(points) - 2 and points[point + 1] <= confidence:
        point += 1
    share = (confidence - points[point]) / (points[point + 1] - points[point])
    chance: float = line[point] + share * (line[point + 1] - line[point])
    return chance
