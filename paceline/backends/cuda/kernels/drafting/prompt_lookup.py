"""Drafting from text on the device: optimistic host drafts, and prompt lookup (n-gram matching).

A program handles one request:

1. If the host has drafted for it, and the tokens sampled since then match that draft, the rest is the chain.
2. Otherwise it counts, for every position of the text, how many tokens up to there equal the end of the text.
   The longest match wins; among equally long ones, the newest.
3. If nothing is found, the tokens that a head or draft model has drafted remain (cascade).

In a tree, the chain replaces the first path (first children); other nodes remain. There is no index: scanning
8,000 tokens takes 7 microseconds. draft/lookup/ngram.py is the reference.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from paceline.backends.async_decoding import NgramLookup
from paceline.backends.cuda.kernels.pdl import pdl_sync, supports_pdl
from paceline.backends.cuda.kernels.step_rows import TOKENS, DeviceRequests, StepRows

LARGEST_BLOCK = 1024  # most tokens of an iteration: with 4,096, short texts took more than twice as long
PER_WARP = 128  # tokens of an iteration
MAX_TEXT = tl.constexpr(1 << 24)  # most tokens of a text: a match's length and index are packed in an int32


@triton.jit  # type: ignore[untyped-decorator]
def _prompt_lookup_kernel(  # type: ignore[no-untyped-def]
    slots_at,
    slot_tokens_at,
    lengths_at,
    limits_at,
    most_drafted_at,
    host_drafts_at,
    path_at,
    nodes_at,
    found_at,
    longest,
    nodes,
    row_nodes,
    host_drafts,
    kept,
    least: tl.constexpr,
    most: tl.constexpr,
    block: tl.constexpr,
    wide_nodes: tl.constexpr,
    wide_drafts: tl.constexpr,
    pdl: tl.constexpr,
) -> None:
    request = tl.program_id(0)
    slot = tl.load(slots_at + request)
    valid_slot = tl.maximum(slot, 0)
    text_at = slot_tokens_at + valid_slot * longest
    limit, takes = tl.load(limits_at + valid_slot), tl.load(most_drafted_at + valid_slot)
    pdl_sync(pdl)
    length = tl.load(lengths_at + valid_slot)
    end = tl.where((slot >= 0) & (length < limit) & (takes > 0), length, -1)  # the index of the last token
    node = tl.arange(0, wide_nodes)
    drafted = (node > 0) & (node < nodes)
    place = tl.load(path_at + node, mask=drafted, other=0)
    tokens, found = tl.zeros((wide_nodes,), tl.int32), tl.full((), 0, tl.int32)
    if wide_drafts > 0:
        draft_at, step = host_drafts_at + request * (1 + host_drafts), tl.arange(0, wide_drafts)
        start = tl.load(draft_at)
        positions = tl.maximum(start, 0) + step  # in the text
        expected = tl.load(draft_at + 1 + step, mask=step < host_drafts, other=-1)
        chosen = (step < host_drafts) & (positions <= end)  # sampled since the host drafted
        wrong = chosen & (tl.load(text_at + positions, mask=chosen, other=-1) != expected)
        left = tl.sum(((positions > end) & (expected >= 0)).to(tl.int32), 0)
        fits = (end >= 0) & (start >= 0) & (start <= end + 1) & (tl.max(wrong.to(tl.int32), 0) == 0)
        found = tl.where(fits, left, 0)
        tokens = tl.load(draft_at + 1 + end - start + node, mask=drafted & (node <= found), other=0)
    if most > 0:
        best = tl.zeros((block,), tl.int32)
        for first in range(0, tl.where(found > 0, 0, end), block):
            index = first + tl.arange(0, block)
            goes_on, count = index < end, tl.zeros((block,), tl.int32)
            for back in tl.static_range(most):  # all loads at once
                inside = (index < end) & (index >= back)
                last = tl.load(text_at + tl.maximum(end - back, 0))  # masked by `inside` for shorter texts
                goes_on &= inside & (tl.load(text_at + index - back, mask=inside, other=-1) == last)
                count += goes_on.to(tl.int32)
            best = tl.maximum(best, tl.where(count >= least, count * MAX_TEXT + index, 0))
        longest_match = tl.max(best, 0)
        index = longest_match % MAX_TEXT
        # a match that reaches the end of the text is continued periodically
        after = index + 1 + tl.maximum(node - 1, 0) % tl.maximum(end - index, 1)
        is_found = longest_match > 0
        tokens = tl.where(is_found, tl.load(text_at + after, mask=drafted, other=0), tokens)
        found = tl.where(is_found, nodes - 1, found)
    is_written = drafted & (node > tl.where(found > 0, 0, kept))
    tl.store(nodes_at + request * row_nodes + place, tokens, mask=is_written)
    drafts = tl.minimum(tl.minimum(found, nodes - 1), tl.minimum(takes, limit - 1 - length))
    tl.store(found_at + request, tl.maximum(drafts, 0))


def prompt_lookup(
    slots: torch.Tensor,
    state: DeviceRequests,
    options: NgramLookup | None,
    host_drafts: torch.Tensor | None,
    rows: StepRows,
    path: torch.Tensor,
    nodes: int,
    found: torch.Tensor,
    kept: int = 0,
    largest_block: int = LARGEST_BLOCK,
) -> None:
    """Draft a chain for the requests in `slots` int32 [requests], each with `nodes` nodes in `rows`.

    path           int32 [1 + tokens of the chain] the nodes that the chain is written to, after the root, 0
    host_drafts    int32 [requests, 1 + most] as the decoder's `launch` takes them; None: none
    options        n-gram sizes of prompt lookup; None: no lookup
    found          int32 [requests] gets the number of drafted tokens
    kept           tokens that remain as they are where nothing is found

    Tokens after the drafted ones are 0, or undefined beyond the request's limit.
    """
    pdl, longest = supports_pdl(slots.device), state.tokens.shape[1]
    assert longest <= MAX_TEXT.value
    most = 0 if host_drafts is None else host_drafts.shape[1] - 1
    block = 1 if options is None else min(triton.next_power_of_2(longest), largest_block)
    _prompt_lookup_kernel[(len(slots),)](
        slots,
        state.tokens,
        state.lengths,
        state.limits,
        state.most_drafted,
        host_drafts,
        path,
        rows.lines[TOKENS],
        found,
        longest,
        len(path),
        nodes,
        most,
        kept,
        options.shortest if options is not None else 0,
        options.longest if options is not None else 0,
        block,
        triton.next_power_of_2(len(path)),
        triton.next_power_of_2(most) if most else 0,
        pdl,
        num_warps=max(block // PER_WARP, 1),
        launch_pdl=pdl,
    )
