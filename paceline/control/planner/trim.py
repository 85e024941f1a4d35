"""Trimming: chooses the drafted nodes to verify, once their confidences are known.

The nodes of all requests are sorted by chance, and the best cut is taken. Nodes that were sampled at random
are never dropped: if verification depended on their value, it would not be exact.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from paceline.compiling import compiled
from paceline.control.acceptance.calibration import POINTS_ARRAY, chance_at
from paceline.control.acceptance.model import AcceptanceModel, CalibrationLines, key_of
from paceline.control.cost import Float64Array
from paceline.control.cost.model import CostModel
from paceline.control.planner.records import StepRecord
from paceline.control.planner.row_costs import BoolArray, RowCosts, worth_verifying
from paceline.control.planner.search import PlanSearch
from paceline.core.arrays import Float32Array, Int32Array, Int64Array
from paceline.core.trees import DraftTrees

if TYPE_CHECKING:
    from paceline.core.schedule import Scheduled


@dataclass(frozen=True, slots=True)
class FastTrim:
    """Trims without learning, with the models of the last full step."""

    drafters: Sequence[str]
    lines: CalibrationLines  # of these drafters
    row_costs: RowCosts
    rate: float  # tokens that a second is worth

    def trim(self, drafters: Sequence[str | None], trees: DraftTrees) -> DraftTrees:
        """The nodes worth verifying; `drafters`: who drafted for each request. Trees with drawn nodes, or
        nodes without a confidence, are kept whole, and so are drafts that no choice asked for: those of
        tokens that a grammar forces."""
        if trees.chances is None or trees.draws is not None:
            return trees
        numbers = {drafter: number for number, drafter in enumerate(self.drafters)}
        drafted_by = np.array([numbers.get(drafter or "", -1) for drafter in drafters])
        keep = _worth_keeping(
            trees.chances,
            trees.offsets,
            drafted_by,
            POINTS_ARRAY,
            *self.lines,
            self.row_costs.seconds,
            self.rate,
        )
        return trees if keep.all() else trees.kept(keep)


@compiled
def _worth_keeping(
    confidences: Float32Array,
    offsets: Int32Array,
    drafters: Int64Array,
    points: Float64Array,
    lines: Float64Array,
    ratios: Float64Array,
    seconds: Float64Array,
    rate: float,
) -> BoolArray:
    """[nodes] Whether a node is worth verifying. All are if a confidence is NaN, and so are those of requests
    whose drafter is -1."""
    keep = np.ones(len(confidences), np.bool_)
    nodes, chances, count = np.empty(len(keep), np.int64), np.empty(len(keep)), 0  # the likeliest first
    for request, drafter in enumerate(drafters):
        if drafter < 0:
            continue
        for node in range(offsets[request], offsets[request + 1]):
            chance = ratios[request, drafter] * chance_at(confidences[node], points, lines[request, drafter])
            if np.isnan(chance):
                return keep
            place = count
            while place > 0 and chances[place - 1] < chance:
                nodes[place], chances[place] = nodes[place - 1], chances[place - 1]
                place -= 1
            nodes[place], chances[place] = node, chance
            count += 1
    for node in nodes[worth_verifying(chances[:count], seconds, rate) : count]:
        keep[node] = False
    return keep


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
    chances = np.array([-chance for chance, _ in candidates])
    count = worth_verifying(chances, row_costs.seconds, step.choice.rate)
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
    ends, parents = trees.offsets.tolist(), trees.parents.tolist()
    said = [math.nan] * len(parents) if trees.chances is None else trees.chances.tolist()
    for index, part in enumerate(parts):
        drafter = part.plan.drafter
        first, end = ends[index], ends[index + 1]
        key = key_of(part.request)
        record = step.drafts.get(key)
        if record is None or drafter is None or drafter not in record.names or first == end:
            continue
        record.add_draft(drafter, first, said[first:end], parents[first:end])
        model, segment = acceptance.of(drafter, part.request), part.request.segment
        if drafter == record.names[0]:  # a second one was asked where the first had little: a biased sample
            confidences = sorted(record.confidences, reverse=True)
            model.add_draft(key, segment, confidences, record.length, part.plan.least_chance)
        record.chances = model.chances(key, segment, record.confidences)
        if trees.draws_of(index) is None:
            candidates += zip([-chance for chance in record.chances], range(first, end), strict=True)
    return sorted(candidates)
