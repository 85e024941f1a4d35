"""Sampling on the device by the Gumbel-max trick: argmax(logits / temperature + gumbel), or plain argmax.

The noise has the bits of verify/noise.py: Philox in integers, and the logarithm of verify/floats.py in
doubles, in the same order (compiled without fused multiply-adds). So the device samples the same token as
the host from the same logits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from paceline.backends.cuda.kernels.pdl import pdl_sync, supports_pdl
from paceline.verify.floats import (
    ATANH,
    EXP_LOWEST,
    LN2_HIGH,
    LN2_LOW,
    LOG2_E,
    ROUNDER,
    SQRT_HALF,
    TAYLOR,
)

BLOCK = 2048  # ids of a program
PART = 256  # ids of an iteration: noise needs many registers
UNUSABLE = -1  # token of a row with NaN or +inf among its logits
LN2_HIGH = tl.constexpr(LN2_HIGH)
LN2_LOW = tl.constexpr(LN2_LOW)
SQRT_HALF = tl.constexpr(SQRT_HALF)
EXP_LOWEST = tl.constexpr(EXP_LOWEST)
LOG2_E = tl.constexpr(LOG2_E)
ROUNDER = tl.constexpr(ROUNDER)
TERMS = tl.constexpr(tuple(float(term) for term in ATANH))
EXP_TERMS = tl.constexpr(tuple(float(term) for term in TAYLOR))


@dataclass(frozen=True)
class Candidates:
    """The best token of each block of ids."""

    scores: torch.Tensor  # float64 [rows, blocks]
    ids: torch.Tensor  # int32 [rows, blocks]; UNUSABLE if a logit of the block is NaN or +inf


def candidates_for(rows: int, vocab_size: int, device: torch.device) -> Candidates:
    """Uninitialized candidates of `rows` rows."""
    blocks = -(-vocab_size // BLOCK)
    return Candidates(
        torch.empty((rows, blocks), dtype=torch.float64, device=device),
        torch.empty((rows, blocks), dtype=torch.int32, device=device),
    )


@dataclass(frozen=True)
class Thresholds:
    """Truncation of rows: keep ids with logit / temperature above `values`, and ties up to `last_ids`."""

    values: torch.Tensor  # float64 [rows]
    last_ids: torch.Tensor  # int32 [rows]


@triton.jit
def load_logits(logits_at, row, stride, token, vocab_size):  # type: ignore[no-untyped-def]
    """The logits of token ids of a row; -inf for ids beyond the vocabulary."""
    at = logits_at + row.to(tl.int64) * stride + token
    return tl.load(at, mask=token < vocab_size, other=float("-inf"))


@triton.jit
def logarithm(x):  # type: ignore[no-untyped-def]
    """The natural logarithm of positive doubles, the bits of verify/floats.py."""
    bits = x.to(tl.int64, bitcast=True)
    exponent = ((bits >> 52) & 0x7FF) - 1022
    mantissa = ((bits & 0xFFFFFFFFFFFFF) | 0x3FE0000000000000).to(tl.float64, bitcast=True)
    low = mantissa < SQRT_HALF
    mantissa = tl.where(low, mantissa * 2.0, mantissa)
    power = tl.where(low, exponent - 1, exponent).to(tl.float64)
    fraction = mantissa - 1.0
    ratio = fraction / (2.0 + fraction)
    square = ratio * ratio
    series = tl.zeros_like(ratio) + TERMS[11]
    for term in tl.static_range(1, 12):
        series = series * square + TERMS[11 - term]
    return power * LN2_HIGH + (power * LN2_LOW + 2.0 * ratio * series)


@triton.jit
def exponential(x):  # type: ignore[no-untyped-def]
    """The exponential of doubles that are not positive, the bits of verify/floats.py."""
    x = tl.maximum(x, EXP_LOWEST)
    power = (x * LOG2_E + ROUNDER) - ROUNDER
    rest = (x - power * LN2_HIGH) - power * LN2_LOW
    series = tl.zeros_like(rest) + EXP_TERMS[13]
    for term in tl.static_range(1, 14):
        series = series * rest + EXP_TERMS[13 - term]
    return series * ((power.to(tl.int64) + 1023) << 52).to(tl.float64, bitcast=True)


@triton.jit
def gumbel(token, seed, position):  # type: ignore[no-untyped-def]
    """The Gumbel noise of token ids at a position: float64."""
    word_0 = (token >> 1).to(tl.uint32)
    word_1 = tl.zeros_like(word_0) + position.to(tl.uint32)
    word_2 = tl.zeros_like(word_0)
    word_3 = tl.zeros_like(word_0)
    key_0 = tl.zeros_like(word_0) + (seed & 0xFFFFFFFF).to(tl.uint32)
    key_1 = tl.zeros_like(word_0) + ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32)
    multiplier_0 = tl.full(word_0.shape, 0xD2511F53, tl.uint32)
    multiplier_1 = tl.full(word_0.shape, 0xCD9E8D57, tl.uint32)
    for _ in tl.static_range(10):
        high_0, low_0 = tl.umulhi(multiplier_0, word_0), multiplier_0 * word_0
        high_1, low_1 = tl.umulhi(multiplier_1, word_2), multiplier_1 * word_2
        word_0, word_2 = high_1 ^ word_1 ^ key_0, high_0 ^ word_3 ^ key_1
        word_1, word_3 = low_1, low_0
        key_0 = key_0 + tl.full(word_0.shape, 0x9E3779B9, tl.uint32)
        key_1 = key_1 + tl.full(word_0.shape, 0xBB67AE85, tl.uint32)
    odd = (token & 1) == 1
    low, high = tl.where(odd, word_2, word_0), tl.where(odd, word_3, word_1)
    bits = (low.to(tl.int64) >> 12) | (high.to(tl.int64) << 20)  # the upper 52 of 64
    uniform = (bits.to(tl.float64) + 0.5) * 2.220446049250313e-16
    return -logarithm(-logarithm(uniform))


@triton.jit  # type: ignore[untyped-decorator]
def _gumbel_argmax_kernel(  # type: ignore[no-untyped-def]
    logits_at,
    temperatures_at,
    seeds_at,
    positions_at,
    thresholds_at,
    last_ids_at,
    scores_at,
    ids_at,
    vocab_size,
    logits_stride,
    first_id,
    has_thresholds: tl.constexpr,
    block: tl.constexpr,
    part: tl.constexpr,
    pdl: tl.constexpr,
) -> None:
    row, number = tl.program_id(0), tl.program_id(1)
    pdl_sync(pdl)
    temperature = tl.load(temperatures_at + row)
    seed, position = tl.load(seeds_at + row), tl.load(positions_at + row) + 1
    best = tl.full([part], float("-inf"), tl.float64)
    chosen = tl.full([part], 0x7FFFFFFF, tl.int32)
    # a whole block at once, which brings it into L1: the parts below do not wait for L2, one after the other
    whole = load_logits(logits_at, row, logits_stride, number * block + tl.arange(0, block), vocab_size)
    unusable = tl.max(((whole != whole) | (whole == float("inf"))).to(tl.int32), 0)
    # in parts: with the noise of a whole block in registers, few programs would fit a multiprocessor
    for first in range(number * block, (number + 1) * block, part):
        column = first + tl.arange(0, part)
        token = first_id + column
        logits = load_logits(logits_at, row, logits_stride, column, vocab_size)
        scores = logits.to(tl.float64)
        if temperature > 0:
            scaled = scores / temperature
            is_kept = logits > float("-inf")
            if has_thresholds:
                threshold, last = tl.load(thresholds_at + row), tl.load(last_ids_at + row)
                is_kept = is_kept & ((scaled > threshold) | ((scaled == threshold) & (token <= last)))
            scores = tl.where(is_kept, scaled + gumbel(token, seed, position), float("-inf"))
        chosen = tl.where(scores > best, token, chosen)
        best = tl.maximum(scores, best)
    highest = tl.max(best, 0)
    first_best = tl.min(tl.where(best == highest, chosen, 0x7FFFFFFF), 0)
    offset = row * tl.num_programs(1) + number
    tl.store(scores_at + offset, highest)
    tl.store(ids_at + offset, tl.where(unusable > 0, -1, first_best))


@triton.jit  # type: ignore[untyped-decorator]
def best_candidate(scores_at, ids_at, row, blocks, most_blocks: tl.constexpr):  # type: ignore[no-untyped-def]
    """The token of a row: the best of its blocks, the lowest id among equals, or UNUSABLE."""
    number = tl.arange(0, most_blocks)
    inside = number < blocks
    scores = tl.load(scores_at + row * blocks + number, mask=inside, other=float("-inf"))
    ids = tl.load(ids_at + row * blocks + number, mask=inside, other=0x7FFFFFFF)
    best = tl.max(scores, 0)
    chosen = tl.min(tl.where(scores == best, ids, 0x7FFFFFFF), 0)
    usable = (tl.min(ids, 0) >= 0) & (best > float("-inf"))
    return tl.where(usable, chosen, -1)


@triton.jit  # type: ignore[untyped-decorator]
def _best_kernel(  # type: ignore[no-untyped-def]
    scores_at, ids_at, chosen_at, blocks, most_blocks: tl.constexpr, pdl: tl.constexpr
) -> None:
    row = tl.program_id(0)
    pdl_sync(pdl)
    tl.store(chosen_at + row, best_candidate(scores_at, ids_at, row, blocks, most_blocks))


def take_best(candidates: Candidates, chosen: torch.Tensor) -> None:
    """Reduce over blocks: write the tokens of the first rows to `chosen` [rows] int32, or UNUSABLE."""
    blocks, pdl = candidates.ids.shape[1], supports_pdl(chosen.device)
    most_blocks = triton.next_power_of_2(blocks)
    _best_kernel[(len(chosen),)](
        candidates.scores,
        candidates.ids,
        chosen,
        blocks,
        most_blocks,
        pdl,
        num_warps=1,
        launch_pdl=pdl,
    )


def gumbel_argmax(
    logits: torch.Tensor,
    vocab_size: int,
    temperatures: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    candidates: Candidates,
    rows: int,
    thresholds: Thresholds | None = None,
    first_id: int = 0,
) -> None:
    """Write the best id of each block of `logits` [rows, at least vocab_size] to `candidates`.

    `temperatures` float64, `seeds` int64 and `positions` int32 are [rows]; the sampled token has the next
    position. `thresholds`: only ids that truncation keeps are candidates. `first_id`: the first id of this
    rank's logits.
    """
    pdl = supports_pdl(logits.device)
    _gumbel_argmax_kernel[(rows, candidates.ids.shape[1])](
        logits,
        temperatures,
        seeds,
        positions,
        None if thresholds is None else thresholds.values,
        None if thresholds is None else thresholds.last_ids,
        candidates.scores,
        candidates.ids,
        vocab_size,
        logits.stride(0),
        first_id,
        thresholds is not None,
        BLOCK,
        PART,
        pdl,
        num_warps=4,
        enable_fp_fusion=False,
        launch_pdl=pdl,
    )
