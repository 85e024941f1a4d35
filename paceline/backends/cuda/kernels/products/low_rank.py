"""LoRA adapters, several in one batch, by shrink and expand (Punica's SGMV).

    shrink    low = down x              a separate kernel, before the product
    expand    W x becomes W x + up low  in the epilogue of the product's kernel

Each adapter that occurs in a tile of rows is multiplied by all rows of the tile, and a row uses the result of
its own adapter. So the bits of a row do not depend on other rows, and rows without an adapter have the bits
of the model without adapters.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from paceline.backends.cuda.kernels.pdl import pdl_launch, pdl_wait, prefetch, supports_pdl
from paceline.backends.cuda.kernels.products.fp8 import scale_offset
from paceline.backends.cuda.kernels.products.matmul import load_squares, norm_factor, program_tokens
from paceline.backends.cuda.kernels.products.matrix import MIN_TOKENS, Normed

CHUNK = 16  # ranks of a shrink program, and depth of expand's matrix instruction
STEP = 64  # depth of an iteration
SPLIT_DEPTH, MAX_SPLITS = 512, 8  # split-K of the shrink product: it determines the bits
STAGES, WARPS = 4, 2
_CHUNK, _STEP, _STEPS = tl.constexpr(CHUNK), tl.constexpr(STEP), tl.constexpr(SPLIT_DEPTH // STEP)


@dataclass(frozen=True)
class LowRank:
    """The matrices of all adapters for one product, in its dtype."""

    down: torch.Tensor  # [adapters, rank, padded depth] rank: a multiple of CHUNK
    up: torch.Tensor  # [adapters, padded width, rank] in the order of the product's columns

    @property
    def rank(self) -> int:
        return self.down.shape[1]


@dataclass(frozen=True)
class LowRankRows:
    """The arguments of expand: each row's adapter, low = down x, and the up matrices."""

    adapters: torch.Tensor  # int32 [rows] the adapter of each; -1: none
    low: torch.Tensor  # [padded rows, rank]
    up: torch.Tensor  # as of LowRank


def added_by(change: LowRankRows | None) -> dict[str, Any]:
    """The LoRA arguments of a product's kernel."""
    if change is None:
        return {"low_at": None, "up_at": None, "adapters_at": None, "up_width": 0, "rank": 0}
    return {
        "low_at": change.low,
        "up_at": change.up,
        "adapters_at": change.adapters,
        "up_width": change.up.shape[1],
        "rank": change.low.shape[1],
    }


@dataclass(frozen=True)
class LowRankBuffers:
    """Buffers shared by all products of a pass, because they run one after the other."""

    low: torch.Tensor  # [padded rows * largest rank]
    partial: torch.Tensor  # float32 [sums of splits]
    counters: torch.Tensor  # int32 [tiles * adapters] zero between products


def make_low_rank_buffers(adapters: int, rank: int, rows: int, like: torch.Tensor) -> LowRankBuffers:
    """Buffers for products of this number of padded rows with adapters of at most this rank."""
    tiles, device = rows // MIN_TOKENS * (rank // CHUNK), like.device
    return LowRankBuffers(
        torch.zeros(rows * rank, dtype=like.dtype, device=device),
        torch.empty(tiles * MAX_SPLITS * CHUNK * MIN_TOKENS, dtype=torch.float32, device=device),
        torch.zeros(tiles * adapters, dtype=torch.int32, device=device),
    )


@triton.jit  # type: ignore[untyped-decorator]
def _shrink_split(  # type: ignore[no-untyped-def]
    rows_at,
    scales_at,
    down_at,
    token,
    real,
    depth,
    begin,
    end,
    stages: tl.constexpr,
    has_scales: tl.constexpr,
):
    """CHUNK ranks of one adapter times rows, over depth `begin` to `end`: float32 [CHUNK, tokens]."""
    along = tl.arange(0, _STEP)
    weights = down_at + tl.arange(0, _CHUNK)[:, None] * depth + along[None, :]
    rows = rows_at + token[None, :].to(tl.int64) * depth + along[:, None]
    total = tl.zeros([_CHUNK, token.shape[0]], tl.float32)
    for at in tl.range(begin, end, _STEP, num_stages=stages):
        at = tl.multiple_of(at, 64)
        values = tl.load(rows + at, mask=real[None, :], other=0.0)
        if has_scales:  # powers of two
            scale = tl.load(scales_at + scale_offset(token, at // 64, depth // 64), mask=real, other=0.0)
            values = (values.to(tl.float32) * scale[None, :]).to(down_at.dtype.element_ty)
        total = tl.dot(tl.load(weights + at), values, total)
    return total


@triton.jit
def next_adapter(adapter, last):  # type: ignore[no-untyped-def]
    """The largest adapter number among the rows that is below `last`; -1: none."""
    return tl.max(tl.where(adapter < last, adapter, -1), 0)


@triton.jit  # type: ignore[untyped-decorator]
def _reduce_own(  # type: ignore[no-untyped-def]
    total,
    own,
    partial_at,
    counter_at,
    split,
    splits: tl.constexpr,
    tokens: tl.constexpr,
):
    """Whether this program is the last of its splits to arrive, and the sum of all splits if so.

    Like `reduce_split_k`, but only for the tile's tokens `own`: the others have other adapters.
    """
    last = True
    if splits > 1:
        offset = tl.arange(0, _CHUNK)[:, None] + tl.arange(0, tokens)[None, :] * _CHUNK
        tl.store(partial_at + split * _CHUNK * tokens + offset, total, mask=own[None, :])
        tl.debug_barrier()
        last = tl.atomic_add(counter_at, 1, sem="acq_rel") == splits - 1
        if last:
            total = tl.load(partial_at + offset, cache_modifier=".cg")
            for other in tl.static_range(1, splits):
                total += tl.load(partial_at + other * _CHUNK * tokens + offset, cache_modifier=".cg")
            tl.store(counter_at, 0)
    return last, total


@triton.jit(do_not_specialize=["row_count"])  # type: ignore[untyped-decorator]
def _shrink_kernel(  # type: ignore[no-untyped-def]
    rows_at,
    scales_at,
    squares_at,
    down_at,
    adapters_at,
    low_at,
    partial_at,
    counters_at,
    depth,
    row_count,
    groups,
    size,
    eps,
    rank: tl.constexpr,
    has_norm: tl.constexpr,
    has_scales: tl.constexpr,
    max_groups: tl.constexpr,
    splits: tl.constexpr,
    tokens: tl.constexpr,
    stages: tl.constexpr,
    pdl: tl.constexpr,
) -> None:
    """Programs are (row tile, adapter and chunk of ranks, split).

    Programs of adapters that no row of the tile has end at once. Adapters, and the adapter of each row, were
    written before the pass, so they are read before the wait for the kernels that compute the rows.
    """
    pdl_launch(pdl)
    chunks: tl.constexpr = rank // _CHUNK
    number, chunk = tl.program_id(1) // chunks, tl.program_id(1) % chunks
    split = tl.program_id(2)
    token = program_tokens(tokens)
    real = token < row_count
    steps = depth // _STEP
    begin, end = split * steps // splits * _STEP, (split + 1) * steps // splits * _STEP
    own = tl.load(adapters_at + token, mask=real, other=-1) == number
    own_at = down_at + (number * rank + chunk * _CHUNK).to(tl.int64) * depth
    is_used = tl.max(own.to(tl.int32), 0) > 0
    if is_used and pdl:
        # the whole split of the adapter, or its first part if the split is deep
        along = tl.minimum(begin + tl.arange(0, _STEPS) * _STEP, end - _STEP)
        prefetch(own_at + tl.arange(0, _CHUNK)[:, None] * depth + along[None, :])
    pdl_wait(pdl)
    if is_used:
        if has_norm:
            squares = load_squares(squares_at, token, groups, max_groups)
        total = _shrink_split(
            rows_at,
            scales_at,
            own_at,
            token,
            own,
            depth,
            begin,
            end,
            stages,
            has_scales,
        )
        partial_at += (tl.program_id(0) * chunks + chunk) * splits * _CHUNK * tokens
        counter_at = counters_at + tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
        last, total = _reduce_own(
            total,
            own,
            partial_at,
            counter_at,
            split,
            splits,
            tokens,
        )
        if last:
            if has_norm:
                total *= norm_factor(squares, size, eps)
            to = low_at + token[None, :] * rank + chunk * _CHUNK + tl.arange(0, _CHUNK)[:, None]
            tl.store(to, total.to(low_at.dtype.element_ty), mask=own[None, :])


@triton.jit  # type: ignore[untyped-decorator]
def add_low_rank(  # type: ignore[no-untyped-def]
    total, column, token, row_count, low_at, up_at, adapters_at, up_width, rank: tl.constexpr
):
    """LoRA expand: `total` [columns, tokens] plus up low of each row's adapter."""
    adapter = tl.load(adapters_at + token, mask=token < row_count, other=-1)
    along, current = tl.arange(0, _CHUNK), tl.max(adapter, 0)
    while current >= 0:
        ups = up_at + (current * up_width + column).to(tl.int64)[:, None] * rank + along[None, :]
        lows = low_at + token[None, :] * rank + along[:, None]
        added = tl.zeros(total.shape, tl.float32)
        for at in range(0, rank, _CHUNK):
            added = tl.dot(tl.load(ups + at), tl.load(lows + at), added)
        total = tl.where((adapter == current)[None, :], total + added, total)
        current = next_adapter(adapter, current)
    return total


def shrink(
    change: LowRank | None,
    inputs: Normed | torch.Tensor,
    adapters: torch.Tensor | None,
    buffers: LowRankBuffers | None,
    scales: torch.Tensor | None = None,
) -> LowRankRows | None:
    """LoRA shrink of these inputs: the arguments of expand; None if no row has an adapter.

    `scales`, as in Normed: inputs are e4m3.
    """
    if change is None or adapters is None or buffers is None:
        return None
    rows, normed = (inputs.rows, inputs) if isinstance(inputs, Normed) else (inputs, None)
    count, rank, depth = len(adapters), change.rank, change.down.shape[2]
    low = buffers.low[: len(rows) * rank].view(len(rows), rank)
    splits = max(1, min(MAX_SPLITS, depth // SPLIT_DEPTH))
    groups = 1 if normed is None else normed.squares.shape[1]
    pdl = supports_pdl(rows.device)
    _shrink_kernel[(-(-count // MIN_TOKENS), len(change.down) * rank // CHUNK, splits)](
        rows,
        scales,
        None if normed is None else normed.squares,
        change.down,
        adapters,
        low,
        buffers.partial,
        buffers.counters,
        depth,
        count,
        groups,
        1 if normed is None else normed.size,
        0.0 if normed is None else normed.eps,
        rank,
        normed is not None,
        scales is not None,
        triton.next_power_of_2(groups),
        splits,
        MIN_TOKENS,
        STAGES,
        pdl,
        num_warps=WARPS,
        enable_fp_fusion=False,
        launch_pdl=pdl,
    )
    return LowRankRows(adapters, low, change.up)
