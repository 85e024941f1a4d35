"""The register tile: `rows` activation rows times 16 weight columns, the heart of every linear layer.

Weights are stored in the order the tile reads them, one sequential stream per 16 columns:

    int8    per group of 32 k: [8][16 columns][4 k] bytes, then 16 half scales
    int4    per group of 32 k: [4][16 columns][4 k] bytes, low nibble k, high nibble k + 16,
            then 16 half scales and 16 half minimums (Q4_0 and Q4_1 exactly as published)
    int4k   per 256 k: 8 such groups of nibbles, then 16 half `d`, 16 half `dmin`,
            8 x 16 byte scales, 8 x 16 byte minimums (Q4_K exactly as published)
    float32 per k: 16 floats

Activations are stored as [K / 32][rows][record], so that all rows of a group lie together; a record is

    32 int8 values | float scale | float scale * sum of the values | int32 -128 * sum | 4 bytes unused

(for float32 weights: 32 floats).

Integer sums within a group are exact, and the groups are added in the order of k by one chain of
fused multiply-adds per output. So an output's bits depend on its own row alone, whatever the
number of rows in the tile: the tiles of 1 and of 8 rows are the same function of a row.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from paceline.backends.cpu.compiled import Emit
from paceline.backends.cpu.isa import I8, I32, ISA, SUMS, WEIGHTS, EmitDot, Isa, call, splat
from paceline.backends.cpu.simd import halves_at

INT8, INT4, INT4K, FLOAT32 = 0, 1, 2, 3  # weight formats
FORMAT_NAMES = {INT8: "int8", INT4: "int4", INT4K: "int4k", FLOAT32: "float32"}
COLUMNS = 16  # outputs of one tile
PREFETCH = 4096  # bytes the tiles read ahead
RECORD = 48  # bytes of one row's quantized activations of one group
GROUP = 32  # k per activation scale, and per weight scale of every format but float32
TILE_ROWS = tuple(range(1, ISA.tile_rows + 1))

_FLOATS = ir.VectorType(ir.FloatType(), COLUMNS)
_I64 = ir.IntType(64)


def _load(builder: ir.IRBuilder, address: Any, kind: ir.Type, offset: int = 0) -> Any:
    """The value of type `kind` at a byte address that may be unaligned."""
    if offset:
        address = builder.add(address, _I64(offset))
    value = builder.load(builder.inttoptr(address, kind.as_pointer()))
    value.align = 4 if isinstance(kind, ir.IntType | ir.FloatType) else 1
    return value


def _halves(builder: ir.IRBuilder, address: Any, offset: int) -> Any:
    return halves_at(builder, builder.add(address, _I64(offset)))


def _bytes_as_floats(builder: ir.IRBuilder, address: Any, offset: int) -> Any:
    wide = builder.zext(_load(builder, address, ir.VectorType(I8, COLUMNS), offset), SUMS)
    return builder.sitofp(wide, _FLOATS)


def _prefetch(builder: ir.IRBuilder, address: Any, size: int) -> None:
    """Ask for the `size` bytes of weights that will be read PREFETCH bytes later, tile after tile."""
    pointer = I8.as_pointer()
    for line in range(0, size, 64):
        place = builder.inttoptr(builder.add(address, _I64(PREFETCH + line)), pointer)
        call(builder, "llvm.prefetch.p0", ir.VoidType(), place, I32(0), I32(3), I32(1))


def _fma(builder: ir.IRBuilder, a: Any, b: Any, c: Any) -> Any:
    return call(builder, "llvm.fma.v16f32", _FLOATS, a, b, c)


def _nibbles(builder: ir.IRBuilder, address: Any) -> list[Any]:
    """The 8 weight vectors of a 4-bit group, k ascending."""
    packed = [_load(builder, address, WEIGHTS, 64 * step) for step in range(4)]
    fifteen, four = ir.Constant(WEIGHTS, [15] * 64), ir.Constant(WEIGHTS, [4] * 64)
    return [builder.and_(word, fifteen) for word in packed] + [builder.lshr(word, four) for word in packed]


class _Tile:
    """Emits one tile; holds what the emitters of all formats share."""

    def __init__(self, builder: ir.IRBuilder, rows: int, isa: Isa, args: list[Any]) -> None:
        self.builder, self.rows, self.isa = builder, rows, isa
        self.weights, self.activations, self.group_stride, self.groups = args[:4]
        self.out, self.out_stride, self.bias, self.added = args[4:]
        self.accumulators = [cgutils.alloca_once(builder, _FLOATS) for _ in range(rows)]
        for accumulator in self.accumulators:
            builder.store(ir.Constant(_FLOATS, [0.0] * COLUMNS), accumulator)

    def records(self, group: Any) -> Any:
        """Where the rows' records of a group start."""
        return self.builder.add(self.activations, self.builder.mul(group, self.group_stride))

    def side(self, records: Any, row: int, which: int, kind: ir.Type) -> Any:
        """The scale (0), scaled sum (1) or -128 * sum (2) of a row's record."""
        return _load(self.builder, records, kind, row * RECORD + GROUP + 4 * which)

    def dots(self, records: Any, row: int, vectors: list[Any], emit: EmitDot, start: Any) -> Any:
        """Exact integer dot products of one group for one row, as float."""
        chains = [start, _ZERO]  # two short chains hide the latency of one long one
        for step, weights in enumerate(vectors):
            values = _load(self.builder, records, I32, row * RECORD + 4 * step)
            chains[step % 2] = emit(self.builder, chains[step % 2], weights, values)
        return self.builder.sitofp(self.builder.add(*chains), _FLOATS)

    def accumulate(self, row: int, a: Any, b: Any) -> None:
        accumulator = self.accumulators[row]
        self.builder.store(_fma(self.builder, a, b, self.builder.load(accumulator)), accumulator)

    def splat(self, value: Any) -> Any:
        return splat(self.builder, value, _FLOATS)

    def finish(self) -> None:
        """out = result + bias, or with `added` out += result + bias; a bias at address 0 is none."""
        builder = self.builder
        with builder.if_then(builder.icmp_signed("!=", self.bias, _I64(0))):
            bias = _load(builder, self.bias, _FLOATS)
            for accumulator in self.accumulators:
                builder.store(builder.fadd(builder.load(accumulator), bias), accumulator)
        places = [builder.add(self.out, builder.mul(self.out_stride, _I64(row))) for row in range(self.rows)]
        with builder.if_then(builder.icmp_signed("!=", self.added, _I64(0))):
            for accumulator, place in zip(self.accumulators, places, strict=True):
                before = _load(builder, place, _FLOATS)
                builder.store(builder.fadd(before, builder.load(accumulator)), accumulator)
        for accumulator, place in zip(self.accumulators, places, strict=True):
            pointer = builder.inttoptr(place, _FLOATS.as_pointer())
            builder.store(builder.load(accumulator), pointer).align = 4


_ZERO = ir.Constant(SUMS, [0] * COLUMNS)


def _emit_int8(tile: _Tile) -> None:
    builder, size = tile.builder, GROUP * COLUMNS
    with cgutils.for_range(builder, tile.groups) as loop:
        address = builder.add(tile.weights, builder.mul(loop.index, _I64(size + 2 * COLUMNS)))
        _prefetch(builder, address, size + 2 * COLUMNS)
        records = tile.records(loop.index)
        vectors = [_load(builder, address, WEIGHTS, 64 * step) for step in range(GROUP // 4)]
        scale = _halves(builder, address, size)
        for row in range(tile.rows):
            start = _ZERO
            if tile.isa.offset_weights:  # weights are w + 128: start from -128 * sum of the activations
                start = splat(builder, tile.side(records, row, 2, I32), SUMS)
            dots = tile.dots(records, row, vectors, tile.isa.dot_wide, start)
            row_scale = tile.splat(tile.side(records, row, 0, ir.FloatType()))
            tile.accumulate(row, dots, builder.fmul(scale, row_scale))


def _add_group4(tile: _Tile, group: Any, vectors: list[Any], scale: Any, minimum: Any) -> None:
    records = tile.records(group)
    for row in range(tile.rows):
        dots = tile.dots(records, row, vectors, tile.isa.dot_narrow, _ZERO)
        row_scale = tile.splat(tile.side(records, row, 0, ir.FloatType()))
        tile.accumulate(row, dots, tile.builder.fmul(scale, row_scale))
        tile.accumulate(row, minimum, tile.splat(tile.side(records, row, 1, ir.FloatType())))


def _emit_int4(tile: _Tile) -> None:
    builder = tile.builder
    with cgutils.for_range(builder, tile.groups) as loop:
        address = builder.add(tile.weights, builder.mul(loop.index, _I64(320)))
        _prefetch(builder, address, 320)
        vectors = _nibbles(builder, address)
        scale, minimum = _halves(builder, address, 256), _halves(builder, address, 288)
        _add_group4(tile, loop.index, vectors, scale, minimum)


def _emit_int4k(tile: _Tile) -> None:
    builder = tile.builder
    with cgutils.for_range(builder, builder.lshr(tile.groups, _I64(3))) as loop:
        address = builder.add(tile.weights, builder.mul(loop.index, _I64(2368)))
        scale, minimum = _halves(builder, address, 2048), _halves(builder, address, 2080)
        minimum = builder.fmul(minimum, ir.Constant(_FLOATS, [-1.0] * COLUMNS))
        _prefetch(builder, builder.add(address, _I64(2048)), 320)
        with cgutils.for_range(builder, _I64(8)) as inner:
            nibbles = builder.add(address, builder.mul(inner.index, _I64(256)))
            side = builder.add(address, builder.mul(inner.index, _I64(COLUMNS)))
            group = builder.add(builder.mul(loop.index, _I64(8)), inner.index)
            _prefetch(builder, nibbles, 256)
            group_scale = builder.fmul(scale, _bytes_as_floats(builder, side, 2112))
            group_minimum = builder.fmul(minimum, _bytes_as_floats(builder, side, 2240))
            _add_group4(tile, group, _nibbles(builder, nibbles), group_scale, group_minimum)


def _emit_float32(tile: _Tile) -> None:
    builder = tile.builder
    with cgutils.for_range(builder, tile.groups) as loop:
        address = builder.add(tile.weights, builder.mul(loop.index, _I64(GROUP * 4 * COLUMNS)))
        records = tile.records(loop.index)
        for step in range(GROUP):
            weights = _load(builder, address, _FLOATS, step * 4 * COLUMNS)
            for row in range(tile.rows):
                value = _load(builder, records, ir.FloatType(), 4 * (row * GROUP + step))
                tile.accumulate(row, weights, tile.splat(value))


_EMITTERS: dict[int, Callable[[_Tile], None]] = {
    INT8: _emit_int8,
    INT4: _emit_int4,
    INT4K: _emit_int4k,
    FLOAT32: _emit_float32,
}


TILE_ARGUMENTS = (types.int64,) * 8  # weights, records, group_stride, groups, out, out_stride, bias, added


def emit_tile(weight_format: int, rows: int, isa: Isa = ISA) -> Emit:
    """The code of a tile, for arguments that are addresses or counts.

    It writes `rows` x 16 floats to `out`, whose rows are `out_stride` bytes apart, or adds them there
    if `added` is not 0; `bias` is the address of 16 floats to add to every row, or 0.
    """

    def emit(builder: ir.IRBuilder, arguments: list[Any]) -> None:
        tile = _Tile(builder, rows, isa, arguments)
        _EMITTERS[weight_format](tile)
        tile.finish()

    return emit


def tile_bytes(weight_format: int, depth: int) -> int:
    """Bytes of the weights of one tile of 16 columns and `depth` k."""
    return {
        INT8: depth // GROUP * 544,
        INT4: depth // GROUP * 320,
        INT4K: depth // 256 * 2368,
        FLOAT32: depth * COLUMNS * 4,
    }[weight_format]
