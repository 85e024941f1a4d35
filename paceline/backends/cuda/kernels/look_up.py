"""Chains that are found in a request's own text, as paceline/draft/ngram.py finds them.

One program has one request. Of every place of its text it counts how many tokens up to there are those that
end the text; most of them win and, among equals, the newest place. So nothing is indexed and nothing is
kept between two steps: to read 8,000 tokens again takes 4 microseconds.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from paceline.backends.base import LookUp
from paceline.backends.cuda.kernels.launching import follow, overlaps
from paceline.backends.cuda.kernels.step_rows import TOKENS, DeviceRequests, StepRows

LARGEST_BLOCK = 4096  # tokens that are looked at together, 8 by each thread: with 16 it took twice as long
PER_WARP = 256
PLACES = tl.constexpr(1 << 24)  # most of a text, so that a length and a place are one number


@triton.jit  # type: ignore[untyped-decorator]
def _look_up_kernel(  # type: ignore[no-untyped-def]
    slots_at,
    known_at,
    lengths_at,
    limits_at,
    takes_at,
    nodes_at,
    found_at,
    longest,
    nodes,
    least: tl.constexpr,
    most: tl.constexpr,
    block: tl.constexpr,
    wide_nodes: tl.constexpr,
    overlap: tl.constexpr,
) -> None:
    request = tl.program_id(0)
    slot = tl.load(slots_at + request)
    own = tl.maximum(slot, 0)
    text_at = known_at + own * longest
    limit, takes = tl.load(limits_at + own), tl.load(takes_at + own)
    follow(overlap)
    length = tl.load(lengths_at + own)
    end = tl.where((slot >= 0) & (length < limit) & (takes > 0), length, -1)  # the place of the last token
    best = tl.zeros((block,), tl.int32)
    for first in range(0, end, block):
        place = first + tl.arange(0, block)
        goes_on, count = place < end, tl.zeros((block,), tl.int32)
        for back in range(most):
            inside = (place < end) & (place >= back)
            last = tl.load(text_at + tl.maximum(end - back, 0))  # of a shorter text no place is inside
            goes_on &= inside & (tl.load(text_at + place - back, mask=inside, other=-1) == last)
            count += goes_on.to(tl.int32)
        best = tl.maximum(best, tl.where(count >= least, count * PLACES + place, 0))
    longest_match = tl.max(best, 0)
    is_found = longest_match > 0
    place = longest_match % PLACES
    # at the end of the text what repeats is taken to repeat again
    node, period = tl.arange(0, wide_nodes), tl.maximum(end - place, 1)
    drafted = (node > 0) & (node < nodes)
    after = place + 1 + tl.maximum(node - 1, 0) % period
    tokens = tl.where(is_found, tl.load(text_at + after, mask=drafted, other=0), 0)
    tl.store(nodes_at + request * nodes + node, tokens, mask=drafted)
    tl.store(found_at + request, tl.where(is_found, tl.minimum(nodes - 1, limit - 1 - length), 0))


def look_up(
    slots: torch.Tensor,
    state: DeviceRequests,
    options: LookUp,
    rows: StepRows,
    nodes: int,
    found: torch.Tensor,
    largest_block: int = LARGEST_BLOCK,
) -> None:
    """Draft for the requests in `slots` int32 [requests] what their own texts say, as chains of `nodes` - 1.

    `found` int32 [requests] gets how many tokens of each chain are drafted. Where it is none, they are 0.
    """
    overlap, longest = overlaps(slots.device), state.tokens.shape[1]
    assert longest <= PLACES.value
    block = min(triton.next_power_of_2(longest), largest_block)
    _look_up_kernel[(len(slots),)](
        slots,
        state.tokens,
        state.lengths,
        state.limits,
        state.takes_drafts,
        rows.lines[TOKENS],
        found,
        longest,
        nodes,
        options.shortest,
        options.longest,
        block,
        triton.next_power_of_2(nodes),
        overlap,
        num_warps=max(block // PER_WARP, 1),
        launch_pdl=overlap,
    )
