"""Steps that are as the one before: the same requests, the same plans, and nothing to be learned.

Planning and learning take as long as a drafted row. Where drafters are well known, a few steps in which only
what is drafted is new can do without.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from paceline.control.calibration import POINTS
from paceline.control.choice import PassPrices, worth_verifying
from paceline.control.planned import Planned
from paceline.core.trees import DraftPlan, DraftTrees

if TYPE_CHECKING:
    from paceline.core.request import Request


@dataclass(frozen=True, slots=True)
class Judge:
    """What is to be believed of drafts, and what they must be worth."""

    models: Sequence[Mapping[str, tuple[Sequence[float], float]]]  # [requests] by drafter: calibration, luck
    prices: PassPrices
    rate: float  # tokens that a second is worth

    def trim(self, drafters: Sequence[str | None], trees: DraftTrees) -> DraftTrees:
        """What is worth verifying of the drafts of these, one a request; what was drawn, or nothing was said
        of, stays."""
        if trees.chances is None or trees.draws is not None:
            return trees
        chances = np.empty(trees.num_nodes)
        ends = trees.offsets.tolist()
        for index, drafter in enumerate(drafters):
            first, end = ends[index], ends[index + 1]
            if drafter is not None and first < end:
                line, luck = self.models[index][drafter]
                chances[first:end] = luck * np.interp(trees.chances[first:end], POINTS, line)
        order = np.argsort(-chances, kind="stable")
        count = worth_verifying(chances[order].tolist(), self.prices, self.rate)
        if count == len(order) or np.isnan(chances).any():
            return trees
        keep = np.zeros(len(order), dtype=np.bool_)
        keep[order[:count]] = True
        return trees.kept(keep)


@dataclass(slots=True)
class Routine:
    """What such a step is."""

    running: Sequence[Request]
    plans: list[DraftPlan]  # [running]
    planned: Planned
    left: int  # how many of them may follow
    judge: Judge | None = None  # None: all that is drafted is verified

    def goes_on(self, running: Sequence[Request]) -> bool:
        """Whether the next step is one of them."""
        return self.left > 0 and running == self.running
