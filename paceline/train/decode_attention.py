"""Attention of one new token per sequence over a padded KV cache, as one kernel that reads the cache once.

Computes what `attend_many` of sampler.py does; library matrix products are far slower with so few rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

COLUMNS = 64  # of the cache, per iteration


@triton.jit  # type: ignore[untyped-decorator]
def _kernel(  # type: ignore[no-untyped-def]
    query_at,
    keys_at,
    values_at,
    first_at,
    output_at,
    stop,
    window,
    row_stride,
    head_stride,
    scale,
    heads: tl.constexpr,
    group: tl.constexpr,  # query heads per KV head
    lanes: tl.constexpr,  # group, rounded up to the minimum of a matrix product
    dim: tl.constexpr,
    columns: tl.constexpr,
) -> None:
    """One sequence and one KV head: online softmax over blocks of columns."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    lane, part = tl.arange(0, lanes), tl.arange(0, dim)
    queries = (row * heads + head * group + lane)[:, None] * dim + part[None, :]
    query = tl.load(query_at + queries, mask=(lane < group)[:, None], other=0.0)
    first = tl.maximum(tl.load(first_at + row).to(tl.int32), stop - window)
    cache = row * row_stride + head * head_stride
    highest = tl.full([lanes], float("-inf"), tl.float32)
    total = tl.zeros([lanes], tl.float32)
    mixed = tl.zeros([lanes, dim], tl.float32)
    for start in range(first // columns * columns, stop, columns):
        column = start + tl.arange(0, columns)
        seen = (column >= first) & (column < stop)
        offsets = cache + column[:, None] * dim + part[None, :]
        key = tl.load(keys_at + offsets, mask=seen[:, None], other=0.0)
        value = tl.load(values_at + offsets, mask=seen[:, None], other=0.0)
        scores = tl.where(seen[None, :], tl.dot(query, tl.trans(key)) * scale, float("-inf"))
        higher = tl.maximum(highest, tl.max(scores, 1))
        weights = tl.exp(scores - higher[:, None])
        shrink = tl.exp(highest - higher)
        total = total * shrink + tl.sum(weights, 1)
        mixed = mixed * shrink[:, None] + tl.dot(weights.to(value.dtype), value)
        highest = higher
    mixed = mixed / total[:, None]
    tl.store(output_at + queries, mixed.to(query.dtype), mask=(lane < group)[:, None])


def attend_one(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    first: torch.Tensor,
    stop: int,
    window: int | None,
) -> torch.Tensor:
    """`attend_many` of sampler.py for one query per row: [rows, 1, heads, head_dim].

    head_dim must be a power of two; keys and values have the same strides, columns of a head are adjacent.
    """
    rows, _, heads, dim = query.shape
    group = heads // keys.shape[1]
    output = torch.empty_like(query, memory_format=torch.contiguous_format)
    _kernel[(rows, keys.shape[1])](
        query.contiguous(),
        keys,
        values,
        first,
        output,
        stop,
        stop if window is None else window,
        keys.stride(0),
        keys.stride(1),
        dim**-0.5,
        heads,
        group,
        max(16, triton.next_power_of_2(group)),
        dim,
        COLUMNS,
    )
    return output
