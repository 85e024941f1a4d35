"""Acceptance on the device: from sampled tokens to the accepted path, and the rows of the next step.

A program handles one request. From the root it follows, node by node, the child whose token was sampled
(pathwise verification). It appends the accepted tokens and the bonus token to the request's state, and writes
the request's rows of the next step from that state.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from paceline.backends.cuda.kernels.pdl import pdl_sync, supports_pdl
from paceline.backends.cuda.kernels.sampling.gumbel import Candidates
from paceline.backends.cuda.kernels.step_rows import DeviceRequests, ShapeTables, StepRows, write_rows

NO_NODE = tl.constexpr(0x7FFFFFFF)


@triton.jit  # type: ignore[untyped-decorator]
def _best_of_nodes(  # type: ignore[no-untyped-def]
    scores_at, ids_at, first, nodes, blocks, wide_nodes: tl.constexpr, most_blocks: tl.constexpr
):
    """The sampled token of every node: the best of its vocabulary blocks, ties to the lowest id, or -1."""
    node, number = tl.arange(0, wide_nodes), tl.arange(0, most_blocks)
    inside = (node < nodes)[:, None] & (number < blocks)[None, :]
    offset = (first + node)[:, None] * blocks + number[None, :]
    scores = tl.load(scores_at + offset, mask=inside, other=float("-inf"))
    ids = tl.load(ids_at + offset, mask=inside, other=NO_NODE)
    best = tl.max(scores, 1)
    chosen = tl.min(tl.where(scores == best[:, None], ids, NO_NODE), 1)
    usable = (tl.min(ids, 1) >= 0) & (best > float("-inf"))
    return tl.where(usable, chosen, -1)


@triton.jit  # type: ignore[untyped-decorator]
def _accept(  # type: ignore[no-untyped-def]
    request, requests, length, limit, takes, tree, to, levels: tl.constexpr, catch_up_rows: tl.constexpr
):
    """The number of new tokens of a request; writes the tokens and the nodes at which they were sampled.

    They go to the output, to the slot's tokens and, as sources, to the drafter's catch-up rows.
    """
    chosen, drafted, parents, nodes = tree
    output_at, accepted_at, slot_at, longest, sources_at = to
    number = tl.arange(0, chosen.shape[0])
    node, count, goes_on = 0, 0, length < limit
    for step in tl.static_range(levels + 1):
        token = tl.sum(tl.where(number == node, chosen, 0), 0)
        offset, at = request * (levels + 1) + step, length + 1 + step
        tl.store(output_at + offset, token, mask=goes_on)
        tl.store(accepted_at + offset, node, mask=goes_on)
        tl.store(slot_at + at, tl.maximum(token, 0), mask=goes_on & (at < longest))
        if step < catch_up_rows:
            source = nodes * requests + request * catch_up_rows + step
            tl.store(sources_at + source, request * nodes + node, mask=goes_on)
        count += goes_on.to(tl.int32)
        fits = (parents == node) & (drafted == token) & (length + number < limit) & (number <= takes)
        node = tl.min(tl.where(fits, number, NO_NODE), 0)
        goes_on = goes_on & (node < NO_NODE)
    return count


@triton.jit  # type: ignore[untyped-decorator]
def _accept_kernel(  # type: ignore[no-untyped-def]
    scores_at,
    ids_at,
    slots_at,
    slot_tokens_at,
    lengths_at,
    limits_at,
    most_drafted_at,
    pages_at,
    window_pages_at,
    parents_at,
    output_at,
    counts_at,
    accepted_at,
    lines_at,
    paths_at,
    plan_at,
    tiles_at,
    rest_at,
    stride,
    blocks,
    longest,
    most_pages,
    nodes,
    num_rows,
    num_tiles,
    catch_up_rows: tl.constexpr,
    always: tl.constexpr,
    levels: tl.constexpr,
    deep: tl.constexpr,
    is_chain: tl.constexpr,
    wide_nodes: tl.constexpr,
    most_blocks: tl.constexpr,
    wide_rows: tl.constexpr,
    wide_tiles: tl.constexpr,
    page_size: tl.constexpr,
    pdl: tl.constexpr,
) -> None:
    request, requests = tl.program_id(0), tl.num_programs(0)
    number = tl.arange(0, wide_nodes)
    slot = tl.load(slots_at + request)
    parents = tl.load(parents_at + number, mask=number < nodes, other=-2)
    pdl_sync(pdl)
    valid_slot = tl.maximum(slot, 0)
    length, limit = tl.load(lengths_at + valid_slot), tl.load(limits_at + valid_slot)
    drafted = tl.load(lines_at + request * nodes + number, mask=number < nodes, other=-2)
    chosen = _best_of_nodes(scores_at, ids_at, request * nodes, nodes, blocks, wide_nodes, most_blocks)
    to = (output_at, accepted_at, slot_tokens_at + valid_slot * longest, longest, lines_at + 5 * stride)
    tree = (chosen, drafted, parents, nodes)
    end, takes = tl.where(slot >= 0, limit, 0), tl.load(most_drafted_at + valid_slot)
    count = _accept(request, requests, length, end, takes, tree, to, levels, catch_up_rows)
    tl.store(counts_at + request, count)
    length += count
    tl.store(lengths_at + valid_slot, length, mask=count > 0)
    tl.debug_barrier()  # write_rows below reads the tokens stored here
    fresh = tl.minimum(length + 1, always) if always > 0 else count
    write_rows(
        request,
        requests,
        slot,
        length,
        limit,
        fresh,
        (slot_tokens_at, pages_at, longest, most_pages),
        window_pages_at,
        (lines_at, paths_at, stride),
        (plan_at, tiles_at, rest_at, num_rows, num_tiles),
        catch_up_rows,
        levels,
        deep,
        is_chain,
        wide_rows,
        wide_tiles,
        page_size,
    )


def accept_drafts(
    candidates: Candidates,
    slots: torch.Tensor,
    state: DeviceRequests,
    shape: ShapeTables,
    rows: StepRows,
    output: torch.Tensor,
    counts: torch.Tensor,
    accepted: torch.Tensor,
    page_size: int,
) -> None:
    """Accept the drafted tokens that the target sampled too, and write the rows of the next step.

    `output` int32 [requests, levels + 1] gets the new tokens, `accepted` the nodes at which they were
    sampled, and `counts` [requests] their number.
    """
    pdl = supports_pdl(slots.device)
    blocks = candidates.ids.shape[1]
    _accept_kernel[(len(slots),)](
        candidates.scores,
        candidates.ids,
        slots,
        state.tokens,
        state.lengths,
        state.limits,
        state.most_drafted,
        state.pages,
        state.window_pages,
        shape.parents,
        output,
        counts,
        accepted,
        rows.lines,
        rows.paths,
        shape.rows,
        shape.tiles,
        shape.paths,
        rows.lines.stride(0),
        blocks,
        wide_nodes=triton.next_power_of_2(len(shape.parents)),
        most_blocks=triton.next_power_of_2(blocks),
        pdl=pdl,
        **shape.arguments(state, page_size),
        num_warps=4,
        launch_pdl=pdl,
    )


@triton.jit  # type: ignore[untyped-decorator]
def _move_kernel(  # type: ignore[no-untyped-def]
    keys_at,
    values_at,
    slots_at,
    lengths_at,
    pages_at,
    counts_at,
    accepted_at,
    layer_stride,
    width,
    most_pages,
    levels: tl.constexpr,
    wide: tl.constexpr,
    page_size: tl.constexpr,
    pdl: tl.constexpr,
) -> None:
    request, layer = tl.program_id(0), tl.program_id(1).to(tl.int64)
    part = tl.arange(0, wide)
    slot = tl.maximum(tl.load(slots_at + request), 0)
    pdl_sync(pdl)
    count = tl.load(counts_at + request)
    before = tl.load(lengths_at + slot) - count
    for step in range(1, levels + 1):
        node = tl.load(accepted_at + request * (levels + 1) + step)
        if (step < count) & (node != step):
            # node numbers ascend along a path, so no source has been overwritten
            source = tl.load(pages_at + slot * most_pages + (before + node) // page_size).to(tl.int64)
            source = layer * layer_stride + (source * page_size + (before + node) % page_size) * width
            to = tl.load(pages_at + slot * most_pages + (before + step) // page_size).to(tl.int64)
            to = layer * layer_stride + (to * page_size + (before + step) % page_size) * width
            inside = part < width
            tl.store(keys_at + to + part, tl.load(keys_at + source + part, mask=inside), mask=inside)
            tl.store(values_at + to + part, tl.load(values_at + source + part, mask=inside), mask=inside)


def move_accepted(
    keys: torch.Tensor,
    values: torch.Tensor,
    slots: torch.Tensor,
    state: DeviceRequests,
    pages: torch.Tensor,
    counts: torch.Tensor,
    accepted: torch.Tensor,
    page_size: int,
) -> None:
    """Move keys and values [layers, slots, KV heads, head_dim] of accepted paths to contiguous KV indices.

    `pages` are the page tables of their KV cache group, int32 [slots of requests, most pages].
    In latent attention keys are latents, and values are empty [layers, slots, KV heads, 0].
    """
    pdl = supports_pdl(slots.device)
    width = keys.shape[2] * keys.shape[3]
    _move_kernel[(len(slots), len(keys))](
        keys,
        values if values.shape[3] else keys,
        slots,
        state.lengths,
        pages,
        counts,
        accepted,
        keys.stride(0),
        width,
        pages.shape[1],
        accepted.shape[1] - 1,
        triton.next_power_of_2(width),
        page_size,
        pdl,
        num_warps=4,
        launch_pdl=pdl,
    )
