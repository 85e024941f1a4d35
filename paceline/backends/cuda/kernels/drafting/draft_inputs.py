"""The inputs of draft heads: norm features and states, and concatenate them with embeddings."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from paceline.backends.cuda.kernels.pdl import pdl_sync, supports_pdl
from paceline.backends.cuda.kernels.products.matrix import Normed

NO_RESIDUAL, STATE_RESIDUAL, NORMED_RESIDUAL = range(3)  # initial value of a head's residual stream


@triton.jit
def _normed(values, norm_at, part, inside, size, eps):  # type: ignore[no-untyped-def]
    """A row divided by its root mean square, times the norm's weight."""
    factor = tl.rsqrt(tl.sum(values * values, 0) / size + eps)
    return values * factor * tl.load(norm_at + part, mask=inside, other=0.0).to(tl.float32)


@triton.jit  # type: ignore[untyped-decorator]
def _norm_rows_kernel(  # type: ignore[no-untyped-def]
    values_at,
    sources_at,
    norm_at,
    output_at,
    size,
    values_stride,
    output_stride,
    eps,
    has_sources: tl.constexpr,
    has_norm: tl.constexpr,
    wide: tl.constexpr,  # size, rounded up to a power of two
    pdl: tl.constexpr,
) -> None:
    row, group = tl.program_id(0), tl.program_id(1)
    part = tl.arange(0, wide)
    inside = part < size
    pdl_sync(pdl)
    source = tl.load(sources_at + row) if has_sources else row
    values = tl.load(
        values_at + source.to(tl.int64) * values_stride + group * size + part, mask=inside, other=0.0
    ).to(tl.float32)
    if has_norm:
        values = _normed(values, norm_at + group * size, part, inside, size, eps)
    to = output_at + row.to(tl.int64) * output_stride + group * size + part
    tl.store(to, values.to(output_at.dtype.element_ty), mask=inside)


def norm_rows(
    values: torch.Tensor,
    sources: torch.Tensor | None,
    norm: torch.Tensor | None,
    eps: float,
    size: int,
    output: torch.Tensor,
    rows: int,
    groups: int = 1,
) -> None:
    """Write rows of `values` [any, groups * size] to `output` [rows, at least groups * size].

    Row r is row sources[r], or r without `sources`. Each group is normed separately with `norm`
    [groups * size], if given.
    """
    pdl = supports_pdl(values.device)
    _norm_rows_kernel[(rows, groups)](
        values,
        sources,
        norm,
        output,
        size,
        values.stride(0),
        output.stride(0),
        eps,
        sources is not None,
        norm is not None,
        triton.next_power_of_2(size),
        pdl,
        num_warps=4,
        launch_pdl=pdl,
    )


@triton.jit  # type: ignore[untyped-decorator]
def _join_kernel(  # type: ignore[no-untyped-def]
    embedded_at,
    states_at,
    sources_at,
    embedding_norm_at,
    state_norm_at,
    joined_at,
    hidden_at,
    size,
    padded,
    eps,
    has_sources: tl.constexpr,
    has_norms: tl.constexpr,
    residual: tl.constexpr,
    wide: tl.constexpr,  # padded, rounded up to a power of two
    pdl: tl.constexpr,
) -> None:
    row = tl.program_id(0)
    part = tl.arange(0, wide)
    inside = part < padded
    pdl_sync(pdl)
    source = tl.load(sources_at + row) if has_sources else row
    embedded = tl.load(embedded_at + row * padded + part, mask=inside, other=0.0)
    state = tl.load(states_at + source * padded + part, mask=inside, other=0.0)
    start = state
    if has_norms:
        embedded = _normed(embedded, embedding_norm_at, part, inside, size, eps)
        state = _normed(state, state_norm_at, part, inside, size, eps)
    if residual == 2:
        start = state
    if residual == 0:
        start = tl.zeros_like(state)
    kind = joined_at.dtype.element_ty
    tl.store(joined_at + row * 2 * padded + part, embedded.to(kind), mask=inside)
    tl.store(joined_at + (row * 2 + 1) * padded + part, state.to(kind), mask=inside)
    tl.store(hidden_at + row * padded + part, start, mask=inside)


def join(
    embedded: torch.Tensor,
    states: torch.Tensor,
    sources: torch.Tensor | None,
    norms: tuple[torch.Tensor, torch.Tensor] | None,
    size: int,
    eps: float,
    residual: int,
    joined: torch.Tensor,
    hidden: torch.Tensor,
    rows: int,
) -> None:
    """Write [embedding, state] to `joined` [rows, 2 * padded], and initialize the residual stream `hidden`.

    `embedded` and `states` are float32 [any, padded]; row r reads the state sources[r], or r without
    `sources`. Both are normed with `norms`, each [padded], if given.
    """
    pdl = supports_pdl(embedded.device)
    embedding_norm, state_norm = norms or (None, None)
    _join_kernel[(rows,)](
        embedded,
        states,
        sources,
        embedding_norm,
        state_norm,
        joined,
        hidden,
        size,
        hidden.shape[1],
        eps,
        sources is not None,
        norms is not None,
        residual,
        triton.next_power_of_2(hidden.shape[1]),
        pdl,
        num_warps=8,
        launch_pdl=pdl,
    )


@triton.jit  # type: ignore[untyped-decorator]
def _pick_kernel(  # type: ignore[no-untyped-def]
    rows_at,
    squares_at,
    wanted_at,
    picked_at,
    picked_squares_at,
    width,
    groups,
    wide: tl.constexpr,
    most_groups: tl.constexpr,
    pdl: tl.constexpr,
) -> None:
    row = tl.program_id(0)
    part, group = tl.arange(0, wide), tl.arange(0, most_groups)
    pdl_sync(pdl)
    source = tl.load(wanted_at + row)
    values = tl.load(rows_at + source * width + part, mask=part < width)
    squares = tl.load(squares_at + source * groups + group, mask=group < groups)
    tl.store(picked_at + row * width + part, values, mask=part < width)
    tl.store(picked_squares_at + row * groups + group, squares, mask=group < groups)


def pick_rows(normed: Normed, wanted: torch.Tensor, picked: Normed) -> None:
    """Copy the rows `wanted` [outputs] of `normed` to `picked`."""
    pdl = supports_pdl(wanted.device)
    width, groups = normed.rows.shape[1], normed.squares.shape[1]
    _pick_kernel[(len(wanted),)](
        normed.rows,
        normed.squares,
        wanted,
        picked.rows,
        picked.squares,
        width,
        groups,
        triton.next_power_of_2(width),
        triton.next_power_of_2(groups),
        pdl,
        num_warps=4,
        launch_pdl=pdl,
    )
