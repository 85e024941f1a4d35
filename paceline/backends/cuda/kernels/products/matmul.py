"""Split-K matrix products with batch-invariant bits; with few rows, memory-bound (at the speed of weights).

    columns of the output    tiles of `columns`, a program each
    depth (K)                `splits` parts, a program each; the last program to finish adds them up in order
                             (split-K reduction). With many rows one program loops over the splits
    rows                     tiles of `tokens`; a tile of 16 costs hardly more than one of 1

Products of many rows are bound by the tensor cores: `_matmul_many`, with the same summation order.

The weights are the left operand, so that their columns fill the larger dimension of the tensor core's
instruction and rows the smaller one. They are stored in the order in which programs read them.

The summation order depends on the matrix alone: over the depth in steps of the instruction, then over the
splits. So a row has the same bits in a pass of one row and in one of hundreds.
"""

from __future__ import annotations

import triton
import triton.language as tl

from paceline.backends.cuda.kernels.products.fp8 import fp8_matmul
from paceline.backends.cuda.kernels.products.unpacking import packed_matmul, words_of_scales


@triton.jit  # type: ignore[untyped-decorator]
def _matmul(  # type: ignore[no-untyped-def]
    weight_at,
    rows_at,
    row,
    real,
    depth,
    begin,
    end,
    columns: tl.constexpr,
    tokens: tl.constexpr,
    step: tl.constexpr,
    tiles: tl.constexpr,
    stages: tl.constexpr,
):
    """Tiles times rows `row` [tokens], over depth `begin` to `end`: float32 [tiles * columns, tokens]."""
    piece: tl.constexpr = 64 if tiles == 4 else step  # see matrix.stages_for
    column, along = tl.arange(0, tiles * columns), tl.arange(0, piece)
    line = column // columns * (columns * depth) + column % columns * step
    weights = weight_at + line[:, None] + along[None, :]
    rows = rows_at + row[None, :] * depth + along[:, None]
    total = tl.zeros([tiles * columns, tokens], tl.float32)
    for at in tl.range(begin, end, piece, num_stages=stages):
        at = tl.multiple_of(at, 64)
        offset = at * columns
        if piece < step:
            offset = tl.multiple_of(at // step * (step * columns) + at % step, 64)
        total = tl.dot(tl.load(weights + offset), tl.load(rows + at, mask=real[None, :], other=0.0), total)
    return total


@triton.jit  # type: ignore[untyped-decorator]
def _add_splits(at, begin: tl.constexpr, end: tl.constexpr, size: tl.constexpr):  # type: ignore[no-untyped-def]
    """The sum of these splits, in order."""
    total = tl.load(at + begin * size, cache_modifier=".cg")
    for other in tl.static_range(begin + 1, end):
        total += tl.load(at + other * size, cache_modifier=".cg")
    return total


@triton.jit  # type: ignore[untyped-decorator]
def reduce_split_k(  # type: ignore[no-untyped-def]
    total,
    partial_at,
    counter_at,
    split,
    splits: tl.constexpr,
    columns: tl.constexpr,
    tokens: tl.constexpr,
    packing: tl.constexpr,
):
    """Whether this program is the last of its tile to arrive, and the sum of all splits if so.

    With packed weights each half of the splits is summed first, then both halves, because the fused layer
    kernel has a program for each half.
    """
    last = True
    if splits > 1:
        offset = tl.arange(0, columns)[:, None] + tl.arange(0, tokens)[None, :] * columns
        tl.store(partial_at + split * columns * tokens + offset, total)
        tl.debug_barrier()
        last = tl.atomic_add(counter_at, 1, sem="acq_rel") == splits - 1
        if last:
            half: tl.constexpr = splits if packing == "none" else splits // 2
            total = _add_splits(partial_at + offset, 0, half, columns * tokens)
            if half < splits:
                total += _add_splits(partial_at + offset, half, splits, columns * tokens)
            tl.store(counter_at, 0)
    return last, total


@triton.jit  # type: ignore[untyped-decorator]
def matmul_split(  # type: ignore[no-untyped-def]
    rows_at,
    row,
    real,
    weight_at,
    scales_at,
    depth,
    tile,
    split,
    splits: tl.constexpr,
    columns: tl.constexpr,
    tokens: tl.constexpr,
    step: tl.constexpr,
    packing: tl.constexpr,
    stages: tl.constexpr,
    tiles: tl.constexpr = 1,
    row_scales_at=None,
):
    """One split of tiles times the rows `row` [tokens]: float32 [tiles * columns, tokens].

    `apply_scales` is still to be called. Splits are whole steps, as equal as possible. Packed tiles are
    computed one by one.
    """
    unit: tl.constexpr = 64 if packing == "e4m3" else step
    steps = depth // unit
    begin, end = split * steps // splits * unit, (split + 1) * steps // splits * unit
    first = (tile * tiles * columns).to(tl.int64)
    if packing == "none":
        tiles_at = weight_at + first * depth
        total = _matmul(tiles_at, rows_at, row, real, depth, begin, end, columns, tokens, step, tiles, stages)
    elif packing == "e4m3":
        total = fp8_matmul(
            weight_at + first * depth,
            rows_at,
            row_scales_at,
            row,
            real,
            depth,
            begin,
            end,
            columns,
            tokens,
            step,
            stages,
        )
    else:
        words_at = weight_at + first * (steps * 32)
        tile_scales_at = scales_at
        scale_words: tl.constexpr = words_of_scales(packing, step)
        if packing != "fp8":
            tile_scales_at += first * (steps * scale_words)
        total = packed_matmul(
            words_at,
            tile_scales_at,
            rows_at,
            row,
            real,
            depth,
            begin,
            end,
            columns,
            tokens,
            step,
            packing,
            scale_words,
            stages,
        )
    return total


@triton.jit  # type: ignore[untyped-decorator]
def apply_scales(total, scales_at, tile, columns: tl.constexpr, packing: tl.constexpr):  # type: ignore[no-untyped-def]
    """The sum over all splits of a tile, times the scales of its columns if the packing has any."""
    if packing == "fp8" or packing == "e4m3":
        total *= tl.load(scales_at + tile.to(tl.int64) * columns + tl.arange(0, columns))[:, None]
    return total


@triton.jit  # type: ignore[untyped-decorator]
def _parking_place(columns: tl.constexpr, tokens: tl.constexpr):  # type: ignore[no-untyped-def]
    """The offsets of this program's sums in the scratch."""
    number = (tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)).to(tl.int64)
    column, token = tl.arange(0, columns), tl.arange(0, tokens)
    return number * (columns * tokens) + (token[:, None] * columns + column[None, :])


@triton.jit  # type: ignore[untyped-decorator]
def _matmul_many(  # type: ignore[no-untyped-def]
    rows_at,
    weight_at,
    partial_at,
    depth,
    splits: tl.constexpr,
    columns: tl.constexpr,
    tokens: tl.constexpr,
    step: tl.constexpr,
    tiles: tl.constexpr,
    stages: tl.constexpr,
):
    """All splits of tiles times many rows, with rows as the left operand: float32 [tiles * columns, tokens].

    The running sum is kept in memory while the next split is computed: registers hold one split.
    """
    wide: tl.constexpr = tiles * columns
    piece: tl.constexpr = 64
    column, along = tl.arange(0, wide), tl.arange(0, piece)
    line = column // columns * (columns * depth) + column % columns * step
    weights = weight_at + (tl.program_id(1) * wide).to(tl.int64) * depth + line[None, :] + along[:, None]
    rows = rows_at + tl.arange(0, tokens)[:, None] * depth + along[None, :]
    steps = depth // step
    total = tl.zeros([tokens, wide], tl.float32)
    for split in tl.range(0, splits):
        begin, end = split * steps // splits * step, (split + 1) * steps // splits * step
        own = tl.zeros([tokens, wide], tl.float32)
        for at in tl.range(begin, end, piece, num_stages=stages):
            at = tl.multiple_of(at, 64)
            offset = tl.multiple_of(at // step * (step * columns) + at % step, 64)
            own = tl.dot(tl.load(rows + at), tl.load(weights + offset), own)
        if split > 0:
            own += tl.load(partial_at + _parking_place(wide, tokens))
        if split + 1 < splits:
            tl.store(partial_at + _parking_place(wide, tokens), own)
            tl.debug_barrier()
        total = own
    return tl.trans(total)


@triton.jit  # type: ignore[untyped-decorator]
def matmul_tiles(  # type: ignore[no-untyped-def]
    rows_at,
    row_count,
    weight_at,
    scales_at,
    partial_at,
    counters_at,
    depth,
    splits: tl.constexpr,
    is_split_k: tl.constexpr,
    columns: tl.constexpr,
    tokens: tl.constexpr,
    step: tl.constexpr,
    packing: tl.constexpr,
    stages: tl.constexpr,
    tiles: tl.constexpr = 1,
    row_scales_at=None,
    rows_first: tl.constexpr = False,
):
    """Whether this program has the result of its tiles, and that result: float32 [tiles * columns, tokens].

    Programs are (row tile, column tiles, split), and the last of the splits to finish has the result. Without
    `is_split_k` a program loops over all splits. `rows_first`: many rows, weights not packed.
    """
    row_tile, tile, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    rows_at += row_tile * tokens * depth
    if rows_first:
        return True, _matmul_many(
            rows_at, weight_at, partial_at, depth, splits, columns, tokens, step, tiles, stages
        )
    if packing == "e4m3":
        row_scales_at += row_tile * tokens * (depth // 64)
    real = program_tokens(tokens) < row_count
    total = matmul_split(
        rows_at,
        tl.arange(0, tokens),
        real,
        weight_at,
        scales_at,
        depth,
        tile,
        split,
        splits,
        columns,
        tokens,
        step,
        packing,
        stages,
        tiles,
        row_scales_at,
    )
    last = True
    if is_split_k:
        wide: tl.constexpr = tiles * columns
        number = row_tile * tl.num_programs(1) + tile
        partial_at += number * splits * wide * tokens
        counter_at = counters_at + number
        last, total = reduce_split_k(total, partial_at, counter_at, split, splits, wide, tokens, packing)
    else:
        for other in tl.static_range(1, splits):
            total += matmul_split(
                rows_at,
                tl.arange(0, tokens),
                real,
                weight_at,
                scales_at,
                depth,
                tile,
                other,
                splits,
                columns,
                tokens,
                step,
                packing,
                stages,
                tiles,
                row_scales_at,
            )
    return last, apply_scales(total, scales_at, tile, columns, packing)


@triton.jit  # type: ignore[untyped-decorator]
def program_tokens(tokens: tl.constexpr):  # type: ignore[no-untyped-def]
    """The rows of this program's row tile: int32 [tokens]."""
    return tl.program_id(0) * tokens + tl.arange(0, tokens)


@triton.jit  # type: ignore[untyped-decorator]
def load_squares(squares_at, token, groups, max_groups: tl.constexpr):  # type: ignore[no-untyped-def]
    """The sums of squares of each row: float32 [tokens, max_groups]. Loaded early to hide the latency."""
    group = tl.arange(0, max_groups)
    offset = token[:, None] * groups + group[None, :]
    return tl.load(squares_at + offset, mask=(group < groups)[None, :], other=0.0)


@triton.jit
def norm_factor(squares, size, eps):  # type: ignore[no-untyped-def]
    """The RMSNorm factor, 1 / root mean square, of each row: float32 [1, tokens].

    Summed in pairs, which fixes the order: otherwise it would depend on how threads share the rows.
    """
    tokens: tl.constexpr = squares.shape[0]
    groups: tl.constexpr = squares.shape[1]
    for power in tl.static_range(12):
        if (groups >> power) > 1:
            squares = tl.sum(tl.reshape(squares, (tokens, (groups >> power) // 2, 2)), 2)
    return tl.rsqrt(tl.reshape(squares, (tokens,)) / size + eps)[None, :]


@triton.jit  # type: ignore[untyped-decorator]
def sum_of_squares(values, tiles: tl.constexpr = 1):  # type: ignore[no-untyped-def]
    """The sums of squares per tile of values [columns, tokens]: float32 [tiles, tokens], in pairs."""
    columns: tl.constexpr = values.shape[0]
    tokens: tl.constexpr = values.shape[1]
    total = values * values
    for power in tl.static_range(12):
        if (columns >> power) > tiles:
            total = tl.sum(tl.reshape(total, ((columns >> power) // 2, 2, tokens)), 1)
    return tl.reshape(total, (tiles, tokens))


@triton.jit  # type: ignore[untyped-decorator]
def halves(total, columns: tl.constexpr, tokens: tl.constexpr, tiles: tl.constexpr = 1):  # type: ignore[no-untyped-def]
    """The first and second halves of each tile's columns: [tiles * columns // 2, tokens] each."""
    half: tl.constexpr = columns // 2
    both = tl.permute(tl.reshape(total, (tiles, 2, half, tokens)), (0, 2, 3, 1))
    return tl.split(tl.reshape(both, (tiles * half, tokens, 2)))
