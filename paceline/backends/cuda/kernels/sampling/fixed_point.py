"""Fixed-point probabilities for top-p on the device: the same integers as in verify/truncation.py.

A histogram finds the bin of the top-p threshold. Tokens fall into 256 bins by the distance of their logit
from the largest. Probabilities are summed in two passes: by the upper 4 bits of the bin, then, within the 16
bins where the required sum is reached, by the lower 4 bits. So a single bin is left to search.
"""

from __future__ import annotations

import triton
import triton.language as tl

from paceline.backends.cuda.kernels.pdl import pdl_sync
from paceline.backends.cuda.kernels.sampling.gumbel import exponential, load_logits, logarithm
from paceline.core.truncation import NUM_FIELDS
from paceline.verify.truncation import FIXED_POINT_ONE, UNDERFLOW_NATS

_NUM_FIELDS = tl.constexpr(NUM_FIELDS)
_FIXED_POINT_ONE = tl.constexpr(FIXED_POINT_ONE)
_UNDERFLOW_NATS = tl.constexpr(UNDERFLOW_NATS)


@triton.jit
def options_of(options_at, temperatures_at, row):  # type: ignore[no-untyped-def]
    """A row's temperature and truncation options (core/truncation.py), and whether it truncates at all."""
    temperature, options_at = tl.load(temperatures_at + row), options_at + _NUM_FIELDS * row
    top_k, top_p = tl.load(options_at).to(tl.int64), tl.load(options_at + 1)
    min_p = tl.load(options_at + 2)
    truncates = (temperature > 0) & ((top_k > 0) | (top_p < 1.0) | (min_p > 0.0))
    return temperature, (top_k, top_p, min_p), truncates


@triton.jit
def fixed_point(scaled, peak):  # type: ignore[no-untyped-def]
    return (exponential(scaled - peak) * _FIXED_POINT_ONE).to(tl.int64)


@triton.jit
def histogram_bin(scaled, peak):  # type: ignore[no-untyped-def]
    """The bin of a scaled logit, by its distance from the largest: 0 to 255."""
    return tl.minimum((peak - scaled) * (256.0 / _UNDERFLOW_NATS), 255.0).to(tl.int32)


@triton.jit
def digit_sums(rank, weight, prefix, shift):  # type: ignore[no-untyped-def]
    """The sums of the weights of ranks that begin with `prefix`, by their next 4 bits: int64 [16]."""
    digit = tl.where((rank >> (shift + 4)) == prefix, (rank >> shift) & 15, 16)
    is_own = digit[:, None] == tl.arange(0, 16)[None, :]
    return tl.sum(tl.where(is_own, weight[:, None], 0), 0)


@triton.jit
def crossing(sums, before, required):  # type: ignore[no-untyped-def]
    """The first digit at which the cumulative weight reaches `required`, the weight before it, its weight."""
    number = tl.arange(0, 16)
    reached = tl.cumsum(sums, 0) + before
    digit = tl.minimum(tl.sum((reached < required).to(tl.int32), 0), 15)
    weight_there = tl.sum(tl.where(number == digit, sums, 0), 0)
    return digit, tl.sum(tl.where(number == digit, reached - sums, 0), 0), weight_there


@triton.jit
def required_sum(total, top_p):  # type: ignore[no-untyped-def]
    """The probability mass that top-p keeps of this total, rounded up."""
    share = top_p * total.to(tl.float64)
    required = share.to(tl.int64)
    required += (required.to(tl.float64) < share).to(tl.int64)  # rounded up
    return tl.maximum(1, tl.minimum(total, required))


@triton.jit  # type: ignore[untyped-decorator]
def peak_and_floor(peaks_at, row, temperature, truncation, groups, most_groups: tl.constexpr):  # type: ignore[no-untyped-def]
    """The largest logits of a row's groups; the largest logit / temperature; its lower bound by min-p."""
    _, top_p, min_p = truncation
    number = tl.arange(0, most_groups)
    logits = tl.load(peaks_at + row * groups + number, mask=number < groups, other=float("-inf"))
    peak = tl.max(logits, 0).to(tl.float64) / temperature
    floor = tl.full([], float("-inf"), tl.float64)
    if min_p > 0.0:
        floor = peak + logarithm(min_p)
    if top_p < 1.0:
        floor = tl.maximum(floor, peak - _UNDERFLOW_NATS)  # top-p keeps no token of probability 0
    return logits, peak, floor


@triton.jit  # type: ignore[untyped-decorator]
def _over_blocks(sums_at, blocks, most_blocks: tl.constexpr):  # type: ignore[no-untyped-def]
    """The sums [16] over all blocks."""
    block = tl.arange(0, most_blocks)[:, None]
    return tl.sum(tl.load(sums_at + block * 16 + tl.arange(0, 16)[None, :], mask=block < blocks, other=0), 0)


@triton.jit  # type: ignore[untyped-decorator]
def upper_bits(sums_at, blocks, top_p, most_blocks: tl.constexpr):  # type: ignore[no-untyped-def]
    """The upper 4 bits of the threshold's bin, the probability before them, and the required probability."""
    sums = _over_blocks(sums_at, blocks, most_blocks)
    required = required_sum(tl.sum(sums, 0), top_p)
    digit, before, _ = crossing(sums, tl.zeros([], tl.int64), required)
    return digit, before, required


@triton.jit  # type: ignore[untyped-decorator]
def find_threshold_bin(sums_at, blocks, top_p, most_blocks: tl.constexpr):  # type: ignore[no-untyped-def]
    """The bin of the top-p threshold, and how much of its probability is required."""
    upper, before, required = upper_bits(sums_at, blocks, top_p, most_blocks)
    sums = _over_blocks(sums_at + blocks * 16, blocks, most_blocks)
    lower, before, _ = crossing(sums, before, required)
    return upper * 16 + lower, required - before


@triton.jit  # type: ignore[untyped-decorator]
def histogram_kernel(  # type: ignore[no-untyped-def]
    logits_at,
    temperatures_at,
    options_at,
    peaks_at,
    probability_sums_at,
    vocab_size,
    logits_stride,
    groups,
    most_groups: tl.constexpr,
    most_blocks: tl.constexpr,
    block: tl.constexpr,
    part: tl.constexpr,
    is_second: tl.constexpr,
    pdl: tl.constexpr,
) -> None:
    """Sum a block's probabilities by the upper 4 bits of their bins, or, if `is_second`, by the lower 4."""
    row, number, blocks = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    pdl_sync(pdl)
    temperature, truncation, truncates = options_of(options_at, temperatures_at, row)
    top_k, top_p = truncation[0], truncation[1]
    if truncates & (top_p < 1.0) & (top_k <= 0):
        _, peak, floor = peak_and_floor(peaks_at, row, temperature, truncation, groups, most_groups)
        sums_at = probability_sums_at + row * (2 * blocks * 16)
        upper, shift = tl.full([], 0, tl.int32), 4
        if is_second:
            upper, _, _ = upper_bits(sums_at, blocks, top_p, most_blocks)
            shift = 0
            sums_at += blocks * 16
        sums = tl.zeros([16], tl.int64)
        for first in range(number * block, (number + 1) * block, part):
            token = first + tl.arange(0, part)
            logits = load_logits(logits_at, row, logits_stride, token, vocab_size)
            scaled = logits.to(tl.float64) / temperature
            weight = tl.where((logits > float("-inf")) & (scaled >= floor), fixed_point(scaled, peak), 0)
            sums += digit_sums(histogram_bin(scaled, peak), weight, upper, shift)
        tl.store(sums_at + number * 16 + tl.arange(0, 16), sums)
