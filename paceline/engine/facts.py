"""The facts of a step, from its parts and what became of them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from paceline.core.schedule import Scheduled
from paceline.core.stats import DraftFacts, StepStats
from paceline.core.trees import DraftTrees
from paceline.core.verdict import Verdict

Shape = tuple[int, int]  # nodes and levels of a draft


def shapes_of(trees: DraftTrees | None) -> list[Shape]:
    """Those of all trees; none if nothing was drafted."""
    if trees is None:
        return []
    shapes = []
    for index in range(trees.num_requests):
        depths: list[int] = []
        for parent in trees.tree_lists(index)[1]:
            depths.append(depths[parent] + 1 if parent >= 0 else 1)
        shapes.append((len(depths), max(depths, default=0)))
    return shapes


def add_facts(
    stats: StepStats,
    parts: Sequence[Scheduled],
    shapes: Sequence[Shape],
    verdicts: Sequence[Verdict],
    gained: Sequence[int],
    rows: int,
    attended: int,
    times: Sequence[float],
) -> None:
    """Write down a step whose parts gained so many tokens and whose phases ended at `times`.

    The parts' drafts had these shapes, if anything was drafted.
    """
    known = sum([part.num_tokens for part in parts])
    drafts = _count_drafts(parts, shapes, verdicts, gained, times)
    stats.requests, stats.rows, stats.attended = len(parts), rows, attended
    stats.prefill_tokens = known - sum([part.num_tokens == 1 for part in parts])
    stats.new_tokens = sum(gained)
    stats.drafted, stats.drafts = rows - known, tuple(drafts)
    stats.accepted = sum([draft.accepted for draft in drafts])
    planned, stats.draft_time, trimmed, *rest = [after - before for before, after in pairwise(times)]
    stats.plan_time = planned + trimmed
    stats.build_time, stats.forward_time, stats.verify_time, stats.commit_time = rest


def _count_drafts(
    parts: Sequence[Scheduled],
    shapes: Sequence[Shape],
    verdicts: Sequence[Verdict],
    gained: Sequence[int],
    times: Sequence[float],
) -> list[DraftFacts]:
    """What became of each draft, counted for its request too, with an even share of the time."""
    planned = [part.request.speculative for part in parts if part.plan.drafter is not None]
    if planned:
        drafting, verifying = (times[2] - times[1]) / len(planned), (times[6] - times[5]) / len(parts)
        for counts in planned:
            counts.draft_time += drafting
            counts.verify_time += verifying
    drafts: list[DraftFacts] = []
    for part, (nodes, depth), verdict, count in zip(parts, shapes, verdicts, gained, strict=False):
        if nodes:
            drafts.append(_draft_facts(part, nodes, depth, verdict.accepted[: min(count, nodes)], count))
            part.request.speculative.add(drafts[-1])
    return drafts


def _draft_facts(
    part: Scheduled, nodes: int, depth: int, path: tuple[int, ...], num_tokens: int
) -> DraftFacts:
    """What became of the draft of one part that gained `num_tokens` tokens."""
    request = part.request
    if request.finished:  # nothing below its last token was tried
        depth = min(depth, num_tokens)
    return DraftFacts(
        request_id=request.request_id,
        segment=request.segment,
        drafter=part.plan.drafter or "",
        nodes=nodes,
        depth=depth,
        accepted=len(path),
        child=request.child,
        path=path,
    )
