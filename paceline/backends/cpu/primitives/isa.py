"""The table of instruction sets (ISAs), and the one that kernels are compiled for.

Kernels need one operation: for 8 or 16 output columns at once, add the dot product of 4 int8 weights and 4
int8 activations to int32 accumulators (dots.py). Every entry of the table implements it with its own
instructions. All give the same integers, so kernels give the same bits on every CPU.

The choice follows numba's own compile target. `PACELINE_ISA` sets a lower one (machine.py), and so do numba's
`NUMBA_CPU_NAME` and `NUMBA_CPU_FEATURES`; numba's cache never mixes them.
"""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass, replace

from llvmlite import binding
from numba.core.registry import cpu_target

from paceline.backends.cpu.primitives import dots
from paceline.backends.cpu.primitives.dots import Dot, EmitSpread
from paceline.backends.cpu.tiles import products
from paceline.backends.cpu.tiles.products import Product
from paceline.errors import ConfigError
from paceline.machine import EMULATED, ISA_VARIABLE, family, request_amx


@dataclass(frozen=True)
class Isa:
    """One way to compute int8 dot products."""

    name: str
    description: str
    family: str  # of CPUs: x86, arm, or "" for all
    needs: frozenset[str]  # LLVM's names of the CPU features it uses
    spread: EmitSpread
    dot_narrow: Dot  # weights in 0..15
    dot_wide: Dot  # weights of 8 bits, signed unless `offset_weights`
    dot_scaled: Dot | None  # weights in 0..63, with a scale for every 16; None: they are stored signed
    product: Product | None = None  # 16 rows x 16 columns by matrix instructions (AMX)
    insert: dots.EmitInsert = dots.plain_insert
    offset_weights: bool = False  # 8-bit weights are stored as w + 128: the instruction wants them unsigned
    columns: int = 16  # outputs of one tile: as many as registers can hold the sums of
    tile_rows: int = 4  # rows of the largest register tile
    unpack_rows: int = 0  # with this many rows or more, weights are unpacked once for all rows; 0: never
    unpacked_bytes: int = 1 << 18  # of tiles that are unpacked together: a part of the L2 cache
    wide_registers: bool = False  # 16 lanes are one register, and there are 32 of them
    slow_conversion: bool = False  # int to float costs more than a float addition; not with `offset_weights`
    single_loads: bool = False  # LLVM's load-pair instructions are slower than two loads
    native_half: bool = True  # half <-> float conversions are instructions

    @property
    def signed_six(self) -> bool:
        """Whether 6-bit weights are stored signed, in the upper bits of a byte."""
        return self.dot_scaled is None


_PAIRS = Dot(dots.add_pairs, dots.join_pairs, pairs=True)
_SCALED_PAIRS = Dot(dots.add_pairs, dots.join_pairs, steps=2, pairs=True)


def _scaled(step: dots.EmitStep) -> Dot:
    """32-bit sums, scaled after every 16 k."""
    return Dot(step, dots.scale_columns, steps=4)


_AVX512_VNNI = Isa(
    "avx512vnni",
    "x86 AVX-512 VNNI (vpdpbusd, 512 bits)",
    family="x86",
    needs=frozenset({"avx512vnni", "avx512bw", "avx512vl", "f16c"}),
    spread=dots.spread_word,
    dot_narrow=Dot(dots.vnni),
    dot_wide=Dot(dots.vnni),
    dot_scaled=_scaled(dots.vnni),
    offset_weights=True,
    tile_rows=8,
    wide_registers=True,
)

# Best first
ISAS = {
    isa.name: isa
    for isa in (
        replace(
            _AVX512_VNNI,
            name="amx",
            description="x86 AMX (tdpbssd, 16 x 16) from 16 rows on, else AVX-512 VNNI",
            needs=_AVX512_VNNI.needs | {"amx-tile", "amx-int8"},
            product=products.AMX,
            unpack_rows=products.MATRIX_ROWS,
            unpacked_bytes=1 << 20,  # half of L2: a prompt's activations are read from L3 less often
        ),
        _AVX512_VNNI,
        Isa(
            "avxvnni",
            "x86 AVX-VNNI (vpdpbusd, 256 bits)",
            family="x86",
            needs=frozenset({"avxvnni", "f16c", "fma"}),
            spread=dots.spread_word,
            dot_narrow=Dot(dots.by_parts(8, dots.vnni)),
            dot_wide=Dot(dots.by_parts(8, dots.vnni)),
            dot_scaled=_scaled(dots.by_parts(8, dots.vnni)),
            offset_weights=True,
        ),
        Isa(
            "avx512",
            "x86 AVX-512 (vpmaddubsw, 512 bits)",
            family="x86",
            needs=frozenset({"avx512bw", "avx512vl", "f16c"}),
            spread=dots.spread_word,
            dot_narrow=_PAIRS,
            dot_wide=Dot(dots.avx512_signed),
            dot_scaled=_SCALED_PAIRS,
            tile_rows=8,
            wide_registers=True,
        ),
        Isa(
            "avx2",
            "x86 AVX2 (vpmaddubsw, 256 bits)",
            family="x86",
            needs=frozenset({"avx2", "f16c", "fma"}),
            spread=dots.spread_word,
            dot_narrow=_PAIRS,
            dot_wide=Dot(dots.avx2_signed),
            dot_scaled=_SCALED_PAIRS,
        ),
        Isa(
            "neon",
            "Arm NEON with dot product (sdot)",
            family="arm",
            needs=frozenset({"dotprod"}),
            spread=dots.spread_lane,
            dot_narrow=Dot(dots.by_parts(4, dots.sdot)),
            dot_wide=Dot(dots.by_parts(4, dots.sdot)),
            dot_scaled=None,
            insert=dots.sli,
            columns=8,
            unpack_rows=8,
            slow_conversion=True,
            single_loads=True,
        ),
        Isa(
            "portable",
            "plain LLVM vectors",
            family="",
            needs=frozenset(),
            spread=dots.spread_word,
            dot_narrow=Dot(dots.plain),
            dot_wide=Dot(dots.plain),
            dot_scaled=_scaled(dots.plain),
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
    # On Arm, LLVM's list of host features lacks dotprod, which follows from the CPU's name. So compile a dot
    # product and look for `sdot` in the result: using an unsupported instruction would end the process.
    probe = binding.parse_assembly(_SUM_OF_PRODUCTS)
    if family(platform.machine()) == "arm" and "sdot" in codegen._tm.emit_assembly(probe):
        features.add("dotprod")
    return _allowed(frozenset(features))


def _allowed(features: frozenset[str]) -> frozenset[str]:
    """The features, without AMX if the operating system does not grant it to this process."""
    return features if request_amx() else features - {"amx-tile", "amx-int8"}


def usable(features: frozenset[str], machine: str) -> list[Isa]:
    """The instruction sets for a machine ("x86_64", "aarch64", ...) with these LLVM features, best first."""
    return [isa for isa in ISAS.values() if isa.family in ("", family(machine)) and isa.needs <= features]


def select(features: frozenset[str], machine: str, asked: str = "") -> Isa:
    """The best instruction set for a machine with these LLVM features, or the one `asked` for by name."""
    best = usable(features, machine)[0]
    if asked == "":
        return best
    name = asked.removesuffix(EMULATED)
    if name not in ISAS:
        raise ConfigError(f"{ISA_VARIABLE} is {asked!r}; use one of {', '.join(ISAS)}, or leave it out.")
    if name != asked:
        return emulated(ISAS[name])
    # on Arm LLVM's list of host features is incomplete, but kernels are only compiled for the host
    host = host_features() | (features if family(machine) == "arm" else frozenset())
    names = [isa.name for isa in usable(host, machine)]
    if asked not in names:
        lacks = ", ".join(sorted(ISAS[asked].needs - host)) or f"the {ISAS[asked].family} architecture"
        raise ConfigError(
            f"{ISA_VARIABLE} is {asked!r}, but this CPU lacks {lacks}; use one of {', '.join(names)}, "
            f"or leave it out for the best."
        )
    if asked != best.name:
        raise ConfigError(
            f"{ISA_VARIABLE}={asked} came too late: numba already compiles for {best.name}. Set it in the "
            "environment of the process, and leave NUMBA_CPU_NAME and NUMBA_CPU_FEATURES out."
        )
    return best


def emulated(isa: Isa) -> Isa:
    """The same kernels with generic LLVM IR in place of the ISA's instructions, for tests on any machine."""
    wide = Dot(dots.plain_unsigned if isa.offset_weights else dots.plain)
    name, description = isa.name + EMULATED, f"{isa.description}, emulated"
    return replace(
        isa,
        name=name,
        description=description,
        family="",
        dot_narrow=Dot(dots.plain),
        dot_wide=wide,
        dot_scaled=_scaled(dots.plain) if isa.dot_scaled else None,
        insert=dots.plain_insert,
        product=products.PLAIN if isa.product else None,
    )


def host_features() -> frozenset[str]:
    """The features of this CPU as LLVM lists them, whatever numba compiles for."""
    features = frozenset(name for name, present in binding.get_host_cpu_features().items() if present)
    return _allowed(features)


ISA = select(target_features(), platform.machine(), os.environ.get(ISA_VARIABLE, ""))
