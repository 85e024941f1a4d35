"""Mixture-of-experts layers: grouped products of the rows of each expert, after routing.py.

A pair is a row and one of its top-k experts. Pairs are sorted by expert, rows ascending, and the records of
each expert's pairs are contiguous, so that an expert's weights are read once for all its rows. A row's result
is the weighted sum over its experts in descending order of their scores.

    pair buffers, for each pair in the order of rows:   expert, weight, index in the sorted order
    for each expert:                                    first index, number of pairs
"""

from __future__ import annotations

import numpy as np

from paceline.backends.cpu.job import (
    CHOICES_AT,
    EXPERT_BIASES_AT,
    EXPERT_HIDDEN,
    EXPERT_LATENT_RECORDS_AT,
    EXPERT_LATENTS_AT,
    EXPERT_LINES,
    EXPERT_MATRICES_AT,
    EXPERT_RECORDS_AT,
    EXPERT_WIDE_RECORDS_AT,
    EXPERT_WIDTH,
    EXPERTS,
    EXPERTS_PER_TOKEN,
    PAIR_ADAPTERS_AT,
    PAIR_OUTPUTS_AT,
    QUANTIZED,
    RECORDS_AT,
    ROW_ADAPTERS_AT,
    RUN_TILE,
    SCALED_INPUTS,
    SHARES_AT,
    SPANS_AT,
    field,
    take,
)
from paceline.backends.cpu.phases.projections import gate_unit
from paceline.backends.cpu.phases.residual import norm_row
from paceline.backends.cpu.phases.routing import PAIR
from paceline.backends.cpu.primitives.compiled import compiled
from paceline.backends.cpu.primitives.rows import (
    ROW_BLOCK,
    add_scaled_row,
    record_block,
    record_stride,
    scale_record,
    write_row,
)
from paceline.backends.cpu.primitives.simd import (
    fma,
    load,
    load_float,
    load_int64,
    spread,
    store,
    store_float,
    store_int64,
)
from paceline.backends.cpu.tiles.matmul import DESCRIPTOR, multiply_rows
from paceline.backends.cpu.tiles.weight_tile import COLUMNS, GROUP, RECORD

_SPAN = 16  # bytes of an expert in SPANS: first index, number of pairs


@compiled
def sort_pairs(tasks, job, rows):  # type: ignore[no-untyped-def]
    """Assign every pair its index in the sorted order and every expert its span; one thread does this."""
    if tasks[0] != 0:
        return
    experts, pairs = field(job, EXPERTS), rows * field(job, EXPERTS_PER_TOKEN)
    choices, spans = field(job, CHOICES_AT), field(job, SPANS_AT)
    for expert in range(experts):
        store_int64(spans + _SPAN * expert + 8, 0)
    for pair in range(pairs):
        count = spans + _SPAN * load_int64(choices + PAIR * pair) + 8
        store_int64(count, load_int64(count) + 1)
    place = 0
    for expert in range(experts):
        store_int64(spans + _SPAN * expert, place)
        place += load_int64(spans + _SPAN * expert + 8)
        store_int64(spans + _SPAN * expert + 8, 0)
    for pair in range(pairs):
        span = spans + _SPAN * load_int64(choices + PAIR * pair)
        store_int64(choices + PAIR * pair + 8, load_int64(span) + load_int64(span + 8))
        store_int64(span + 8, load_int64(span + 8) + 1)


@compiled
def gather_rows(tasks, job, counter, rows):  # type: ignore[no-untyped-def]
    """Copy each pair's records to its expert's block: [groups][the expert's rows][record].

    In a latent space they are those of the row's latent.

    Where routing weights scale the experts' input, they are applied here and set to 1.
    """
    chosen, groups = field(job, EXPERTS_PER_TOKEN), field(job, EXPERT_HIDDEN) // GROUP
    latents = field(job, EXPERT_LATENT_RECORDS_AT)
    records = latents if latents != 0 else field(job, RECORDS_AT)
    size = RECORD if field(job, QUANTIZED) else 4 * GROUP
    while True:
        pair, _ = take(tasks, counter, rows * chosen, 1)
        if pair >= rows * chosen:
            return
        choice = field(job, CHOICES_AT) + PAIR * pair
        span = field(job, SPANS_AT) + _SPAN * load_int64(choice)
        first, count = load_int64(span), load_int64(span + 8)
        row, block = pair // chosen, field(job, EXPERT_RECORDS_AT) + first * groups * size
        own = record_block(records, row, rows, groups, field(job, QUANTIZED))
        own += row % ROW_BLOCK * size
        share = field(job, SHARES_AT) + 4 * pair
        for group in range(groups):
            source = own + group * record_stride(rows) * size
            target = block + (group * count + load_int64(choice + 8) - first) * size
            for offset in range(0, size, 8):
                store_int64(target + offset, load_int64(source + offset))
            if field(job, SCALED_INPUTS):
                scale_record(target, load_float(share), field(job, QUANTIZED))
        if field(job, SCALED_INPUTS):
            store_float(share, np.float32(1))
        if field(job, ROW_ADAPTERS_AT) != 0:
            table = load_int64(field(job, ROW_ADAPTERS_AT) + 8 * row)
            store_int64(field(job, PAIR_ADAPTERS_AT) + 8 * load_int64(choice + 8), table)


@compiled
def write_latents(tasks, job, counter, rows):  # type: ignore[no-untyped-def]
    """Write records of every row's latent."""
    groups = field(job, EXPERT_HIDDEN) // GROUP
    latents, records = field(job, EXPERT_LATENTS_AT), field(job, EXPERT_LATENT_RECORDS_AT)
    while True:
        row, _ = take(tasks, counter, rows, 1)
        if row >= rows:
            return
        source = latents + 4 * GROUP * groups * row
        write_row(source, groups, records, row, rows, groups, field(job, QUANTIZED))


@compiled
def _biases(job, layer, expert):  # type: ignore[no-untyped-def]
    """The address of an expert's biases of gate, up and down, padded as their matrices are; 0: none."""
    table, width = field(job, EXPERT_BIASES_AT), 2 * field(job, EXPERT_WIDTH) + field(job, EXPERT_HIDDEN)
    return table + 4 * width * (layer * field(job, EXPERTS) + expert) if table != 0 else 0


@compiled
def gate_experts(tasks, job, counter, layer, scratch):  # type: ignore[no-untyped-def]
    """Gate and up projections and activation of every expert for its rows; a task is 32 columns."""
    experts, units = field(job, EXPERTS), field(job, EXPERT_WIDTH) // GROUP
    groups = field(job, EXPERT_HIDDEN) // GROUP
    size = RECORD if field(job, QUANTIZED) else 4 * GROUP
    tables = field(job, PAIR_ADAPTERS_AT) if field(job, ROW_ADAPTERS_AT) != 0 else 0
    while True:
        task, _ = take(tasks, counter, experts * units, 1)
        if task >= experts * units:
            return
        expert, unit = task // units, task % units
        span = field(job, SPANS_AT) + _SPAN * expert
        first, rows = load_int64(span), load_int64(span + 8)
        gates = field(job, EXPERT_MATRICES_AT) + DESCRIPTOR * 3 * (layer * experts + expert)
        biases = _biases(job, layer, expert)
        up_biases = biases + 4 * field(job, EXPERT_WIDTH) if biases != 0 else 0
        records = field(job, EXPERT_RECORDS_AT) + first * groups * size
        out = field(job, EXPERT_WIDE_RECORDS_AT) + (first * units + unit * rows) * size
        ups = gates + DESCRIPTOR
        block = ROW_BLOCK * size  # an expert's records are contiguous: the next 16 rows follow directly
        gate_unit(
            job, tables, layer, EXPERT_LINES + 3 * expert, first, unit, gates, ups, biases, up_biases,
            records, rows, block, rows, 0, out, block, scratch,
        )  # fmt: skip


@compiled
def project_experts(tasks, job, counter, layer):  # type: ignore[no-untyped-def]
    """Down projection of every expert for its rows, into the pairs' outputs; a task is a tile."""
    experts, padded = field(job, EXPERTS), field(job, EXPERT_HIDDEN)
    units = field(job, EXPERT_WIDTH) // GROUP
    size = RECORD if field(job, QUANTIZED) else 4 * GROUP
    table = field(job, EXPERT_MATRICES_AT) + DESCRIPTOR * 3 * layer * experts
    tiles = load_int64(table + 2 * DESCRIPTOR + 24)
    while True:
        task, _ = take(tasks, counter, experts * tiles, 1)
        if task >= experts * tiles:
            return
        expert, tile = task // tiles, task % tiles
        span = field(job, SPANS_AT) + _SPAN * expert
        first, rows = load_int64(span), load_int64(span + 8)
        matrix = table + DESCRIPTOR * (3 * expert + 2)
        records = field(job, EXPERT_WIDE_RECORDS_AT) + first * units * size
        out = field(job, PAIR_OUTPUTS_AT) + 4 * (padded * first + COLUMNS * tile)
        bias = _biases(job, layer, expert)
        if bias != 0:
            bias += 4 * (2 * field(job, EXPERT_WIDTH) + COLUMNS * tile)
        multiply_rows(
            field(job, RUN_TILE), matrix, tile, tile + 1, records, rows, rows, out, 4 * padded, bias, 0
        )


@compiled
def combine_rows(tasks, job, counter, rows, out, added, norm, scratch):  # type: ignore[no-untyped-def]
    """Write the weighted sum of each row's experts, best first, to `out`, or with `added` add it there.

    `norm` is the address of the weights of a norm that is applied to the sum first; 0: none.
    """
    padded, chosen = field(job, EXPERT_HIDDEN), field(job, EXPERTS_PER_TOKEN)
    while True:
        row, _ = take(tasks, counter, rows, 1)
        if row >= rows:
            return
        target = out + 4 * padded * row
        for k in range(0, padded, 16):
            total = spread(np.float32(0))
            for pair in range(row * chosen, (row + 1) * chosen):
                place = load_int64(field(job, CHOICES_AT) + PAIR * pair + 8)
                share = spread(load_float(field(job, SHARES_AT) + 4 * pair))
                total = fma(share, load(field(job, PAIR_OUTPUTS_AT) + 4 * (padded * place + k)), total)
            if norm != 0:
                store(scratch + 4 * k, total)
                continue
            if added:
                total = fma(spread(np.float32(1)), load(target + 4 * k), total)
            store(target + 4 * k, total)
        if norm != 0:
            add_scaled_row(target, norm_row(job, scratch, norm, scratch), np.float32(1), padded)
