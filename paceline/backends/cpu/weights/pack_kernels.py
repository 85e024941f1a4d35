"""The compiled side of packing.py: decode GGUF blocks to floats, and quantize floats to int8 tiles.

Both give the bits of their references, the decoders of models/gguf/blocks.py and `round_to_int8` of
packing.py.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types

from paceline.backends.cpu.primitives.compiled import compiled
from paceline.backends.cpu.primitives.emit import I8, I32, splat
from paceline.backends.cpu.primitives.halves import load_half
from paceline.backends.cpu.primitives.isa import ISA
from paceline.backends.cpu.primitives.simd import (
    LANES,
    add,
    floats,
    ints,
    largest_magnitude,
    load,
    load_byte,
    multiply,
    operation,
    read_at,
    scaled_to_nearest,
    spread,
    store,
    store_word,
    write_at,
)
from paceline.backends.cpu.tiles.weight_tile import COLUMNS, GROUP

_FLOATS, _INTS = ir.VectorType(ir.FloatType(), LANES), ir.VectorType(I32, LANES)
_SIGN = 0x80 if ISA.offset_weights else 0  # flips the sign bit where tiles store w + 128
_TILE_GROUP = 34 * COLUMNS  # bytes of a group of all columns: 32 weights and a half scale each


@operation(ints, types.int64, types.int64, types.int64)
def load_bits(builder, address, shift, mask):  # type: ignore[no-untyped-def]
    """(byte >> shift) & mask of 16 bytes at an address."""
    wide = builder.zext(read_at(builder, address, ir.VectorType(I8, LANES), 1), _INTS)
    moved = builder.lshr(wide, splat(builder, builder.trunc(shift, I32), _INTS))
    return builder.and_(moved, splat(builder, builder.trunc(mask, I32), _INTS))


@operation(ints, ints, ints, types.int64)
def join_bits(builder, low, high, shift):  # type: ignore[no-untyped-def]
    """low | high << shift."""
    return builder.or_(low, builder.shl(high, splat(builder, builder.trunc(shift, I32), _INTS)))


@operation(floats, ints, types.int64)
def to_floats(builder, values, offset):  # type: ignore[no-untyped-def]
    """values - offset, as floats."""
    return builder.sitofp(builder.sub(values, splat(builder, builder.trunc(offset, I32), _INTS)), _FLOATS)


@operation(ints, ints)
def clip_to_int8(builder, values):  # type: ignore[no-untyped-def]
    """The values between -127 and 127."""
    for sign, limit in ((">", 127), ("<", -127)):
        edge = ir.Constant(_INTS, [limit] * LANES)
        values = builder.select(builder.icmp_signed(sign, values, edge), edge, values)
    return values


@operation(types.void, types.int64, types.int64, ints)
def store_columns(builder, address, stride, values):  # type: ignore[no-untyped-def]
    """Write the low bytes of 16 ints, four at a time, to addresses that are `stride` bytes apart."""
    low = builder.xor(builder.trunc(values, ir.VectorType(I8, LANES)), _sign_bits())
    words = builder.bitcast(low, ir.VectorType(I32, LANES // 4))
    for step in range(LANES // 4):
        write_at(builder, address, builder.extract_element(words, I32(step)), 4)
        address = builder.add(address, stride)


def _sign_bits() -> Any:
    return ir.Constant(ir.VectorType(I8, LANES), [_SIGN] * LANES)


@compiled
def half_bits(value):  # type: ignore[no-untyped-def]
    """The bits of the half float nearest to a float32 that is not negative; ties to even."""
    bits = np.float32(value).view(np.int32)
    if bits > 0x7F800000:
        return 0x7E00  # NaN
    if bits >= 0x47800000:
        return 0x7C00  # infinity, from 2 ** 16 on
    if bits >= 0x38800000:  # a normal half: drop 13 bits of the fraction, rebias the exponent
        return (bits + 0xFFF + ((bits >> 13) & 1) - 0x38000000) >> 13
    return np.int64(np.rint(value * np.float32(2.0**24)))


@compiled(cached=True)
def round_to_int8(values, rows, groups, tiles):  # type: ignore[no-untyped-def]
    """Quantize rows of `groups` groups of floats to int8, scaled by each group's maximum, and write tiles."""
    for row in range(rows):
        tile = tiles + row // COLUMNS * groups * _TILE_GROUP
        column = row % COLUMNS
        for group in range(groups):
            place = values + (row * groups + group) * 4 * GROUP
            first, second = load(place), load(place + 4 * LANES)
            to = tile + group * _TILE_GROUP
            scale_at = to + GROUP * COLUMNS + 2 * column
            store_word(scale_at, half_bits(largest_magnitude(first, second) / np.float32(127)))
            scale = load_half(scale_at)
            inverse = spread(np.float32(1) / scale if scale != 0 else np.float32(0))
            one = spread(np.float32(1))
            low = clip_to_int8(scaled_to_nearest(multiply(first, inverse), one))
            high = clip_to_int8(scaled_to_nearest(multiply(second, inverse), one))
            store_columns(to + 4 * column, 4 * COLUMNS, low)
            store_columns(to + 4 * column + 16 * COLUMNS, 4 * COLUMNS, high)


@compiled(cached=True)
def decode_q4_0(blocks, count, out):  # type: ignore[no-untyped-def]
    for block in range(count):
        at, to = blocks + 18 * block, out + 128 * block
        scale = spread(load_half(at))
        for half in range(2):
            quants = to_floats(load_bits(at + 2, 4 * half, 15), 8)
            store(to + 64 * half, multiply(scale, quants))


@compiled(cached=True)
def decode_q4_1(blocks, count, out):  # type: ignore[no-untyped-def]
    for block in range(count):
        at, to = blocks + 20 * block, out + 128 * block
        scale, minimum = spread(load_half(at)), spread(load_half(at + 2))
        for half in range(2):
            quants = to_floats(load_bits(at + 4, 4 * half, 15), 0)
            store(to + 64 * half, add(multiply(scale, quants), minimum))


@compiled
def _scale_and_minimum(at, group):  # type: ignore[no-untyped-def]
    """The 6-bit scale and minimum of one of the 8 groups of a Q4_K or Q5_K block."""
    if group < 4:
        return load_byte(at + 4 + group) & 63, load_byte(at + 8 + group) & 63
    both = load_byte(at + 8 + group)
    scale = (both & 15) | (load_byte(at + group) >> 6 << 4)
    return scale, (both >> 4) | (load_byte(at + 4 + group) >> 6 << 4)


@compiled(cached=True)
def decode_q4_k(blocks, count, out):  # type: ignore[no-untyped-def]
    for block in range(count):
        at, to = blocks + 144 * block, out + 1024 * block
        scale, minimum = load_half(at), load_half(at + 2)
        for group in range(8):
            steps, below = _scale_and_minimum(at, group)
            step, lowest = spread(scale * np.float32(steps)), spread(-(minimum * np.float32(below)))
            for half in range(2):
                quants = load_bits(at + 16 + 32 * (group // 2) + 16 * half, 4 * (group % 2), 15)
                store(to + 128 * group + 64 * half, add(multiply(step, to_floats(quants, 0)), lowest))


@compiled(cached=True)
def decode_q5_k(blocks, count, out):  # type: ignore[no-untyped-def]
    for block in range(count):
        at, to = blocks + 176 * block, out + 1024 * block
        scale, minimum = load_half(at), load_half(at + 2)
        for group in range(8):
            steps, below = _scale_and_minimum(at, group)
            step, lowest = spread(scale * np.float32(steps)), spread(-(minimum * np.float32(below)))
            for half in range(2):
                low = load_bits(at + 48 + 32 * (group // 2) + 16 * half, 4 * (group % 2), 15)
                quants = join_bits(low, load_bits(at + 16 + 16 * half, group, 1), 4)
                store(to + 128 * group + 64 * half, add(multiply(step, to_floats(quants, 0)), lowest))


@compiled(cached=True)
def decode_q6_k(blocks, count, out):  # type: ignore[no-untyped-def]
    for block in range(count):
        at, to = blocks + 210 * block, out + 1024 * block
        scale = load_half(at + 208)
        for part in range(16):  # 16 values share a scale
            half, group = part // 8, part // 2 % 4  # of 128 values, and the 32 values in it
            low = load_bits(at + 64 * half + 16 * (part % 4), 4 * (group // 2), 15)
            high = load_bits(at + 128 + 32 * half + 16 * (part % 2), 2 * group, 3)
            quants = to_floats(join_bits(low, high, 4), 32)
            signed = np.int8(load_byte(at + 192 + part))
            store(to + 64 * part, multiply(spread(scale * np.float32(signed)), quants))


# {kind of block: function that decodes `count` blocks at an address to floats at another}
DECODERS = {
    "Q4_0": decode_q4_0,
    "Q4_1": decode_q4_1,
    "Q4_K": decode_q4_k,
    "Q5_K": decode_q5_k,
    "Q6_K": decode_q6_k,
}
