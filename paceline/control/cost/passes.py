"""Cost model of target passes: a table of seconds by rows, with steps from kernel tiles and graph buckets.

The table is measured at start-up (measure.py) and updated by every step.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.compiling import compiled
from paceline.control.config import CONFIG

Float64Array = npt.NDArray[np.float64]
Numbers = Float64Array | float

LAST_ROWS = 1e6  # rows of the last point, from which the table is never left
FINE_ROWS = 32  # up to here each row count is a point; above, eight points for every doubling


class StepCosts:
    """Seconds of a step without its drafters, by rows and by the keys that they read.

    Observed row counts have entries. Between entries seconds are interpolated, and above the largest they are
    extrapolated. Across a wide gap they follow the roofline: the time of the smaller pass (memory-bound),
    until it is exceeded by the larger pass's time per row (compute-bound).
    """

    def __init__(self, rows: Sequence[int], seconds: Sequence[float], per_key: float = 0.0) -> None:
        """Starts from measured passes of these row counts, ascending; each key that a row reads adds
        `per_key` seconds."""
        assert len(rows) == len(seconds) >= 2
        self._rows = [*map(float, rows), LAST_ROWS]  # [points]
        self._seconds = [*map(float, seconds), 0.0]  # [points] the last one is extrapolated
        self._visits = [CONFIG.passes.measured_weight] * len(rows)
        self._scale = 1.0
        self._num_observed = 0
        self.per_key = per_key

    def seconds(self, rows: Numbers, keys: float) -> Float64Array:
        """[...] seconds of passes of these rows, ascending, each of which reads `keys` keys.

        A pass is never slower than one of more rows: if it looks so, it was preempted.
        """
        counts = np.asarray(rows, dtype=np.float64)
        return self._scaled(counts, self._scale, self.per_key * keys)

    def _scaled(self, rows: Float64Array, scale: float, per_row: float) -> Float64Array:
        """The table's seconds and `per_row` for each row, all times the scale."""
        self._seconds[-1] = self._extrapolated()
        points, seconds = np.array(self._rows), np.array(self._seconds)
        max_gap = CONFIG.passes.max_gap
        return _interpolate(rows.ravel(), points, seconds, max_gap, scale, per_row).reshape(rows.shape)

    def observe(self, rows: int, attended: int, seconds: float) -> None:
        """Update from a pass whose rows read `attended` keys in all.

        Rarely observed entries are updated fast. If a well-known entry is slow, the machine has become
        slower, and the scale of all entries is updated.
        """
        config = CONFIG.passes
        point = self._point(rows)
        self._visits[point] += 1
        if self._visits[point] <= config.guessed_passes:
            measured = max(seconds / self._scale - self.per_key * attended, 1e-9)
            self._seconds[point] += (measured - self._seconds[point]) / self._visits[point]
            return
        expected = self._scale * (self._seconds[point] + self.per_key * attended)
        surprise = math.log(min(max(seconds / expected, 1 / config.max_outlier), config.max_outlier))
        # a measured pass lacks what a step does around it, so the first steps move all entries at once
        self._num_observed += 1
        is_young = self._num_observed <= config.young_passes
        surprise *= config.slow_weight if surprise > 0.0 and not is_young else 1.0
        self._scale *= math.exp(surprise * (1.0 / self._num_observed if is_young else config.scale_rate))
        self._seconds[point] *= math.exp(max(config.shape_rate, 1.0 / self._visits[point]) * surprise)

    def _point(self, rows: int) -> int:
        """The index of this row count, rounded above FINE_ROWS; inserted if it is new."""
        step = 1 if rows <= FINE_ROWS else max(8, (1 << (rows.bit_length() - 1)) // 8)
        place = float((rows + step // 2) // step * step)
        point = bisect_left(self._rows, place)
        if self._rows[point] != place:
            below = self._rows[point - 1]
            is_last = point == len(self._rows) - 1
            far = CONFIG.passes.max_reach * below if is_last else CONFIG.passes.max_gap * below
            is_guess = (place if is_last else self._rows[point]) > far
            self._seconds.insert(point, float(self._scaled(np.array([place]), 1.0, 0.0)[0]))
            self._rows.insert(point, place)
            self._visits.insert(point, 0 if is_guess else CONFIG.passes.interpolated_weight)
        return point

    def _extrapolated(self) -> float:
        """The seconds at the last point: beyond the largest known row count the table goes on at the slope of
        its upper half.

        Two neighbours would not do: their difference may be noise. A row never costs more than its share.
        """
        last, end = self._rows[-2:]
        most = self._seconds[-2]
        half = max(0, bisect_right(self._rows, last / 2) - 1)
        slope = (most - self._seconds[half]) / (last - self._rows[half])
        return most + min(max(0.0, slope), most / last) * (end - last)

    def facts(self) -> dict[str, Any]:
        """The table as JSON values, to start another from."""
        seconds = [self._scale * entry for entry in self._seconds[:-1]]
        return {"rows": [int(rows) for rows in self._rows[:-1]], "seconds": seconds, "per_key": self.per_key}

    @classmethod
    def from_facts(cls, facts: Mapping[str, Any]) -> StepCosts:
        """The table that gave these facts; ValueError, TypeError or KeyError if there is none."""
        rows, seconds = [int(rows) for rows in facts["rows"]], [float(entry) for entry in facts["seconds"]]
        per_key = float(facts["per_key"])
        is_ascending = rows == sorted(set(rows)) and len(rows) == len(seconds) >= 2
        is_sound = all(0.0 < entry < 1e3 for entry in (*seconds, per_key + 1e-12))
        if not is_ascending or min(rows) < 1 or not is_sound:
            raise ValueError("these are not costs of passes")
        return cls(rows, seconds, per_key)


@compiled
def _interpolate(
    rows: Float64Array,
    points: Float64Array,
    seconds: Float64Array,
    max_gap: float,
    scale: float,
    per_row: float,
) -> Float64Array:
    """The seconds of each of these row counts, from those at the points, and `per_row` for each row, scaled.

    Overwrites `seconds`, so that none is slower than a pass of more rows.
    """
    for point in range(len(points) - 2, -1, -1):
        seconds[point] = min(seconds[point], seconds[point + 1])
    found = np.empty(len(rows))
    for place, count in enumerate(rows):
        right = min(max(np.searchsorted(points, count, side="right"), 1), len(points) - 1)
        left = right - 1
        share = (count - points[left]) / (points[right] - points[left])
        found[place] = seconds[left] + min(max(share, 0.0), 1.0) * (seconds[right] - seconds[left])
        is_wide = points[right] > max_gap * points[left] and right < len(points) - 1
        if is_wide and count > max(FINE_ROWS, points[left]):
            roofline = max(seconds[left], seconds[right] * count / points[right])
            found[place] = min(found[place], roofline)
        found[place] = scale * (found[place] + per_row * count)
    return found
