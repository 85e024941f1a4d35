"""What a pass of the target costs, by its rows: a table, because tiles and graphs make steps in it.

It is measured at the start, see measure.py, and learned from every step.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Float64Array = npt.NDArray[np.float64]
Numbers = Float64Array | float

SCALE_RATE = 0.05  # how far one step moves the price of all row counts
SHAPE_RATE = 0.03  # and that of its own, when that has been seen often
MEASURED = 12  # steps that a measurement at the start counts for
GUESSED = 4  # and what lies between two row counts that were seen
OUTLIER = 1.5  # times the expected: a step that took longer counts as this much
HELD_UP = 0.4  # of a step that was slow: it may have been held up, which a quick one never is
FAR = 1e6  # rows: where the table ends


class StepCosts:
    """Seconds of a step without its drafters, by rows and by what they attend to.

    Row counts that were seen have a price of their own. Between them it is linear, and above the largest it
    goes on as between the last two.
    """

    def __init__(self, rows: Sequence[int], seconds: Sequence[float], per_key: float = 0.0) -> None:
        """From measured passes of so many rows, ascending; `per_key` more for each key that a row reads."""
        assert len(rows) == len(seconds) >= 2
        self._rows = [*map(float, rows), FAR]  # [points]
        self._seconds = [*map(float, seconds), 0.0]  # [points] the last one follows from the two before it
        self._visits = [MEASURED] * len(rows)
        self._scale = 1.0
        self.per_key = per_key
        self._extend()

    def seconds(self, rows: Numbers, keys: float) -> Float64Array:
        """[...] seconds of passes of so many rows, ascending, each of which reads `keys` keys.

        None is thought to be quicker than one of fewer rows: what seems so is noise.
        """
        table = np.maximum.accumulate(np.atleast_1d(np.interp(rows, self._rows, self._seconds)))
        table = table.reshape(np.shape(rows))
        return np.asarray(self._scale * (table + self.per_key * keys * np.asarray(rows)))

    def observe(self, rows: int, attended: int, seconds: float) -> None:
        """Take in a pass whose rows read `attended` keys together.

        The price of a row count that was seldom seen follows quickly. If one that is well known takes longer,
        the machine has become slower, and all prices follow.
        """
        point = self._point(rows)
        expected = self._scale * (self._seconds[point] + self.per_key * attended)
        surprise = math.log(min(max(seconds / expected, 1 / OUTLIER), OUTLIER))
        surprise *= HELD_UP if surprise > 0.0 else 1.0
        self._scale *= math.exp(SCALE_RATE * surprise)
        self._visits[point] += 1
        self._seconds[point] *= math.exp(max(SHAPE_RATE, 1.0 / self._visits[point]) * surprise)
        self._extend()

    def _point(self, rows: int) -> int:
        """The place of this row count among the points; above 32 rows that of the nearest multiple of 8."""
        place = float(rows if rows <= 32 else (rows + 4) // 8 * 8)
        point = bisect_left(self._rows, place)
        if self._rows[point] != place:
            self._seconds.insert(point, float(np.interp(place, self._rows, self._seconds)))
            self._rows.insert(point, place)
            self._visits.insert(point, GUESSED)
        return point

    def _extend(self) -> None:
        """Let the table go on behind its last two points."""
        before, last, far = self._rows[-3:]
        less, more, _ = self._seconds[-3:]
        self._seconds[-1] = more + max(0.0, (more - less) / (last - before)) * (far - last)

    def facts(self) -> dict[str, Any]:
        """What another model can begin with, as JSON has it."""
        seconds = [self._scale * own for own in self._seconds[:-1]]
        return {"rows": [int(rows) for rows in self._rows[:-1]], "seconds": seconds, "per_key": self.per_key}

    @classmethod
    def from_facts(cls, facts: Mapping[str, Any]) -> StepCosts:
        """The model that gave these facts; ValueError, TypeError or KeyError if there is none."""
        rows, seconds = [int(rows) for rows in facts["rows"]], [float(own) for own in facts["seconds"]]
        per_key = float(facts["per_key"])
        ascending = rows == sorted(set(rows)) and len(rows) == len(seconds) >= 2
        if not ascending or min(rows) < 1 or not all(0.0 < own < 1e3 for own in (*seconds, per_key + 1e-12)):
            raise ValueError("these are not costs of passes")
        return cls(rows, seconds, per_key)
