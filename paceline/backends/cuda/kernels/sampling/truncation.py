"""min-p, top-k and top-p on the device: they keep the same ids as verify/truncation.py.

All three keep a prefix of the ids in one order: likeliest first, ties to the lower id. So a row has a single
threshold, a logit and an id, and keeps everything up to it. Five kernels find it:

    groups       the largest logit of every 256 ids
    histogram    fixed-point probabilities summed per bin, for top-p: see fixed_point.py
    bounds       from both: the range of logits that contains the threshold
    candidates   the ids in that range, usually a few
    thresholds   radix select: where the candidates' weights reach the required sum, 4 bits at a time

Weights are integers (1 each, or fixed-point probabilities), so sums are exact in any order and candidate
lists need no order. If a list overflows, the last kernel scans the vocabulary instead.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from paceline.backends.cuda.kernels.pdl import pdl_sync, supports_pdl
from paceline.backends.cuda.kernels.sampling.fixed_point import (
    crossing,
    digit_sums,
    find_threshold_bin,
    fixed_point,
    histogram_bin,
    histogram_kernel,
    options_of,
    peak_and_floor,
    required_sum,
)
from paceline.backends.cuda.kernels.sampling.gumbel import BLOCK, Thresholds, load_logits

GROUP = 256  # ids of a group
MAX_CANDIDATES = 8192  # ids of a row's candidate list
CHUNK = 1024  # candidates read at a time
PART = 512  # ids whose probabilities are computed at a time
_NO_ID = tl.constexpr(0x7FFFFFFF)
_LAST_RANK = tl.constexpr(1 << 32)


@dataclass(frozen=True)
class TruncationBuffers:
    """The intermediate results of the kernels, and the thresholds."""

    peaks: torch.Tensor  # float32 [rows, groups] the largest logit of each group
    probability_sums: torch.Tensor  # int64 [rows, 2, blocks, 16] by the bins' upper 4 bits, then lower 4
    bounds: torch.Tensor  # float64 [rows, 2] logit / temperature: the largest, the lowest that may be kept
    bins: torch.Tensor  # int32 [rows] bin of the top-p threshold; -1: none, or top_k is set
    required: torch.Tensor  # int64 [rows] probability mass that top-p keeps of that bin
    counts: torch.Tensor  # int32 [rows] number of candidates for the threshold
    ids: torch.Tensor  # int32 [rows, MAX_CANDIDATES] candidate ids in any order, if they fit
    thresholds: Thresholds


def truncation_buffers(rows: int, vocab_size: int, device: torch.device) -> TruncationBuffers:
    """Uninitialized buffers for `rows` rows."""

    def room(*shape: int, kind: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=kind, device=device)

    blocks = -(-vocab_size // BLOCK)
    return TruncationBuffers(
        room(rows, blocks * (BLOCK // GROUP), kind=torch.float32),
        room(rows, 2, blocks, 16, kind=torch.int64),
        room(rows, 2, kind=torch.float64),
        room(rows, kind=torch.int32),
        room(rows, kind=torch.int64),
        room(rows, kind=torch.int32),
        room(rows, min(MAX_CANDIDATES, vocab_size), kind=torch.int32),
        Thresholds(room(rows, kind=torch.float64), room(rows, kind=torch.int32)),
    )


@triton.jit
def _rank(logits):  # type: ignore[no-untyped-def]
    """Radix keys of logits: 32-bit integers in their order, the largest logit first."""
    bits = tl.where(logits == 0.0, 0.0, logits).to(tl.int32, bitcast=True)  # -0.0 equals 0.0
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
    pdl: tl.constexpr,
) -> None:
    row, number = tl.program_id(0), tl.program_id(1)
    pdl_sync(pdl)
    _, _, truncates = options_of(options_at, temperatures_at, row)
    if truncates:
        groups: tl.constexpr = block // group
        own = number * groups + tl.arange(0, groups)
        token = own[:, None] * group + tl.arange(0, group)[None, :]
        logits = load_logits(logits_at, row, logits_stride, token, vocab_size)
        tl.store(peaks_at + row * (tl.num_programs(1) * groups) + own, tl.max(logits, 1))


@triton.jit  # type: ignore[untyped-decorator]
def _bounds_kernel(  # type: ignore[no-untyped-def]
    temperatures_at,
    options_at,
    peaks_at,
    probability_sums_at,
    bounds_at,
    bins_at,
    required_at,
    counts_at,
    groups,
    blocks,
    most_groups: tl.constexpr,
    most_blocks: tl.constexpr,
    pdl: tl.constexpr,
) -> None:
    row = tl.program_id(0)
    pdl_sync(pdl)
    temperature, truncation, truncates = options_of(options_at, temperatures_at, row)
    top_k, top_p = truncation[0], truncation[1]
    if truncates:
        logits, peak, low = peak_and_floor(peaks_at, row, temperature, truncation, groups, most_groups)
        tl.store(bins_at + row, -1)
        if (top_p < 1.0) & (top_k <= 0):
            threshold_bin, required = find_threshold_bin(
                probability_sums_at + row * (2 * blocks * 16), blocks, top_p, most_blocks
            )
            tl.store(bins_at + row, threshold_bin)
            tl.store(required_at + row, required)
        if (top_k > 0) & (top_k <= groups):
            # the top_k-th largest group maximum: at least top_k tokens are not below it
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
def _may_be_threshold(logits, temperature, bounds):  # type: ignore[no-untyped-def]
    """Which of these logits may be the threshold; and the logits / temperature."""
    peak, low, threshold_bin = bounds
    scaled = logits.to(tl.float64) / temperature
    inside = (logits > float("-inf")) & (scaled >= low)
    inside = inside & ((threshold_bin < 0) | (histogram_bin(scaled, peak) == threshold_bin))
    return inside, scaled


@triton.jit  # type: ignore[untyped-decorator]
def _candidates_kernel(  # type: ignore[no-untyped-def]
    logits_at,
    temperatures_at,
    options_at,
    bounds_at,
    bins_at,
    counts_at,
    ids_at,
    vocab_size,
    logits_stride,
    max_candidates,
    block: tl.constexpr,
    pdl: tl.constexpr,
) -> None:
    row, number = tl.program_id(0), tl.program_id(1)
    pdl_sync(pdl)
    temperature, _, truncates = options_of(options_at, temperatures_at, row)
    if truncates:
        token = number * block + tl.arange(0, block)
        logits = load_logits(logits_at, row, logits_stride, token, vocab_size)
        bounds = (tl.load(bounds_at + 2 * row), tl.load(bounds_at + 2 * row + 1), tl.load(bins_at + row))
        is_candidate = _may_be_threshold(logits, temperature, bounds)[0].to(tl.int32)
        before = tl.atomic_add(counts_at + row, tl.sum(is_candidate, 0))
        index = before + tl.cumsum(is_candidate, 0) - 1
        to = ids_at + row.to(tl.int64) * max_candidates + index
        tl.store(to, token, mask=(is_candidate > 0) & (index < max_candidates))


@triton.jit  # type: ignore[untyped-decorator]
def _entries(first, source, threshold_rank, threshold_id, by_probability: tl.constexpr, chunk: tl.constexpr):  # type: ignore[no-untyped-def]
    """Rank, id and weight of candidates from `first` on, from a list or from the whole vocabulary."""
    logits_at, ids_at, entries, has_list, temperature, bounds = source
    entry = first + tl.arange(0, chunk)
    inside = entry < entries
    token = entry
    if has_list:
        token = tl.load(ids_at + entry, mask=inside, other=0)
    logits = tl.load(logits_at + token, mask=inside, other=float("-inf"))
    rank = _rank(logits)
    may_be, scaled = _may_be_threshold(logits, temperature, bounds)
    inside = (
        inside & may_be & ((rank < threshold_rank) | ((rank == threshold_rank) & (token <= threshold_id)))
    )
    weight = fixed_point(scaled, bounds[0]) if by_probability else tl.full([chunk], 1, tl.int64)
    return rank, token, tl.where(inside, weight, 0)


@triton.jit  # type: ignore[untyped-decorator]
def _find_crossing(  # type: ignore[no-untyped-def]
    source,
    threshold_rank,
    threshold_id,
    required,
    by_probability: tl.constexpr,
    by_id: tl.constexpr,
    chunk: tl.constexpr,
):
    """Radix select: the rank where weights reach `required`, the weight before it, and its own weight.

    If `by_id`, the id among the candidates of rank `threshold_rank`.
    """
    prefix, before, own = tl.zeros([], tl.int64), tl.zeros([], tl.int64), tl.zeros([], tl.int64)
    for step in range(8):
        sums = tl.zeros([16], tl.int64)
        for first in range(0, source[2], chunk):
            rank, token, weight = _entries(first, source, threshold_rank, threshold_id, by_probability, chunk)
            if by_id:
                weight, rank = tl.where(rank == threshold_rank, weight, 0), token.to(tl.int64)
            sums += digit_sums(rank, weight, prefix, 28 - 4 * step)
        digit, before, own = crossing(sums, before, required)
        prefix = prefix * 16 + digit
    return prefix, before, own


@triton.jit  # type: ignore[untyped-decorator]
def _find_threshold(  # type: ignore[no-untyped-def]
    source, threshold_rank, threshold_id, required, by_probability: tl.constexpr, chunk: tl.constexpr
):
    """The rank and id at which the cumulative weight, likeliest first, reaches `required`."""
    rank, before, own = _find_crossing(
        source, threshold_rank, threshold_id, required, by_probability, False, chunk
    )
    each = tl.full([], 1, tl.int64)
    if by_probability:  # equal logits have equal probabilities
        temperature, bounds = source[4], source[5]
        each = tl.maximum(fixed_point(_logit(rank).to(tl.float64) / temperature, bounds[0]), 1)
    wanted, equals = (required - before + each - 1) // each, own // each
    last = threshold_id + 0
    if rank < threshold_rank:
        last = _NO_ID
    if wanted < equals:
        prefix, _, _ = _find_crossing(source, rank, last, wanted, False, True, chunk)
        last = prefix.to(tl.int32)
    return rank, last


@triton.jit  # type: ignore[untyped-decorator]
def _thresholds_kernel(  # type: ignore[no-untyped-def]
    logits_at,
    temperatures_at,
    options_at,
    bounds_at,
    bins_at,
    counts_at,
    ids_at,
    required_at,
    values_at,
    last_ids_at,
    vocab_size,
    logits_stride,
    max_candidates,
    chunk: tl.constexpr,
    pdl: tl.constexpr,
) -> None:
    row = tl.program_id(0)
    pdl_sync(pdl)
    temperature, truncation, truncates = options_of(options_at, temperatures_at, row)
    top_k, top_p = truncation[0], truncation[1]
    tl.store(values_at + row, float("-inf"))
    tl.store(last_ids_at + row, _NO_ID)
    if truncates:
        low = tl.load(bounds_at + 2 * row + 1)
        bounds = (tl.load(bounds_at + 2 * row), low, tl.load(bins_at + row))
        count = tl.load(counts_at + row)
        has_list = count <= max_candidates
        own_logits_at = logits_at + row.to(tl.int64) * logits_stride
        own_ids_at = ids_at + row.to(tl.int64) * max_candidates
        entries = tl.where(has_list, count, vocab_size)
        source = (own_logits_at, own_ids_at, entries, has_list, temperature, bounds)
        rank, last = tl.full([], _LAST_RANK, tl.int64), tl.full([], _NO_ID, tl.int32)
        if (top_k > 0) & (top_k < count):
            rank, last = _find_threshold(source, rank, last, top_k, False, chunk)
        if top_p < 1.0:
            required = tl.full([], 0, tl.int64)
            if top_k > 0:  # top-p applies to what top-k has kept
                total = tl.zeros([], tl.int64)
                for first in range(0, entries, chunk):
                    total += tl.sum(_entries(first, source, rank, last, True, chunk)[2], 0)
                required = required_sum(total, top_p)
            else:
                required = tl.load(required_at + row)
            rank, last = _find_threshold(source, rank, last, required, True, chunk)
        value = low
        if rank < _LAST_RANK:
            value = _logit(rank).to(tl.float64) / temperature
        tl.store(values_at + row, value)
        tl.store(last_ids_at + row, last)


def find_thresholds(
    logits: torch.Tensor,
    vocab_size: int,
    temperatures: torch.Tensor,
    options: torch.Tensor,
    kept: TruncationBuffers,
    rows: int,
) -> None:
    """Write the thresholds of the first rows of `logits` [rows, at least vocab_size] to `kept.thresholds`.

    `temperatures` [rows] and `options` [rows, NUM_FIELDS of core/truncation.py] are float64. At temperature 0
    everything is kept, because the argmax is taken anyway.
    """
    pdl, groups, blocks = supports_pdl(logits.device), kept.peaks.shape[1], kept.probability_sums.shape[2]
    shared = {"pdl": pdl, "enable_fp_fusion": False, "launch_pdl": pdl}
    sizes, given = (vocab_size, logits.stride(0)), (temperatures, options)
    counts = (triton.next_power_of_2(groups), triton.next_power_of_2(blocks))
    max_candidates, grid = kept.ids.shape[1], (rows, blocks)
    _groups_kernel[grid](logits, *given, kept.peaks, *sizes, BLOCK, GROUP, num_warps=4, **shared)
    for is_second in (False, True):
        known = (logits, *given, kept.peaks, kept.probability_sums, *sizes, groups)
        histogram_kernel[grid](*known, *counts, BLOCK, PART, is_second, num_warps=8, **shared)
    bounds = (kept.bounds, kept.bins)
    found = (kept.peaks, kept.probability_sums, *bounds, kept.required, kept.counts)
    _bounds_kernel[(rows,)](*given, *found, groups, blocks, *counts, num_warps=16, **shared)
    lists = (logits, *given, *bounds, kept.counts, kept.ids)
    _candidates_kernel[grid](*lists, *sizes, max_candidates, BLOCK, num_warps=8, **shared)
    thresholds = (kept.required, kept.thresholds.values, kept.thresholds.last_ids)
    _thresholds_kernel[(rows,)](*lists, *thresholds, *sizes, max_candidates, CHUNK, num_warps=16, **shared)
