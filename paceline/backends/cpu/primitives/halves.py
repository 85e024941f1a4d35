"""Conversion between float16 and float32, by instructions or, on CPUs without them, by integer operations."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types

from paceline.backends.cpu.primitives.emit import I32
from paceline.backends.cpu.primitives.isa import ISA
from paceline.backends.cpu.primitives.simd import LANES, floats, operation, read_at, write_at

_FLOAT, _HALF, _I16 = ir.FloatType(), ir.HalfType(), ir.IntType(16)
_INTS = ir.VectorType(I32, LANES)


def _like(kind: Any, value: float) -> Any:
    """IR: a constant of a type, the same in all lanes of a vector."""
    lanes = getattr(kind, "count", 0)
    return ir.Constant(kind, [value] * lanes if lanes else value)


def _half_bits_to_float(builder: ir.IRBuilder, bits: Any, ints_type: Any, floats_type: Any) -> Any:
    """IR: float32 from float16 bits without a half type: shift the bits, rebias by a power of two."""
    magnitude = builder.shl(builder.and_(bits, _like(ints_type, 0x7FFF)), _like(ints_type, 13))
    scaled = builder.fmul(builder.bitcast(magnitude, floats_type), _like(floats_type, 2.0**112))
    # infinity and NaN have the largest exponent, which the multiplication does not produce
    no_number = builder.icmp_unsigned(">=", magnitude, _like(ints_type, 0x7C00 << 13))
    exponent = builder.select(no_number, _like(ints_type, 0x7F800000), _like(ints_type, 0))
    sign = builder.shl(builder.and_(bits, _like(ints_type, 0x8000)), _like(ints_type, 16))
    found = builder.or_(builder.or_(builder.bitcast(scaled, ints_type), exponent), sign)
    return builder.bitcast(found, floats_type)


def float_to_half_bits(builder: ir.IRBuilder, value: Any, ints_type: Any) -> Any:
    """IR: float16 bits from float32 without a half type, to nearest, ties to even."""

    def number(of: int) -> Any:
        return _like(ints_type, of)

    bits = builder.bitcast(value, ints_type)
    magnitude = builder.and_(bits, number(0x7FFFFFFF))
    # a normal half: rebias the exponent, and drop 13 bits of the fraction
    odd = builder.and_(builder.lshr(magnitude, number(13)), number(1))
    rounded = builder.add(builder.add(magnitude, odd), number(0xFFF - (112 << 23)))
    normal = builder.lshr(rounded, number(13))
    # below 2 ** -14: adding 0.5 rounds to the lowest bit of a subnormal half, and leaves it in the low bits
    shifted = builder.fadd(builder.bitcast(magnitude, value.type), _like(value.type, 0.5))
    tiny = builder.sub(builder.bitcast(shifted, ints_type), number(0x3F000000))
    payload = builder.and_(builder.lshr(magnitude, number(13)), number(0x3FF))
    nan = builder.or_(payload, number(0x7E00))
    is_nan = builder.icmp_unsigned(">", magnitude, number(0x7F800000))
    found = builder.select(builder.icmp_unsigned("<", magnitude, number(0x38800000)), tiny, normal)
    large = builder.icmp_unsigned(">=", magnitude, number(0x47800000))  # 2 ** 16
    found = builder.select(large, builder.select(is_nan, nan, number(0x7C00)), found)
    sign = builder.lshr(builder.and_(bits, number(0x80000000)), number(16))
    return builder.or_(found, sign)


@operation(types.float32, types.int64)
def load_half(builder, address):  # type: ignore[no-untyped-def]
    """The half float at an address, widened."""
    bits = builder.zext(read_at(builder, address, _I16, 2), I32)
    return _half_bits_to_float(builder, bits, I32, _FLOAT)


@operation(types.void, types.int64, types.float32)
def store_half(builder, address, value):  # type: ignore[no-untyped-def]
    """Write a float32 as half. Without an instruction for it LLVM would call a library we lack."""
    if ISA.native_half:
        write_at(builder, address, builder.fptrunc(value, _HALF), 2)
    else:
        write_at(builder, address, builder.trunc(float_to_half_bits(builder, value, I32), _I16), 2)


def halves_at(builder: ir.IRBuilder, address: Any, lanes: int = LANES) -> Any:
    """IR: half floats at an address, widened."""
    wide, words = ir.VectorType(_FLOAT, lanes), ir.VectorType(I32, lanes)
    if ISA.native_half:
        return builder.fpext(read_at(builder, address, ir.VectorType(_HALF, lanes), 2), wide)
    bits = builder.zext(read_at(builder, address, ir.VectorType(_I16, lanes), 2), words)
    return _half_bits_to_float(builder, bits, words, wide)


@operation(floats, types.int64)
def load_halves(builder, address):  # type: ignore[no-untyped-def]
    """16 half floats at an address, widened."""
    return halves_at(builder, address)


@operation(types.void, types.int64, floats)
def store_halves(builder, address, value):  # type: ignore[no-untyped-def]
    """Write 16 floats as half."""
    if ISA.native_half:
        write_at(builder, address, builder.fptrunc(value, ir.VectorType(_HALF, LANES)), 2)
    else:
        bits = float_to_half_bits(builder, value, _INTS)
        write_at(builder, address, builder.trunc(bits, ir.VectorType(_I16, LANES)), 2)
