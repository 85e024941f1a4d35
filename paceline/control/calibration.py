"""From what a drafter says of its chances to what became of drafts about which it said so.

A calibration is a line through a few points, each of which begins at "as was said" and follows what is
seen. It serves any drafter: one that is sure and always wrong is soon believed nothing, and for one that has
no opinion, what is said for it depends on depth alone, so that chances by depth are learned.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence

import numpy as np

from paceline.control.cost import Float64Array

POINTS = (0.0, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.96, 1.0)
DOUBT = 3.0  # nodes that "as was said" counts for, at each point
FADE = 0.99  # what is left of the counts after another draft
MOST = 0.995  # nothing is surer than this


class Calibration:
    """The chance that a node is accepted, by what its drafter said."""

    def __init__(self) -> None:
        self._tried = [0.0] * len(POINTS)  # nodes near each point, each shared by its two neighbours
        self._right = [0.0] * len(POINTS)
        self.line = self._fit()  # [points] chances at POINTS, ascending, by what was seen up to the last fit

    def add(self, said: Sequence[float], right: Sequence[bool]) -> None:
        """Take in what became of the nodes of one draft."""
        self._tried = [FADE * count for count in self._tried]
        self._right = [FADE * count for count in self._right]
        for chance, was_right in zip(said, right, strict=True):
            point, share = _place(chance)
            self._tried[point] += 1.0 - share
            self._tried[point + 1] += share
            if was_right:
                self._right[point] += 1.0 - share
                self._right[point + 1] += share

    def fit(self) -> None:
        """Let the line follow what was seen."""
        self.line = self._fit()

    def chances(self, said: Sequence[float]) -> list[float]:
        """What is to be believed."""
        line = self.line
        believed = []
        for chance in said:
            point, share = _place(chance)
            believed.append(line[point] + share * (line[point + 1] - line[point]))
        return believed

    def of_array(self, said: Float64Array) -> Float64Array:
        """The same for an array of any shape."""
        return np.interp(said, POINTS, self.line)

    def said_for(self, chance: float) -> float:
        """The least that a drafter says where this is the chance: the way back."""
        line = self.line
        point = bisect_left(line, chance)
        if point == 0:
            return 0.0
        if point == len(line):
            return 1.0
        share = (chance - line[point - 1]) / (line[point] - line[point - 1])
        return POINTS[point - 1] + share * (POINTS[point] - POINTS[point - 1])

    def _fit(self) -> list[float]:
        """Pools neighbours that would make the line fall: who says more is believed no less."""
        pools: list[tuple[float, float, int]] = []  # right, tried, points; with what was thought before
        for point, right, tried in zip(POINTS, self._right, self._tried, strict=True):
            pools.append((right + DOUBT * point, tried + DOUBT, 1))
            while len(pools) > 1 and pools[-2][0] * pools[-1][1] > pools[-1][0] * pools[-2][1]:
                last, before = pools.pop(), pools.pop()
                pools.append((before[0] + last[0], before[1] + last[1], before[2] + last[2]))
        return [min(MOST, right / tried) for right, tried, points in pools for _ in range(points)]

    def counts(self) -> list[list[float]]:
        """What was seen, for another calibration to begin with."""
        return [self._tried, self._right]

    @classmethod
    def of_counts(cls, counts: Sequence[Sequence[float]]) -> Calibration:
        """The calibration that has seen this; ValueError if it cannot be."""
        tried, right = ([float(count) for count in line] for line in counts)
        sound = all(0.0 <= few <= many < 1e9 for few, many in zip(right, tried, strict=True))
        if len(tried) != len(POINTS) or not sound:
            raise ValueError("these are not counts of a calibration")
        calibration = cls()
        calibration._tried, calibration._right = tried, right
        calibration.fit()
        return calibration


def _place(chance: float) -> tuple[int, float]:
    """The point at or below a chance, and how far on the way to the next it lies."""
    point = min(bisect_right(POINTS, chance) - 1, len(POINTS) - 2)
    return point, (chance - POINTS[point]) / (POINTS[point + 1] - POINTS[point])
