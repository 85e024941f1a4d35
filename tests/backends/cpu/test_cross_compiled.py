"""Code for CPUs that are not here: LLVM compiles it, with the instructions it is meant to have."""

from __future__ import annotations

import pytest
from llvmlite import binding, ir

from paceline.backends.cpu.primitives.isa import ISAS
from paceline.backends.cpu.tiles.weight_tile import (
    FORMAT_NAMES,
    INT8,
    MATRIX_ROWS,
    TILE_ARGUMENTS,
    UNPACKED4,
    UNPACKED6,
    emit_tile,
)
from tests.large import REPEATS

ARM, APPLE, X86 = "aarch64-linux-gnu", "arm64-apple-darwin", "x86_64-linux-gnu"


def assembly(code: str, triple: str, cpu: str) -> str:
    """LLVM code compiled for a CPU."""
    binding.initialize_all_targets()
    binding.initialize_all_asmprinters()
    machine = binding.Target.from_triple(triple).create_target_machine(cpu=cpu, opt=3)
    module = binding.parse_assembly(f'target triple = "{triple}"\n{code}')
    module.verify()
    return str(machine.emit_assembly(module))


def tile_code(isa: str, weight_format: int, rows: int) -> str:
    """A function that is one tile."""
    module = ir.Module("tile")
    kind = ir.FunctionType(ir.VoidType(), [ir.IntType(64)] * len(TILE_ARGUMENTS))
    function = ir.Function(module, kind, "tile")
    builder = ir.IRBuilder(function.append_basic_block())
    emit_tile(weight_format, rows, ISAS[isa])(builder, list(function.args))
    builder.ret_void()
    return "\n".join(line for line in str(module).splitlines() if not line.startswith("target "))


MACHINES = {
    "neoverse-n1": ("neon", ARM, "neoverse-n1", ("sdot",)),
    "apple-m1": ("neon", APPLE, "apple-m1", ("sdot",)),
    "cascadelake": ("avx512vnni", X86, "cascadelake", ("vpdpbusd", "zmm")),
    "alderlake": ("avxvnni", X86, "alderlake", ("vpdpbusd", "ymm")),
    "skylake-avx512": ("avx512", X86, "skylake-avx512", ("vpmaddubsw", "zmm")),
    "haswell": ("avx2", X86, "haswell", ("vpmaddubsw", "ymm")),
}


# all formats where there is a product of signed bytes and where there is none, and all CPUs
@pytest.mark.parametrize(
    ("machine", "weight_format"),
    [
        pytest.param(
            machine,
            number,
            id=f"{name}-{FORMAT_NAMES[number]}",
            marks=[] if number == INT8 or name in ("neoverse-n1", "haswell") else REPEATS,
        )
        for name, machine in MACHINES.items()
        for number in FORMAT_NAMES
    ],
)
def test_tiles_have_the_instruction_of_their_cpu(
    machine: tuple[str, str, str, tuple[str, ...]], weight_format: int
) -> None:
    isa, triple, cpu, instructions = machine
    code = assembly(tile_code(isa, weight_format, ISAS[isa].tile_rows), triple, cpu)
    if FORMAT_NAMES[weight_format] == "float32":
        instructions = ("fmla",) if isa == "neon" else ("vfmadd",)
    for instruction in instructions:
        assert instruction in code


@pytest.mark.parametrize("weight_format", [UNPACKED4, UNPACKED6])
def test_16_rows_of_unpacked_weights_have_matrix_instructions(weight_format: int) -> None:
    code = assembly(tile_code("amx", weight_format, MATRIX_ROWS), X86, "sapphirerapids")
    products = code.count("tdpbssd")
    assert products > 0
    assert [code.count(name) for name in ("tilestored", "tileloadd")] == [products, 2 * products]
    assert code.count("ldtilecfg") == code.count("tilerelease") == 1


def test_a_group_of_4_bit_weights_is_summed_in_16_bits() -> None:
    """A multiplication fewer for every 4 k, of 8: see dots.py."""
    narrow = assembly(tile_code("avx2", 1, 1), X86, "haswell")
    wide = assembly(tile_code("avx2", INT8, 1), X86, "haswell")
    assert [code.count("vpmaddwd") for code in (narrow, wide)] == [2, 16]  # 2 x 8 columns


PRODUCT_AND_SUM = """
define {kind} @product_and_sum({kind} %a, {kind} %b, {kind} %c) {{
  %product = fmul {kind} %a, %b
  %sum = fadd {kind} %product, %c
  ret {kind} %sum
}}
"""


@pytest.mark.parametrize("kind", ["float", "double", "<4 x float>", "<2 x double>"])
@pytest.mark.parametrize(
    ("triple", "cpu"), [(ARM, "neoverse-n1"), (APPLE, "apple-m1"), (X86, "skylake-avx512")]
)
def test_no_cpu_contracts_a_product_and_a_sum(triple: str, cpu: str, kind: str) -> None:
    code = assembly(PRODUCT_AND_SUM.format(kind=kind), triple, cpu)
    assert "mul" in code
    assert "add" in code
    assert not any(fused in code for fused in ("fmadd", "fmla"))
