"""What min_p, top_k and top_p keep of a row's logits, on the device: the ids that verify/keeping.py keeps.

Each of the three keeps the first of the same order, the likeliest first and the lower id of equals. So what
they leave ends at one place, the cut, and a token is kept if it does not stand behind it:

    groups   the largest logit of each 128 ids
    bounds   from these alone: a value below which nothing can be kept, as a rule all but a few tokens
    lists    the ids above it, and the masses that top_p is measured on
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
from paceline.backends.cuda.kernels.sampling import BLOCK, Cuts, exponential, logarithm
from paceline.verify.keeping import MASS_ONE, MASSLESS

GROUP = 128  # ids that have one largest logit
MOST_LISTED = 8192  # ids of a row's list
CHUNK = 1024  # entries of a list that are looked at together
LEAST_SPARED = 1e-6  # of all mass: who spares less spares nothing that must be bounded
_MASS_ONE = tl.constexpr(MASS_ONE)
_MASSLESS = tl.constexpr(MASSLESS)
_LEAST_SPARED = tl.constexpr(LEAST_SPARED)
_NO_ID = tl.constexpr(0x7FFFFFFF)
_LAST_RANK = tl.constexpr(1 << 32)


@dataclass(frozen=True)
class Kept:
    """Where the kernels meet, and the cuts that they find."""

    peaks: torch.Tensor  # float32 [rows, groups] the largest logit of each group
    bounds: torch.Tensor  # float64 [rows, 3] scaled: the largest, what has mass, what may be kept
    counts: torch.Tensor  # int32 [rows] ids that may be kept
    ids: torch.Tensor  # int32 [rows, MOST_LISTED] these, in any order, if there is room for them
    masses: torch.Tensor  # int64 [rows, blocks] of what has mass
    cuts: Cuts


def kept_for(rows: int, vocab_size: int, device: torch.device) -> Kept:
    """Room for what is kept of so many rows."""

    def room(*shape: int, kind: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=kind, device=device)

    blocks = -(-vocab_size // BLOCK)
    return Kept(
        room(rows, blocks * (BLOCK // GROUP), kind=torch.float32),
        room(rows, 3, kind=torch.float64),
        room(rows, kind=torch.int32),
        room(rows, min(MOST_LISTED, vocab_size), kind=torch.int32),
        room(rows, blocks, kind=torch.int64),
        Cuts(room(rows, kind=torch.float64), room(rows, kind=torch.int32)),
    )


@triton.jit
def _options(options_at, temperatures_at, row):  # type: ignore[no-untyped-def]
    """Temperature, top_k, top_p and min_p of a row, and whether they leave anything out."""
    temperature = tl.load(temperatures_at + row)
    top_k, top_p = tl.load(options_at + 3 * row).to(tl.int64), tl.load(options_at + 3 * row + 1)
    min_p = tl.load(options_at + 3 * row + 2)
    restricts = (temperature > 0) & ((top_k > 0) | (top_p < 1.0) | (min_p > 0.0))
    return temperature, top_k, top_p, min_p, restricts


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


@triton.jit
def _mass(scaled, peak):  # type: ignore[no-untyped-def]
    return (exponential(scaled - peak) * _MASS_ONE).to(tl.int64)


@triton.jit
def _digit_sums(rank, weight, prefix, shift):  # type: ignore[no-untyped-def]
    """The weights of ranks that begin with `prefix`, by the four bits that follow: int64 [16]."""
    digit = tl.where((rank >> (shift + 4)) == prefix, (rank >> shift) & 15, 16)
    is_own = digit[:, None] == tl.arange(0, 16)[None, :]
    return tl.sum(tl.where(is_own, weight[:, None], 0), 0)


@triton.jit
def _digit(sums, before, need):  # type: ignore[no-untyped-def]
    """The first digit at which weights reach the need, what those before it weigh, and what it weighs."""
    number = tl.arange(0, 16)
    reached = tl.cumsum(sums, 0) + before
    digit = tl.minimum(tl.sum((reached < need).to(tl.int32), 0), 15)
    own = tl.sum(tl.where(number == digit, sums, 0), 0)
    return digit, tl.sum(tl.where(number == digit, reached - sums, 0), 0), own


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
    _, _, _, _, restricts = _options(options_at, temperatures_at, row)
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
    bounds_at,
    counts_at,
    vocab_size,
    groups,
    most_groups: tl.constexpr,
    overlap: tl.constexpr,
) -> None:
    row = tl.program_id(0)
    follow(overlap)
    temperature, top_k, top_p, min_p, restricts = _options(options_at, temperatures_at, row)
    if restricts:
        number = tl.arange(0, most_groups)
        logits = tl.load(peaks_at + row * groups + number, mask=number < groups, other=float("-inf"))
        scaled = logits.to(tl.float64) / temperature
        peak = tl.max(scaled, 0)
        floor = tl.full([], float("-inf"), tl.float64)
        if min_p > 0.0:
            floor = peak + logarithm(min_p)
        if top_p < 1.0:
            floor = tl.maximum(floor, peak - _MASSLESS)  # top_p keeps nothing that has no mass
        low = floor
        if (top_k > 0) & (top_k <= groups):
            # as many groups as top_k keeps have a token like this one
            rank, before = tl.zeros([], tl.int64), tl.zeros([], tl.int64)
            for step in range(8):
                sums = _digit_sums(_rank(logits), tl.full([most_groups], 1, tl.int64), rank, 28 - 4 * step)
                digit, before, _ = _digit(sums, before, top_k)
                rank = rank * 16 + digit
            low = tl.maximum(floor, _logit(rank).to(tl.float64) / temperature)
        elif (top_k <= 0) & (1.0 - top_p > _LEAST_SPARED):
            # those that are half as likely as what top_p spares, shared out evenly, can be spared together
            known = tl.sum(tl.where(scaled >= floor, exponential(scaled - peak), 0.0), 0)
            light = (1.0 - top_p) * known / (2.000001 * vocab_size)
            low = tl.maximum(floor, peak + logarithm(light))
        tl.store(bounds_at + 3 * row, peak)
        tl.store(bounds_at + 3 * row + 1, floor)
        tl.store(bounds_at + 3 * row + 2, low)
        tl.store(counts_at + row, 0)


@triton.jit  # type: ignore[untyped-decorator]
def _lists_kernel(  # type: ignore[no-untyped-def]
    logits_at,
    temperatures_at,
    options_at,
    bounds_at,
    counts_at,
    ids_at,
    masses_at,
    vocab_size,
    logits_stride,
    most_listed,
    block: tl.constexpr,
    overlap: tl.constexpr,
) -> None:
    row, number = tl.program_id(0), tl.program_id(1)
    follow(overlap)
    temperature, top_k, top_p, _, restricts = _options(options_at, temperatures_at, row)
    if restricts:
        token = number * block + tl.arange(0, block)
        at = logits_at + row.to(tl.int64) * logits_stride + token
        scaled = tl.load(at, mask=token < vocab_size, other=float("-inf")).to(tl.float64) / temperature
        peak, floor = tl.load(bounds_at + 3 * row), tl.load(bounds_at + 3 * row + 1)
        real = scaled > float("-inf")
        if (top_p < 1.0) & (top_k <= 0):
            masses = tl.where(real & (scaled >= floor), _mass(scaled, peak), 0)
            tl.store(masses_at + row * tl.num_programs(1) + number, tl.sum(masses, 0))
        listed = (real & (scaled >= tl.load(bounds_at + 3 * row + 2))).to(tl.int32)
        before = tl.atomic_add(counts_at + row, tl.sum(listed, 0))
        place = before + tl.cumsum(listed, 0) - 1
        to = ids_at + row.to(tl.int64) * most_listed + place
        tl.store(to, token, mask=(listed > 0) & (place < most_listed))


@triton.jit  # type: ignore[untyped-decorator]
def _entries(first, source, cut_rank, cut_id, by_mass: tl.constexpr, chunk: tl.constexpr):  # type: ignore[no-untyped-def]
    """Rank, id and weight of what may be kept, some entries of a list (or of all ids) from `first` on."""
    logits_at, ids_at, entries, is_listed, temperature, peak, low = source
    entry = first + tl.arange(0, chunk)
    inside = entry < entries
    token = entry
    if is_listed:
        token = tl.load(ids_at + entry, mask=inside, other=0)
    logits = tl.load(logits_at + token, mask=inside, other=float("-inf"))
    scaled, rank = logits.to(tl.float64) / temperature, _rank(logits)
    inside = inside & (logits > float("-inf")) & (scaled >= low)
    inside = inside & ((rank < cut_rank) | ((rank == cut_rank) & (token <= cut_id)))
    weight = _mass(scaled, peak) if by_mass else tl.full([chunk], 1, tl.int64)
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
            sums += _digit_sums(rank, weight, place, 28 - 4 * step)
        digit, before, own = _digit(sums, before, need)
        place = place * 16 + digit
    return place, before, own


@triton.jit  # type: ignore[untyped-decorator]
def _cut(source, cut_rank, cut_id, need, by_mass: tl.constexpr, chunk: tl.constexpr):  # type: ignore[no-untyped-def]
    """Where the weights of the first reach the need: rank and id."""
    rank, before, own = _reach(source, cut_rank, cut_id, need, by_mass, False, chunk)
    each = tl.full([], 1, tl.int64)
    if by_mass:  # equals have equal masses
        peak, temperature = source[5], source[4]
        each = tl.maximum(_mass(_logit(rank).to(tl.float64) / temperature, peak), 1)
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
    counts_at,
    ids_at,
    masses_at,
    values_at,
    lasts_at,
    vocab_size,
    logits_stride,
    most_listed,
    blocks,
    most_blocks: tl.constexpr,
    chunk: tl.constexpr,
    overlap: tl.constexpr,
) -> None:
    row = tl.program_id(0)
    follow(overlap)
    temperature, top_k, top_p, _, restricts = _options(options_at, temperatures_at, row)
    tl.store(values_at + row, float("-inf"))
    tl.store(lasts_at + row, _NO_ID)
    if restricts:
        peak, low = tl.load(bounds_at + 3 * row), tl.load(bounds_at + 3 * row + 2)
        count = tl.load(counts_at + row)
        is_listed = count <= most_listed
        own_logits_at = logits_at + row.to(tl.int64) * logits_stride
        own_ids_at = ids_at + row.to(tl.int64) * most_listed
        entries = tl.where(is_listed, count, vocab_size)
        source = (own_logits_at, own_ids_at, entries, is_listed, temperature, peak, low)
        rank, last = tl.full([], _LAST_RANK, tl.int64), tl.full([], _NO_ID, tl.int32)
        if (top_k > 0) & (top_k < count):
            rank, last = _cut(source, rank, last, top_k, False, chunk)
        if top_p < 1.0:
            number = tl.arange(0, most_blocks)
            total = tl.zeros([], tl.int64)
            if top_k > 0:
                for first in range(0, entries, chunk):
                    total += tl.sum(_entries(first, source, rank, last, True, chunk)[2], 0)
            else:
                total = tl.sum(tl.load(masses_at + row * blocks + number, mask=number < blocks, other=0), 0)
            share = top_p * total.to(tl.float64)
            need = share.to(tl.int64)
            need += (need.to(tl.float64) < share).to(tl.int64)  # rounded up
            need = tl.maximum(1, tl.minimum(total, need))
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
    overlap, (_, groups), (_, blocks) = overlaps(logits.device), kept.peaks.shape, kept.masses.shape
    shared = {"overlap": overlap, "enable_fp_fusion": False, "launch_pdl": overlap}
    sizes = (vocab_size, logits.stride(0))
    given = (temperatures, options)
    _groups_kernel[(rows, blocks)](logits, *given, kept.peaks, *sizes, BLOCK, GROUP, num_warps=4, **shared)
    most_groups = triton.next_power_of_2(groups)
    places = (kept.bounds, kept.counts)
    _bounds_kernel[(rows,)](
        *given, kept.peaks, *places, vocab_size, groups, most_groups, num_warps=16, **shared
    )
    lists = (logits, *given, *places, kept.ids, kept.masses)
    listed = kept.ids.shape[1]
    _lists_kernel[(rows, blocks)](*lists, *sizes, listed, BLOCK, num_warps=8, **shared)
    most_blocks, cuts = triton.next_power_of_2(blocks), (kept.cuts.values, kept.cuts.lasts)
    _cuts_kernel[(rows,)](*lists, *cuts, *sizes, listed, blocks, most_blocks, CHUNK, num_warps=16, **shared)
