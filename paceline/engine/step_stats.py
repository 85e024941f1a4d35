"""The StepStats of a pass, from its parts and verdicts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import compress, pairwise
from typing import NamedTuple

from paceline.core.request import Request
from paceline.core.schedule import Scheduled
from paceline.core.stats import DraftKind, DraftStats, StepStats
from paceline.core.trees import DraftTrees
from paceline.core.verdict import Verdict


class Shape(NamedTuple):
    """The shape of a request's draft."""

    nodes: int
    depth: int  # levels
    forced: frozenset[int] = frozenset()  # nodes whose token a grammar forces


def shapes_of(trees: DraftTrees | None) -> list[Shape]:
    """The shapes of all trees; empty if nothing was drafted."""
    if trees is None:
        return []
    shapes = []
    parents = trees.parents.tolist()
    for index, (first, end) in enumerate(pairwise(trees.offsets.tolist())):
        depths: list[int] = []
        for parent in parents[first:end]:
            depths.append(depths[parent] + 1 if parent >= 0 else 1)
        shape = Shape(len(depths), max(depths, default=0))
        if trees.forced is not None:
            shape = shape._replace(forced=frozenset(compress(range(len(depths)), trees.forced_of(index))))
        shapes.append(shape)
    return shapes


def add_pass(
    stats: StepStats,
    parts: Sequence[Scheduled],
    shapes: Sequence[Shape],
    verdicts: Sequence[Verdict],
    paths: Sequence[tuple[int, ...]],
    gained: Sequence[int],
    seconds: Mapping[str, float],
) -> None:
    """Fill in the statistics of a pass. The caller sets `rows` and `attended`.

    `shapes` and `paths`: as in StepResult. `gained`: new tokens of each part. `seconds`: of each phase.
    """
    known = sum([part.num_tokens for part in parts])
    if shapes:
        if stats.overlapped:
            stats.drafts = _count_device_drafts(parts, shapes, verdicts, paths or [()] * len(parts), gained)
        else:
            stats.drafts = _count_drafts(parts, shapes, verdicts, gained)
    _share_time(parts, seconds)
    stats.requests = len(parts)
    stats.prefill_tokens = known - sum([part.num_tokens == 1 for part in parts])
    stats.new_tokens = sum(gained)
    stats.drafted = max(stats.rows - known, 0)
    stats.accepted = sum([draft.count * draft.accepted for draft in stats.drafts])
    if not stats.overlapped:
        planned = [part.request for part in parts if part.plan.budget]
        stats.asked = frozenset([(request.request_id, request.child) for request in planned])
    stats.plan_time, stats.draft_time = seconds["plan"], seconds["draft"]
    stats.build_time, stats.forward_time = seconds["build"], seconds["forward"]
    stats.verify_time, stats.commit_time = seconds["verify"], seconds["commit"]


def _share_time(parts: Sequence[Scheduled], seconds: Mapping[str, float]) -> None:
    """Add an even share of the time of drafting and verifying to each request that was drafted for."""
    planned = [part.request.speculative for part in parts if part.plan.budget]
    if planned:
        drafting, verifying = seconds["draft"] / len(planned), seconds["verify"] / len(parts)
        for counts in planned:
            counts.draft_time += drafting
            counts.verify_time += verifying


def _count_drafts(
    parts: Sequence[Scheduled], shapes: Sequence[Shape], verdicts: Sequence[Verdict], gained: Sequence[int]
) -> tuple[DraftStats, ...]:
    """The statistics of the drafts of a host pass, and their counts for the requests."""
    drafts: list[DraftStats] = []
    for part, shape, verdict, count in zip(parts, shapes, verdicts, gained, strict=True):
        if shape.nodes:
            path = verdict.accepted[: min(count, shape.nodes)]
            drafts.append(_draft_stats(part, shape, path, _depth(part.request, shape.depth, count)))
            part.request.speculative.add(drafts[-1].kind)
    return tuple(drafts)


def _count_device_drafts(
    parts: Sequence[Scheduled],
    shapes: Sequence[Shape],
    verdicts: Sequence[Verdict],
    paths: Sequence[tuple[int, ...]],
    gained: Sequence[int],
) -> tuple[DraftStats, ...]:
    """The statistics of the drafts of a device pass, and their counts for the requests.

    There may be hundreds in every pass, so drafts with equal results share one entry.
    """
    equal: dict[tuple[str, DraftKind, bool, tuple[int, ...]], int] = {}
    for part, (nodes, levels, forced), verdict, path, count in zip(
        parts, shapes, verdicts, paths, gained, strict=True
    ):
        if nodes:
            request = part.request
            accepted = min(len(verdict.accepted), count, nodes)
            depth = levels if request.finish_reason is None else _depth(request, levels, count)
            kind = part.plan.drafter or "", nodes, depth, accepted
            request.speculative.add(kind)
            is_forced = bool(forced)  # all nodes of a chain, or none
            name = request.segment, kind, is_forced, path[:accepted]
            equal[name] = equal.get(name, 0) + 1
    return tuple(
        [
            DraftStats(
                "",
                segment,
                *kind,
                forced=kind[1] if is_forced else 0,
                accepted_forced=kind[3] if is_forced else 0,
                path=path,
                count=count,
            )
            for (segment, kind, is_forced, path), count in equal.items()
        ]
    )


def _depth(request: Request, levels: int, num_tokens: int) -> int:
    """The levels of a draft that were verified: nothing below the last token of a request."""
    return min(levels, num_tokens) if request.finish_reason is not None else levels


def _draft_stats(part: Scheduled, shape: Shape, path: tuple[int, ...], depth: int) -> DraftStats:
    """The statistics of one part's draft."""
    request = part.request
    return DraftStats(
        request_id=request.request_id,
        segment=request.segment,
        drafter=part.plan.drafter or "",
        nodes=shape.nodes,
        depth=depth,
        accepted=len(path),
        child=request.child,
        path=path,
        forced=len(shape.forced),
        accepted_forced=sum([node in shape.forced for node in path]) if shape.forced else 0,
    )
