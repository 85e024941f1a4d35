"""The results of a pass on the device, by request: which drafter has drafted, and what samplers need."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.backends.async_decoding import DecodeOutput
from paceline.core.arrays import Float64Array
from paceline.core.request import Request, SamplingNeeds
from paceline.core.schedule import Scheduled
from paceline.core.trees import DraftPlan
from paceline.core.verdict import Verdict
from paceline.engine.executors.verification import chosen_logprobs
from paceline.engine.step_stats import Shape

# plain ints: every pass compares them for all requests, and operators of an IntFlag take a microsecond
LOGPROBS, TOKEN_MASK = int(SamplingNeeds.LOGPROBS), int(SamplingNeeds.TOKEN_MASK)
# these depend on the tokens before, so their state on the host advances with every token
CHANGES = int(SamplingNeeds.LOGIT_EDITS) | TOKEN_MASK


def advance_sampling(request: Request, needs: int, verdict: Verdict, logprobs: Float64Array | None) -> None:
    """Add the log-probabilities of a verdict's tokens, and advance what depends on the path, if asked."""
    if needs & LOGPROBS and logprobs is not None:
        verdict.logprobs = chosen_logprobs(verdict, request, logprobs.tolist())
    if needs & CHANGES:
        for count, token in enumerate(verdict.tokens):
            request.sampling.advance(token)
            if request.ends_by(token, request.num_output + count):
                break  # a constraint allows nothing after the end


def accepted_paths(output: DecodeOutput, rows: Sequence[int]) -> list[tuple[int, ...]]:
    """The accepted nodes of the trees of these rows; empty if the drafts were no trees."""
    if output.nodes is None:
        return []
    counts = output.counts.tolist()
    return [tuple([node - 1 for node in output.nodes[row, 1 : counts[row]].tolist()]) for row in rows]


def drafted_parts(
    parts: list[Scheduled],
    second: Sequence[Scheduled],
    plan: DraftPlan,
    found: Sequence[int] | None,
    is_forced: bool = False,
) -> tuple[list[Scheduled], list[Shape]]:
    """The parts with the plans that their drafts came from, and the drafts' shapes: none in a plain pass.

    `found` is the number of tokens drafted from texts, by part. Where it is 0, the `otherwise` plan has
    drafted, whose parts are in `second`. `is_forced`: a grammar forces all drafted tokens.
    """
    if not plan.budget:
        return parts, []
    if plan.branching > 1:  # a tree of a fixed shape
        drafted, empty = Shape(plan.nodes, plan.levels), Shape(0, 0)
        if found is not None:
            parts = [
                part if count else other for part, other, count in zip(parts, second, found, strict=True)
            ]
        return parts, [drafted if part.plan.budget else empty for part in parts]
    counts = [part.plan.levels for part in parts] if found is None else list(found)
    if found is not None and plan.otherwise is not None:
        levels = plan.second().levels
        counts = [count or levels for count in found]
        parts = [part if count else other for part, other, count in zip(parts, second, found, strict=True)]
    shapes = {
        count: Shape(count, count, frozenset(range(count)) if is_forced else frozenset())
        for count in {0, *counts}
    }
    pairs = zip(parts, counts, strict=True)
    return parts, [shapes[count if part.plan.budget else 0] for part, count in pairs]
