"""Products of 16 rows of int8 activations and 16 columns of int8 weights, by matrix instructions.

AMX has 8 tile registers of up to 16 rows of 64 bytes; a thread first says which shapes they have. `tdpbssd`
adds the products of a tile of activations, one row in each row, and a tile of weights, 4 k of 16 columns in
each row: as unpacked weights are stored.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from llvmlite import ir
from numba.core import cgutils

from paceline.backends.cpu.dots import plain, spread_word
from paceline.backends.cpu.emit import I8, I32, I64, call

MATRIX_ROWS = 16  # rows and columns of a product
_TILE_ROW = 64  # bytes of a tile's row: 16 sums, or 4 weights of 16 columns
_SUMS, _OPERANDS = 0, {32: (1, 2), 16: (3, 4)}  # tile registers: sums; activations and weights, by depth


@dataclass(frozen=True)
class Product:
    """How a product is computed.

    `multiply(builder, activations, stride, weights, depth, out)` writes int32 [16][16] to `out`. All are
    addresses; rows of activations are `stride` bytes apart, weights are [depth / 4][16 columns][4 k].
    """

    multiply: Callable[[ir.IRBuilder, Any, int, Any, int, Any], None]
    begin: Callable[[ir.IRBuilder], None] = lambda builder: None  # before the first product of a tile
    end: Callable[[ir.IRBuilder], None] = lambda builder: None  # after the last one


def _run(builder: ir.IRBuilder, name: str, *arguments: Any) -> None:
    call(builder, f"llvm.x86.{name}", ir.VoidType(), *arguments)


def tile_shapes() -> bytes:
    """The shapes of the tile registers as `ldtilecfg` reads them: palette 1, bytes of a row, rows."""
    shapes = {_SUMS: (_TILE_ROW, MATRIX_ROWS)}
    for depth, (activations, weights) in _OPERANDS.items():
        shapes |= {activations: (depth, MATRIX_ROWS), weights: (_TILE_ROW, depth // 4)}
    widths, rows = zip(*(shapes.get(tile, (0, 0)) for tile in range(16)), strict=True)
    return bytes([1, *[0] * 15]) + b"".join(width.to_bytes(2, "little") for width in widths) + bytes(rows)


def _load_shapes(builder: ir.IRBuilder) -> None:
    name, value = "tile_shapes", tile_shapes()
    constant = ir.Constant(ir.ArrayType(I8, len(value)), bytearray(value))
    place = builder.module.globals.get(name) or cgutils.global_constant(builder, name, constant)
    _run(builder, "ldtilecfg", builder.bitcast(place, I8.as_pointer()))


def _multiply(
    builder: ir.IRBuilder, activations: Any, stride: int, weights: Any, depth: int, out: Any
) -> None:
    first, second = _OPERANDS[depth]
    pointers = [builder.inttoptr(address, I8.as_pointer()) for address in (activations, weights, out)]
    _run(builder, "tilezero", I8(_SUMS))
    _run(builder, "tileloadd64", I8(first), pointers[0], I64(stride))
    _run(builder, "tileloadd64", I8(second), pointers[1], I64(_TILE_ROW))
    _run(builder, "tdpbssd", I8(_SUMS), I8(first), I8(second))
    _run(builder, "tilestored64", I8(_SUMS), pointers[2], I64(_TILE_ROW))


def _multiply_plainly(
    builder: ir.IRBuilder, activations: Any, stride: int, weights: Any, depth: int, out: Any
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
