"""What min_p, top_k and top_p keep of a row's logits, on the device: the ids that verify/truncation.py keeps.

Each of the three keeps the first of the same order, the likeliest first and the lower id of equals. So what
they leave ends at one place, the cut, and a token is kept if it does not stand behind it:

    groups   the largest logit of each 256 ids
    masses   what top_p is measured on, summed: see masses.py
    bounds   from these: between which values the cut is
    lists    the ids that have such, as a rule a few
    cuts     where the weights of the likeliest reach what is needed, four bits of the logit at a time

Weights are whole numbers (1 each, or masses) and sums of them are exact in any order, so it does not matter
that lists have none. If there is no room for a list, the last kernel looks at all ids instead.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from paceline.backends.cuda.kernels.launching import follow, overlaps
from paceline.backends.cuda.kernels.masses import (
    crossing,
    digit_sums,
    grade,
    likeliest,
    mass,
    masses_kernel,
    needed,
    needed_grade,
    options_of,
)
from paceline.backends.cuda.kernels.sampling import BLOCK, Cuts

GROUP = 256  # ids that have one largest logit
MOST_LISTED = 8192  # ids of a row's list
CHUNK = 1024  # entries of a list that are looked at together
PART = 512  # ids whose masses are
_NO_ID = tl.constexpr(0x7FFFFFFF)
_LAST_RANK = tl.constexpr(1 << 32)


@dataclass(frozen=True)
class Kept:
    """Where the kernels meet, and the cuts that they find."""

    peaks: torch.Tensor  # float32 [rows, groups] the largest logit of each group
    masses: torch.Tensor  # int64 [rows, 2, blocks, 16] by upper four bits of grades, then by lower ones
    bounds: torch.Tensor  # float64 [rows, 2] scaled: the largest, and what is kept at least
    grades: torch.Tensor  # int32 [rows] that of the cut of top_p, where there is no top_k; else -1
    needs: torch.Tensor  # int64 [rows] the mass of this grade that it keeps
    counts: torch.Tensor  # int32 [rows] ids at which the cut may be
    ids: torch.Tensor  # int32 [rows, MOST_LISTED] these, in any order, if there is room for them
    cuts: Cuts


def kept_for(rows: int, vocab_size: int, device: torch.device) -> Kept:
    """Room for what is kept of so many rows."""

    def room(*shape: int, kind: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=kind, device=device)

    blocks = -(-vocab_size // BLOCK)
    return Kept(
        room(rows, blocks * (BLOCK // GROUP), kind=torch.float32),
        room(rows, 2, blocks, 16, kind=torch.int64),
        room(rows, 2, kind=torch.float64),
        room(rows, kind=torch.int32),
        room(rows, kind=torch.int64),
        room(rows, kind=torch.int32),
        room(rows, min(MOST_LISTED, vocab_size), kind=torch.int32),
        Cuts(room(rows, kind=torch.float64), room(rows, kind=torch.int32)),
    )


@triton.jit
def _rank(logits):  # type: ignore[no-untyped-def]
    """Whole numbers of 32 bits in the order of logits, the largest logit first."""
    bits = tl.where(logits == 0.0, 0.0, logits).to(tl.int32, bitcast=True)  # there are two zeros
    return 0x7FFFFFFF - (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)


@triton.jit
def _logit(rank):  # type: ignore[no-untyped-def]
    """The logit of a rank."""
    key = (0x7FFFFFFF - rank).to(tl.int32)
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit  # type: ignore[untyped-decorator]
def _groups_kernel(  # type: ignore[no-untyped-def]
    logits_at,
    temperatures_at,
    options_at,
    peaks_at,
    vocab_size,
    logits_stride,
    block: tl.constexpr,
    group: tl.constexpr,
    overlap: tl.constexpr,
) -> None:
    row, number = tl.program_id(0), tl.program_id(1)
    follow(overlap)
    _, _, _, _, restricts = options_of(options_at, temperatures_at, row)
    if restricts:
        groups: tl.constexpr = block // group
        own = number * groups + tl.arange(0, groups)
        token = own[:, None] * group + tl.arange(0, group)[None, :]
        at = logits_at + row.to(tl.int64) * logits_stride + token
        logits = tl.load(at, mask=token < vocab_size, other=float("-inf"))
        tl.store(peaks_at + row * (tl.num_programs(1) * groups) + own, tl.max(logits, 1))


@triton.jit  # type: ignore[untyped-decorator]
def _bounds_kernel(  # type: ignore[no-untyped-def]
    temperatures_at,
    options_at,
    peaks_at,
    masses_at,
    bounds_at,
    grades_at,
    needs_at,
    counts_at,
    groups,
    blocks,
    most_groups: tl.constexpr,
    most_blocks: tl.constexpr,
    overlap: tl.constexpr,
) -> None:
    row = tl.program_id(0)
    follow(overlap)
    temperature, top_k, top_p, min_p, restricts = options_of(options_at, temperatures_at, row)
    if restricts:
        logits, peak, low = likeliest(peaks_at, row, temperature, top_p, min_p, groups, most_groups)
        tl.store(grades_at + row, -1)
        if (top_p < 1.0) & (top_k <= 0):
            grade_of_cut, need = needed_grade(masses_at + row * (2 * blocks * 16), blocks, top_p, most_blocks)
            tl.store(grades_at + row, grade_of_cut)
            tl.store(needs_at + row, need)
        if (top_k > 0) & (top_k <= groups):
            # as many groups as top_k keeps have a token like this one
            rank, before = tl.zeros([], tl.int64), tl.zeros([], tl.int64)
            for step in range(8):
                each = tl.full([most_groups], 1, tl.int64)
                sums = digit_sums(_rank(logits), each, rank, 28 - 4 * step)
                digit, before, _ = crossing(sums, before, top_k)
                rank = rank * 16 + digit
            low = tl.maximum(low, _logit(rank).to(tl.float64) / temperature)
        tl.store(bounds_at + 2 * row, peak)
        tl.store(bounds_at + 2 * row + 1, low)
        tl.store(counts_at + row, 0)


@triton.jit
def _may_be_cut(logits, temperature, bounds):  # type: ignore[no-untyped-def]
    """Whether the cut may be at these logits, whose scaled values are given too."""
    peak, low, grade_of_cut = bounds
    scaled = logits.to(tl.float64) / temperature
    inside = (logits > float("-inf")) & (scaled >= low)
    inside = inside & ((grade_of_cut < 0) | (grade(scaled, peak) == grade_of_cut))
    return inside, scaled


@triton.jit  # type: ignore[untyped-decorator]
def _lists_kernel(  # type: ignore[no-untyped-def]
    logits_at,
    temperatures_at,
    options_at,
    bounds_at,
    grades_at,
    counts_at,
    ids_at,
    vocab_size,
    logits_stride,
    most_listed,
    block: tl.constexpr,
    overlap: tl.constexpr,
) -> None:
    row, number = tl.program_id(0), tl.program_id(1)
    follow(overlap)
    temperature, _, _, _, restricts = options_of(options_at, temperatures_at, row)
    if restricts:
        token = number * block + tl.arange(0, block)
        at = logits_at + row.to(tl.int64) * logits_stride + token
        logits = tl.load(at, mask=token < vocab_size, other=float("-inf"))
        bounds = (tl.load(bounds_at + 2 * row), tl.load(bounds_at + 2 * row + 1), tl.load(grades_at + row))
        listed = _may_be_cut(logits, temperature, bounds)[0].to(tl.int32)
        before = tl.atomic_add(counts_at + row, tl.sum(listed, 0))
        place = before + tl.cumsum(listed, 0) - 1
        to = ids_at + row.to(tl.int64) * most_listed + place
        tl.store(to, token, mask=(listed > 0) & (place < most_listed))


@triton.jit  # type: ignore[untyped-decorator]
def _entries(first, source, cut_rank, cut_id, by_mass: tl.constexpr, chunk: tl.constexpr):  # type: ignore[no-untyped-def]
    """Rank, id and weight of where the cut may be: entries of a list, or of all ids, from `first` on."""
    logits_at, ids_at, entries, is_listed, temperature, bounds = source
    entry = first + tl.arange(0, chunk)
    inside = entry < entries
    token = entry
    if is_listed:
        token = tl.load(ids_at + entry, mask=inside, other=0)
    logits = tl.load(logits_at + token, mask=inside, other=float("-inf"))
    rank = _rank(logits)
    may_be, scaled = _may_be_cut(logits, temperature, bounds)
    inside = inside & may_be & ((rank < cut_rank) | ((rank == cut_rank) & (token <= cut_id)))
    weight = mass(scaled, bounds[0]) if by_mass else tl.full([chunk], 1, tl.int64)
    return rank, token, tl.where(inside, weight, 0)


@triton.jit  # type: ignore[untyped-decorator]
def _reach(source, cut_rank, cut_id, need, by_mass: tl.constexpr, by_id: tl.constexpr, chunk: tl.constexpr):  # type: ignore[no-untyped-def]
    """The rank at which the weights of the first reach the need, what those before it weigh, and its own.

    If `by_id`, of those at the cut, by their ids.
    """
    place, before, own = tl.zeros([], tl.int64), tl.zeros([], tl.int64), tl.zeros([], tl.int64)
    for step in range(8):
        sums = tl.zeros([16], tl.int64)
        for first in range(0, source[2], chunk):
            rank, token, weight = _entries(first, source, cut_rank, cut_id, by_mass, chunk)
            if by_id:
                weight, rank = tl.where(rank == cut_rank, weight, 0), token.to(tl.int64)
            sums += digit_sums(rank, weight, place, 28 - 4 * step)
        digit, before, own = crossing(sums, before, need)
        place = place * 16 + digit
    return place, before, own


@triton.jit  # type: ignore[untyped-decorator]
def _cut(source, cut_rank, cut_id, need, by_mass: tl.constexpr, chunk: tl.constexpr):  # type: ignore[no-untyped-def]
    """Where the weights of the first reach the need: rank and id."""
    rank, before, own = _reach(source, cut_rank, cut_id, need, by_mass, False, chunk)
    each = tl.full([], 1, tl.int64)
    if by_mass:  # equals have equal masses
        temperature, bounds = source[4], source[5]
        each = tl.maximum(mass(_logit(rank).to(tl.float64) / temperature, bounds[0]), 1)
    wanted, equals = (need - before + each - 1) // each, own // each
    last = cut_id + 0
    if rank < cut_rank:
        last = _NO_ID
    if wanted < equals:
        place, _, _ = _reach(source, rank, last, wanted, False, True, chunk)
        last = place.to(tl.int32)
    return rank, last


@triton.jit  # type: ignore[untyped-decorator]
def _cuts_kernel(  # type: ignore[no-untyped-def]
    logits_at,
    temperatures_at,
    options_at,
    bounds_at,
    grades_at,
    counts_at,
    ids_at,
    needs_at,
    values_at,
    lasts_at,
    vocab_size,
    logits_stride,
    most_listed,
    chunk: tl.constexpr,
    overlap: tl.constexpr,
) -> None:
    row = tl.program_id(0)
    follow(overlap)
    temperature, top_k, top_p, _, restricts = options_of(options_at, temperatures_at, row)
    tl.store(values_at + row, float("-inf"))
    tl.store(lasts_at + row, _NO_ID)
    if restricts:
        low = tl.load(bounds_at + 2 * row + 1)
        bounds = (tl.load(bounds_at + 2 * row), low, tl.load(grades_at + row))
        count = tl.load(counts_at + row)
        is_listed = count <= most_listed
        own_logits_at = logits_at + row.to(tl.int64) * logits_stride
        own_ids_at = ids_at + row.to(tl.int64) * most_listed
        entries = tl.where(is_listed, count, vocab_size)
        source = (own_logits_at, own_ids_at, entries, is_listed, temperature, bounds)
        rank, last = tl.full([], _LAST_RANK, tl.int64), tl.full([], _NO_ID, tl.int32)
        if (top_k > 0) & (top_k < count):
            rank, last = _cut(source, rank, last, top_k, False, chunk)
        if top_p < 1.0:
            need = tl.full([], 0, tl.int64)
            if top_k > 0:  # of what it has kept
                total = tl.zeros([], tl.int64)
                for first in range(0, entries, chunk):
                    total += tl.sum(_entries(first, source, rank, last, True, chunk)[2], 0)
                need = needed(total, top_p)
            else:
                need = tl.load(needs_at + row)
            rank, last = _cut(source, rank, last, need, True, chunk)
        value = low
        if rank < _LAST_RANK:
            value = _logit(rank).to(tl.float64) / temperature
        tl.store(values_at + row, value)
        tl.store(lasts_at + row, last)


def find_cuts(
    logits: torch.Tensor,
    vocab_size: int,
    temperatures: torch.Tensor,
    options: torch.Tensor,
    kept: Kept,
    rows: int,
) -> None:
    """Write to `kept.cuts` what the options leave of the first rows of `logits` [rows, at least vocab_size].

    `temperatures` [rows] and `options` [rows, 3] are float64; the latter are top_k, top_p and min_p, of which
    0, 1 and 0 keep all. At temperature 0 all is kept: the largest is.
    """
    overlap, groups, blocks = overlaps(logits.device), kept.peaks.shape[1], kept.masses.shape[2]
    shared = {"overlap": overlap, "enable_fp_fusion": False, "launch_pdl": overlap}
    sizes, given = (vocab_size, logits.stride(0)), (temperatures, options)
    counts = (triton.next_power_of_2(groups), triton.next_power_of_2(blocks))
    listed, grid = kept.ids.shape[1], (rows, blocks)
    _groups_kernel[grid](logits, *given, kept.peaks, *sizes, BLOCK, GROUP, num_warps=4, **shared)
    for is_second in (False, True):
        known = (logits, *given, kept.peaks, kept.masses, *sizes, groups)
        masses_kernel[grid](*known, *counts, BLOCK, PART, is_second, num_warps=8, **shared)
    bounds = (kept.bounds, kept.grades)
    found = (kept.peaks, kept.masses, *bounds, kept.needs, kept.counts)
    _bounds_kernel[(rows,)](*given, *found, groups, blocks, *counts, num_warps=16, **shared)
    lists = (logits, *given, *bounds, kept.counts, kept.ids)
    _lists_kernel[grid](*lists, *sizes, listed, BLOCK, num_warps=8, **shared)
    cuts = (kept.needs, kept.cuts.values, kept.cuts.lasts)
    _cuts_kernel[(rows,)](*lists, *cuts, *sizes, listed, CHUNK, num_warps=16, **shared)
