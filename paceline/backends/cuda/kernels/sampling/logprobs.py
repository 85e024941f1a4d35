"""Log-probabilities on the device, with the bits of verify/logprobs.py. Three kernels, for each row:

    sums         exp(logit - largest), summed in LANES partial sums as in verify/kernels.py
    likeliest    the largest logits of each block of ids
    fields       the sum of the partial sums, the likeliest ids, the sampled token's logit and rank

Additions have the order of the host, so one lane computes each partial sum.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from paceline.backends.cuda.kernels.pdl import pdl_sync, supports_pdl
from paceline.backends.cuda.kernels.sampling.gumbel import (
    BLOCK,
    Candidates,
    best_candidate,
    exponential,
    load_logits,
    logarithm,
)
from paceline.core.params import MAX_LOGPROBS
from paceline.verify.kernels import LANES
from paceline.verify.logprobs import FIRST_ID, FIRST_LOGIT, NUM_FIELDS

LANES_PER_PROGRAM = 128
READ = 4096  # ids read at a time
_LANES = tl.constexpr(LANES)
_LIKELIEST = tl.constexpr(MAX_LOGPROBS)
_FIRST_ID, _FIRST_LOGIT, _NUM_FIELDS = (
    tl.constexpr(FIRST_ID),
    tl.constexpr(FIRST_LOGIT),
    tl.constexpr(NUM_FIELDS),
)
_NO_ID = tl.constexpr(0x7FFFFFFF)


@dataclass(frozen=True)
class LogprobBuffers:
    """The intermediate and final results of the three kernels."""

    peaks: torch.Tensor  # float64 [rows] the largest logit; inf if one is NaN, as a mask may forbid its id
    sums: torch.Tensor  # float64 [rows, LANES]
    ids: torch.Tensor  # int32 [rows, blocks, MAX_LOGPROBS] the likeliest of each block
    logits: torch.Tensor  # float32 [rows, blocks, MAX_LOGPROBS]
    fields: torch.Tensor  # float64 [rows, NUM_FIELDS] as in verify/logprobs.py


def logprob_buffers(rows: int, vocab_size: int, device: torch.device) -> LogprobBuffers:
    """Uninitialized buffers for `rows` rows."""
    blocks = triton.cdiv(vocab_size, BLOCK)

    def room(*shape: int, kind: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=kind, device=device)

    return LogprobBuffers(
        room(rows, kind=torch.float64),
        room(rows, LANES, kind=torch.float64),
        room(rows, blocks, MAX_LOGPROBS, kind=torch.int32),
        room(rows, blocks, MAX_LOGPROBS, kind=torch.float32),
        room(rows, NUM_FIELDS, kind=torch.float64),
    )


@triton.jit
def _is_asked(slots_at, asks_at, request):  # type: ignore[no-untyped-def]
    slot = tl.load(slots_at + request)
    return (slot >= 0) & (tl.load(asks_at + tl.maximum(slot, 0)) > 0)


@triton.jit  # type: ignore[untyped-decorator]
def _sums_kernel(  # type: ignore[no-untyped-def]
    logits_at,
    slots_at,
    asks_at,
    peaks_at,
    sums_at,
    vocab_size,
    logits_stride,
    nodes,
    read: tl.constexpr,
    lanes: tl.constexpr,
    pdl: tl.constexpr,
) -> None:
    row, number = tl.program_id(0), tl.program_id(1)
    pdl_sync(pdl)
    if _is_asked(slots_at, asks_at, row // nodes):
        largest = tl.full([read], float("-inf"), tl.float32)
        for first in range(0, vocab_size, read):
            token = first + tl.arange(0, read)
            own = load_logits(logits_at, row, logits_stride, token, vocab_size)
            largest = tl.maximum(largest, tl.where(own != own, float("inf"), own))
        peak = tl.max(largest, 0).to(tl.float64)
        lane = number * lanes + tl.arange(0, lanes)
        sums = tl.zeros([lanes], tl.float64)
        for first in range(0, vocab_size, _LANES):
            token = first + lane
            logits = load_logits(logits_at, row, logits_stride, token, vocab_size).to(tl.float64)
            sums += tl.where(token < vocab_size, exponential(logits - peak), 0.0)
        tl.store(sums_at + row * _LANES + lane, sums)
        tl.store(peaks_at + row, peak)


@triton.jit
def _next_likeliest(logits, ids):  # type: ignore[no-untyped-def]
    """The largest logit, its id (ties to the lowest), and the logits without it."""
    largest = tl.max(logits, 0)
    token = tl.min(tl.where(logits == largest, ids, _NO_ID), 0)
    return largest, token, tl.where(ids == token, float("-inf"), logits)


@triton.jit  # type: ignore[untyped-decorator]
def _likeliest_kernel(  # type: ignore[no-untyped-def]
    logits_at,
    slots_at,
    asks_at,
    ids_at,
    likeliest_at,
    vocab_size,
    logits_stride,
    nodes,
    block: tl.constexpr,
    pdl: tl.constexpr,
) -> None:
    row, number = tl.program_id(0), tl.program_id(1)
    pdl_sync(pdl)
    if _is_asked(slots_at, asks_at, row // nodes):
        token = number * block + tl.arange(0, block)
        logits = load_logits(logits_at, row, logits_stride, token, vocab_size)
        offset = (row * tl.num_programs(1) + number) * _LIKELIEST
        for rank in range(_LIKELIEST):
            largest, likely, logits = _next_likeliest(logits, token)
            tl.store(ids_at + offset + rank, likely)
            tl.store(likeliest_at + offset + rank, largest)


@triton.jit  # type: ignore[untyped-decorator]
def _rank(logits_at, row, logits_stride, vocab_size, chosen, read: tl.constexpr):  # type: ignore[no-untyped-def]
    """1 + the number of larger logits."""
    larger = tl.zeros([read], tl.int32)
    for first in range(0, vocab_size, read):
        token = first + tl.arange(0, read)
        larger += (load_logits(logits_at, row, logits_stride, token, vocab_size) > chosen).to(tl.int32)
    return 1 + tl.sum(larger, 0)


@triton.jit  # type: ignore[untyped-decorator]
def _fields_kernel(  # type: ignore[no-untyped-def]
    logits_at,
    slots_at,
    asks_at,
    scores_at,
    best_at,
    peaks_at,
    sums_at,
    ids_at,
    likeliest_at,
    fields_at,
    vocab_size,
    logits_stride,
    nodes,
    blocks,
    most_blocks: tl.constexpr,
    wide: tl.constexpr,
    read: tl.constexpr,
    pdl: tl.constexpr,
) -> None:
    row = tl.program_id(0)
    pdl_sync(pdl)
    if _is_asked(slots_at, asks_at, row // nodes):
        to = fields_at + row * _NUM_FIELDS
        total = tl.full((), 0.0, tl.float64)
        for lane in range(_LANES):  # one after the other, as the host adds them
            total += tl.load(sums_at + row * _LANES + lane)
        tl.store(to, tl.load(peaks_at + row) + logarithm(total))
        token = tl.maximum(best_candidate(scores_at, best_at, row, blocks, most_blocks), 0)
        chosen = tl.load(logits_at + row.to(tl.int64) * logits_stride + token)
        tl.store(to + 1, chosen.to(tl.float64))
        rank = _rank(logits_at, row, logits_stride, vocab_size, chosen, read)
        tl.store(to + 2, rank.to(tl.float64))
        number = tl.arange(0, wide)
        inside = number < blocks * _LIKELIEST
        offset = row * blocks * _LIKELIEST + number
        ids = tl.load(ids_at + offset, mask=inside, other=_NO_ID)
        logits = tl.load(likeliest_at + offset, mask=inside, other=float("-inf"))
        for place in range(_LIKELIEST):
            largest, likely, logits = _next_likeliest(logits, ids)
            is_id = (likely < vocab_size) & (largest > float("-inf"))
            tl.store(to + _FIRST_ID + place, tl.where(is_id, likely, -1).to(tl.float64))
            tl.store(to + _FIRST_LOGIT + place, largest.to(tl.float64))


def write_logprobs(
    logits: torch.Tensor,
    vocab_size: int,
    slots: torch.Tensor,
    asks: torch.Tensor,
    candidates: Candidates,
    buffers: LogprobBuffers,
    nodes: int,
) -> None:
    """Write the log-probability fields of rows whose requests ask for them.

    `logits` [rows, at least vocab_size] are raw, without masks and edits; each request has `nodes` rows.
    `slots` int32 [requests]; `asks` int32 [slots], nonzero for requests that ask; `candidates`: the sampled
    tokens.
    """
    rows, pdl = len(slots) * nodes, supports_pdl(logits.device)
    blocks = buffers.ids.shape[1]
    source = (logits, slots, asks)
    sizes = (vocab_size, logits.stride(0), nodes)
    options = {"pdl": pdl, "enable_fp_fusion": False, "launch_pdl": pdl}
    _sums_kernel[(rows, LANES // LANES_PER_PROGRAM)](
        *source, buffers.peaks, buffers.sums, *sizes, READ, LANES_PER_PROGRAM, num_warps=4, **options
    )
    _likeliest_kernel[(rows, blocks)](
        *source, buffers.ids, buffers.logits, *sizes, BLOCK, num_warps=4, **options
    )
    _fields_kernel[(rows,)](
        *source,
        candidates.scores,
        candidates.ids,
        buffers.peaks,
        buffers.sums,
        buffers.ids,
        buffers.logits,
        buffers.fields,
        *sizes,
        blocks,
        triton.next_power_of_2(blocks),
        triton.next_power_of_2(blocks * MAX_LOGPROBS),
        READ,
        num_warps=4,
        **options,
    )
