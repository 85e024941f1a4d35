"""Operations on one row: embedding, norm, quantization, RoPE, the MLP's activation, soft caps.

Every function reads and writes a single row, in a fixed order, so its result cannot depend on other rows.
`records` are the quantized activations described in weight_tile.py, in blocks of 16 rows; the record of group
g and row r of a block is at (g * record_stride(rows) + r) * size.
"""

from __future__ import annotations

import math

import numpy as np

from paceline.backends.cpu.primitives.compiled import compiled
from paceline.backends.cpu.primitives.halves import load_half
from paceline.backends.cpu.primitives.isa import ISA
from paceline.backends.cpu.primitives.simd import (
    add,
    divide,
    exponential,
    fma,
    fma_float,
    larger,
    largest_magnitude,
    load,
    load_byte,
    load_float,
    multiply,
    scaled_to_nearest,
    smaller,
    spread,
    store,
    store_bytes,
    store_float,
    store_int32,
    store_word,
    sum_int_lanes,
    sum_lanes,
)
from paceline.backends.cpu.tiles.weight_tile import COLUMNS, FLOAT32, GROUP, INT4, INT4K, INT6K, INT8, RECORD

ROW_BLOCK = 16  # rows whose records are contiguous: tiles are multiplied by these rows, then by the next 16

# Activations of the MLP's gate, by ModelConfig.activation
SILU, GELU_TANH, CLAMPED_SILU, RELU2 = 0, 1, 2, 3
ACTIVATIONS = {"silu": SILU, "gelu_tanh": GELU_TANH, "clamped_silu": CLAMPED_SILU, "relu2": RELU2}
OFFSET, SIGNED_SIX = 128 if ISA.offset_weights else 0, ISA.signed_six


@compiled
def write_record(values, record, quantized):  # type: ignore[no-untyped-def]
    """Store one group of 32 floats as the record that the tiles read."""
    first, second = load(values), load(values + 64)
    if quantized == 0:
        store(record, first)
        store(record + 64, second)
        return
    largest = largest_magnitude(first, second)
    scale = largest / np.float32(127)
    # below that the inverse would be infinite, and the values are negligible beside any other group
    inverse = spread(np.float32(127) / largest if largest > 1e-36 else np.float32(0))
    first_ints, second_ints = scaled_to_nearest(first, inverse), scaled_to_nearest(second, inverse)
    store_bytes(record, first_ints)
    store_bytes(record + 16, second_ints)
    first_sum, second_sum = sum_int_lanes(first_ints), sum_int_lanes(second_ints)
    total = first_sum + second_sum
    store_float(record + GROUP, scale)
    store_float(record + GROUP + 4, scale * np.float32(total))
    store_int32(record + GROUP + 8, -OFFSET * total)
    store_word(record + GROUP + 12, -first_sum)
    store_word(record + GROUP + 14, -second_sum)


@compiled
def scale_record(record, factor, quantized):  # type: ignore[no-untyped-def]
    """Multiply the values of a record by a factor."""
    if quantized == 0:
        scale_row(record, factor, GROUP)
        return
    store_float(record + GROUP, load_float(record + GROUP) * factor)
    store_float(record + GROUP + 4, load_float(record + GROUP + 4) * factor)


@compiled
def record_stride(rows):  # type: ignore[no-untyped-def]
    """Records between two groups: odd, because groups a power of two apart map to the same cache sets."""
    return min(rows, ROW_BLOCK) | 1


@compiled
def record_block(records, row, rows, groups, quantized):  # type: ignore[no-untyped-def]
    """The address of the block with `row`, in records of `rows` rows of `groups` groups.

    A block's records are contiguous: with all rows of a prompt side by side, each group would be on another
    memory page.
    """
    return records + row // ROW_BLOCK * groups * record_stride(rows) * (RECORD if quantized else 4 * GROUP)


@compiled
def write_records(values, groups, records, stride, row, quantized):  # type: ignore[no-untyped-def]
    """Store a row of `groups` groups of floats as records; two groups are `stride` records apart."""
    size = RECORD if quantized else 4 * GROUP
    for group in range(groups):
        write_record(values + 128 * group, records + (group * stride + row) * size, quantized)


@compiled
def write_row(values, groups, records, row, rows, all_groups, quantized):  # type: ignore[no-untyped-def]
    """Store `groups` groups of floats as records of a row, in the records of `rows` rows of `all_groups`."""
    block = record_block(records, row, rows, all_groups, quantized)
    write_records(values, groups, block, record_stride(rows), row % ROW_BLOCK, quantized)


@compiled
def normalize(values, weight, out, width, padded, epsilon):  # type: ignore[no-untyped-def]
    """RMSNorm of a row of `width` floats, padded with zeros to `padded`, a multiple of 16."""
    squares = spread(np.float32(0))
    for k in range(0, padded, 16):
        part = load(values + 4 * k)
        squares = fma(part, part, squares)
    mean = sum_lanes(squares) / np.float32(width)
    scale = spread(np.float32(1) / np.float32(math.sqrt(mean + epsilon)))
    for k in range(0, padded, 16):
        store(out + 4 * k, multiply(multiply(load(values + 4 * k), scale), load(weight + 4 * k)))


@compiled
def center(values, out, width, padded):  # type: ignore[no-untyped-def]
    """out = values minus their mean, of a row of `width` floats that is padded with zeros to `padded`."""
    total = spread(np.float32(0))
    for k in range(0, padded, 16):
        total = add(total, load(values + 4 * k))
    minus = -sum_lanes(total) / np.float32(width)
    whole = width // 16 * 16
    for k in range(0, whole, 16):
        store(out + 4 * k, add(load(values + 4 * k), spread(minus)))
    for k in range(whole, padded):
        store_float(out + 4 * k, load_float(values + 4 * k) + minus if k < width else np.float32(0))


@compiled
def copy_row(values, out, padded):  # type: ignore[no-untyped-def]
    """out = values."""
    for k in range(0, padded, 16):
        store(out + 4 * k, load(values + 4 * k))


@compiled
def add_row(values, other, padded):  # type: ignore[no-untyped-def]
    """values += other."""
    for k in range(0, padded, 16):
        store(values + 4 * k, add(load(values + 4 * k), load(other + 4 * k)))


@compiled
def add_scaled_row(values, other, factor, padded):  # type: ignore[no-untyped-def]
    """values += factor * other."""
    for k in range(0, padded, 16):
        store(values + 4 * k, fma(load(other + 4 * k), spread(factor), load(values + 4 * k)))


@compiled
def scale_row(values, factor, padded):  # type: ignore[no-untyped-def]
    """values *= factor."""
    for k in range(0, padded, 16):
        store(values + 4 * k, multiply(load(values + 4 * k), spread(factor)))


@compiled
def soft_cap(values, cap, padded):  # type: ignore[no-untyped-def]
    """values = cap * tanh(values / cap), where tanh(y) is 1 - 2 / (1 + exp(2 y))."""
    one, minus_two = spread(np.float32(1)), spread(np.float32(-2) * cap)
    inverse = spread(np.float32(2) / cap)
    for k in range(0, padded, 16):
        grown = add(one, exponential(multiply(load(values + 4 * k), inverse)))
        store(values + 4 * k, add(spread(cap), divide(minus_two, grown)))


@compiled
def rotate(values, cosines, sines, half):  # type: ignore[no-untyped-def]
    """RoPE of one head in place: lanes i and i + half are rotated by the angle of frequency i."""
    whole = half // 16 * 16
    for i in range(0, whole, 16):
        first, second = load(values + 4 * i), load(values + 4 * (i + half))
        cosine, sine = load(cosines + 4 * i), load(sines + 4 * i)
        minus = multiply(second, spread(np.float32(-1)))
        store(values + 4 * i, fma(minus, sine, multiply(first, cosine)))
        store(values + 4 * (i + half), fma(first, sine, multiply(second, cosine)))
    for i in range(whole, half):
        x, y = load_float(values + 4 * i), load_float(values + 4 * (i + half))
        c, s = load_float(cosines + 4 * i), load_float(sines + 4 * i)
        store_float(values + 4 * i, fma_float(-y, s, x * c))
        store_float(values + 4 * (i + half), fma_float(x, s, y * c))


@compiled
def normalize_head(values, weight, width, epsilon):  # type: ignore[no-untyped-def]
    """RMSNorm of one head in place (Qwen3); heads need not be a multiple of 16 wide."""
    squares = np.float32(0)
    for i in range(width):
        squares = fma_float(load_float(values + 4 * i), load_float(values + 4 * i), squares)
    scale = np.float32(1) / np.float32(math.sqrt(squares / np.float32(width) + epsilon))
    for i in range(width):
        store_float(values + 4 * i, load_float(values + 4 * i) * scale * load_float(weight + 4 * i))


@compiled
def silu(values):  # type: ignore[no-untyped-def]
    """values * sigmoid(values)."""
    minus = multiply(values, spread(np.float32(-1)))
    return divide(values, add(spread(np.float32(1)), exponential(minus)))


@compiled
def gate_by_sigmoid(values, gates, padded):  # type: ignore[no-untyped-def]
    """values *= sigmoid(gates)."""
    one = spread(np.float32(1))
    for k in range(0, padded, 16):
        grown = exponential(multiply(load(gates + 4 * k), spread(np.float32(-1))))
        store(values + 4 * k, divide(load(values + 4 * k), add(one, grown)))


@compiled
def gate(gates, ups, activation):  # type: ignore[no-untyped-def]
    """activation(gate) * up of 32 columns, written over the gates.

    SiLU and GELU are gate * sigmoid(y): for SiLU y is the gate, for tanh-GELU a polynomial of it. Squared
    ReLU has no gate: it applies to the first values.
    """
    for k in range(0, GROUP, 16):
        value, up = load(gates + 4 * k), load(ups + 4 * k)
        if activation == RELU2:
            positive = larger(value, spread(np.float32(0)))
            store(gates + 4 * k, multiply(positive, positive))
            continue
        minus = multiply(value, spread(np.float32(-1)))
        if activation == GELU_TANH:
            # -2 sqrt(2 / pi) (gate + 0.044715 gate ** 3)
            square = multiply(value, value)
            cubic = fma(square, spread(np.float32(-0.07135481282)), spread(np.float32(-1.5957691216)))
            minus = multiply(value, cubic)
        elif activation == CLAMPED_SILU:
            value = smaller(value, spread(np.float32(7)))
            minus = multiply(value, spread(np.float32(-1.702)))
            clamped = larger(smaller(up, spread(np.float32(7))), spread(np.float32(-7)))
            up = add(clamped, spread(np.float32(1)))
        activated = divide(value, add(spread(np.float32(1)), exponential(minus)))
        store(gates + 4 * k, multiply(activated, up))


@compiled
def _read_six_bits(bits, within):  # type: ignore[no-untyped-def]
    """q - 32 of one of the 32 values of a group and column in the format int6k: see weight_tile.py."""
    place = bits + within // 16 * 3 * 4 * COLUMNS + within % 4
    step, quant = within // 4 % 4, 0
    for index in range(3):
        byte = load_byte(place + index * 4 * COLUMNS)
        if SIGNED_SIX:
            byte = byte >> 2 | (byte & 3) << 6
        if step == index:
            quant = byte & 63
        elif step == 3:
            quant |= byte >> 6 << 2 * index
    return (quant ^ 32) - 32 if SIGNED_SIX else quant - 32


@compiled
def read_matrix_row(address, weight_format, groups, size, row, out):  # type: ignore[no-untyped-def]
    """Dequantize row `row` of a packed matrix: the embedding of a token."""
    tile, column = address + row // COLUMNS * size, row % COLUMNS
    for k in range(groups * GROUP):
        group, within = k // GROUP, k % GROUP
        value = np.float32(0)
        if weight_format == FLOAT32:
            value = load_float(tile + 4 * (k * COLUMNS + column))
        elif weight_format == INT8:
            block = tile + group * 34 * COLUMNS
            byte = load_byte(block + (within // 4 * COLUMNS + column) * 4 + within % 4)
            if OFFSET == 0 and byte > 127:
                byte -= 256
            value = np.float32(byte - OFFSET) * load_half(block + GROUP * COLUMNS + 2 * column)
        else:
            low = within % 16
            place = (low // 4 * COLUMNS + column) * 4 + low % 4
            shift = 4 if within >= 16 else 0
            if weight_format == INT4:
                block = tile + group * 20 * COLUMNS
                halves = block + 16 * COLUMNS + 2 * column
                nibble = load_byte(block + place) >> shift & 15
                value = load_half(halves) * np.float32(nibble) + load_half(halves + 2 * COLUMNS)
            elif weight_format == INT4K:
                block = tile + group // 8 * 148 * COLUMNS
                nibble = load_byte(block + group % 8 * 16 * COLUMNS + place) >> shift & 15
                halves = block + 128 * COLUMNS + 2 * column
                side = block + 132 * COLUMNS + group % 8 * COLUMNS + column
                scale = load_half(halves) * np.float32(load_byte(side))
                minimum = load_half(halves + 2 * COLUMNS) * np.float32(load_byte(side + 8 * COLUMNS))
                value = scale * np.float32(nibble) - minimum
            elif weight_format == INT6K:
                block = tile + group // 8 * 210 * COLUMNS
                quant = _read_six_bits(block + group % 8 * 24 * COLUMNS + 4 * column, within)
                of_16 = load_byte(block + (194 + group % 8 * 2) * COLUMNS + 2 * column + within // 16)
                scale = load_half(block + 192 * COLUMNS + 2 * column) * np.float32(np.int8(of_16))
                value = scale * np.float32(quant)
        store_float(out + 4 * k, value)
