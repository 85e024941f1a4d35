"""Vectors of 16 floats or ints as numba values, and the scalar operations that numba lacks.

With these, kernels are written as ordinary Python. LLVM maps 16 lanes onto one 512-bit, two 256-bit or four
128-bit registers. Addresses are plain int64.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core.imputils import impl_ret_untracked
from numba.extending import models, register_model

from paceline.backends.cpu.primitives.compiled import make_intrinsic
from paceline.backends.cpu.primitives.emit import I8, I32, call, splat

LANES = 16
_FLOAT, _I16, _I64 = ir.FloatType(), ir.IntType(16), ir.IntType(64)
_FLOATS, _INTS = ir.VectorType(_FLOAT, LANES), ir.VectorType(I32, LANES)


class Floats(types.Type):  # type: ignore[misc]
    """Numba's type of a vector of 16 float32."""

    def __init__(self) -> None:
        super().__init__(name="float32x16")


class Ints(types.Type):  # type: ignore[misc]
    """Numba's type of a vector of 16 int32."""

    def __init__(self) -> None:
        super().__init__(name="int32x16")


floats, ints = Floats(), Ints()


@register_model(Floats)
class _FloatsModel(models.PrimitiveModel):  # type: ignore[misc]
    def __init__(self, manager: Any, numba_type: Any) -> None:
        super().__init__(manager, numba_type, _FLOATS)


@register_model(Ints)
class _IntsModel(models.PrimitiveModel):  # type: ignore[misc]
    def __init__(self, manager: Any, numba_type: Any) -> None:
        super().__init__(manager, numba_type, _INTS)


def operation(result: Any, *arguments: Any) -> Callable[[Callable[..., Any]], Any]:
    """Turn `emit(builder, *values)` into a numba intrinsic of this signature."""

    def decorate(emit: Callable[..., Any]) -> Any:
        def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
            value = emit(builder, *args)
            if result == types.void:
                return context.get_dummy_value()
            return impl_ret_untracked(context, builder, result, value)

        return make_intrinsic(emit.__name__, result(*arguments), codegen)

    return decorate


def caller(*arguments: Any) -> Any:
    """An intrinsic call(address, *arguments) of a C function without a result."""

    def call_address(builder: ir.IRBuilder, address: Any, *values: Any) -> None:
        kind = ir.FunctionType(ir.VoidType(), [value.type for value in values])
        builder.call(builder.inttoptr(address, kind.as_pointer()), values)

    return operation(types.void, types.int64, *arguments)(call_address)


def pointer_at(builder: ir.IRBuilder, address: Any, kind: ir.Type) -> Any:
    """IR: an address as a pointer to `kind`."""
    return builder.inttoptr(address, kind.as_pointer())


def read_at(builder: ir.IRBuilder, address: Any, kind: ir.Type, align: int) -> Any:
    """IR: the value of type `kind` at an address."""
    value = builder.load(pointer_at(builder, address, kind))
    value.align = align
    return value


def write_at(builder: ir.IRBuilder, address: Any, value: Any, align: int) -> None:
    """IR: write a value to an address."""
    builder.store(value, pointer_at(builder, address, value.type)).align = align


# Scalars ------------------------------------------------------------------------------------------


@operation(types.float32, types.int64)
def load_float(builder, address):  # type: ignore[no-untyped-def]
    """The float32 at an address."""
    return read_at(builder, address, _FLOAT, 4)


@operation(types.void, types.int64, types.float32)
def store_float(builder, address, value):  # type: ignore[no-untyped-def]
    """Write a float32."""
    write_at(builder, address, value, 4)


@operation(types.int64, types.int64)
def load_int32(builder, address):  # type: ignore[no-untyped-def]
    """The int32 at an address."""
    return builder.sext(read_at(builder, address, I32, 4), _I64)


@operation(types.void, types.int64, types.int64)
def store_int32(builder, address, value):  # type: ignore[no-untyped-def]
    """Write an int32."""
    write_at(builder, address, builder.trunc(value, I32), 4)


@operation(types.int64, types.int64)
def load_int64(builder, address):  # type: ignore[no-untyped-def]
    """The int64 at an address."""
    return read_at(builder, address, _I64, 8)


@operation(types.void, types.int64, types.int64)
def store_int64(builder, address, value):  # type: ignore[no-untyped-def]
    """Write an int64."""
    write_at(builder, address, value, 8)


@operation(types.int64, types.int64)
def load_byte(builder, address):  # type: ignore[no-untyped-def]
    """The unsigned byte at an address."""
    return builder.zext(read_at(builder, address, I8, 1), _I64)


@operation(types.int64, types.int64)
def load_word(builder, address):  # type: ignore[no-untyped-def]
    """The unsigned 16-bit word at an address."""
    return builder.zext(read_at(builder, address, _I16, 2), _I64)


@operation(types.void, types.int64, types.int64)
def store_word(builder, address, value):  # type: ignore[no-untyped-def]
    """Write the low 16 bits of an integer."""
    write_at(builder, address, builder.trunc(value, _I16), 2)


@operation(types.float32, types.float32, types.float32, types.float32)
def fma_float(builder, a, b, c):  # type: ignore[no-untyped-def]
    """a * b + c with one rounding."""
    return call(builder, "llvm.fma.f32", _FLOAT, a, b, c)


# Vectors ------------------------------------------------------------------------------------------


@operation(floats, types.int64)
def load(builder, address):  # type: ignore[no-untyped-def]
    """16 floats at an address."""
    return read_at(builder, address, _FLOATS, 4)


@operation(types.void, types.int64, floats)
def store(builder, address, value):  # type: ignore[no-untyped-def]
    """Write 16 floats."""
    write_at(builder, address, value, 4)


@operation(types.void, types.int64)
def prefetch(builder, address):  # type: ignore[no-untyped-def]
    """Prefetch the cache line at an address."""
    pointer = builder.inttoptr(address, I8.as_pointer())
    call(builder, "llvm.prefetch.p0", ir.VoidType(), pointer, I32(0), I32(3), I32(1))


@operation(types.void, types.int64, ints)
def store_bytes(builder, address, value):  # type: ignore[no-untyped-def]
    """Write the low byte of each of 16 ints."""
    write_at(builder, address, builder.trunc(value, ir.VectorType(I8, LANES)), 1)


@operation(floats, types.float32)
def spread(builder, value):  # type: ignore[no-untyped-def]
    """One float in all lanes."""
    return splat(builder, value, _FLOATS)


@operation(floats, floats, floats)
def add(builder, a, b):  # type: ignore[no-untyped-def]
    """a + b."""
    return builder.fadd(a, b)


@operation(floats, floats, floats)
def multiply(builder, a, b):  # type: ignore[no-untyped-def]
    """a * b."""
    return builder.fmul(a, b)


@operation(floats, floats, floats)
def divide(builder, a, b):  # type: ignore[no-untyped-def]
    """a / b."""
    return builder.fdiv(a, b)


@operation(floats, floats, floats, floats)
def fma(builder, a, b, c):  # type: ignore[no-untyped-def]
    """a * b + c with one rounding."""
    return call(builder, "llvm.fma.v16f32", _FLOATS, a, b, c)


@operation(floats, floats, floats)
def larger(builder, a, b):  # type: ignore[no-untyped-def]
    """The larger of each lane; NaN where either is NaN, so that a broken row stays visible."""
    return call(builder, "llvm.maximum.v16f32", _FLOATS, a, b)


@operation(floats, floats, floats)
def smaller(builder, a, b):  # type: ignore[no-untyped-def]
    """The smaller of each lane; NaN where either is NaN."""
    return call(builder, "llvm.minimum.v16f32", _FLOATS, a, b)


@operation(types.float32, floats, floats)
def largest_magnitude(builder, a, b):  # type: ignore[no-untyped-def]
    """The largest absolute value of the lanes of a and b; NaN if there is one.

    The bits of floats without their sign order as integers do, infinity and NaN at the top.
    """
    mask = ir.Constant(_INTS, [0x7FFFFFFF] * LANES)

    def larger_of(x: Any, y: Any) -> Any:
        return builder.select(builder.icmp_signed(">", x, y), x, y)

    magnitudes = [builder.and_(builder.bitcast(value, _INTS), mask) for value in (a, b)]
    return builder.bitcast(_fold(builder, larger_of(*magnitudes), larger_of), _FLOAT)


@operation(ints, floats, floats)
def scaled_to_nearest(builder, a, b):  # type: ignore[no-untyped-def]
    """The integers nearest to a * b, ties to even, for |a * b| < 2 ** 22.

    Adding 1.5 * 2 ** 23 leaves the rounded integer in the low bits of the float.
    """
    magic = ir.Constant(_FLOATS, [12582912.0] * LANES)
    bits = builder.bitcast(call(builder, "llvm.fma.v16f32", _FLOATS, a, b, magic), _INTS)
    return builder.sub(bits, ir.Constant(_INTS, [0x4B400000] * LANES))


@operation(floats, floats, types.int64, types.int64)
def keep_lanes(builder, a, first, last):  # type: ignore[no-untyped-def]
    """Lanes first..last of a; minus infinity in the others."""
    lanes = ir.Constant(_INTS, list(range(LANES)))
    low = builder.icmp_signed(">=", lanes, splat(builder, builder.trunc(first, I32), _INTS))
    high = builder.icmp_signed("<=", lanes, splat(builder, builder.trunc(last, I32), _INTS))
    outside = ir.Constant(_FLOATS, [float("-inf")] * LANES)
    return builder.select(builder.and_(low, high), a, outside)


def _fold(builder: ir.IRBuilder, vector: Any, combine: Callable[[Any, Any], Any]) -> Any:
    """Reduce 16 lanes to one value by halving: a fixed order on every machine."""
    while vector.type.count > 1:
        half = vector.type.count // 2
        parts = [
            builder.shuffle_vector(
                vector,
                ir.Constant(vector.type, ir.Undefined),
                ir.Constant(ir.VectorType(I32, half), list(range(start, start + half))),
            )
            for start in (0, half)
        ]
        vector = combine(*parts)
    return builder.extract_element(vector, I32(0))


@operation(types.float32, floats)
def sum_lanes(builder, a):  # type: ignore[no-untyped-def]
    """The sum of the lanes, in a fixed order."""
    return _fold(builder, a, builder.fadd)


@operation(types.float32, floats)
def largest_lane(builder, a):  # type: ignore[no-untyped-def]
    """The largest lane."""
    return _fold(builder, a, lambda x, y: call(builder, f"llvm.maximum.v{x.type.count}f32", x.type, x, y))


@operation(types.int64, ints)
def sum_int_lanes(builder, a):  # type: ignore[no-untyped-def]
    """The sum of the lanes."""
    return builder.sext(_fold(builder, a, builder.add), _I64)


@operation(floats, floats)
def exponential(builder, x):  # type: ignore[no-untyped-def]
    """exp(x) to about 2 units in the last place; exactly 0 below -87, and for minus infinity.

    x = n ln 2 + r with |r| <= ln 2 / 2; a polynomial for exp(r), then n is added to the exponent.
    """

    def constant(value: float) -> Any:
        return ir.Constant(_FLOATS, [value] * LANES)

    tiny = builder.fcmp_unordered("<", x, constant(-87.0))
    huge = builder.fcmp_ordered(">", x, constant(88.0))
    clipped = builder.select(tiny, constant(0.0), builder.select(huge, constant(88.0), x))
    exact_n = builder.fmul(clipped, constant(1.4426950216293335))
    # adding 1.5 * 2 ** 23 rounds to the nearest integer, and leaves it in the low bits
    magic = builder.fadd(exact_n, constant(12582912.0))
    n, bits = builder.fsub(magic, constant(12582912.0)), builder.bitcast(magic, _INTS)
    # ln 2 in two parts, so that n ln 2 is subtracted without loss
    r = call(builder, "llvm.fma.v16f32", _FLOATS, n, constant(-0.693145751953125), clipped)
    r = call(builder, "llvm.fma.v16f32", _FLOATS, n, constant(-1.4286068202862268e-06), r)
    value = constant(0.0013888889225199819)
    for coefficient in (0.008333333767950535, 0.0416666679084301, 0.1666666716337204, 0.5, 1.0, 1.0):
        value = call(builder, "llvm.fma.v16f32", _FLOATS, value, r, constant(coefficient))
    shifted = builder.shl(bits, ir.Constant(_INTS, [23] * LANES))
    scaled = builder.bitcast(builder.add(builder.bitcast(value, _INTS), shifted), _FLOATS)
    return builder.select(tiny, constant(0.0), scaled)
