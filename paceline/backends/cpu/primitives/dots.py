"""int8 dot products, an implementation for each instruction set; all give the same integers.

A step adds, for n output columns at once, the dot product of 4 weights and 4 activations to the sums:

    step(builder, sums, weights: <4 n x i8> as [n columns][4 k], activations: <n x i32>) -> sums

The sums are <n x i32>, or, on x86 without VNNI, <2 n x i16>: two for each column, of the even and odd pairs
of k. With weights in 0..15 they fit into 16 bits for a whole group of 32: 8 * 2 * 15 * 127 = 30,480; with
weights in 0..63 for two steps: 2 * 2 * 63 * 127 = 32,004. So a step is one multiply-add and an addition,
where 32-bit sums take two multiply-adds and an addition. The `finish` that widens them can also scale them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from llvmlite import ir

from paceline.backends.cpu.primitives.emit import I8, I16, I32, I64, call, join, part, splat

# emit(builder, address, index, kind: <n x i32> or <n x float>) -> word `index` at the address, broadcast
EmitSpread = Callable[[ir.IRBuilder, Any, int, ir.VectorType], Any]
# insert(builder, low, high, count) -> the low `count` bits of each byte of `low`, below those of `high`
EmitInsert = Callable[[ir.IRBuilder, Any, Any, int], Any]
EmitStep = Callable[[ir.IRBuilder, Any, Any, Any], Any]
# finish(builder, sums, factors: <2 n x i16>, two alike for each column, or None) -> <n x i32>
EmitFinish = Callable[[ir.IRBuilder, Any, Any], Any]


@dataclass(frozen=True)
class Dot:
    """The steps that compute the dot products of a group."""

    step: EmitStep
    finish: EmitFinish | None = None  # None: the sums have 32 bits, and no scale
    steps: int = 8  # summed before each `finish`
    pairs: bool = False  # the sums have 16 bits

    def zero(self, columns: int) -> ir.Constant:
        """The initial sums: zeros."""
        kind = ir.VectorType(I16, 2 * columns) if self.pairs else ir.VectorType(I32, columns)
        return ir.Constant(kind, [0] * kind.count)


def spread_word(builder: ir.IRBuilder, address: Any, index: int, kind: ir.VectorType) -> Any:
    """Broadcast by a load that fills all lanes."""
    pointer = builder.inttoptr(builder.add(address, I64(4 * index)), kind.element.as_pointer())
    value = builder.load(pointer)
    value.align = 4
    return splat(builder, value, kind)


def spread_lane(builder: ir.IRBuilder, address: Any, index: int, kind: ir.VectorType) -> Any:
    """Broadcast by lane: Arm's dot products and multiplications read a lane of 4 words at no extra cost."""
    four = ir.VectorType(kind.element, 4)
    words = builder.load(builder.inttoptr(builder.add(address, I64(index // 4 * 16)), four.as_pointer()))
    words.align = 4
    lanes = ir.Constant(ir.VectorType(I32, kind.count), [index % 4] * kind.count)
    return builder.shuffle_vector(words, ir.Constant(four, ir.Undefined), lanes)


def by_parts(lanes: int, step: EmitStep) -> EmitStep:
    """A step over all columns, from one over `lanes` columns."""

    def emit(builder: ir.IRBuilder, sums: Any, weights: Any, activations: Any) -> Any:
        parts = []
        for start in range(0, sums.type.count, lanes):
            part_weights = part(builder, weights, 4 * start, 4 * lanes)
            part_activations = part(builder, activations, start, lanes)
            parts.append(step(builder, part(builder, sums, start, lanes), part_weights, part_activations))
        return join(builder, parts)

    return emit


def vnni(builder: ir.IRBuilder, sums: Any, weights: Any, activations: Any) -> Any:
    """u8 x s8 by `vpdpbusd`, 8 or 16 columns."""
    name = f"llvm.x86.avx512.vpdpbusd.{32 * sums.type.count}"
    return call(builder, name, sums.type, sums, builder.bitcast(weights, sums.type), activations)


# Multiply-adds of AVX2 and AVX-512 by the number of columns: u8 x s8 to pairs, and pairs to columns
_PAIRS = {8: "llvm.x86.avx2.pmadd.ub.sw", 16: "llvm.x86.avx512.pmaddubs.w.512"}
_COLUMNS = {8: "llvm.x86.avx2.pmadd.wd", 16: "llvm.x86.avx512.pmaddw.d.512"}


def _pairs(builder: ir.IRBuilder, unsigned: Any, signed: Any) -> Any:
    """Sums of two products u8 x s8, in 16 bits: exact for u8 up to 129."""
    columns = signed.type.count // 4
    return call(builder, _PAIRS[columns], ir.VectorType(I16, 2 * columns), unsigned, signed)


def add_pairs(builder: ir.IRBuilder, sums: Any, weights: Any, activations: Any) -> Any:
    """A step with 16-bit sums, for weights in 0..15 or 0..63."""
    return builder.add(sums, _pairs(builder, weights, builder.bitcast(activations, weights.type)))


def join_pairs(builder: ir.IRBuilder, sums: Any, factors: Any = None) -> Any:
    """The sums of columns from those of pairs, times factors if there are any."""
    columns = sums.type.count // 2
    if factors is None:
        factors = ir.Constant(sums.type, [1] * sums.type.count)
    return call(builder, _COLUMNS[columns], ir.VectorType(I32, columns), sums, factors)


def scale_columns(builder: ir.IRBuilder, sums: Any, factors: Any) -> Any:
    """The sums of columns times factors."""
    high = builder.ashr(builder.bitcast(factors, sums.type), ir.Constant(sums.type, [16] * sums.type.count))
    return builder.mul(sums, high)


def sum_products(builder: ir.IRBuilder, a: Any, b: Any) -> Any:
    """For <2 n x i16>: a * b of each even lane plus a * b of the odd lane after it: <n x i32>."""
    wide = ir.VectorType(I32, a.type.count)
    products = builder.mul(builder.sext(a, wide), builder.sext(b, wide))
    undefined, half = ir.Constant(wide, ir.Undefined), ir.VectorType(I32, a.type.count // 2)
    even, odd = (
        builder.shuffle_vector(products, undefined, ir.Constant(half, list(range(k, a.type.count, 2))))
        for k in range(2)
    )
    return builder.add(even, odd)


def avx2_signed(builder: ir.IRBuilder, sums: Any, weights: Any, activations: Any) -> Any:
    """s8 x s8 in 8 columns: move the weight's sign to the activation, then |weight| is unsigned."""
    bytes32 = ir.VectorType(I8, 32)
    spread = builder.bitcast(activations, bytes32)
    magnitude = call(builder, "llvm.x86.avx2.psign.b", bytes32, weights, weights)
    signed = call(builder, "llvm.x86.avx2.psign.b", bytes32, spread, weights)
    return builder.add(sums, join_pairs(builder, _pairs(builder, magnitude, signed)))


def avx512_signed(builder: ir.IRBuilder, sums: Any, weights: Any, activations: Any) -> Any:
    """s8 x s8 in 16 columns, as `avx2_signed`; AVX-512 has masks instead of `psign`."""
    zero = ir.Constant(weights.type, [0] * weights.type.count)
    spread = builder.bitcast(activations, weights.type)
    magnitude = call(builder, "llvm.abs.v64i8", weights.type, weights, ir.IntType(1)(0))
    negated = builder.sub(zero, spread)
    signed = builder.select(builder.icmp_signed("<", weights, zero), negated, spread)
    return builder.add(sums, join_pairs(builder, _pairs(builder, magnitude, signed)))


def sdot(builder: ir.IRBuilder, sums: Any, weights: Any, activations: Any) -> Any:
    """s8 x s8 in 4 columns by Arm's `sdot`."""
    four, spread = ir.VectorType(I32, 4), builder.bitcast(activations, weights.type)
    return call(builder, "llvm.aarch64.neon.sdot.v4i32.v16i8", four, sums, weights, spread)


def sli(builder: ir.IRBuilder, low: Any, high: Any, count: int) -> Any:
    """Arm's shift left and insert, 16 bytes at a time."""
    size, name = 16, "llvm.aarch64.neon.vsli.v16i8"
    pieces = [
        (part(builder, low, at, size), part(builder, high, at, size)) for at in range(0, low.type.count, size)
    ]
    return join(builder, [call(builder, name, a.type, a, b, I32(count)) for a, b in pieces])


def plain_insert(builder: ir.IRBuilder, low: Any, high: Any, count: int) -> Any:
    """Plain LLVM: what `sli` computes."""
    lanes = low.type.count
    mask, shift = (ir.Constant(low.type, [value] * lanes) for value in ((1 << count) - 1, count))
    return builder.or_(builder.and_(low, mask), builder.shl(high, shift))


def plain(builder: ir.IRBuilder, sums: Any, weights: Any, activations: Any) -> Any:
    """Plain LLVM, s8 x s8: widen, multiply, add the four products of each column."""
    return _plain(builder, sums, builder.sext(weights, _words(weights)), activations)


def plain_unsigned(builder: ir.IRBuilder, sums: Any, weights: Any, activations: Any) -> Any:
    """Plain LLVM, u8 x s8: what `vnni` computes, for tests on machines that lack it."""
    return _plain(builder, sums, builder.zext(weights, _words(weights)), activations)


def _words(weights: Any) -> ir.VectorType:
    return ir.VectorType(I16, weights.type.count)


def _plain(builder: ir.IRBuilder, sums: Any, words: Any, activations: Any) -> Any:
    spread = builder.bitcast(activations, ir.VectorType(I8, words.type.count))
    products = builder.mul(words, builder.sext(spread, words.type))
    for k in range(4):
        lanes = ir.Constant(sums.type, list(range(k, words.type.count, 4)))
        column = builder.shuffle_vector(products, ir.Constant(words.type, ir.Undefined), lanes)
        sums = builder.add(sums, builder.sext(column, sums.type))
    return sums
