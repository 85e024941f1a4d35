"""The register tile: `rows` activation rows times C weight columns, the heart of every linear layer.

C is 16, or 8 where more sums than that do not fit into the registers. Weights are stored in the order
the tile reads them, one sequential stream per C columns:

    int8    per group of 32 k: [8][C columns][4 k] bytes, then C half scales
    int4    per group of 32 k: [4][C columns][4 k] bytes, low nibble k, high nibble k + 16,
            then C half scales and C half minimums (Q4_0 and Q4_1 exactly as published)
    int4k   per 256 k: 8 such groups of nibbles, then C half `d`, C half `dmin`,
            8 x C byte scales, 8 x C byte minimums (Q4_K exactly as published)
    int6k   per 256 k: 8 groups of nibbles as in int4, each followed by [2][C columns][4 k] bytes with bits
            4 and 5 of 16 k: step s of 4 k has bits 2 (s // 2) of vector s % 2; then C half `d`,
            8 x C x 2 signed byte scales, of 16 k each (Q6_K exactly as published: w = d * scale * (q - 32))
    float32 per k: C floats

Activations are stored as [K / 32][rows][record], so that all rows of a group lie together; a record is

    32 int8 values | float scale | float scale * sum of the values | int32 -128 * sum |
    int16 -sum of the first 16 | int16 -sum of the others

(for float32 weights: 32 floats).

Integer sums within a group are exact, and the groups are added in the order of k by one chain of
fused multiply-adds per output. So an output's bits depend on its own row alone, whatever the
number of rows in the tile: the tiles of 1 and of 8 rows are the same function of a row.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from paceline.backends.cpu.compiled import Emit
from paceline.backends.cpu.dots import Dot, sum_products
from paceline.backends.cpu.emit import I8, I16, I32, call, join, load_as_written
from paceline.backends.cpu.isa import ISA, Isa
from paceline.backends.cpu.simd import halves_at

INT8, INT4, INT4K, INT6K, FLOAT32 = range(5)  # weight formats
FORMAT_NAMES = {INT8: "int8", INT4: "int4", INT4K: "int4k", INT6K: "int6k", FLOAT32: "float32"}
COLUMNS = ISA.columns  # outputs of one tile
PREFETCH = 4096  # bytes the tiles read ahead
NEAR_PREFETCH = 512  # the same for few rows where the hardware reads far ahead itself
RECORD = 48  # bytes of one row's quantized activations of one group
GROUP = 32  # k per activation scale, and per weight scale of every format but float32
TILE_ROWS = tuple(range(1, ISA.tile_rows + 1))

# The words of a record behind the values
_SCALE, _SCALED_SUM, _OFFSET, _HALF_SUMS = 8, 9, 10, 11
_MAGIC = 1.5 * 2**23  # a float whose lowest bit is worth 1: adding an int to its bits adds it to the float
_MAGIC_BITS = 0x4B400000
_I64 = ir.IntType(64)


def _load(builder: ir.IRBuilder, address: Any, kind: ir.Type, offset: int = 0) -> Any:
    """The value of type `kind` at a byte address that may be unaligned."""
    if offset:
        address = builder.add(address, _I64(offset))
    value = builder.load(builder.inttoptr(address, kind.as_pointer()))
    value.align = 4 if isinstance(kind, ir.IntType | ir.FloatType) else 1
    return value


def _constant_in_memory(builder: ir.IRBuilder, name: str, value: ir.Constant) -> Any:
    """A constant that LLVM must load where it is used."""
    place = builder.module.globals.get(name) or cgutils.global_constant(builder, name, value)
    return load_as_written(builder, place, value.type)


class _Tile:
    """Emits one tile; holds what the emitters of all formats share.

    Where registers are few, columns are done 8 at a time, and each weight meets all rows before
    the next is read; where a register is 16 lanes wide, all weights of a group stay and meet row after row.
    """

    def __init__(self, builder: ir.IRBuilder, rows: int, isa: Isa, args: list[Any]) -> None:
        self.builder, self.rows, self.isa = builder, rows, isa
        self.weights, self.activations, self.group_stride, self.groups = args[:4]
        self.out, self.out_stride, self.bias, self.added = args[4:]
        self.width = 16 if isa.wide_registers else 8
        self.floats, self.ints = ir.VectorType(ir.FloatType(), self.width), ir.VectorType(I32, self.width)
        self.bytes = ir.VectorType(I8, 4 * self.width)
        starts = range(0, COLUMNS, self.width)
        self.sums = {
            (row, start): cgutils.alloca_once(builder, self.floats) for row in range(rows) for start in starts
        }
        for place in self.sums.values():
            builder.store(self.constant(self.floats, 0.0), place)
        self.prefetch_distance = self.distance()

    def distance(self) -> Any:
        """How many bytes ahead weights are asked for.

        Where loads are written one by one: as a number that LLVM does not know, because from a base as far
        as that it would compute the address of every single load.
        """
        if not self.isa.single_loads:
            return _I64(PREFETCH)
        bytes_ahead = NEAR_PREFETCH if self.rows <= 2 else PREFETCH
        return _constant_in_memory(self.builder, f"prefetch_{bytes_ahead}", _I64(bytes_ahead))

    def prefetch(self, address: Any, size: int) -> None:
        """Ask for the `size` bytes of weights that will be read later, in this tile or in the next."""
        builder, ahead = self.builder, self.builder.add(address, self.prefetch_distance)
        for line in range(0, size, 64):
            place = builder.inttoptr(builder.add(ahead, _I64(line)), I8.as_pointer())
            call(builder, "llvm.prefetch.p0", ir.VoidType(), place, I32(0), I32(3), I32(1))

    def constant(self, kind: ir.VectorType, value: float) -> Any:
        return ir.Constant(kind, [value] * kind.count)

    def parts(self) -> Iterator[int]:
        """The first column of each part of the tile."""
        for start in range(0, COLUMNS, self.width):
            yield start
            self.forget()

    def forget(self) -> None:
        """Let nothing read so far be kept for later: reading it again is cheaper than a spilled register."""
        if not self.isa.wide_registers:
            self.builder.fence("seq_cst", "singlethread")

    def record(self, group: Any, row: int) -> Any:
        """Where the record of a group and row lies."""
        records = self.builder.add(self.activations, self.builder.mul(group, self.group_stride))
        return self.builder.add(records, _I64(row * RECORD))

    def spread(self, group: Any, row: int, word: int, kind: ir.VectorType) -> Any:
        """A word of a record, in all lanes."""
        return self.isa.spread(self.builder, self.record(group, row), word, kind)

    def load_bytes(self, address: Any, offset: int) -> Any:
        if not self.isa.single_loads:
            return _load(self.builder, address, self.bytes, offset)
        register, parts = ir.VectorType(I8, 16), []
        for part in range(offset, offset + 4 * self.width, 16):
            place = self.builder.inttoptr(self.builder.add(address, _I64(part)), register.as_pointer())
            parts.append(load_as_written(self.builder, place, register))
        return join(self.builder, parts)

    def halves(self, address: Any, offset: int) -> Any:
        """The half floats of a part's columns, widened."""
        return halves_at(self.builder, self.builder.add(address, _I64(offset)), self.width)

    def dots(
        self, group: Any, weights: Callable[[int], Any], dot: Dot, offset: bool
    ) -> Iterator[tuple[int, Any]]:
        """Each row with its exact integer dot products of one group, as floats.

        `weights(step)` emits the weights of 4 k; with `offset` they are w + 128.
        """
        for rows in self.row_sets():
            chains = {row: self.start(group, row, dot, offset) for row in rows}
            for row, sums in self.run_steps(group, weights, dot, range(GROUP // 4), chains):
                yield row, self.as_floats(dot.finish(self.builder, sums, None) if dot.finish else sums)

    def scaled_dots(
        self, group: Any, weights: Callable[[int], Any], dot: Dot, scales: Any
    ) -> Iterator[tuple[int, Any]]:
        """Each row with its exact dot products of one group, times a scale for every 16 k, as floats.

        `weights(step)` are w + 32 for w in -32..31; `scales` are <2 n x i16>, two for each column. A product
        is at most 2 * 128 * 16 * 32 * 127 < 2 ** 24, so it is exact as a float, too.
        """
        builder, halves = self.builder, scales.type
        by_half = [self.alike(scales, half) for half in range(2)]
        five = ir.Constant(halves, [5] * halves.count)
        for rows in self.row_sets():
            totals = {}
            for row in rows:
                sums = builder.bitcast(self.spread(group, row, _HALF_SUMS, self.ints), halves)
                totals[row] = sum_products(builder, builder.shl(scales, five), sums)
            for first in range(0, GROUP // 4, dot.steps):
                steps, factors = range(first, first + dot.steps), by_half[first // (GROUP // 8)]
                chains = {row: [dot.zero(self.width)] for row in rows}
                for row, sums in self.run_steps(group, weights, dot, steps, chains):
                    assert dot.finish is not None
                    totals[row] = builder.add(totals[row], dot.finish(builder, sums, factors))
            for row in rows:
                yield row, builder.sitofp(totals[row], self.floats)

    def alike(self, pairs: Any, which: int) -> Any:
        """One number of each pair, twice."""
        lanes = [lane // 2 * 2 + which for lane in range(pairs.type.count)]
        every = ir.Constant(ir.VectorType(I32, len(lanes)), lanes)
        return self.builder.shuffle_vector(pairs, ir.Constant(pairs.type, ir.Undefined), every)

    def row_sets(self) -> list[list[int]]:
        """Rows whose sums grow side by side; one by one where all weights of a group stay in registers."""
        every = list(range(self.rows))
        return [[row] for row in every] if self.isa.wide_registers else [every]

    def run_steps(
        self,
        group: Any,
        weights: Callable[[int], Any],
        dot: Dot,
        steps: range,
        chains: dict[int, list[Any]],
    ) -> Iterator[tuple[int, Any]]:
        """Each row with the sum of its chains after some steps of a group."""
        for step in steps:
            if step == GROUP // 8:
                self.forget()
            vector = weights(step)
            for row, sums in chains.items():
                values = self.spread(group, row, step, self.ints)
                chain = step % len(sums)
                sums[chain] = dot.step(self.builder, sums[chain], vector, values)
        for row, sums in chains.items():
            yield row, functools.reduce(self.builder.add, sums)

    def start(self, group: Any, row: int, dot: Dot, offset: bool) -> list[Any]:
        """What the chains of additions start from."""
        zero = dot.zero(self.width)
        if offset:  # weights are w + 128: start from -128 * sum of the activations
            first = self.spread(group, row, _OFFSET, self.ints)
        else:
            first = zero
            if self.isa.slow_conversion:  # copies of a register would take time from the dots; loads do not
                magic = self.constant(self.ints, _MAGIC_BITS)
                first = _constant_in_memory(self.builder, f"magic_{self.width}", magic)
        return [first, zero] if self.isa.wide_registers else [first]  # two chains hide the latency of one

    def as_floats(self, numbers: Any) -> Any:
        """Ints as floats; where conversion is slow, _MAGIC_BITS was added to the ints before."""
        if self.isa.slow_conversion:
            magic = self.constant(self.floats, _MAGIC)
            return self.builder.fsub(self.builder.bitcast(numbers, self.floats), magic)
        return self.builder.sitofp(numbers, self.floats)

    def accumulate(self, row: int, start: int, a: Any, b: Any) -> None:
        place, name = self.sums[row, start], f"llvm.fma.v{self.width}f32"
        self.builder.store(call(self.builder, name, self.floats, a, b, self.builder.load(place)), place)

    def finish(self) -> None:
        """out = result + bias, or with `added` out += result + bias; a bias at address 0 is none."""
        builder = self.builder
        with builder.if_then(builder.icmp_signed("!=", self.bias, _I64(0))):
            for (_, start), place in self.sums.items():
                bias = _load(builder, self.bias, self.floats, 4 * start)
                builder.store(builder.fadd(builder.load(place), bias), place)
        targets = {
            (row, start): builder.add(
                builder.add(self.out, builder.mul(self.out_stride, _I64(row))), _I64(4 * start)
            )
            for row, start in self.sums
        }
        with builder.if_then(builder.icmp_signed("!=", self.added, _I64(0))):
            for key, place in self.sums.items():
                before = _load(builder, targets[key], self.floats)
                builder.store(builder.fadd(before, builder.load(place)), place)
        for key, place in self.sums.items():
            pointer = builder.inttoptr(targets[key], self.floats.as_pointer())
            builder.store(builder.load(place), pointer).align = 4


def _emit_int8(tile: _Tile) -> None:
    builder, size = tile.builder, GROUP * COLUMNS
    with cgutils.for_range(builder, tile.groups) as loop:
        address = builder.add(tile.weights, builder.mul(loop.index, _I64(size + 2 * COLUMNS)))
        tile.prefetch(address, size + 2 * COLUMNS)
        for start in tile.parts():
            weights = partial(_int8_step, tile, address, start)
            dots = tile.dots(loop.index, weights, tile.isa.dot_wide, tile.isa.offset_weights)
            scale = tile.halves(address, size + 2 * start)
            for row, sums in dots:
                row_scale = tile.spread(loop.index, row, _SCALE, tile.floats)
                tile.accumulate(row, start, sums, builder.fmul(scale, row_scale))


def _int8_step(tile: _Tile, address: Any, start: int, step: int) -> Any:
    return tile.load_bytes(address, 4 * (COLUMNS * step + start))


def _nibble_step(tile: _Tile, address: Any, start: int, step: int) -> Any:
    """The low nibbles are the first half of the k, the high ones the second."""
    half = GROUP // 8
    packed = tile.load_bytes(address, 4 * (COLUMNS * (step % half) + start))
    if step < half:
        return tile.builder.and_(packed, tile.constant(tile.bytes, 15))
    return tile.builder.lshr(packed, tile.constant(tile.bytes, 4))


def _add_group4(tile: _Tile, group: Any, start: int, address: Any, scale: Any, minimum: Any) -> None:
    """One group of one part of the columns; `scale()` and `minimum()` emit theirs when it is time."""
    dots = tile.dots(group, partial(_nibble_step, tile, address, start), tile.isa.dot_narrow, False)
    for row, sums in dots:
        row_scale = tile.spread(group, row, _SCALE, tile.floats)
        tile.accumulate(row, start, sums, tile.builder.fmul(scale(), row_scale))
        tile.accumulate(row, start, minimum(), tile.spread(group, row, _SCALED_SUM, tile.floats))


def _emit_int4(tile: _Tile) -> None:
    builder = tile.builder
    with cgutils.for_range(builder, tile.groups) as loop:
        address = builder.add(tile.weights, builder.mul(loop.index, _I64(20 * COLUMNS)))
        tile.prefetch(address, 20 * COLUMNS)
        for start in tile.parts():
            scale = partial(tile.halves, address, 16 * COLUMNS + 2 * start)
            minimum = partial(tile.halves, address, 18 * COLUMNS + 2 * start)
            _add_group4(tile, loop.index, start, address, scale, minimum)


def _emit_int4k(tile: _Tile) -> None:
    builder = tile.builder

    def scaled(factor: Any, address: Any, offset: int) -> Any:
        return builder.fmul(factor, _bytes_as_floats(tile, address, offset))

    with cgutils.for_range(builder, builder.lshr(tile.groups, _I64(3))) as loop:
        address = builder.add(tile.weights, builder.mul(loop.index, _I64(148 * COLUMNS)))
        starts, side_at = range(0, COLUMNS, tile.width), 128 * COLUMNS
        scales = {start: tile.halves(address, side_at + 2 * start) for start in starts}
        minus = tile.constant(tile.floats, -1.0)
        minimums = {
            start: builder.fmul(tile.halves(address, side_at + 2 * (COLUMNS + start)), minus)
            for start in starts
        }
        tile.prefetch(builder.add(address, _I64(side_at)), 20 * COLUMNS)
        with cgutils.for_range(builder, _I64(8)) as inner:
            nibbles = builder.add(address, builder.mul(inner.index, _I64(16 * COLUMNS)))
            side = builder.add(address, builder.mul(inner.index, _I64(COLUMNS)))
            group = builder.add(builder.mul(loop.index, _I64(8)), inner.index)
            tile.prefetch(nibbles, 16 * COLUMNS)
            for start in tile.parts():
                scale = partial(scaled, scales[start], side, side_at + 4 * COLUMNS + start)
                minimum = partial(scaled, minimums[start], side, side_at + 12 * COLUMNS + start)
                _add_group4(tile, group, start, nibbles, scale, minimum)


def _six_bit_step(tile: _Tile, address: Any, start: int, step: int) -> Any:
    """Nibbles with two more bits above them."""
    high = tile.load_bytes(address, 4 * (COLUMNS * (4 + step % 2) + start))
    shift = 4 - 2 * (step // 2)
    if shift > 0:
        high = tile.builder.shl(high, tile.constant(tile.bytes, shift))
    elif shift < 0:
        high = tile.builder.lshr(high, tile.constant(tile.bytes, -shift))
    high = tile.builder.and_(high, tile.constant(tile.bytes, 0x30))
    return tile.builder.or_(_nibble_step(tile, address, start, step), high)


def _emit_int6k(tile: _Tile) -> None:
    builder, side_at = tile.builder, 8 * 24 * COLUMNS
    pairs = ir.VectorType(I8, 2 * tile.width)
    with cgutils.for_range(builder, builder.lshr(tile.groups, _I64(3))) as loop:
        address = builder.add(tile.weights, builder.mul(loop.index, _I64(210 * COLUMNS)))
        scales = {start: tile.halves(address, side_at + 2 * start) for start in range(0, COLUMNS, tile.width)}
        tile.prefetch(builder.add(address, _I64(side_at)), 18 * COLUMNS)
        with cgutils.for_range(builder, _I64(8)) as inner:
            bits = builder.add(address, builder.mul(inner.index, _I64(24 * COLUMNS)))
            side = builder.add(address, builder.mul(inner.index, _I64(2 * COLUMNS)))
            group = builder.add(builder.mul(loop.index, _I64(8)), inner.index)
            tile.prefetch(bits, 24 * COLUMNS)
            for start in tile.parts():
                of_16 = _load(builder, side, pairs, side_at + 2 * COLUMNS + 2 * start)
                factors = builder.sext(of_16, ir.VectorType(I16, 2 * tile.width))
                weights = partial(_six_bit_step, tile, bits, start)
                for row, sums in tile.scaled_dots(group, weights, tile.isa.dot_scaled, factors):
                    row_scale = tile.spread(group, row, _SCALE, tile.floats)
                    tile.accumulate(row, start, sums, builder.fmul(scales[start], row_scale))


def _bytes_as_floats(tile: _Tile, address: Any, offset: int) -> Any:
    values = tile.builder.zext(_load(tile.builder, address, ir.VectorType(I8, tile.width), offset), tile.ints)
    if tile.isa.slow_conversion:
        values = tile.builder.or_(values, tile.constant(tile.ints, _MAGIC_BITS))
    return tile.as_floats(values)


def _emit_float32(tile: _Tile) -> None:
    builder = tile.builder
    with cgutils.for_range(builder, tile.groups) as loop:
        address = builder.add(tile.weights, builder.mul(loop.index, _I64(GROUP * 4 * COLUMNS)))
        records = builder.add(tile.activations, builder.mul(loop.index, tile.group_stride))
        for step in range(GROUP):
            for start in range(0, COLUMNS, tile.width):
                weights = _load(builder, address, tile.floats, 4 * (step * COLUMNS + start))
                for row in range(tile.rows):
                    value = tile.isa.spread(builder, records, row * GROUP + step, tile.floats)
                    tile.accumulate(row, start, weights, value)


_EMITTERS: dict[int, Callable[[_Tile], None]] = {
    INT8: _emit_int8,
    INT4: _emit_int4,
    INT4K: _emit_int4k,
    INT6K: _emit_int6k,
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
    """Bytes of the weights of one tile of `depth` k."""
    bytes_of_column = {
        INT8: depth // GROUP * 34,
        INT4: depth // GROUP * 20,
        INT4K: depth // 256 * 148,
        INT6K: depth // 256 * 210,
        FLOAT32: depth * 4,
    }
    return COLUMNS * bytes_of_column[weight_format]
