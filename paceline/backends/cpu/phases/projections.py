"""The linear phases of a dense layer: projections, and the gated half of an MLP.

In each phase, threads take tasks until none is left, and meet at a barrier. A task's result does not depend
on the thread that runs it or on other tasks.
"""

from __future__ import annotations

from paceline.backends.cpu.job import (
    ACTIVATION,
    GATE,
    QUANTIZED,
    RECORDS_AT,
    ROW_ADAPTERS_AT,
    RUN_TILE,
    WIDE_RECORDS_AT,
    field,
    take,
)
from paceline.backends.cpu.phases.low_rank import add_low_rank
from paceline.backends.cpu.primitives.compiled import compiled
from paceline.backends.cpu.primitives.isa import ISA
from paceline.backends.cpu.primitives.rows import (
    RELU2,
    ROW_BLOCK,
    gate,
    record_block,
    record_stride,
    scale_row,
    write_record,
)
from paceline.backends.cpu.primitives.simd import load_float, load_int64
from paceline.backends.cpu.tiles.matmul import multiply_rows, tiles_of_task, unit_bytes, unpack_tiles
from paceline.backends.cpu.tiles.weight_tile import COLUMNS, GROUP, RECORD

UNPACKED_SPACE = ISA.unpacked_bytes  # of scratch, for a matrix's unpacked tiles
GATED_BYTES = 2 * ROW_BLOCK * 4 * GROUP  # gate and up projections of ROW_BLOCK rows, 32 float32 columns each


@compiled
def project(tasks, job, counter, matrix, records, rows, out, out_stride, bias, added, scratch):  # type: ignore[no-untyped-def]
    """out = records @ matrix + bias, or with `added` out += that; a task is some tiles of the matrix."""
    project_heads(tasks, job, counter, matrix, 1, records, rows, out, out_stride, 0, bias, added, scratch)


@compiled
def project_heads(  # type: ignore[no-untyped-def]
    tasks, job, counter, matrix, heads, records, rows, out, out_stride, head_stride, bias, added, scratch
):
    """The same for `heads` stacked matrices, one per head, each of which reads its part of the records.

    The results of two heads are `head_stride` bytes apart.
    """
    groups, tiles = load_int64(matrix + 16), load_int64(matrix + 24)
    run_tile, stride, own_tiles = field(job, RUN_TILE), record_stride(rows), tiles // heads
    own_bytes = groups * stride * (RECORD if field(job, QUANTIZED) else 4 * GROUP)
    chunk = tiles_of_task(matrix, rows, tasks[1], UNPACKED_SPACE)
    while True:
        first, last = take(tasks, counter, tiles, chunk)
        if first >= tiles:
            return
        weights = unpack_tiles(run_tile, matrix, first, last, rows, scratch)
        for row in range(0, rows, ROW_BLOCK):
            count = min(ROW_BLOCK, rows - row)
            block = record_block(records, row, rows, heads * groups, field(job, QUANTIZED))
            tile = first
            while tile < last:
                head = tile // own_tiles
                end = min(last, own_tiles * (head + 1))
                tile_bias = bias + 4 * COLUMNS * tile if bias != 0 else 0
                place = out + row * out_stride + head * head_stride + 4 * COLUMNS * (tile - head * own_tiles)
                multiply_rows(
                    run_tile, weights, tile, end, block + head * own_bytes, stride, count, place, out_stride,
                    tile_bias, added,
                )  # fmt: skip
                tile = end


@compiled
def gate_unit(  # type: ignore[no-untyped-def]
    job,
    tables,
    layer,
    line,
    first_row,
    unit,
    gates,
    ups,
    gate_biases,
    up_biases,
    records,
    stride,
    block,
    rows,
    shares,
    out,
    out_block,
    scratch,
):
    """Write records of 32 columns of activation(gate) * up of all rows to `out`.

    In the input records, two groups are `stride` records apart and two blocks of rows `block` bytes, at `out`
    `out_block` bytes. The addresses of biases and of `shares`, a factor for each row, may be 0. `tables` has
    the adapter table of each row, whose first is `first_row` (0: no row has one); `line` is the gate's line
    in them, and that of up follows.
    """
    quantized, run_tile, activation = field(job, QUANTIZED), field(job, RUN_TILE), field(job, ACTIVATION)
    size, columns = RECORD if quantized else 4 * GROUP, COLUMNS * load_int64(gates + 24)
    ups_at = scratch + ROW_BLOCK * 4 * GROUP
    first, last, unpacked_at = GROUP // COLUMNS * unit, GROUP // COLUMNS * (unit + 1), scratch + GATED_BYTES
    gates = unpack_tiles(run_tile, gates, first, last, rows, unpacked_at)
    ups = unpack_tiles(run_tile, ups, first, last, rows, unpacked_at + unit_bytes(load_int64(gates + 16)))
    gate_bias = gate_biases + 4 * GROUP * unit if gate_biases != 0 else 0
    up_bias = up_biases + 4 * GROUP * unit if up_biases != 0 else 0
    for start in range(0, rows, ROW_BLOCK):
        count, source = min(ROW_BLOCK, rows - start), records + start // ROW_BLOCK * block
        multiply_rows(run_tile, gates, first, last, source, stride, count, scratch, 4 * GROUP, gate_bias, 0)
        if activation != RELU2:  # which has no gate
            multiply_rows(run_tile, ups, first, last, source, stride, count, ups_at, 4 * GROUP, up_bias, 0)
        for row in range(count):
            values = scratch + 4 * GROUP * row
            if tables != 0:
                base = values - 4 * GROUP * unit  # of column 0
                own = GROUP * unit, GROUP * (unit + 1), columns
                changed = first_row + start + row
                add_low_rank(job, tables, layer, line, 0, changed, base, *own)
                add_low_rank(job, tables, layer, line + 1, 1, changed, base + ups_at - scratch, *own)
            gate(values, ups_at + 4 * GROUP * row, activation)
            if shares != 0:
                scale_row(values, load_float(shares + 4 * (start + row)), GROUP)
            write_record(values, out + start // ROW_BLOCK * out_block + row * size, quantized)


@compiled
def gate_rows(tasks, job, layer, counter, rows, gates, ups, shares, scratch):  # type: ignore[no-untyped-def]
    """Gate and up projections and activation of all rows; a task is 32 columns."""
    tables = field(job, ROW_ADAPTERS_AT)
    size = RECORD if field(job, QUANTIZED) else 4 * GROUP
    units, stride = COLUMNS * load_int64(gates + 24) // GROUP, record_stride(rows)
    while True:
        unit, _ = take(tasks, counter, units, 1)
        if unit >= units:
            return
        out = field(job, WIDE_RECORDS_AT) + unit * stride * size
        block, out_block = load_int64(gates + 16) * stride * size, units * stride * size
        gate_unit(
            job, tables, layer, GATE, 0, unit, gates, ups, 0, 0, field(job, RECORDS_AT), stride, block, rows,
            shares, out, out_block, scratch,
        )  # fmt: skip
