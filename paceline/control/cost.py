"""What a step costs: seconds of the target's pass by its rows, and of the drafters' calls.

Both are learned from every step. A pass is priced by a table over row counts, because tiles and graphs
make steps in it; a drafter's call by a sum of a few terms, because few calls must be enough to know it.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
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
NEW, REFIT = 50, 8  # calls after each of which prices are fitted, and how often later
SKIPPED = 4  # steps of which one teaches what calls cost, once that is known
FORGET = 0.98  # weight of a drafter's call after another one
WARM_UP = 2  # calls of a drafter of which the cheapest counts: the first ones fill its caches


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
# How much is needed to believe that a term costs something. What could be a price of levels is taken for
# one: if it is not, short drafts and large batches are tried once too often, and not once too seldom.
DOUBTS = (0.3, 0.3, 0.01, 1.0, 100.0)


class DraftCosts:
    """Seconds of drafters' calls: so much for each of the TERMS, never below 0.

    The terms of all drafters are fitted together, because a step's time is that of all its calls. What
    was never called is thought to cost nothing, so it is tried once.
    """

    def __init__(self, drafters: Sequence[str]) -> None:
        self._places = {name: slice(TERMS * i, TERMS * (i + 1)) for i, name in enumerate(drafters)}
        size = TERMS * len(drafters)
        self._doubts = np.tile(DOUBTS, len(drafters))  # [terms]
        self._products = np.zeros((size, size))  # [terms, terms] decayed sums of products of calls' sizes
        self._answers = np.zeros(size)  # [terms] decayed sums of sizes times seconds
        self._prices = np.zeros(size)  # [terms]
        self._since_fit = 0  # steps that the prices do not know yet
        self._steps = 0
        self._warming: dict[str, list[float]] = {name: [] for name in drafters}

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
        if len(calls) == 1 and len(self._warming[calls[0].drafter]) < WARM_UP:
            seconds = self._warmed(calls[0].drafter, seconds)
        elif (expected := float(sizes @ self._prices)) > 0.0:
            seconds = min(seconds, 2 * OUTLIER * expected)
        self._products *= FORGET
        self._answers *= FORGET
        self._products += np.outer(sizes, sizes)
        self._answers += sizes * seconds
        self._since_fit += 1

    def _warmed(self, drafter: str, seconds: float) -> float:
        """The least of the first calls; those before it are forgotten."""
        before = self._warming[drafter]
        if before and seconds < min(before):
            place = self._places[drafter]
            self._products[place, :] = self._products[:, place] = 0.0
            self._answers[place] = 0.0
        before.append(seconds)
        return min(before)

    def prices(self, drafter: str) -> list[float]:
        """Seconds of each of the TERMS."""
        if self._since_fit >= (1 if self._steps <= NEW else REFIT):
            self._prices = _least_squares(self._products + np.diag(self._doubts), self._answers)
            self._since_fit = 0
        prices: list[float] = self._prices[self._places[drafter]].tolist()
        return prices

    def facts(self) -> dict[str, list[list[float]]]:
        """For each drafter what others can begin with, as JSON has it: sums of products, and answers."""
        return {
            name: [*self._products[place, place].tolist(), self._answers[place].tolist()]
            for name, place in self._places.items()
        }

    def begin_with(self, facts: Mapping[str, Any]) -> None:
        """Take in what calls cost before; ValueError or TypeError if that makes no sense."""
        for name in self._places.keys() & facts.keys():
            place = self._places[name]
            sums = np.array(facts[name], dtype=np.float64)
            if sums.shape != (TERMS + 1, TERMS) or not np.isfinite(sums).all():
                raise ValueError("these are not sums of calls")
            self._products[place, place], self._answers[place] = sums[:-1], sums[-1]
            self._warming[name] = [0.0] * WARM_UP if sums.any() else []
            self._since_fit = REFIT


def _least_squares(products: Float64Array, answers: Float64Array) -> Float64Array:
    """[terms] a solution without negative terms: those that would be are left out, the worst first."""
    solution = np.zeros(len(answers))
    terms = np.flatnonzero(answers > 0.0)
    while len(terms):
        found = np.linalg.solve(products[np.ix_(terms, terms)], answers[terms])
        if found.min() >= 0.0:
            solution[terms] = found
            break
        terms = np.delete(terms, int(found.argmin()))
    return solution
