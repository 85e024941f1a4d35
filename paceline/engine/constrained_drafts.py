"""Drafts of requests with a grammar: forced tokens come first, and what the grammar forbids is removed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from paceline.constrain.pruning import Draft, fit_draft
from paceline.core.schedule import Scheduled
from paceline.core.trees import PLAIN, DraftPlan, DraftTrees, Draws
from paceline.draft.base import Drafter


def plan_after_forced(part: Scheduled, drafter: Drafter) -> DraftPlan:
    """The plan that the drafter of a part gets: it starts after the forced tokens, and has the nodes that
    they leave. Plain if nothing can follow them."""
    plan, constraint = part.plan, part.request.sampling.constraint
    if plan.forced == 0 or constraint is None:
        return plan
    run = constraint.forced()
    remaining = replace(plan.shrunk(plan.budget - plan.forced), forced=0)
    if remaining.budget == 0 or not run:
        return remaining
    depth = None if plan.depth is None else plan.depth - len(run)
    over = len(run) > plan.forced or run[-1] in part.request.ending_ids or (depth is not None and depth < 1)
    if over or not drafter.follows_prefix:
        return PLAIN
    return replace(remaining, depth=depth, prefix=run)


def fit_trees(trees: DraftTrees, parts: Sequence[Scheduled], members: Sequence[int]) -> DraftTrees:
    """The trees, with those of the parts `members` fitted to their constraints."""
    rows = [-1] * trees.num_nodes if trees.draws is None else trees.draws.rows.tolist()
    ends = trees.offsets.tolist()
    drafts = [
        Draft(
            *trees.tree_lists(index),
            rows[ends[index] : ends[index + 1]],
            trees.chances_of(index),
            trees.forced_of(index),
        )
        for index in range(len(parts))
    ]
    for index in members:
        plan, constraint = parts[index].plan, parts[index].request.sampling.constraint
        assert constraint is not None
        run = constraint.forced()[: plan.forced]
        drafts[index] = fit_draft(drafts[index], constraint, run, plan.budget, plan.levels)
    fitted = DraftTrees.from_lists(
        [(draft.tokens, draft.parents) for draft in drafts], [draft.chances or () for draft in drafts]
    )
    forced = np.array([each for draft in drafts for each in draft.forced], dtype=bool)
    fitted = replace(fitted, forced=forced)
    if trees.draws is None:
        return fitted
    flat = np.array([row for draft in drafts for row in draft.rows], dtype=np.int32)
    return replace(fitted, draws=Draws(trees.draws.draft_probs, flat))
