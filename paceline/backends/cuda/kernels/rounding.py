"""Activations in e4m3, and their products with weights in e4m3.

Each 64 of a row have a scale of their own, so whoever writes them needs to know no others: no kernel more is
needed to round rows, and their bits depend on nothing but the row.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def rounding_scales(peaks):  # type: ignore[no-untyped-def]
    """Powers of two that multiply the e4m3 numbers of groups with these largest ones, and their inverses.

    Numbers have exponents of their own, so that a finer scale would make few of them more exact.
    """
    exponent = tl.maximum((peaks.to(tl.int32, bitcast=True) >> 23) - 7, 1)
    return (exponent << 23).to(tl.float32, bitcast=True), ((254 - exponent) << 23).to(
        tl.float32, bitcast=True
    )


@triton.jit
def scale_place(row, group, groups):  # type: ignore[no-untyped-def]
    """Where the scale of a row's group lies, so that 16 rows have theirs together."""
    return (row // 16 * groups + group) * 16 + row % 16


@triton.jit  # type: ignore[untyped-decorator]
def store_rounded(values, token, group, depth, rounded_at, scales_at) -> None:  # type: ignore[no-untyped-def]
    """Write values [64, tokens], a group of these tokens' rows, as e4m3 numbers and their scales."""
    scale, inverse = rounding_scales(tl.max(tl.abs(values), 0))
    place = token[None, :] * depth + group * 64 + tl.arange(0, 64)[:, None]
    tl.store(rounded_at + place, (values * inverse[None, :]).to(rounded_at.dtype.element_ty))
    tl.store(scales_at + scale_place(token, group, depth // 64), scale)


@triton.jit  # type: ignore[untyped-decorator]
def rounded_product(  # type: ignore[no-untyped-def]
    weight_at,
    rows_at,
    row_scales_at,
    row,
    depth,
    begin,
    end,
    columns: tl.constexpr,
    tokens: tl.constexpr,
    stages: tl.constexpr,
):
    """Weights of a tile times the rows `row` [tokens], `begin` to `end`: float32 [columns, tokens].

    Both are e4m3: nothing is unpacked, groups of a row are scaled.

    The matrix unit sums e4m3 products in fewer bits than float32 has, so it sums no more than a group.
    """
    column, along = tl.arange(0, columns), tl.arange(0, 64)
    weights, rows = weight_at + column[:, None] * 64 + along[None, :], rows_at + row[None, :] * depth
    total = tl.zeros([columns, tokens], tl.float32)
    for at in tl.range(begin, end, 64, num_stages=stages):
        at = tl.multiple_of(at, 64)
        some = tl.dot(tl.load(weights + at * columns), tl.load(rows + at + along[:, None]))
        scale = tl.load(row_scales_at + scale_place(row, at // 64, depth // 64))
        total = tl.fma(some, tl.broadcast_to(scale[None, :], some.shape), total)
    return total
