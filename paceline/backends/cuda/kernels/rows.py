"""What happens to one row at a time: its embedding, and its queries, keys and values before attention."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from paceline.backends.cuda.kernels.launching import follow, overlaps
from paceline.backends.cuda.kernels.matrix import Matrix, Normed


@triton.jit  # type: ignore[untyped-decorator]
def _embed_kernel(  # type: ignore[no-untyped-def]
    tokens_at,
    embedding_at,
    hidden_at,
    norm_at,
    normed_at,
    squares_at,
    padded,
    groups,
    group: tl.constexpr,
    columns: tl.constexpr,
    step: tl.constexpr,
    overlap: tl.constexpr,
) -> None:
    row, tile = tl.program_id(0), tl.program_id(1)
    follow(overlap)
    token = tl.load(tokens_at + row).to(tl.int64)
    column = tile * group + tl.arange(0, group)
    begin = token // columns * columns * padded + token % columns * step  # of the token in its tile
    hidden = tl.load(embedding_at + begin + column // step * step * columns + column % step).to(tl.float32)
    weighted = hidden * tl.load(norm_at + column).to(tl.float32)
    tl.store(hidden_at + row * padded + column, hidden)
    tl.store(normed_at + row * padded + column, weighted.to(normed_at.dtype.element_ty))
    tl.store(squares_at + row * groups + tile, tl.sum(hidden * hidden, 0))


def embed(
    tokens: torch.Tensor, table: Matrix, hidden: torch.Tensor, norm: torch.Tensor, normed: Normed
) -> None:
    """Write the embeddings of `tokens` [rows] to `hidden`, and prepare `normed` for the norm of this weight.

    The table is a matrix as products read it, because often it is one.
    """
    groups = normed.squares.shape[1]
    overlap = overlaps(hidden.device)
    _embed_kernel[(len(tokens), groups)](
        tokens,
        table.weight,
        hidden,
        norm,
        normed.rows,
        normed.squares,
        hidden.shape[1],
        groups,
        hidden.shape[1] // groups,
        table.tiling.columns,
        table.tiling.step,
        overlap,
        num_warps=1,
        launch_pdl=overlap,
    )


@triton.jit  # type: ignore[untyped-decorator]
def _rotate_kernel(  # type: ignore[no-untyped-def]
    qkv_at,
    positions_at,
    places_at,
    cosines_at,
    sines_at,
    query_norm_at,
    key_norm_at,
    query_at,
    keys_at,
    values_at,
    qkv_stride,
    eps,
    has_norm: tl.constexpr,
    heads: tl.constexpr,
    kv_heads: tl.constexpr,
    dim: tl.constexpr,
    wide: tl.constexpr,  # half of dim, rounded up to a power of two
    overlap: tl.constexpr,
) -> None:
    row, head = tl.program_id(0), tl.program_id(1)
    half: tl.constexpr = dim // 2
    part = tl.arange(0, wide)
    inside = part < half
    follow(overlap)
    position, place = tl.load(positions_at + row), tl.load(places_at + row).to(tl.int64)
    at = qkv_at + row.to(tl.int64) * qkv_stride + head * dim
    first = tl.load(at + part, mask=inside, other=0.0)
    second = tl.load(at + half + part, mask=inside, other=0.0)
    stored = part < tl.where(place >= 0, half, 0)
    if head >= heads + kv_heads:
        to = values_at + (place * kv_heads + head - heads - kv_heads) * dim
        tl.store(to + part, first, mask=stored)
        tl.store(to + half + part, second, mask=stored)
    else:
        one, two = first.to(tl.float32), second.to(tl.float32)
        if has_norm:
            factor = tl.rsqrt((tl.sum(one * one, 0) + tl.sum(two * two, 0)) / dim + eps)
            norm_at = query_norm_at if head < heads else key_norm_at
            one *= factor * tl.load(norm_at + part, mask=inside, other=0.0).to(tl.float32)
            two *= factor * tl.load(norm_at + half + part, mask=inside, other=0.0).to(tl.float32)
        cosine = tl.load(cosines_at + position * half + part, mask=inside, other=0.0)
        sine = tl.load(sines_at + position * half + part, mask=inside, other=0.0)
        first = (one * cosine - two * sine).to(first.dtype)
        second = (two * cosine + one * sine).to(first.dtype)
        if head < heads:
            to = query_at + (row * heads + head) * dim
            tl.store(to + part, first, mask=inside)
            tl.store(to + half + part, second, mask=inside)
        else:
            to = keys_at + (place * kv_heads + head - heads) * dim
            tl.store(to + part, first, mask=stored)
            tl.store(to + half + part, second, mask=stored)


def rotate_and_store(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    places: torch.Tensor,
    rotation: tuple[torch.Tensor, torch.Tensor],
    norms: tuple[torch.Tensor, torch.Tensor] | None,
    eps: float,
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
) -> None:
    """Turn queries and keys of `qkv` [rows, (heads + 2 * key heads) * head_dim] by their positions.

    Queries go to `query` [rows, heads, head_dim], keys and values to their places of one layer's
    [places, key heads, head_dim]; those with place -1 go nowhere. `rotation` is cosine and sine, each
    [positions, head_dim // 2]; `norms` are the weights [head_dim] of queries' and keys' norms.
    """
    rows, heads, dim = len(positions), query.shape[1], query.shape[2]
    kv_heads = keys.shape[1]
    overlap = overlaps(qkv.device)
    query_norm, key_norm = norms or (None, None)
    _rotate_kernel[(rows, heads + 2 * kv_heads)](
        qkv,
        positions,
        places,
        *rotation,
        query_norm,
        key_norm,
        query,
        keys,
        values,
        qkv.stride(0),
        eps,
        norms is not None,
        heads,
        kv_heads,
        dim,
        triton.next_power_of_2(dim // 2),
        overlap,
        num_warps=1,
        launch_pdl=overlap,
    )
