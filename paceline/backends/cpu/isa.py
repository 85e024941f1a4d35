"""Which dot-product instruction this CPU has, and how to emit it.

A kernel asks for one thing: for 8 or 16 output columns at once, add to as many int32 accumulators
the dot product of 4 int8 weights and 4 int8 activations. Each instruction set below answers with its
own instruction; all give the same integers.

The choice follows numba's own compile target, so that `NUMBA_CPU_NAME` and `NUMBA_CPU_FEATURES`
force another one, and numba's cache never mixes them.
"""

from __future__ import annotations

import platform
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from llvmlite import binding, ir
from numba.core.registry import cpu_target

I8, I16, I32, I64 = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64)
SUMS = ir.VectorType(I32, 16)

# emit(builder, address, index, kind: <n x i32> or <n x float>) -> word `index` at the address, in all lanes
EmitSpread = Callable[[ir.IRBuilder, Any, int, ir.VectorType], Any]
# emit(builder, sums: <n x i32>, weights: <4 n x i8> as [n columns][4 k], activations: <n x i32>) -> <n x i32>
EmitDot = Callable[[ir.IRBuilder, Any, Any, Any], Any]


@dataclass(frozen=True)
class Isa:
    """One way to compute int8 dot products."""

    name: str
    description: str
    spread: EmitSpread
    dot_narrow: EmitDot  # weights in 0..15
    dot_wide: EmitDot  # weights of 8 bits, signed unless `offset_weights`
    offset_weights: bool = False  # 8-bit weights are stored as w + 128: the instruction wants them unsigned
    columns: int = 16  # outputs of one tile: as many as their sums fit into registers
    tile_rows: int = 4  # rows of the largest register tile
    chunk_rows: int = 0  # rows that meet some tiles before the next rows do; 0: all rows meet a tile
    wide_registers: bool = False  # 16 lanes are one register, and there are 32 of them
    slow_conversion: bool = False  # int to float costs more than a float addition; not with `offset_weights`
    single_loads: bool = False  # a load of two registers, which LLVM prefers, takes longer than two loads
    native_half: bool = True  # half <-> float conversions are instructions
    slow_half: bool = False  # widening halves costs more than to multiply them
    prefers_4bit: bool = False  # dots are so cheap that halving the weight bytes wins for several rows too


def splat(builder: ir.IRBuilder, value: Any, vector: ir.VectorType) -> Any:
    undefined = ir.Constant(vector, ir.Undefined)
    first = builder.insert_element(undefined, value, I32(0))
    mask = ir.Constant(ir.VectorType(I32, vector.count), [0] * vector.count)
    return builder.shuffle_vector(first, undefined, mask)


def _part(builder: ir.IRBuilder, vector: Any, start: int, count: int) -> Any:
    """Lanes start..start + count of a vector."""
    lanes = ir.Constant(ir.VectorType(I32, count), list(range(start, start + count)))
    return builder.shuffle_vector(vector, ir.Constant(vector.type, ir.Undefined), lanes)


def join(builder: ir.IRBuilder, parts: list[Any]) -> Any:
    """One vector out of equal parts, a power of two of them."""
    while len(parts) > 1:
        lanes = ir.Constant(ir.VectorType(I32, 2 * parts[0].type.count), list(range(2 * parts[0].type.count)))
        parts = [builder.shuffle_vector(a, b, lanes) for a, b in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]


def call(builder: ir.IRBuilder, name: str, result: ir.Type, *arguments: Any) -> Any:
    kind = ir.FunctionType(result, [argument.type for argument in arguments])
    function = builder.module.globals.get(name) or ir.Function(builder.module, kind, name)
    return builder.call(function, arguments)


class _VolatileLoad(ir.instructions.LoadInstr):  # type: ignore[misc]
    """A load that LLVM neither merges with another nor moves out of a loop."""

    def descr(self, buf: list[str]) -> None:
        parts: list[str] = []
        super().descr(parts)
        buf.append("".join(parts).replace("load", "load volatile", 1))


def load_as_written(builder: ir.IRBuilder, pointer: Any, kind: ir.Type) -> Any:
    """The value at a pointer, by a load of its own: see Isa.single_loads."""
    value = _VolatileLoad(builder.block, pointer, typ=kind)
    value.align = 4
    builder._insert(value)
    return value


def _spread_word(builder: ir.IRBuilder, address: Any, index: int, kind: ir.VectorType) -> Any:
    """A load that fills all lanes."""
    pointer = builder.inttoptr(builder.add(address, I64(4 * index)), kind.element.as_pointer())
    value = builder.load(pointer)
    value.align = 4
    return splat(builder, value, kind)


def _spread_lane(builder: ir.IRBuilder, address: Any, index: int, kind: ir.VectorType) -> Any:
    """One lane of a load of 4 words. Arm's dots and multiplications read it there, so it costs nothing."""
    four = ir.VectorType(kind.element, 4)
    words = builder.load(builder.inttoptr(builder.add(address, I64(index // 4 * 16)), four.as_pointer()))
    words.align = 4
    lanes = ir.Constant(ir.VectorType(I32, kind.count), [index % 4] * kind.count)
    return builder.shuffle_vector(words, ir.Constant(four, ir.Undefined), lanes)


def _by_parts(lanes: int, dot: EmitDot) -> EmitDot:
    """The dot over all columns by an instruction that does `lanes` columns."""

    def emit(builder: ir.IRBuilder, sums: Any, weights: Any, activations: Any) -> Any:
        parts = []
        for start in range(0, sums.type.count, lanes):
            part_weights = _part(builder, weights, 4 * start, 4 * lanes)
            part_activations = _part(builder, activations, start, lanes)
            parts.append(dot(builder, _part(builder, sums, start, lanes), part_weights, part_activations))
        return join(builder, parts)

    return emit


def _vnni_512(builder: ir.IRBuilder, sums: Any, weights: Any, activations: Any) -> Any:
    words = builder.bitcast(weights, SUMS)
    return call(builder, "llvm.x86.avx512.vpdpbusd.512", SUMS, sums, words, activations)


def _vnni_256(builder: ir.IRBuilder, sums: Any, weights: Any, activations: Any) -> Any:
    eight = ir.VectorType(I32, 8)
    words = builder.bitcast(weights, eight)
    return call(builder, "llvm.x86.avx512.vpdpbusd.256", eight, sums, words, activations)


def _avx2_pairs(builder: ir.IRBuilder, sums: Any, unsigned: Any, signed: Any) -> Any:
    """u8 x s8 by two multiply-adds; |u8| <= 127 here, so the 16-bit pair sums cannot saturate."""
    bytes32, words16 = ir.VectorType(I8, 32), ir.VectorType(I16, 16)
    pairs = call(
        builder,
        "llvm.x86.avx2.pmadd.ub.sw",
        words16,
        builder.bitcast(unsigned, bytes32),
        builder.bitcast(signed, bytes32),
    )
    ones = ir.Constant(words16, [1] * 16)
    return builder.add(sums, call(builder, "llvm.x86.avx2.pmadd.wd", ir.VectorType(I32, 8), pairs, ones))


def _avx2_narrow(builder: ir.IRBuilder, sums: Any, weights: Any, activations: Any) -> Any:
    return _avx2_pairs(builder, sums, weights, activations)


def _avx2_wide(builder: ir.IRBuilder, sums: Any, weights: Any, activations: Any) -> Any:
    """s8 x s8: move the weight's sign to the activation, then |weight| is unsigned."""
    bytes32 = ir.VectorType(I8, 32)
    spread = builder.bitcast(activations, bytes32)
    magnitude = call(builder, "llvm.x86.avx2.psign.b", bytes32, weights, weights)
    signed = call(builder, "llvm.x86.avx2.psign.b", bytes32, spread, weights)
    return _avx2_pairs(builder, sums, magnitude, signed)


def _sdot(builder: ir.IRBuilder, sums: Any, weights: Any, activations: Any) -> Any:
    four, spread = ir.VectorType(I32, 4), builder.bitcast(activations, weights.type)
    return call(builder, "llvm.aarch64.neon.sdot.v4i32.v16i8", four, sums, weights, spread)


def _portable(builder: ir.IRBuilder, sums: Any, weights: Any, activations: Any) -> Any:
    """Plain LLVM: widen, multiply, add the four products of each column."""
    words = ir.VectorType(I16, weights.type.count)
    spread = builder.bitcast(activations, weights.type)
    products = builder.mul(builder.sext(weights, words), builder.sext(spread, words))
    for k in range(4):
        lanes = ir.Constant(sums.type, list(range(k, words.count, 4)))
        column = builder.shuffle_vector(products, ir.Constant(words, ir.Undefined), lanes)
        sums = builder.add(sums, builder.sext(column, sums.type))
    return sums


ISAS = {
    isa.name: isa
    for isa in (
        Isa(
            "avx512-vnni",
            "x86 AVX-512 VNNI (vpdpbusd, 512 bits)",
            spread=_spread_word,
            dot_narrow=_vnni_512,
            dot_wide=_vnni_512,
            offset_weights=True,
            tile_rows=8,
            wide_registers=True,
            prefers_4bit=True,
        ),
        Isa(
            "avx-vnni",
            "x86 AVX-VNNI (vpdpbusd, 256 bits)",
            spread=_spread_word,
            dot_narrow=_by_parts(8, _vnni_256),
            dot_wide=_by_parts(8, _vnni_256),
            offset_weights=True,
            prefers_4bit=True,
        ),
        Isa(
            "avx2",
            "x86 AVX2 (vpmaddubsw)",
            spread=_spread_word,
            dot_narrow=_by_parts(8, _avx2_narrow),
            dot_wide=_by_parts(8, _avx2_wide),
        ),
        Isa(
            "sdot",
            "Arm dot product (sdot)",
            spread=_spread_lane,
            dot_narrow=_by_parts(4, _sdot),
            dot_wide=_by_parts(4, _sdot),
            columns=8,
            chunk_rows=16,
            slow_conversion=True,
            single_loads=True,
            slow_half=True,
        ),
        Isa(
            "portable",
            "plain LLVM vectors",
            spread=_spread_word,
            dot_narrow=_portable,
            dot_wide=_portable,
            native_half=False,
        ),
    )
}


# LLVM turns this into one `sdot` where the target has it.
_SUM_OF_PRODUCTS = """
declare i32 @llvm.vector.reduce.add.v16i32(<16 x i32>)
define i32 @sum_of_products(<16 x i8> %a, <16 x i8> %b) {
  %x = sext <16 x i8> %a to <16 x i32>
  %y = sext <16 x i8> %b to <16 x i32>
  %products = mul <16 x i32> %x, %y
  %sum = call i32 @llvm.vector.reduce.add.v16i32(<16 x i32> %products)
  ret i32 %sum
}
"""


def target_features() -> frozenset[str]:
    """The CPU features numba compiles for, named as LLVM names them."""
    codegen = cpu_target.target_context.codegen()
    features = {name[1:] for name in codegen._tm_features.split(",") if name.startswith("+")}
    # On Arm, LLVM's list of the host's features leaves dotprod out: it follows from the CPU's name, and
    # only what LLVM makes of a dot product tells. To ask for `sdot` in vain would end the process.
    probe = binding.parse_assembly(_SUM_OF_PRODUCTS)
    if _is_arm(platform.machine()) and "sdot" in codegen._tm.emit_assembly(probe):
        features.add("dotprod")
    return frozenset(features)


def _is_arm(machine: str) -> bool:
    return machine.lower() in ("aarch64", "arm64")


def select(features: frozenset[str], machine: str) -> Isa:
    """The best instruction set for a machine ("x86_64", "aarch64", ...) with these LLVM features."""
    x86 = machine.lower() in ("x86_64", "amd64")
    if x86 and {"avx512vnni", "avx512bw", "avx512vl", "f16c"} <= features:
        return ISAS["avx512-vnni"]
    if x86 and {"avxvnni", "f16c", "fma"} <= features:
        return ISAS["avx-vnni"]
    if x86 and {"avx2", "f16c", "fma"} <= features:
        return ISAS["avx2"]
    if _is_arm(machine) and "dotprod" in features:
        return ISAS["sdot"]
    return ISAS["portable"]


ISA = select(target_features(), platform.machine())
