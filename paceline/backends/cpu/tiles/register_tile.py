"""Tile: the base of register tiles of all weight formats. Emits loads, dot products of a group, and sums.

See weight_tile.py for the formats and for activation records.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from llvmlite import ir
from numba.core import cgutils

from paceline.backends.cpu.primitives.dots import Dot, sum_products
from paceline.backends.cpu.primitives.emit import I8, I16, I32, call, join, load_as_written
from paceline.backends.cpu.primitives.halves import halves_at
from paceline.backends.cpu.primitives.isa import ISA, Isa

COLUMNS = ISA.columns  # outputs of one tile
GROUP = 32  # k per activation scale, and per weight scale of every format but float32
RECORD = 48  # bytes of one row's quantized activations of one group
UNPACKED4_BYTES = GROUP + 8  # of a group and column, unpacked: 4-bit weights, float scale and minimum
UNPACKED6_BYTES = GROUP + 12  # 6-bit weights, floats: a quarter of each half's scale, the common scale
PREFETCH = 4096  # bytes that tiles prefetch ahead
NEAR_PREFETCH = 2048  # the same for few rows, where the hardware prefetcher reads far ahead

# Words of a record after the values
SCALE, SCALED_SUM, OFFSET, HALF_SUMS = 8, 9, 10, 11
MAGIC_BITS = 0x4B400000
_MAGIC = 1.5 * 2**23  # a float whose lowest bit is worth 1: adding an int to its bits adds it to the float
_QUARTER_BITS, _QUARTER_MAGIC = 0x4A400000, 1.5 * 2**21  # the same, of a bit that is worth 1/4
_I64 = ir.IntType(64)


def load_at(builder: ir.IRBuilder, address: Any, kind: ir.Type, offset: int = 0) -> Any:
    """The value of type `kind` at a byte address that may be unaligned."""
    if offset:
        address = builder.add(address, _I64(offset))
    value = builder.load(builder.inttoptr(address, kind.as_pointer()))
    value.align = 4 if isinstance(kind, ir.IntType | ir.FloatType) else 1
    return value


def _constant_in_memory(builder: ir.IRBuilder, name: str, value: ir.Constant) -> Any:
    """A constant that LLVM must load from memory where it is used."""
    place = builder.module.globals.get(name) or cgutils.global_constant(builder, name, value)
    return load_as_written(builder, place, value.type)


class Tile:
    """Emits one register tile; the base for all formats.

    With few registers, columns are computed 8 at a time, and each weight is used for all rows before the next
    is loaded. With 16-lane registers, all weights of a group stay in registers, and rows are computed one by
    one.
    """

    def __init__(self, builder: ir.IRBuilder, rows: int, isa: Isa, args: list[Any]) -> None:
        self.builder, self.rows, self.isa = builder, rows, isa
        self.weights, self.activations, self.group_stride, self.groups = args[:4]
        self.out, self.out_stride, self.bias, self.added = args[4:8]
        self.columns, self.width = isa.columns, 16 if isa.wide_registers else 8
        self.floats, self.ints = ir.VectorType(ir.FloatType(), self.width), ir.VectorType(I32, self.width)
        self.bytes = ir.VectorType(I8, 4 * self.width)
        starts = range(0, self.columns, self.width)
        self.sums = {
            (row, start): cgutils.alloca_once(builder, self.floats) for row in range(rows) for start in starts
        }
        for place in self.sums.values():
            builder.store(self.constant(self.floats, 0.0), place)
        self.prefetch_distance = self.distance()
        self.keeps_weights = isa.single_loads and rows <= 2  # few rows leave registers free

    def distance(self) -> Any:
        """How many bytes ahead weights are prefetched.

        With single_loads, a number that LLVM cannot see: otherwise it would use the prefetch address as base,
        and compute the address of every load from it.
        """
        if not self.isa.single_loads:
            return _I64(PREFETCH)
        bytes_ahead = NEAR_PREFETCH if self.rows <= 2 else PREFETCH
        return _constant_in_memory(self.builder, f"prefetch_{bytes_ahead}", _I64(bytes_ahead))

    def prefetch(self, address: Any, size: int) -> None:
        """Prefetch `size` bytes of weights that are read later, in this tile or the next."""
        builder, ahead = self.builder, self.builder.add(address, self.prefetch_distance)
        for line in range(0, size, 64):
            place = builder.inttoptr(builder.add(ahead, _I64(line)), I8.as_pointer())
            call(builder, "llvm.prefetch.p0", ir.VoidType(), place, I32(0), I32(3), I32(1))

    def prefetch_records(self, group: Any, ahead: int) -> None:
        """Prefetch the records of many rows, `ahead` groups ahead: in a prompt they are not in L1."""
        builder = self.builder
        if self.rows > 2:
            place = self.record(builder.add(group, _I64(ahead)), 0)
            for line in range(0, self.rows * RECORD, 64):
                pointer = builder.inttoptr(builder.add(place, _I64(line)), I8.as_pointer())
                call(builder, "llvm.prefetch.p0", ir.VoidType(), pointer, I32(0), I32(3), I32(1))

    def constant(self, kind: ir.VectorType, value: float) -> Any:
        return ir.Constant(kind, [value] * kind.count)

    def parts(self) -> Iterator[int]:
        """The first column of each part of the tile."""
        for start in range(0, self.columns, self.width):
            yield start
            self.forget()

    def forget(self) -> None:
        """Make LLVM reload values instead of keeping them: a load is cheaper than spilling a register."""
        if not self.isa.wide_registers and not self.keeps_weights:
            self.builder.fence("seq_cst", "singlethread")

    def record(self, group: Any, row: int) -> Any:
        """The address of the record of a group and row."""
        records = self.builder.add(self.activations, self.builder.mul(group, self.group_stride))
        return self.builder.add(records, _I64(row * RECORD))

    def spread(self, group: Any, row: int, word: int, kind: ir.VectorType) -> Any:
        """A word of a record, broadcast to all lanes."""
        return self.isa.spread(self.builder, self.record(group, row), word, kind)

    def load_bytes(self, address: Any, offset: int) -> Any:
        if not self.isa.single_loads:
            return load_at(self.builder, address, self.bytes, offset)
        register, parts = ir.VectorType(I8, 16), []
        for part in range(offset, offset + 4 * self.width, 16):
            place = self.builder.inttoptr(self.builder.add(address, _I64(part)), register.as_pointer())
            parts.append(load_as_written(self.builder, place, register))
        return join(self.builder, parts)

    def load_floats(self, address: Any, offset: int) -> Any:
        """The floats of a part's columns."""
        return self.builder.bitcast(self.load_bytes(address, offset), self.floats)

    def halves(self, address: Any, offset: int) -> Any:
        """The half floats of a part's columns, widened."""
        return halves_at(self.builder, self.builder.add(address, _I64(offset)), self.width)

    def dots(
        self, group: Any, weights: Callable[[int], Any], dot: Dot, offset: bool
    ) -> Iterator[tuple[int, Any]]:
        """(row, its exact integer dot products of one group, as floats), for each row.

        `weights(step)` emits the weights of 4 k; with `offset` they are w + 128.
        """
        if self.isa.wide_registers:
            self.prefetch_records(group, 2)
        for rows in self.row_sets():
            chains = {row: self.start(group, row, dot, offset) for row in rows}
            for row, sums in self.run_steps(group, weights, dot, range(GROUP // 4), chains):
                yield row, self.as_floats(dot.finish(self.builder, sums, None) if dot.finish else sums)

    def scaled_dots(
        self, group: Any, weights: Callable[[int], Any], dot: Dot, scales: Any
    ) -> Iterator[tuple[int, Any]]:
        """(row, its exact dot products of one group, times a scale for every 16 k, as floats), for each row.

        `weights(step)` are w + 32 for w in -32..31; `scales` are <2 n x i8>, two for each column. A product
        is at most 2 * 128 * 16 * 32 * 127 < 2 ** 24, so it is exact as a float, too.
        """
        if self.isa.wide_registers:
            self.prefetch_records(group, 2)
        builder, halves = self.builder, ir.VectorType(I16, scales.type.count)
        scales = builder.sext(scales, halves)
        by_half = [self.alike(scales, half) for half in range(2)]
        five = ir.Constant(halves, [5] * halves.count)
        for rows in self.row_sets():
            totals = {}
            for row in rows:
                sums = builder.bitcast(self.spread(group, row, HALF_SUMS, self.ints), halves)
                totals[row] = sum_products(builder, builder.shl(scales, five), sums)
            for first in range(0, GROUP // 4, dot.steps):
                steps, factors = range(first, first + dot.steps), by_half[first // (GROUP // 8)]
                chains = {row: [dot.zero(self.width)] for row in rows}
                for row, sums in self.run_steps(group, weights, dot, steps, chains):
                    assert dot.finish is not None
                    totals[row] = builder.add(totals[row], dot.finish(builder, sums, factors))
            for row in rows:
                yield row, builder.sitofp(totals[row], self.floats)

    def signed_scaled_dots(
        self, group: Any, weights: Callable[[int], Any], scales: Sequence[Callable[[], Any]]
    ) -> Iterator[tuple[int, Any]]:
        """The same as `scaled_dots`, for weights 4 w and functions that emit a quarter of each half's scales.

        Scales are floats here; the products are exact, too.
        """
        totals: dict[int, Any] = {}
        dot = self.isa.dot_wide
        for half, scale in enumerate(scales):
            chains = {row: self.start(group, row, dot, False) for row in range(self.rows)}
            steps = range(GROUP // 8 * half, GROUP // 8 * (half + 1))
            for row, sums in self.run_steps(group, weights, dot, steps, chains):
                numbers = self.as_floats(sums)
                first = totals.get(row)
                totals[row] = (
                    self.fma(numbers, scale(), first) if first else self.builder.fmul(numbers, scale())
                )
        yield from totals.items()

    def quarters(self, pairs: Any, which: int) -> Any:
        """A quarter of one signed byte of each pair, as floats."""
        offset = self.builder.xor(pairs, ir.Constant(pairs.type, [0x80] * pairs.type.count))
        floats = self.with_magic(offset, list(range(which, pairs.type.count, 2)), _QUARTER_BITS)
        return self.builder.fsub(floats, self.constant(self.floats, _QUARTER_MAGIC + 32))

    def with_magic(self, numbers: Any, lanes: list[int], magic: int) -> Any:
        """Bytes of a vector as the lowest bytes of floats whose other bits are `magic`."""
        count = numbers.type.count
        constants = ir.Constant(numbers.type, list(magic.to_bytes(4, "little")) * (count // 4))
        mask = [index for lane in lanes for index in (lane, count + 1, count + 2, count + 3)]
        places = ir.Constant(ir.VectorType(I32, len(mask)), mask)
        return self.builder.bitcast(self.builder.shuffle_vector(numbers, constants, places), self.floats)

    def multiplier(self, factors: Any) -> Callable[[Any, int], Any]:
        """A function (address, offset) -> the bytes there, one per column of a part, times the factors."""
        builder, kind = self.builder, ir.VectorType(I8, self.width)
        if not self.isa.slow_conversion:
            return lambda address, offset: builder.fmul(
                factors,
                builder.sitofp(builder.zext(load_at(builder, address, kind, offset), self.ints), self.floats),
            )
        # (magic + byte) * factor - magic * factor is exact; loading the accumulator is free, a copy is not
        place = cgutils.alloca_once(builder, self.floats)
        builder.store(builder.fmul(factors, self.constant(self.floats, -_MAGIC)), place)

        def multiply(address: Any, offset: int) -> Any:
            numbers = load_at(builder, address, kind, offset)
            floats = self.with_magic(numbers, list(range(self.width)), MAGIC_BITS)
            return self.fma(floats, factors, load_as_written(builder, place, self.floats))

        return multiply

    def alike(self, pairs: Any, which: int) -> Any:
        """One number of each pair, twice."""
        lanes = [lane // 2 * 2 + which for lane in range(pairs.type.count)]
        every = ir.Constant(ir.VectorType(I32, len(lanes)), lanes)
        return self.builder.shuffle_vector(pairs, ir.Constant(pairs.type, ir.Undefined), every)

    def row_sets(self) -> list[list[int]]:
        """Groups of rows that are computed together; single rows if all weights stay in registers."""
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
        """(row, the sum of its chains after some steps of a group), for each row."""
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
        """The initial values of a row's chains of additions."""
        zero = dot.zero(self.width)
        if offset:  # weights are w + 128: start from -128 * sum of the activations
            first = self.spread(group, row, OFFSET, self.ints)
        else:
            first = zero
            if self.isa.slow_conversion:  # a load does not compete with dot products; a register copy does
                magic = self.constant(self.ints, MAGIC_BITS)
                first = _constant_in_memory(self.builder, f"magic_{self.width}", magic)
        return [first, zero] if self.isa.wide_registers else [first]  # two chains hide the latency of one

    def as_floats(self, numbers: Any) -> Any:
        """Ints as floats; where conversion is slow, MAGIC_BITS were added to the ints before."""
        if self.isa.slow_conversion:
            magic = self.constant(self.floats, _MAGIC)
            return self.builder.fsub(self.builder.bitcast(numbers, self.floats), magic)
        return self.builder.sitofp(numbers, self.floats)

    def add_group(
        self,
        group: Any,
        start: int,
        weights: Callable[[int], Any],
        dot: Dot,
        scale: Callable[[], Any],
        minimum: Callable[[], Any] | None = None,
        offset: bool = False,
    ) -> None:
        """Add the products of a group and part of the columns; `scale` and `minimum` emit their loads."""
        self.add_dots(group, start, self.dots(group, weights, dot, offset), scale, minimum)

    def add_scaled_group(
        self, group: Any, start: int, weights: Callable[[int], Any], scales: Any, scale: Callable[[], Any]
    ) -> None:
        """The same for 6-bit weights, with bytes `scales`, two for each column, beside the `scale`."""
        dot = self.isa.dot_scaled
        if dot is not None:
            self.add_dots(group, start, self.scaled_dots(group, weights, dot, scales), scale)
            return
        floats = [functools.cache(functools.partial(self.quarters, scales, half)) for half in range(2)]
        self.add_dots(group, start, self.signed_scaled_dots(group, weights, floats), scale)

    def add_dots(
        self,
        group: Any,
        start: int,
        dots: Iterator[tuple[int, Any]],
        scale: Callable[[], Any],
        minimum: Callable[[], Any] | None = None,
    ) -> None:
        """Add each row's dot products of one part of the columns, times the scales, and the minimums."""
        for row, sums in dots:
            row_scale = self.spread(group, row, SCALE, self.floats)
            self.accumulate(row, start, sums, self.builder.fmul(scale(), row_scale))
            if minimum is not None:
                self.accumulate(row, start, minimum(), self.spread(group, row, SCALED_SUM, self.floats))

    @contextmanager
    def unpacked_tiles(self, group_bytes: int, depth: int) -> Iterator[None]:
        """Wraps the code of an unpacked tile: bytes of a group and column, and the k that share a scale."""
        yield

    def unpacked_dots(self, group: Any, address: Any, start: int) -> Iterator[tuple[int, Any]]:
        """(row, its dot products of a group of unpacked weights, as floats), for each row."""
        return self.dots(group, self.stored(address, start), self.isa.dot_wide, offset=False)

    def unpacked_scaled_dots(
        self, group: Any, address: Any, start: int, scales: Sequence[Callable[[], Any]]
    ) -> Iterator[tuple[int, Any]]:
        """The same for weights 4 w, with a quarter of the scales of each half."""
        return self.signed_scaled_dots(group, self.stored(address, start), scales)

    def stored(self, address: Any, start: int) -> Callable[[int], Any]:
        """The weights of each step of 4 k, as they are stored."""
        return lambda step: self.load_bytes(address, 4 * (self.columns * step + start))

    def fma(self, a: Any, b: Any, c: Any) -> Any:
        """a * b + c with one rounding."""
        return call(self.builder, f"llvm.fma.v{self.width}f32", self.floats, a, b, c)

    def accumulate(self, row: int, start: int, a: Any, b: Any) -> None:
        place = self.sums[row, start]
        self.builder.store(self.fma(a, b, self.builder.load(place)), place)

    def finish(self) -> None:
        """out = result + bias, or with `added` out += result + bias; a bias at address 0 is none."""
        builder = self.builder
        with builder.if_then(builder.icmp_signed("!=", self.bias, _I64(0))):
            for (_, start), place in self.sums.items():
                bias = load_at(builder, self.bias, self.floats, 4 * start)
                builder.store(builder.fadd(builder.load(place), bias), place)
        targets = {
            (row, start): builder.add(
                builder.add(self.out, builder.mul(self.out_stride, _I64(row))), _I64(4 * start)
            )
            for row, start in self.sums
        }
        with builder.if_then(builder.icmp_signed("!=", self.added, _I64(0))):
            for key, place in self.sums.items():
                before = load_at(builder, targets[key], self.floats)
                builder.store(builder.fadd(before, builder.load(place)), place)
        for key, place in self.sums.items():
            pointer = builder.inttoptr(targets[key], self.floats.as_pointer())
            builder.store(builder.load(place), pointer).align = 4
