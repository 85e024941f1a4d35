"""RowCosts: the marginal cost of rows in a batch, and how many drafted nodes are worth it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from paceline.compiling import compiled
from paceline.control.cost import Float64Array, StepCosts

BoolArray = npt.NDArray[np.bool_]
ROW_SPAN = 4  # rows over which the cost of one more is averaged: the table has steps


@dataclass(frozen=True, slots=True)
class Batch:
    """A step before anything is drafted, without its prefill.

    Prefill has to be computed anyway. If its seconds counted, tokens would look more valuable in a step with
    a prompt than in the next one.
    """

    tokens: float  # new tokens without drafts
    rows: int
    keys: float  # mean keys that a row reads
    per_token: float = 0.0  # seconds on the host for a new token, drafted or not


class RowCosts:
    """Seconds of a batch's pass with 0, 1, 2, ... more rows."""

    def __init__(self, batch: Batch, passes: StepCosts, most: int) -> None:
        """With up to `most` more."""
        self.seconds = passes.seconds(
            np.arange(batch.rows, batch.rows + most + 1.0), batch.keys
        )  # [more rows]
        self.listed: list[float] = self.seconds.tolist()  # the same as a list: faster to read one by one

    def cheapest(self, rows: float) -> float:
        """Seconds of a row: the mean of this many, or of all further ones where these are cheaper.

        In a mixture of experts they are: the first rows read experts that no row before them has read.
        """
        most, count = len(self.listed) - 1, round(rows)
        first = max(1, min(count, most))
        row = (self.listed[first] - self.listed[0]) / first
        if most - count < ROW_SPAN:  # the rest of a tile says nothing of the rows after it
            return row
        return min(row, (self.listed[most] - self.listed[count]) / (most - count))

    def row(self, rows: float) -> float:
        """Seconds of one row after this many more rows, averaged over the next few."""
        first = min(int(rows), len(self.listed) - 1)
        last = min(first + ROW_SPAN, len(self.listed) - 1)
        return (self.listed[last] - self.listed[first]) / max(1, last - first)


@compiled
def worth_verifying(chances: Float64Array, seconds: Float64Array, rate: float) -> int:
    """How many nodes to verify, given their chances in descending order, RowCosts.seconds, and the tokens per
    second `rate`.

    Every place to stop is compared, because rows get cheap and expensive in turn: a row that fills a tile is
    worth taking where one that starts another is not.
    """
    best, best_worth, worth = 0, 0.0, 0.0
    for node in range(min(len(chances), len(seconds) - 1)):
        worth += chances[node] - rate * (seconds[node + 1] - seconds[node])
        if worth > best_worth:
            best, best_worth = node + 1, worth
    return best
