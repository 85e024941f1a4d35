"""The masses that top_p is measured on, on the device: whole numbers, as in verify/truncation.py.

A token's mass follows from how far its logit is below the largest. That distance has 256 grades, and masses
are summed by grade, first by the upper four bits of it, then within the sixteen where they reach the need by
the lower four. So one grade is left to be searched for the cut, whatever the logits are.
"""

from __future__ import annotations

import triton
import triton.language as tl

from paceline.backends.cuda.kernels.launching import follow
from paceline.backends.cuda.kernels.sampling import exponential, logarithm
from paceline.verify.truncation import FIXED_POINT_ONE, UNDERFLOW_NATS

_MASS_ONE = tl.constexpr(FIXED_POINT_ONE)
_MASSLESS = tl.constexpr(UNDERFLOW_NATS)


@triton.jit
def options_of(options_at, temperatures_at, row):  # type: ignore[no-untyped-def]
    """Temperature, top_k, top_p and min_p of a row, and whether they leave anything out."""
    temperature = tl.load(temperatures_at + row)
    top_k, top_p = tl.load(options_at + 3 * row).to(tl.int64), tl.load(options_at + 3 * row + 1)
    min_p = tl.load(options_at + 3 * row + 2)
    restricts = (temperature > 0) & ((top_k > 0) | (top_p < 1.0) | (min_p > 0.0))
    return temperature, top_k, top_p, min_p, restricts


@triton.jit
def mass(scaled, peak):  # type: ignore[no-untyped-def]
    return (exponential(scaled - peak) * _MASS_ONE).to(tl.int64)


@triton.jit
def grade(scaled, peak):  # type: ignore[no-untyped-def]
    """How far below the largest a value is, that of all that has mass: 0 to 255."""
    return tl.minimum((peak - scaled) * (256.0 / _MASSLESS), 255.0).to(tl.int32)


@triton.jit
def digit_sums(rank, weight, prefix, shift):  # type: ignore[no-untyped-def]
    """The weights of ranks that begin with `prefix`, by the four bits that follow: int64 [16]."""
    digit = tl.where((rank >> (shift + 4)) == prefix, (rank >> shift) & 15, 16)
    is_own = digit[:, None] == tl.arange(0, 16)[None, :]
    return tl.sum(tl.where(is_own, weight[:, None], 0), 0)


@triton.jit
def crossing(sums, before, need):  # type: ignore[no-untyped-def]
    """The first digit at which weights reach the need, what those before it weigh, and what it weighs."""
    number = tl.arange(0, 16)
    reached = tl.cumsum(sums, 0) + before
    digit = tl.minimum(tl.sum((reached < need).to(tl.int32), 0), 15)
    own = tl.sum(tl.where(number == digit, sums, 0), 0)
    return digit, tl.sum(tl.where(number == digit, reached - sums, 0), 0), own


@triton.jit
def needed(total, top_p):  # type: ignore[no-untyped-def]
    """The mass that top_p keeps of this total."""
    share = top_p * total.to(tl.float64)
    need = share.to(tl.int64)
    need += (need.to(tl.float64) < share).to(tl.int64)  # rounded up
    return tl.maximum(1, tl.minimum(total, need))


@triton.jit  # type: ignore[untyped-decorator]
def likeliest(peaks_at, row, temperature, top_p, min_p, groups, most_groups: tl.constexpr):  # type: ignore[no-untyped-def]
    """The largest logits of a row's groups, the largest of all scaled, and what kept ones reach at least."""
    number = tl.arange(0, most_groups)
    logits = tl.load(peaks_at + row * groups + number, mask=number < groups, other=float("-inf"))
    peak = tl.max(logits, 0).to(tl.float64) / temperature
    floor = tl.full([], float("-inf"), tl.float64)
    if min_p > 0.0:
        floor = peak + logarithm(min_p)
    if top_p < 1.0:
        floor = tl.maximum(floor, peak - _MASSLESS)  # top_p keeps nothing that has no mass
    return logits, peak, floor


@triton.jit  # type: ignore[untyped-decorator]
def _over_blocks(sums_at, blocks, most_blocks: tl.constexpr):  # type: ignore[no-untyped-def]
    """The sums [16] over all blocks."""
    block = tl.arange(0, most_blocks)[:, None]
    return tl.sum(tl.load(sums_at + block * 16 + tl.arange(0, 16)[None, :], mask=block < blocks, other=0), 0)


@triton.jit  # type: ignore[untyped-decorator]
def upper_grade(sums_at, blocks, top_p, most_blocks: tl.constexpr):  # type: ignore[no-untyped-def]
    """The upper four bits of the grade where masses reach the need, what those before it weigh, the need."""
    sums = _over_blocks(sums_at, blocks, most_blocks)
    need = needed(tl.sum(sums, 0), top_p)
    digit, before, _ = crossing(sums, tl.zeros([], tl.int64), need)
    return digit, before, need


@triton.jit  # type: ignore[untyped-decorator]
def needed_grade(sums_at, blocks, top_p, most_blocks: tl.constexpr):  # type: ignore[no-untyped-def]
    """The grade where the masses of the likeliest reach what top_p needs, and how much of it they need."""
    upper, before, need = upper_grade(sums_at, blocks, top_p, most_blocks)
    sums = _over_blocks(sums_at + blocks * 16, blocks, most_blocks)
    lower, before, _ = crossing(sums, before, need)
    return upper * 16 + lower, need - before


@triton.jit  # type: ignore[untyped-decorator]
def masses_kernel(  # type: ignore[no-untyped-def]
    logits_at,
    temperatures_at,
    options_at,
    peaks_at,
    masses_at,
    vocab_size,
    logits_stride,
    groups,
    most_groups: tl.constexpr,
    most_blocks: tl.constexpr,
    block: tl.constexpr,
    part: tl.constexpr,
    is_second: tl.constexpr,
    overlap: tl.constexpr,
) -> None:
    """Sum a block's masses by the upper four bits of grades, or by the lower ones of those that matter."""
    row, number, blocks = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    follow(overlap)
    temperature, top_k, top_p, min_p, restricts = options_of(options_at, temperatures_at, row)
    if restricts & (top_p < 1.0) & (top_k <= 0):
        _, peak, floor = likeliest(peaks_at, row, temperature, top_p, min_p, groups, most_groups)
        sums_at = masses_at + row * (2 * blocks * 16)
        upper, shift = tl.full([], 0, tl.int32), 4
        if is_second:
            upper, _, _ = upper_grade(sums_at, blocks, top_p, most_blocks)
            shift = 0
            sums_at += blocks * 16
        at = logits_at + row.to(tl.int64) * logits_stride
        sums = tl.zeros([16], tl.int64)
        for first in range(number * block, (number + 1) * block, part):
            token = first + tl.arange(0, part)
            logits = tl.load(at + token, mask=token < vocab_size, other=float("-inf"))
            scaled = logits.to(tl.float64) / temperature
            weight = tl.where((logits > float("-inf")) & (scaled >= floor), mass(scaled, peak), 0)
            sums += digit_sums(grade(scaled, peak), weight, upper, shift)
        tl.store(sums_at + number * 16 + tl.arange(0, 16), sums)
