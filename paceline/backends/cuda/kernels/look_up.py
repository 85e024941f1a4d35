"""Chains that the host has expected, or that are found in a request's own text as draft/ngram.py finds them.

One program has one request. If the host has given it a lead (engine/leads.py), that is held against the text,
and what it says of the next tokens is the chain, if it was right until here. Else, of every place of the text
it counts how many tokens up to there are those that end the text; most of them win and, among equals, the
newest place. So nothing is indexed and nothing is kept between two steps: to read 8,000 tokens again takes 4
microseconds.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from paceline.backends.ahead import LookUp
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
    leads_at,
    nodes_at,
    found_at,
    longest,
    nodes,
    leads,
    least: tl.constexpr,
    most: tl.constexpr,
    block: tl.constexpr,
    wide_nodes: tl.constexpr,
    wide_leads: tl.constexpr,
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
    node = tl.arange(0, wide_nodes)
    drafted = (node > 0) & (node < nodes)
    tokens, found = tl.zeros((wide_nodes,), tl.int32), tl.full((), 0, tl.int32)
    if wide_leads > 0:
        lead_at, step = leads_at + request * (1 + leads), tl.arange(0, wide_leads)
        start = tl.load(lead_at)
        led = tl.maximum(start, 0) + step  # places of the text
        expected = tl.load(lead_at + 1 + step, mask=step < leads, other=-1)
        chosen = (step < leads) & (led <= end)  # meanwhile
        wrong = chosen & (tl.load(text_at + led, mask=chosen, other=-1) != expected)
        left = tl.sum(((led > end) & (expected >= 0)).to(tl.int32), 0)
        fits = (end >= 0) & (start >= 0) & (start <= end + 1) & (tl.max(wrong.to(tl.int32), 0) == 0)
        found = tl.where(fits, left, 0)
        tokens = tl.load(lead_at + 1 + end - start + node, mask=drafted & (node <= found), other=0)
    if most > 0:
        best = tl.zeros((block,), tl.int32)
        for first in range(0, tl.where(found > 0, 0, end), block):
            place = first + tl.arange(0, block)
            goes_on, count = place < end, tl.zeros((block,), tl.int32)
            for back in range(most):
                inside = (place < end) & (place >= back)
                last = tl.load(text_at + tl.maximum(end - back, 0))  # of a shorter text no place is inside
                goes_on &= inside & (tl.load(text_at + place - back, mask=inside, other=-1) == last)
                count += goes_on.to(tl.int32)
            best = tl.maximum(best, tl.where(count >= least, count * PLACES + place, 0))
        longest_match = tl.max(best, 0)
        place = longest_match % PLACES
        # at the end of the text what repeats is taken to repeat again
        after = place + 1 + tl.maximum(node - 1, 0) % tl.maximum(end - place, 1)
        is_found = longest_match > 0
        tokens = tl.where(is_found, tl.load(text_at + after, mask=drafted, other=0), tokens)
        found = tl.where(is_found, nodes - 1, found)
    tl.store(nodes_at + request * nodes + node, tokens, mask=drafted)
    tl.store(found_at + request, tl.maximum(tl.minimum(tl.minimum(found, nodes - 1), limit - 1 - length), 0))


def look_up(
    slots: torch.Tensor,
    state: DeviceRequests,
    options: LookUp | None,
    leads: torch.Tensor | None,
    rows: StepRows,
    nodes: int,
    found: torch.Tensor,
    largest_block: int = LARGEST_BLOCK,
) -> None:
    """Draft for the requests in `slots` int32 [requests] what leads or their texts say: `nodes` - 1 tokens.

    `leads` int32 [requests, 1 + most] are lines as AheadDecoder.launch takes them; None: there are none.
    Without `options` nothing is looked up. `found` int32 [requests] gets how many tokens of each chain are
    drafted. Behind them they are 0, or anything beyond the request's limit.
    """
    overlap, longest = overlaps(slots.device), state.tokens.shape[1]
    assert longest <= PLACES.value
    most = 0 if leads is None else leads.shape[1] - 1
    block = 1 if options is None else min(triton.next_power_of_2(longest), largest_block)
    _look_up_kernel[(len(slots),)](
        slots,
        state.tokens,
        state.lengths,
        state.limits,
        state.takes_drafts,
        leads,
        rows.lines[TOKENS],
        found,
        longest,
        nodes,
        most,
        options.shortest if options is not None else 0,
        options.longest if options is not None else 0,
        block,
        triton.next_power_of_2(nodes),
        triton.next_power_of_2(most) if most else 0,
        overlap,
        num_warps=max(block // PER_WARP, 1),
        launch_pdl=overlap,
    )
