"""From a draft's logits to guesses: the best tokens of each row, to the rows that read them next."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from paceline.backends.cuda.kernels.launching import follow, overlaps
from paceline.backends.cuda.kernels.sampling import BLOCK, gumbel


@dataclass(frozen=True)
class Guesses:
    """The best guesses of each block of ids."""

    scores: torch.Tensor  # float64 [rows, blocks, most]
    ids: torch.Tensor  # int32 [rows, blocks, most] of the target
    weights: torch.Tensor  # float32 [rows, blocks] sums of exp(logit - the highest logit of the block)
    highest: torch.Tensor  # float32 [rows, blocks] that logit


def guesses_for(rows: int, vocab_size: int, most: int, device: torch.device) -> Guesses:
    """Room for the `most` best guesses of so many rows."""
    blocks = -(-vocab_size // BLOCK)
    return Guesses(
        torch.empty((rows, blocks, most), dtype=torch.float64, device=device),
        torch.empty((rows, blocks, most), dtype=torch.int32, device=device),
        torch.empty((rows, blocks), dtype=torch.float32, device=device),
        torch.empty((rows, blocks), dtype=torch.float32, device=device),
    )


@triton.jit  # type: ignore[untyped-decorator]
def _guess_kernel(  # type: ignore[no-untyped-def]
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
    most: tl.constexpr,
    block: tl.constexpr,
    overlap: tl.constexpr,
) -> None:
    row, number = tl.program_id(0), tl.program_id(1)
    guess = number * block + tl.arange(0, block)
    inside = guess < vocab_size
    token = tl.load(target_ids_at + guess, mask=inside, other=0) if has_ids else guess
    follow(overlap)
    logits = tl.load(logits_at + row.to(tl.int64) * logits_stride + guess, mask=inside, other=float("-inf"))
    place = row * tl.num_programs(1) + number
    highest = tl.maximum(tl.max(logits, 0), -1e30)
    tl.store(highest_at + place, highest)
    tl.store(weights_at + place, tl.sum(tl.exp(logits - highest), 0))  # NaN: no chance at all
    logits = tl.where(logits == logits, logits, float("-inf"))
    temperature = tl.load(temperatures_at + row // rows_each)
    scores = logits.to(tl.float64)
    if temperature > 0:  # the noise with which the target chooses
        position = tl.load(lengths_at + row // rows_each * lengths_stride) + ahead
        scores = scores / temperature + gumbel(token, tl.load(seeds_at + row // rows_each), position)
    for rank in tl.static_range(most):
        best = tl.max(scores, 0)
        chosen = tl.min(tl.where(scores == best, token, 0x7FFFFFFF), 0)
        tl.store(scores_at + place * most + rank, best)
        tl.store(ids_at + place * most + rank, chosen)
        scores = tl.where(token == chosen, float("-inf"), scores)


def guess(
    logits: torch.Tensor,
    vocab_size: int,
    target_ids: torch.Tensor | None,
    temperatures: torch.Tensor,
    seeds: torch.Tensor,
    lengths: torch.Tensor,
    ahead: int,
    guesses: Guesses,
    rows: int,
) -> None:
    """Write the best ids of each block of `logits` [rows, at least vocab_size] to `guesses`.

    `temperatures` float64, `seeds` int64 and `lengths` int32, with any stride, are [requests], whose rows are
    as many for each; the token that is guessed stands at `lengths + ahead`. `target_ids` [vocab_size] are the
    target's ids of the draft's; None: the same.
    """
    overlap = overlaps(logits.device)
    blocks, most = guesses.ids.shape[1:]
    _guess_kernel[(rows, blocks)](
        logits,
        target_ids,
        temperatures,
        seeds,
        lengths,
        guesses.scores,
        guesses.ids,
        guesses.weights,
        guesses.highest,
        vocab_size,
        logits.stride(0),
        rows // len(lengths),
        lengths.stride(0),
        ahead,
        target_ids is not None,
        most,
        BLOCK,
        overlap,
        num_warps=4,
        enable_fp_fusion=False,
        launch_pdl=overlap,
    )


@triton.jit  # type: ignore[untyped-decorator]
def _share(weights_at, highest_at, row, blocks, most_blocks: tl.constexpr):  # type: ignore[no-untyped-def]
    """The largest part of a row's softmax."""
    number = tl.arange(0, most_blocks)
    inside = number < blocks
    highest = tl.load(highest_at + row * blocks + number, mask=inside, other=float("-inf"))
    weights = tl.load(weights_at + row * blocks + number, mask=inside, other=0.0)
    return 1.0 / tl.sum(weights * tl.exp(highest - tl.max(highest, 0)), 0)


@triton.jit  # type: ignore[untyped-decorator]
def _choose_kernel(  # type: ignore[no-untyped-def]
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
    overlap: tl.constexpr,
) -> None:
    row = tl.program_id(0)
    request, local = row // rows_each, row % rows_each
    number = tl.arange(0, wide)
    inside = number < blocks * most
    follow(overlap)
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


def choose(
    guesses: Guesses,
    children: torch.Tensor,
    tokens: torch.Tensor,
    chances: torch.Tensor,
    temperatures: torch.Tensor,
    rows: int,
    requests: int,
) -> None:
    """Write the best guesses of each row to the rows that read them.

    `children` int32 [rows of a request, most, 2, 3] says where the children of each row stand in `tokens`, at
    most twice each: the rows before them, by request, the rows of a request among them, and the own one of
    those; -1: nowhere. `chances` float32 [rows] gets the chance that the best guess is right, as seen by
    head_chains.py: where `temperatures` float64 [requests] are above 0, its share among the known guesses.
    """
    overlap = overlaps(tokens.device)
    blocks, most = guesses.ids.shape[1:]
    _choose_kernel[(rows,)](
        guesses.scores,
        guesses.ids,
        guesses.weights,
        guesses.highest,
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
        overlap,
        num_warps=4,
        launch_pdl=overlap,
    )
