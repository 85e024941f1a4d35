"""int8 products of 16 rows and 16 columns by matrix instructions (AMX).

AMX has 8 tile registers of up to 16 rows of 64 bytes, whose shapes a thread configures first. `tdpbssd`
multiplies a tile of activations (one activation row per tile row) by a tile of weights (4 k of 16 columns per
tile row, as unpacked weights are stored), and accumulates.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from llvmlite import ir
from numba.core import cgutils

from paceline.backends.cpu.primitives.dots import plain, spread_word
from paceline.backends.cpu.primitives.emit import I8, I32, I64, call

MATRIX_ROWS = 16  # rows and columns of a product
_TILE_ROW = 64  # bytes of a tile's row: 16 sums, or 4 weights of 16 columns
# Tile registers: several of each kind, so that consecutive products do not wait for each other
_SUMS, _ACTIVATIONS, _WEIGHTS = range(4), range(4, 6), range(6, 8)


@dataclass(frozen=True)
class Product:
    """The functions that emit products of a depth of 32 or 16 k.

    `multiply(builder, number, activations, stride, weights, depth, out)` writes int32 [16][16] to `out`.
    These are addresses; rows of activations are `stride` bytes apart, weights [depth / 4][16 columns][4 k].
    Consecutive products should have different `number`s, 0 to 3.
    """

    multiply: Callable[[ir.IRBuilder, int, Any, int, Any, int, Any], None]
    begin: Callable[[ir.IRBuilder, int], None] = lambda builder, depth: None  # before a tile's first product
    end: Callable[[ir.IRBuilder], None] = lambda builder: None  # after its last one


def _run(builder: ir.IRBuilder, name: str, *arguments: Any) -> None:
    call(builder, f"llvm.x86.{name}", ir.VoidType(), *arguments)


def tile_shapes(depth: int) -> bytes:
    """The shapes of the tile registers as `ldtilecfg` reads them: palette 1, bytes of a row, rows."""
    shapes = [(_TILE_ROW, MATRIX_ROWS)] * 4 + [(depth, MATRIX_ROWS)] * 2 + [(_TILE_ROW, depth // 4)] * 2
    widths = b"".join(width.to_bytes(2, "little") for width, _ in shapes)
    return (
        bytes([1, *[0] * 15]) + widths.ljust(32, b"\0") + bytes(rows for _, rows in shapes).ljust(16, b"\0")
    )


def _load_shapes(builder: ir.IRBuilder, depth: int) -> None:
    name, value = f"tile_shapes_{depth}", tile_shapes(depth)
    constant = ir.Constant(ir.ArrayType(I8, len(value)), bytearray(value))
    place = builder.module.globals.get(name) or cgutils.global_constant(builder, name, constant)
    _run(builder, "ldtilecfg", builder.bitcast(place, I8.as_pointer()))


def _multiply(
    builder: ir.IRBuilder, number: int, activations: Any, stride: int, weights: Any, depth: int, out: Any
) -> None:
    sums, first, second = (I8(_SUMS[number]), I8(_ACTIVATIONS[number % 2]), I8(_WEIGHTS[number % 2]))
    pointers = [builder.inttoptr(address, I8.as_pointer()) for address in (activations, weights, out)]
    _run(builder, "tilezero", sums)
    _run(builder, "tileloadd64", first, pointers[0], I64(stride))
    _run(builder, "tileloadd64", second, pointers[1], I64(_TILE_ROW))
    _run(builder, "tdpbssd", sums, first, second)
    _run(builder, "tilestored64", sums, pointers[2], I64(_TILE_ROW))


def _multiply_plainly(
    builder: ir.IRBuilder, number: int, activations: Any, stride: int, weights: Any, depth: int, out: Any
) -> None:
    ints, row_of_weights = ir.VectorType(I32, MATRIX_ROWS), ir.VectorType(I8, _TILE_ROW)
    with cgutils.for_range(builder, I64(MATRIX_ROWS)) as loop:
        row = builder.add(activations, builder.mul(loop.index, I64(stride)))
        sums = ir.Constant(ints, [0] * MATRIX_ROWS)
        for step in range(depth // 4):
            address = builder.add(weights, I64(_TILE_ROW * step))
            vector = builder.load(builder.inttoptr(address, row_of_weights.as_pointer()))
            vector.align = 1
            sums = plain(builder, sums, vector, spread_word(builder, row, step, ints))
        place = builder.add(out, builder.mul(loop.index, I64(_TILE_ROW)))
        builder.store(sums, builder.inttoptr(place, ints.as_pointer())).align = 4


AMX = Product(_multiply, _load_shapes, lambda builder: _run(builder, "tilerelease"))
PLAIN = Product(_multiply_plainly)  # what AMX computes, by plain LLVM
