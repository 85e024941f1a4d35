"""Trimming: chooses the drafted nodes to verify, once their confidences are known.

The nodes of all requests are sorted by chance, and the best cut is taken. Nodes that were sampled at random
are never dropped: if verification depended on their value, it would not be exact.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from paceline.control.acceptance.calibration import POINTS
from paceline.control.acceptance.model import AcceptanceModel, key_of
from paceline.control.cost.model import CostModel
from paceline.control.planner.records import StepRecord
from paceline.control.planner.row_costs import RowCosts, worth_verifying
from paceline.control.planner.search import PlanSearch
from paceline.core.trees import DraftTrees

if TYPE_CHECKING:
    from paceline.core.schedule import Scheduled


@dataclass(frozen=True, slots=True)
class FastTrim:
    """Trims without learning: one interpolation per request, with the models of the last full step."""

    lines: Sequence[Mapping[str, tuple[Sequence[float], float]]]  # [requests] AcceptanceModel.lines
    row_costs: RowCosts
    rate: float  # tokens that a second is worth

    def trim(self, drafters: Sequence[str | None], trees: DraftTrees) -> DraftTrees:
        """The nodes worth verifying; `drafters`: who drafted for each request. Trees with drawn nodes, or
        nodes without a confidence, are kept whole, and so are drafts that no choice asked for: those of
        tokens that a grammar forces."""
        if trees.chances is None or trees.draws is not None:
            return trees
        chances = np.empty(trees.num_nodes)
        is_judged = np.zeros(trees.num_nodes, dtype=np.bool_)
        ends = trees.offsets.tolist()
        for index, drafter in enumerate(drafters):
            first, end = ends[index], ends[index + 1]
            model = self.lines[index].get(drafter or "")
            if model is not None and first < end:
                line, ratio = model
                chances[first:end] = ratio * np.interp(trees.chances[first:end], POINTS, line)
                is_judged[first:end] = True
        judged = np.flatnonzero(is_judged)
        order = judged[np.argsort(-chances[judged], kind="stable")]
        count = worth_verifying(chances[order].tolist(), self.row_costs, self.rate)
        if count == len(order) or np.isnan(chances[judged]).any():
            return trees
        keep = np.ones(trees.num_nodes, dtype=np.bool_)
        keep[order[count:]] = False
        return trees.kept(keep)


def trim_drafts(
    step: StepRecord,
    parts: Sequence[Scheduled],
    trees: DraftTrees,
    search: PlanSearch,
    costs: CostModel,
    acceptance: AcceptanceModel,
) -> DraftTrees:
    """The nodes worth verifying. Notes the drafts in the step's record and in the acceptance model."""
    candidates = _record_drafts(step, parts, trees, acceptance)
    row_costs = search.row_costs
    rows = sum(part.num_tokens for part in parts) + trees.num_nodes - len(candidates)
    if rows != search.batch.rows:
        row_costs = RowCosts(replace(search.batch, rows=rows), costs.passes, len(candidates))
    count = worth_verifying([-chance for chance, _ in candidates], row_costs, step.choice.rate)
    if count == len(candidates):
        return trees
    keep = np.ones(trees.num_nodes, dtype=np.bool_)
    keep[[node for _, node in candidates[count:]]] = False
    explored = [own for own in step.drafts.values() if own.size and own.drafter == own.explored]
    keep[[record.first for record in explored]] = True  # at least one node, to learn
    for record in step.drafts.values():
        record.keep_only(keep)
    return trees.kept(keep)


def _record_drafts(
    step: StepRecord, parts: Sequence[Scheduled], trees: DraftTrees, acceptance: AcceptanceModel
) -> list[tuple[float, int]]:
    """Note the drafts. Returns (-chance, node) of the nodes that may be dropped, most likely first."""
    candidates: list[tuple[float, int]] = []
    for index, part in enumerate(parts):
        drafter = part.plan.drafter
        first, end = int(trees.offsets[index]), int(trees.offsets[index + 1])
        key = key_of(part.request)
        record = step.drafts.get(key)
        if record is None or drafter is None or drafter not in record.names or first == end:
            continue
        record.add_draft(drafter, first, trees.chances_of(index), trees.tree_lists(index)[1])
        model = acceptance.of(drafter, part.request)
        if (
            drafter == record.names[0]
        ):  # a second drafter was asked where the first had little: a biased sample
            confidences = sorted(record.confidences, reverse=True)
            threshold = part.plan.least_chance
            model.add_draft(key, part.request.segment, confidences, record.length, threshold)
        record.chances = model.chances(key, part.request.segment, record.confidences)
        if trees.draws_of(index) is None:
            candidates += zip([-chance for chance in record.chances], range(first, end), strict=True)
    return sorted(candidates)
