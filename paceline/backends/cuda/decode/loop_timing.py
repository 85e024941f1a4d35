"""Prepares a decode loop at start-up: captures its graphs, and times its passes on a GPU."""

from __future__ import annotations

from functools import partial

from paceline.backends.cuda.decode.decode_loop import DecodeLoop, DeviceRequests
from paceline.backends.cuda.decode.draft_loops import Loop
from paceline.backends.cuda.decode.page_sender import PageSender
from paceline.backends.cuda.kernels.sampling.logit_edits import EditState
from paceline.backends.cuda.passes.graphs import buckets, device_seconds
from paceline.backends.cuda.passes.shared_prefix import no_shared_prefix

TIMED_CONTEXT = 256  # tokens of each request in timed passes: typical of a chat


def capture_and_time(
    loop: Loop, pages: PageSender, page_size: int, needs: int, edits: EditState | None
) -> dict[int, float]:
    """Seconds of a pass by its number of requests, for every bucket; empty without a GPU.

    No slot may be in use. `needs`: all SamplingNeeds that passes may have.
    """
    steps, seconds = loop.steps, {}
    for rows in buckets(loop.most):
        steps.begin([], rows)
        steps.step(rows)
        if steps.weights.adapters:
            steps.step(rows, has_adapters=True)
        steps.begin(_fill_slots(rows, steps.requests, pages, page_size), rows)
        if (measured := device_seconds(steps.weights.device, partial(steps.step, rows))) is not None:
            seconds[rows] = measured
    steps.begin([], rows)
    _compile_rare(steps, rows, needs, edits)
    return seconds


def _compile_rare(steps: DecodeLoop, rows: int, needs: int, edits: EditState | None) -> None:
    """Compile what few passes need, for all sizes; other sizes are captured when first needed."""
    steps.start_draft(rows)
    steps.start_logits(rows)
    steps.finish(rows, needs, edits)
    steps.use_shared_prefix(no_shared_prefix(rows))
    steps.step(rows)


def _fill_slots(count: int, state: DeviceRequests, pages: PageSender, page_size: int) -> list[int]:
    """Fill up to `count` slots with dummy requests of TIMED_CONTEXT tokens, to time passes; their slots.

    They have separate pages, if there are enough. They reject all drafts, so that all drafts are timed
    over the same context. Requests that join later overwrite them.
    """
    available, longest = state.tokens.shape
    slots, context = min(count, available), min(TIMED_CONTEXT, longest // 2)
    state.lengths.fill_(context)
    state.limits.fill_(longest)
    state.most_drafted.fill_(0)
    pages.fill(slots, -(-2 * context // page_size))  # with room for the tokens that passes add
    return list(range(slots))
