"""What a step costs: seconds of the target's pass by its rows, and of the drafters' calls.

Both are learned from every step. A pass is priced by a table over row counts, because tiles and graphs
make steps in it; a drafter's call by a sum of a few terms, because few calls must be enough to know it.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
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
FAR = 1e6  # rows: where the table ends
NEW, SKIPPED = 50, 4  # steps each of which teaches what calls cost; later one of so many
WARM_UP = 2  # calls of a drafter of which the quickest counts: the first ones fill its caches


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


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a drafter."""

    drafter: str
    requests: int
    levels: int  # of the deepest draft
    nodes: int  # of all drafts
    late: int = 0  # tokens that it had to catch up with first


TERMS = 5  # of a call's price: the call, each request, each level, each node, each token to catch up with
# What is thought possible of each, in times of a drafter's first call. What could be a price of levels is
# taken for one: if it is not, short drafts are tried once too often, and not once too seldom.
THINKABLE = np.array((0.3, 0.1, 0.5, 0.05, 0.02))
DRIFT = 0.01  # of that: how far prices may move from one call to the next
SPREAD = (
    0.15  # of a call's seconds: what is left unexplained. So a quick call is believed more than a slow one
)
FADE = 0.998  # what is left of the price of what is not called, after a while
SURPRISE = 3.0  # times what is to be expected: no call is believed to differ by more


class DraftCosts:
    """Seconds of drafters' calls: so much for each of the TERMS, never below 0.

    A Kalman filter over the terms of all drafters, because a step's time is that of all its calls. What
    calls do not tell apart is left as it was thought to be. What was never called is thought to cost
    nothing, so it is tried once.
    """

    def __init__(self, drafters: Sequence[str]) -> None:
        self._places = {name: slice(TERMS * i, TERMS * (i + 1)) for i, name in enumerate(drafters)}
        size = TERMS * len(drafters)
        self._prices = np.zeros(size)  # [terms]
        self._doubt = np.zeros((size, size))  # [terms, terms] covariance of what prices may be
        self._drift = np.zeros((size, size))  # [terms, terms] what is added to it by a call
        self._first: dict[str, list[float]] = {name: [] for name in drafters}  # seconds of first calls
        self._steps = 0

    def seconds(self, drafter: str, requests: Numbers, levels: Numbers, nodes: Numbers) -> Float64Array:
        """[...] seconds of calls of these sizes that find all up to date; 0 for those of no request."""
        call, request, level, node, _ = self.prices(drafter)
        count = np.asarray(requests)
        return np.where(count > 0, call, 0.0) + request * count + level * levels + node * nodes

    def observe(self, calls: Sequence[Call], seconds: float) -> None:
        """Take in the calls of one step, which took so long together."""
        self._steps += 1
        if self._steps > NEW and self._steps % SKIPPED:
            return
        sizes = np.zeros(len(self._prices))
        for call in calls:
            sizes[self._places[call.drafter]] = (1.0, call.requests, call.levels, call.nodes, call.late)
            if len(self._first[call.drafter]) < WARM_UP:
                self._begin(call.drafter, seconds)
        shared = self._doubt @ sizes
        spread = float(sizes @ shared) + (SPREAD * seconds) ** 2 + 1e-12
        most = SURPRISE * math.sqrt(spread)
        gain = shared / spread
        surprise = seconds - float(sizes @ self._prices)
        self._prices = np.maximum(self._prices + gain * min(max(surprise, -most), most), 0.0)
        self._doubt = self._doubt - np.outer(gain, shared) + self._drift
        if abs(surprise) > most:  # prices may be quite different from what was thought possible
            for call in calls:
                place = self._places[call.drafter]
                self._doubt[place, place] += np.diag((0.3 * seconds * THINKABLE) ** 2)

    def _begin(self, drafter: str, seconds: float) -> None:
        """Take in one of the first calls: what was thought before it is forgotten if it is the quickest."""
        if seconds < min(self._first[drafter], default=math.inf):
            place = self._places[drafter]
            self._prices[place] = 0.0
            self._doubt[place, :] = self._doubt[:, place] = 0.0
            self._doubt[place, place] = np.diag((seconds * THINKABLE) ** 2)
            self._drift[place, place] = np.diag((seconds * DRIFT * THINKABLE) ** 2)
        self._first[drafter].append(seconds)

    def prices(self, drafter: str) -> list[float]:
        """Seconds of each of the TERMS."""
        prices: list[float] = self._prices[self._places[drafter]].tolist()
        return prices

    def fade(self, drafters: Iterable[str]) -> None:
        """Let prices of drafters that are not called sink, so that none is too dear to be tried for ever."""
        for name in drafters:
            self._prices[self._places[name]] *= FADE

    def facts(self) -> dict[str, list[list[float]]]:
        """For each drafter what others can begin with, as JSON has it: doubts, and prices."""
        return {
            name: [*self._doubt[place, place].tolist(), self._prices[place].tolist()]
            for name, place in self._places.items()
            if self._first[name]
        }

    def begin_with(self, facts: Mapping[str, Any]) -> None:
        """Take in what calls cost before. ValueError or TypeError if that makes no sense."""
        for name in self._places.keys() & facts.keys():
            place = self._places[name]
            known = np.array(facts[name], dtype=np.float64)
            if (
                known.shape != (TERMS + 1, TERMS)
                or not np.isfinite(known).all()
                or not 0 <= known[-1].min() <= known[-1].max() < 1
            ):
                raise ValueError("these are not prices of calls")
            self._doubt[place, place], self._prices[place] = known[:-1], known[-1]
            usual = float(known[-1] @ (1.0, 1.0, 1.0, 1.0, 0.0))
            self._drift[place, place] = np.diag((usual * DRIFT * THINKABLE) ** 2)
            self._first[name] = [usual] * WARM_UP
