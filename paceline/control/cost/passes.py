"""Seconds of a target pass by its rows: a table, because kernel tiles and captured graphs make steps in it.

The table is measured at start-up (measure.py) and updated by every step.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.control.config import CONFIG

Float64Array = npt.NDArray[np.float64]
Numbers = Float64Array | float

LAST_ROWS = 1e6  # rows of the last point, from which the table is never left
FINE_ROWS, COARSE_STEP = 32, 8  # up to 32 rows each count is a point, above only multiples of 8


class StepCosts:
    """Seconds of a step without its drafters, by rows and by the keys that they read.

    Row counts that were seen have their own entry. Between them seconds are interpolated, and above the
    largest they are extrapolated from the last two.
    """

    def __init__(self, rows: Sequence[int], seconds: Sequence[float], per_key: float = 0.0) -> None:
        """Starts from measured passes of these row counts, ascending; each key that a row reads adds
        `per_key` seconds."""
        assert len(rows) == len(seconds) >= 2
        self._rows = [*map(float, rows), LAST_ROWS]  # [points]
        self._seconds = [*map(float, seconds), 0.0]  # [points] the last one is extrapolated
        self._visits = [CONFIG.passes.measured_weight] * len(rows)
        self._scale = 1.0
        self.per_key = per_key
        self._extrapolate()

    def seconds(self, rows: Numbers, keys: float) -> Float64Array:
        """[...] seconds of passes of these rows, ascending, each of which reads `keys` keys.

        A pass is never faster than one of fewer rows: if it looks so, that is noise.
        """
        table = np.maximum.accumulate(np.atleast_1d(np.interp(rows, self._rows, self._seconds)))
        table = table.reshape(np.shape(rows))
        return np.asarray(self._scale * (table + self.per_key * keys * np.asarray(rows)))

    def observe(self, rows: int, attended: int, seconds: float) -> None:
        """Update from a pass whose rows read `attended` keys in all.

        An entry that was rarely seen moves fast. If a well-known one is slow, the machine has become slower,
        and the scale of all entries moves.
        """
        config = CONFIG.passes
        point = self._point(rows)
        expected = self._scale * (self._seconds[point] + self.per_key * attended)
        surprise = math.log(min(max(seconds / expected, 1 / config.max_outlier), config.max_outlier))
        surprise *= config.slow_weight if surprise > 0.0 else 1.0
        self._scale *= math.exp(config.scale_rate * surprise)
        self._visits[point] += 1
        self._seconds[point] *= math.exp(max(config.shape_rate, 1.0 / self._visits[point]) * surprise)
        self._extrapolate()

    def _point(self, rows: int) -> int:
        """The index of this row count, rounded above FINE_ROWS; inserted if it is new."""
        rounded = (rows + COARSE_STEP // 2) // COARSE_STEP * COARSE_STEP
        place = float(rows if rows <= FINE_ROWS else rounded)
        point = bisect_left(self._rows, place)
        if self._rows[point] != place:
            self._seconds.insert(point, float(np.interp(place, self._rows, self._seconds)))
            self._rows.insert(point, place)
            self._visits.insert(point, CONFIG.passes.interpolated_weight)
        return point

    def _extrapolate(self) -> None:
        """Continue the table beyond its last two measured points."""
        before, last, end = self._rows[-3:]
        less, more, _ = self._seconds[-3:]
        self._seconds[-1] = more + max(0.0, (more - less) / (last - before)) * (end - last)

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
