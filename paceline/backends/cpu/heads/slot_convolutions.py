"""The phases of DFlash2's two-tap convolutions, which mix each slot of a block with the slot before it.

    normed rows -> a product -> corrections of the kernels of both convolutions below
    normed rows -> convolution -> records that attention or the MLP reads
    output of attention or the MLP (branch) -> convolution -> added to the residual stream

The kernel of a slot is a learned kernel plus a correction that the channels of a group share. The first slot
of a block has no predecessor. torch_block.py is the reference.
"""

from __future__ import annotations

from paceline.backends.cpu.job import (
    BRANCH_AT,
    HIDDEN,
    HIDDEN_PADDED,
    QUANTIZED,
    RECORDS_AT,
    ROWS,
    SLOT_CORRECTIONS_AT,
    SLOT_CORRECTIONS_STRIDE,
    SLOT_GROUP,
    SLOT_INPUTS_AT,
    SLOT_KERNELS_AT,
    SLOT_MATRICES_AT,
    SLOTS,
    STATE_AT,
    field,
    take,
)
from paceline.backends.cpu.phases.projections import project
from paceline.backends.cpu.phases.residual import norm_row
from paceline.backends.cpu.primitives.compiled import compiled
from paceline.backends.cpu.primitives.rows import write_row
from paceline.backends.cpu.primitives.simd import (
    LANES,
    add,
    fma,
    load,
    load_float,
    multiply,
    spread,
    store,
    store_float,
)
from paceline.backends.cpu.team import barrier
from paceline.backends.cpu.tiles.matmul import DESCRIPTOR
from paceline.backends.cpu.tiles.weight_tile import GROUP

# The two sublayers of a layer; the first of the two taps (slot, previous slot) of input and output kernels
ATTENTION, MLP, SUBLAYERS = range(3)
INPUT, OUTPUT, TAPS = 0, 2, 4


@compiled
def enter_sublayer(control, tasks, job, sublayer, counter, norm, scratch):  # type: ignore[no-untyped-def]
    """Write the records that a sublayer reads: the convolved norm of all rows.

    `sublayer` is its index in the model: SUBLAYERS * layer + ATTENTION or MLP.
    """
    threads, line, rows = tasks[1], 64 * tasks[1], field(job, ROWS)
    _norm_inputs(tasks, job, counter, rows, norm)
    barrier(control, threads)
    matrix, stride = field(job, SLOT_MATRICES_AT) + DESCRIPTOR * sublayer, field(job, SLOT_CORRECTIONS_STRIDE)
    records, corrections = field(job, RECORDS_AT), field(job, SLOT_CORRECTIONS_AT)
    project(tasks, job, counter + line, matrix, records, rows, corrections, stride, 0, 0, scratch)
    barrier(control, threads)
    _convolve_inputs(tasks, job, counter + 2 * line, rows, sublayer, scratch)
    barrier(control, threads)


@compiled
def leave_sublayer(control, tasks, job, sublayer, counter, scratch):  # type: ignore[no-untyped-def]
    """Add the convolved branch of all rows to the residual stream."""
    rows, stride = field(job, ROWS), 4 * field(job, HIDDEN_PADDED)
    while True:
        row, _ = take(tasks, counter, rows, 1)
        if row >= rows:
            break
        state, source = field(job, STATE_AT) + stride * row, field(job, BRANCH_AT) + stride * row
        for channel in range(0, field(job, HIDDEN_PADDED), LANES):
            mixed = _convolved(job, sublayer, OUTPUT, row, source, channel, scratch)
            store(state + 4 * channel, add(load(state + 4 * channel), mixed))
    barrier(control, tasks[1])


@compiled
def _norm_inputs(tasks, job, counter, rows, norm):  # type: ignore[no-untyped-def]
    """Write the norm of the residual stream as floats and as records."""
    padded = field(job, HIDDEN_PADDED)
    groups = padded // GROUP
    while True:
        row, _ = take(tasks, counter, rows, 1)
        if row >= rows:
            return
        values = field(job, SLOT_INPUTS_AT) + 4 * padded * row
        norm_row(job, field(job, STATE_AT) + 4 * padded * row, norm, values)
        write_row(values, groups, field(job, RECORDS_AT), row, rows, groups, field(job, QUANTIZED))


@compiled
def _convolve_inputs(tasks, job, counter, rows, sublayer, scratch):  # type: ignore[no-untyped-def]
    """Write records of the convolved norm."""
    padded = field(job, HIDDEN_PADDED)
    groups = padded // GROUP
    while True:
        row, _ = take(tasks, counter, rows, 1)
        if row >= rows:
            return
        source = field(job, SLOT_INPUTS_AT) + 4 * padded * row
        for channel in range(0, padded, LANES):
            mixed = _convolved(job, sublayer, INPUT, row, source, channel, scratch + 4 * padded)
            store(scratch + 4 * channel, mixed)
        write_row(scratch, groups, field(job, RECORDS_AT), row, rows, groups, field(job, QUANTIZED))


@compiled
def _convolved(job, sublayer, tap, row, source, channel, scratch):  # type: ignore[no-untyped-def]
    """16 channels of a row at `source`, convolved with those of the previous slot, in the row before."""
    own = _kernel(job, sublayer, tap, row, channel, scratch)
    mixed = multiply(load(source + 4 * channel), own)
    if row % field(job, SLOTS) > 0:
        before = source - 4 * field(job, HIDDEN_PADDED) + 4 * channel
        mixed = fma(load(before), _kernel(job, sublayer, tap + 1, row, channel, scratch), mixed)
    return mixed


@compiled
def _kernel(job, sublayer, tap, row, channel, scratch):  # type: ignore[no-untyped-def]
    """The weights of a tap for 16 channels of a row: learned weights plus corrections."""
    learned = field(job, SLOT_KERNELS_AT) + 4 * (
        field(job, HIDDEN_PADDED) * (TAPS * sublayer + tap) + channel
    )
    group, last = field(job, SLOT_GROUP), field(job, HIDDEN) - 1  # channels after the last are padding
    corrections = field(job, SLOT_CORRECTIONS_AT) + row * field(job, SLOT_CORRECTIONS_STRIDE)
    corrections += 4 * (field(job, HIDDEN) // group * tap)
    if group % LANES == 0:
        return add(load(learned), spread(load_float(corrections + 4 * (min(channel, last) // group))))
    for lane in range(LANES):
        correction = load_float(corrections + 4 * (min(channel + lane, last) // group))
        store_float(scratch + 4 * lane, correction)
    return add(load(learned), load(scratch))
