"""Products of e4m3 activations and e4m3 weights, and the quantization of activations.

Every 64 numbers of a row have their own scale, so the kernel that writes them quantizes them without seeing
the rest of the row: quantization needs no extra kernel, and its bits depend on the row alone.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def fp8_scales(peaks):  # type: ignore[no-untyped-def]
    """Power-of-two scales for groups with these maxima, and their inverses.

    e4m3 is a floating-point format, so finer scales would hardly gain precision.
    """
    exponent = tl.maximum((peaks.to(tl.int32, bitcast=True) >> 23) - 7, 1)
    return (exponent << 23).to(tl.float32, bitcast=True), ((254 - exponent) << 23).to(
        tl.float32, bitcast=True
    )


@triton.jit
def scale_offset(row, group, groups):  # type: ignore[no-untyped-def]
    """The offset of the scale of a row's group; the scales of 16 rows are contiguous."""
    return (row // 16 * groups + group) * 16 + row % 16


@triton.jit  # type: ignore[untyped-decorator]
def store_fp8(values, token, group, depth, fp8_at, scales_at) -> None:  # type: ignore[no-untyped-def]
    """Store values [64, tokens], a group of these tokens' rows, as e4m3 with their scales."""
    scale, inverse = fp8_scales(tl.max(tl.abs(values), 0))
    offset = token[None, :] * depth + group * 64 + tl.arange(0, 64)[:, None]
    tl.store(fp8_at + offset, (values * inverse[None, :]).to(fp8_at.dtype.element_ty))
    tl.store(scales_at + scale_offset(token, group, depth // 64), scale)


@triton.jit  # type: ignore[untyped-decorator]
def fp8_matmul(  # type: ignore[no-untyped-def]
    weight_at,
    rows_at,
    row_scales_at,
    row,
    real,
    depth,
    begin,
    end,
    columns: tl.constexpr,
    tokens: tl.constexpr,
    step: tl.constexpr,
    stages: tl.constexpr,
):
    """Weights of a tile times rows `row` [tokens], over depth `begin` to `end`: float32 [columns, tokens].

    Both are e4m3. Each group of 64 is accumulated in float32 after scaling: within the tensor core, e4m3
    products are summed with fewer bits.
    """
    column, along = tl.arange(0, columns), tl.arange(0, 64)
    weights, rows = weight_at + column[:, None] * step + along[None, :], rows_at + row[None, :] * depth
    total = tl.zeros([columns, tokens], tl.float32)
    for at in tl.range(begin, end, 64, num_stages=stages):
        at = tl.multiple_of(at, 64)
        numbers = tl.load(rows + at + along[:, None], mask=real[None, :], other=0.0)
        offset = tl.multiple_of(at // step * (step * columns) + at % step, 64)
        some = tl.dot(tl.load(weights + offset), numbers)
        scale = tl.load(row_scales_at + scale_offset(row, at // 64, depth // 64))
        total = tl.fma(some, tl.broadcast_to(scale[None, :], some.shape), total)
    return total
