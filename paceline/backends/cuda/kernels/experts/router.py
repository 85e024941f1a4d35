"""The MoE router: a score for each expert and row, with the same summation order for any number of rows.

A score is a sum of parts, one for each tile of 64 columns of the residual stream. With few rows and experts,
each program that finishes a tile of the stream (linear.py) also stores its part of all scores, which saves
the latency of a kernel; `route` sums the parts. With more of either, a separate kernel computes scores in the
same order: for few rows it has a program for each part, and the last to finish sums them (split-K).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from paceline.backends.cuda.kernels.pdl import pdl_launch, pdl_sync, pdl_wait, prefetch, supports_pdl
from paceline.backends.cuda.kernels.products.matrix import Matrix, Normed, shared_bytes, token_tile
from paceline.backends.cuda.weights.shard import TILE

COLUMNS = tl.constexpr(TILE)  # of a tile of the residual stream, and of the router
FEW_ROWS = 64  # most rows for which parts of scores are stored by the kernel before
MAX_PARTS = 8192  # most numbers of a row (parts times experts) for which that is faster than a kernel
MAX_STAGES = 8  # pipeline stages: few programs read the router, each keeps 80 KB in flight


@dataclass(frozen=True)
class Scores:
    """The router, and the buffer for parts of scores in passes with few rows."""

    router: Matrix
    parts: torch.Tensor  # float32 [FEW_ROWS, tiles of the residual stream, padded experts]


@triton.jit  # type: ignore[untyped-decorator]
def _lines_at(router_at, tile, depth, expert, step: tl.constexpr):  # type: ignore[no-untyped-def]
    """The address of the router's weights of these experts for a tile of the stream: COLUMNS in a line."""
    column = tile * COLUMNS
    at = router_at + column // step * (COLUMNS * step) + column % step
    return at + expert // COLUMNS * (COLUMNS * depth) + expert % COLUMNS * step


@triton.jit  # type: ignore[untyped-decorator]
def prefetch_router(router_at, tile, depth, experts: tl.constexpr, step: tl.constexpr) -> None:  # type: ignore[no-untyped-def]
    """Prefetch the router weights that `store_scores` reads: a cache line per expert."""
    for first in tl.static_range(0, experts, COLUMNS):
        prefetch(_lines_at(router_at, tile, depth, first + tl.arange(0, COLUMNS), step))


@triton.jit  # type: ignore[untyped-decorator]
def store_scores(  # type: ignore[no-untyped-def]
    rows, tile, tiles, token, router_at, parts_at, depth, experts: tl.constexpr, step: tl.constexpr
) -> None:
    """Store the part of all scores that comes from this tile of the stream [COLUMNS, tokens]."""
    at_once: tl.constexpr = 64 if experts == 64 else 128
    to = parts_at + (token[None, :] * tiles + tile) * experts
    for first in tl.range(0, experts, at_once, num_stages=2):
        expert = first + tl.arange(0, at_once)
        lines, inside = _lines_at(router_at, tile, depth, expert, step), (expert < experts)[:, None]
        weights = tl.load(lines[:, None] + tl.arange(0, COLUMNS)[None, :], mask=inside, other=0.0)
        tl.store(to + expert[:, None], tl.dot(weights, rows), mask=inside)


@triton.jit(do_not_specialize=["row_count"])  # type: ignore[untyped-decorator]
def _scores_kernel(  # type: ignore[no-untyped-def]
    rows_at,
    router_at,
    scores_at,
    depth,
    row_count,
    line,
    tokens: tl.constexpr,
    step: tl.constexpr,
    stages: tl.constexpr,
    pdl: tl.constexpr,
) -> None:
    pdl_sync(pdl)
    token = tl.program_id(0) * tokens + tl.arange(0, tokens)
    part = tl.arange(0, COLUMNS)
    expert = tl.program_id(1) * COLUMNS + part
    real = (token < row_count)[None, :]
    total = tl.zeros([COLUMNS, tokens], tl.float32)
    for tile in tl.range(0, depth // COLUMNS, num_stages=stages):
        weights = tl.load(_lines_at(router_at, tile, depth, expert, step)[:, None] + part[None, :])
        at = rows_at + token[None, :].to(tl.int64) * depth + tile * COLUMNS + part[:, None]
        own = tl.dot(weights, tl.load(at, mask=real, other=0.0))
        total += tl.where(real, own, 0.0)  # not accumulated by the tensor core, which would round differently
    to = scores_at + token[None, :].to(tl.int64) * line + expert[:, None]
    tl.store(to, total, mask=real)


@triton.jit(do_not_specialize=["row_count"])  # type: ignore[untyped-decorator]
def _split_scores_kernel(  # type: ignore[no-untyped-def]
    rows_at,
    router_at,
    parts_at,
    arrivals_at,
    scores_at,
    depth,
    row_count,
    line,
    tiles: tl.constexpr,  # of the residual stream
    tokens: tl.constexpr,
    step: tl.constexpr,
    pdl: tl.constexpr,
) -> None:
    pdl_launch(pdl)
    tile, number = tl.program_id(0), tl.program_id(1)
    token, part = tl.arange(0, tokens), tl.arange(0, COLUMNS)
    expert, real = number * COLUMNS + part, (token < row_count)[None, :]
    # before the wait: weights are constant during a pass
    weights = tl.load(_lines_at(router_at, tile, depth, expert, step)[:, None] + part[None, :])
    pdl_wait(pdl)
    at = rows_at + token[None, :] * depth + tile * COLUMNS + part[:, None]
    own = tl.dot(weights, tl.load(at, mask=real, other=0.0))
    to = parts_at + token[None, :] * (tiles * line) + expert[:, None]
    tl.store(to + tile * line, own, mask=real)
    tl.debug_barrier()
    if tl.atomic_add(arrivals_at + number, 1, sem="acq_rel") == tiles - 1:
        total = tl.load(to, mask=real, other=0.0, cache_modifier=".cg")
        for other in tl.static_range(1, tiles):
            total += tl.load(to + other * line, mask=real, other=0.0, cache_modifier=".cg")
        tl.store(scores_at + token[None, :] * line + expert[:, None], total, mask=real)
        tl.store(arrivals_at + number, 0)


def has_parts(router: Matrix, rows: int) -> bool:
    """Whether the kernel that adds to the residual stream also stores parts of scores."""
    return rows <= FEW_ROWS and router.depth // TILE * router.padded_width <= MAX_PARTS


def stages_for(tokens: int, rows: torch.Tensor) -> int:
    """Pipeline stages that fit in shared memory, for a router's kernel with tiles of `tokens` rows."""
    stage = TILE * (TILE + tokens) * rows.element_size()
    return min(MAX_STAGES, shared_bytes(rows.device) // stage)


def score_rows(
    read: Normed, router: Matrix, parts: torch.Tensor, arrivals: torch.Tensor, scores: torch.Tensor, rows: int
) -> None:
    """Write router scores to `scores` [rows, padded experts], before the norm's factor and the bias.

    `parts` and `arrivals` are buffers of Routing.
    """
    tokens, pdl = min(FEW_ROWS, token_tile(rows)), supports_pdl(scores.device)
    if rows <= FEW_ROWS:
        tiles = router.depth // TILE
        _split_scores_kernel[(tiles, router.tiles)](
            read.rows,
            router.weight,
            parts,
            arrivals,
            scores,
            router.depth,
            rows,
            scores.shape[1],
            tiles,
            tokens,
            router.tiling.step,
            pdl,
            num_warps=4,
            enable_fp_fusion=False,
            launch_pdl=pdl,
        )
        return
    _scores_kernel[(-(-rows // tokens), router.tiles)](
        read.rows,
        router.weight,
        scores,
        router.depth,
        rows,
        scores.shape[1],
        tokens,
        router.tiling.step,
        stages_for(tokens, read.rows),
        pdl,
        num_warps=4,
        enable_fp_fusion=False,
        launch_pdl=pdl,
    )
