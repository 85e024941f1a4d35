"""Draft sampling on the device: the top tokens of a drafter's logits, written to the rows that read them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from paceline.backends.cuda.kernels.pdl import pdl_sync, supports_pdl
from paceline.backends.cuda.kernels.sampling.gumbel import BLOCK, gumbel, load_logits


@dataclass(frozen=True)
class DraftCandidates:
    """The best tokens of each vocabulary block."""

    scores: torch.Tensor  # float64 [rows, blocks, most]
    ids: torch.Tensor  # int32 [rows, blocks, most] the target's ids
    weights: torch.Tensor  # float32 [rows, blocks] sums of exp(logit - highest)
    highest: torch.Tensor  # float32 [rows, blocks] largest logit of the block


def draft_candidates_for(rows: int, vocab_size: int, most: int, device: torch.device) -> DraftCandidates:
    """Uninitialized candidates: the `most` best tokens of each row."""
    blocks = -(-vocab_size // BLOCK)
    return DraftCandidates(
        torch.empty((rows, blocks, most), dtype=torch.float64, device=device),
        torch.empty((rows, blocks, most), dtype=torch.int32, device=device),
        torch.empty((rows, blocks), dtype=torch.float32, device=device),
        torch.empty((rows, blocks), dtype=torch.float32, device=device),
    )


@triton.jit  # type: ignore[untyped-decorator]
def _candidates_kernel(  # type: ignore[no-untyped-def]
    logits_at,
    target_ids_at,
    temperatures_at,
    seeds_at,
    lengths_at,
    scores_at,
    ids_at,
    weights_at,
    highest_at,
    vocab_size,
    logits_stride,
    rows_each,
    lengths_stride,
    ahead,
    has_ids: tl.constexpr,
    in_order: tl.constexpr,
    most: tl.constexpr,
    block: tl.constexpr,
    pdl: tl.constexpr,
) -> None:
    row, number = tl.program_id(0), tl.program_id(1)
    index = number * block + tl.arange(0, block)
    inside = index < vocab_size
    token = tl.load(target_ids_at + index, mask=inside, other=0) if has_ids else index
    pdl_sync(pdl)
    logits = load_logits(logits_at, row, logits_stride, index, vocab_size)
    offset = row * tl.num_programs(1) + number
    highest = tl.maximum(tl.max(logits, 0), -1e30)
    tl.store(highest_at + offset, highest)
    tl.store(weights_at + offset, tl.sum(tl.exp(logits - highest), 0))  # NaN: chance 0
    logits = tl.where(logits == logits, logits, float("-inf"))
    temperature = tl.load(temperatures_at + row // rows_each)
    scores = logits.to(tl.float64)
    if temperature > 0:  # coupled drafting: add the target's noise
        position = tl.load(lengths_at + row // rows_each * lengths_stride) + ahead
        if in_order:
            position += row % rows_each
        scores = scores / temperature + gumbel(token, tl.load(seeds_at + row // rows_each), position)
    for rank in tl.static_range(most):
        best = tl.max(scores, 0)
        chosen = tl.min(tl.where(scores == best, token, 0x7FFFFFFF), 0)
        tl.store(scores_at + offset * most + rank, best)
        tl.store(ids_at + offset * most + rank, chosen)
        scores = tl.where(token == chosen, float("-inf"), scores)


def score_draft_tokens(
    logits: torch.Tensor,
    vocab_size: int,
    target_ids: torch.Tensor | None,
    temperatures: torch.Tensor,
    seeds: torch.Tensor,
    lengths: torch.Tensor,
    ahead: int,
    candidates: DraftCandidates,
    rows: int,
    in_order: bool = False,
) -> None:
    """Write the best ids of each block of `logits` [rows, at least vocab_size] to `candidates`.

    Best by logit, or by logit / temperature + the target's Gumbel noise (coupled drafting).
    `temperatures` float64, `seeds` int64 and `lengths` int32 [requests] may have any stride; requests have
    equally many rows. The drafted token has position `lengths + ahead`; with `in_order`, this is the position
    of a request's first row, and its rows have consecutive positions. `target_ids` [vocab_size] map the draft
    vocabulary to the target's; None: the same ids.
    """
    pdl = supports_pdl(logits.device)
    blocks, most = candidates.ids.shape[1:]
    _candidates_kernel[(rows, blocks)](
        logits,
        target_ids,
        temperatures,
        seeds,
        lengths,
        candidates.scores,
        candidates.ids,
        candidates.weights,
        candidates.highest,
        vocab_size,
        logits.stride(0),
        rows // len(lengths),
        lengths.stride(0),
        ahead,
        target_ids is not None,
        in_order,
        most,
        BLOCK,
        pdl,
        num_warps=4,
        enable_fp_fusion=False,
        launch_pdl=pdl,
    )


@triton.jit  # type: ignore[untyped-decorator]
def _share(weights_at, highest_at, row, blocks, most_blocks: tl.constexpr):  # type: ignore[no-untyped-def]
    """The largest probability of a row's softmax."""
    number = tl.arange(0, most_blocks)
    inside = number < blocks
    highest = tl.load(highest_at + row * blocks + number, mask=inside, other=float("-inf"))
    weights = tl.load(weights_at + row * blocks + number, mask=inside, other=0.0)
    return 1.0 / tl.sum(weights * tl.exp(highest - tl.max(highest, 0)), 0)


@triton.jit  # type: ignore[untyped-decorator]
def _write_tokens_kernel(  # type: ignore[no-untyped-def]
    scores_at,
    ids_at,
    weights_at,
    highest_at,
    children_at,
    tokens_at,
    chances_at,
    temperatures_at,
    num_rows,
    blocks,
    rows_each,
    most: tl.constexpr,
    wide: tl.constexpr,  # blocks * most, rounded up to a power of two
    most_blocks: tl.constexpr,
    pdl: tl.constexpr,
) -> None:
    row = tl.program_id(0)
    request, local = row // rows_each, row % rows_each
    number = tl.arange(0, wide)
    inside = number < blocks * most
    pdl_sync(pdl)
    scores = tl.load(scores_at + row * blocks * most + number, mask=inside, other=float("-inf"))
    ids = tl.load(ids_at + row * blocks * most + number, mask=inside, other=0x7FFFFFFF)
    first_score, rivals = tl.max(scores, 0), 0.0
    for rank in tl.static_range(most):
        best = tl.max(scores, 0)
        rivals += tl.exp(tl.maximum(best - first_score, -1e3))
        chosen = tl.min(tl.where(scores == best, ids, 0x7FFFFFFF), 0)
        chosen = tl.where(best > float("-inf"), chosen, 0)
        scores = tl.where(ids == chosen, float("-inf"), scores)
        for copy in tl.static_range(2):
            child_at = children_at + ((local * most + rank) * 2 + copy) * 3
            first, each, at = tl.load(child_at), tl.load(child_at + 1), tl.load(child_at + 2)
            tl.store(tokens_at + first * num_rows + request * each + at, chosen, mask=at >= 0)
    likely = tl.sqrt(_share(weights_at, highest_at, row, blocks, most_blocks))
    noisy = tl.load(temperatures_at + request) > 0
    tl.store(chances_at + row, tl.where(noisy, 1.0 / rivals, likely))


def write_draft_tokens(
    candidates: DraftCandidates,
    children: torch.Tensor,
    tokens: torch.Tensor,
    chances: torch.Tensor,
    temperatures: torch.Tensor,
    rows: int,
    requests: int,
) -> None:
    """Write the best tokens of each row to the rows of its children.

    `children` int32 [rows of a request, most, 2, 3]: up to two destinations in `tokens` for each child, as
    (rows of a request before its pass, rows of a request in that pass, index among those); -1: none.
    `chances` float32 [rows] gets the acceptance chance of the best token, as head_chains.py estimates it:
    with `temperatures` float64 [requests] above 0, its softmax weight among the candidates.
    """
    pdl = supports_pdl(tokens.device)
    blocks, most = candidates.ids.shape[1:]
    _write_tokens_kernel[(rows,)](
        candidates.scores,
        candidates.ids,
        candidates.weights,
        candidates.highest,
        children,
        tokens,
        chances,
        temperatures,
        requests,
        blocks,
        rows // requests,
        most,
        triton.next_power_of_2(blocks * most),
        triton.next_power_of_2(blocks),
        pdl,
        num_warps=4,
        launch_pdl=pdl,
    )
