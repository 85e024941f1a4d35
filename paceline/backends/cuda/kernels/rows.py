"""The embedding kernel: starts the residual stream, with the first norm."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from paceline.backends.cuda.kernels.pdl import pdl_sync, supports_pdl
from paceline.backends.cuda.kernels.products.fp8 import store_fp8
from paceline.backends.cuda.kernels.products.matrix import Matrix, Normed


@triton.jit  # type: ignore[untyped-decorator]
def _embed_kernel(  # type: ignore[no-untyped-def]
    tokens_at,
    embedding_at,
    hidden_at,
    norm_at,
    normed_at,
    squares_at,
    fp8_at,
    scales_at,
    padded,
    groups,
    quantizes: tl.constexpr,
    group: tl.constexpr,
    columns: tl.constexpr,
    step: tl.constexpr,
    pdl: tl.constexpr,
) -> None:
    row, tile = tl.program_id(0), tl.program_id(1)
    pdl_sync(pdl)
    token = tl.load(tokens_at + row).to(tl.int64)
    column = tile * group + tl.arange(0, group)
    begin = (
        token // columns * columns * padded + token % columns * step
    )  # of the token's row in the tiled table
    hidden = tl.load(embedding_at + begin + column // step * step * columns + column % step).to(tl.float32)
    weighted = hidden * tl.load(norm_at + column).to(tl.float32)
    tl.store(hidden_at + row * padded + column, hidden)
    tl.store(normed_at + row * padded + column, weighted.to(normed_at.dtype.element_ty))
    if quantizes:
        store_fp8(weighted[:, None], row + tl.arange(0, 1), tile, padded, fp8_at, scales_at)
    tl.store(squares_at + row * groups + tile, tl.sum(hidden * hidden, 0))


def embed(
    tokens: torch.Tensor, table: Matrix, hidden: torch.Tensor, norm: torch.Tensor, normed: Normed
) -> None:
    """Write the embeddings of `tokens` [rows] to `hidden`, and prepare `normed` for the norm of this weight.

    The table has the tiled layout of weights, because with tied embeddings it is also the LM head.
    """
    groups = normed.squares.shape[1]
    pdl = supports_pdl(hidden.device)
    _embed_kernel[(len(tokens), groups)](
        tokens,
        table.weight,
        hidden,
        norm,
        normed.rows,
        normed.squares,
        normed.fp8,
        normed.scales,
        hidden.shape[1],
        groups,
        normed.fp8 is not None,
        hidden.shape[1] // groups,
        table.tiling.columns,
        table.tiling.step,
        pdl,
        num_warps=1,
        launch_pdl=pdl,
    )
