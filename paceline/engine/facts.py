"""The facts of a step, from its parts and what became of them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from paceline.draft.trees import DraftTrees
from paceline.engine.drafting import draft_facts
from paceline.engine.scheduler import Scheduled
from paceline.engine.stats import DraftFacts, StepStats
from paceline.verify.verdict import Verdict


def add_facts(
    stats: StepStats,
    parts: Sequence[Scheduled],
    trees: DraftTrees | None,
    verdicts: Sequence[Verdict],
    gained: Sequence[int],
    rows: int,
    attended: int,
    times: Sequence[float],
) -> None:
    """Write down a step whose parts gained so many tokens and whose phases ended at `times`."""
    known = sum(part.num_tokens for part in parts)
    drafts = _count_drafts(parts, trees, verdicts, gained, times)
    stats.requests, stats.rows, stats.attended = len(parts), rows, attended
    stats.prefill_tokens = known - sum([part.num_tokens == 1 for part in parts])
    stats.new_tokens = sum(gained)
    stats.drafted, stats.drafts = rows - known, tuple(drafts)
    stats.accepted = sum([draft.accepted for draft in drafts])
    planned, stats.draft_time, trimmed, *rest = np.diff(times).tolist()
    stats.plan_time = planned + trimmed
    stats.build_time, stats.forward_time, stats.verify_time, stats.commit_time = rest


def _count_drafts(
    parts: Sequence[Scheduled],
    trees: DraftTrees | None,
    verdicts: Sequence[Verdict],
    gained: Sequence[int],
    times: Sequence[float],
) -> list[DraftFacts]:
    """What became of each draft, counted for its request too, with an even share of the time."""
    planned = [part.request for part in parts if part.plan.drafter is not None]
    for request in planned:
        request.speculative.draft_time += (times[2] - times[1]) / len(planned)
        request.speculative.verify_time += (times[6] - times[5]) / len(parts)
    drafts: list[DraftFacts] = []
    if trees is None:
        return drafts
    for index, (part, verdict, count) in enumerate(zip(parts, verdicts, gained, strict=True)):
        _, parents = trees.tree_lists(index)
        if parents:
            drafts.append(draft_facts(part, parents, verdict.accepted, count))
            part.request.speculative.add(drafts[-1])
    return drafts
