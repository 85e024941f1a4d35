"""Weights that are unpacked once for many rows: the tile that writes them, and their products by AMX.

Without matrix instructions, ordinary register tiles read the unpacked weights.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from llvmlite import ir
from numba.core import cgutils

from paceline.backends.cpu.primitives.dots import Dot
from paceline.backends.cpu.primitives.emit import I64
from paceline.backends.cpu.primitives.isa import Isa
from paceline.backends.cpu.tiles.products import MATRIX_ROWS
from paceline.backends.cpu.tiles.register_tile import (
    GROUP,
    RECORD,
    UNPACKED4_BYTES,
    UNPACKED6_BYTES,
    Tile,
    load_at,
)

AHEAD = 2  # products computed ahead of their use
RING = 4  # products in the ring buffer, 4 KB: a load waits for an earlier store with the same low 12 bits


class UnpackedTile(Tile):
    """Unpacks a tile: writes its weights and scales to `out` in an unpacked format, to use for many rows."""

    def __init__(self, builder: ir.IRBuilder, isa: Isa, args: list[Any]) -> None:
        super().__init__(builder, 0, isa, args)

    def write(
        self, group: Any, start: int, weights: Callable[[int], Any], scales: list[Any], size: int
    ) -> None:
        """Write the weights of a group and part of the columns, then the scales of each column as floats."""
        place = self.builder.add(self.out, self.builder.mul(group, I64(size * self.columns)))
        for step in range(GROUP // 4):
            self.store(place, 4 * (self.columns * step + start), weights(step))
        for index, value in enumerate(scales):
            self.store(place, GROUP * self.columns + 4 * (self.columns * index + start), value)

    def store(self, address: Any, offset: int, value: Any) -> None:
        pointer = self.builder.inttoptr(self.builder.add(address, I64(offset)), value.type.as_pointer())
        self.builder.store(value, pointer).align = 4

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
        assert minimum is not None
        self.write(group, start, weights, [scale(), minimum()], UNPACKED4_BYTES)

    def add_scaled_group(
        self, group: Any, start: int, weights: Callable[[int], Any], scales: Any, scale: Callable[[], Any]
    ) -> None:
        floats = [self.quarters(scales, half) for half in range(2)]
        if not self.isa.signed_six:
            weights = functools.partial(self.signed_by_four, weights)
        self.write(group, start, weights, [*floats, scale()], UNPACKED6_BYTES)

    def signed_by_four(self, weights: Callable[[int], Any], step: int) -> Any:
        """4 w from stored w + 32: the upper bits, minus the 128 of the offset."""
        shifted = self.builder.shl(weights(step), self.constant(self.bytes, 2))
        return self.builder.xor(shifted, self.constant(self.bytes, 0x80))


class MatrixTile(Tile):
    """16 rows times unpacked weights by matrix instructions: one integer product per group or half group.

    Products go through memory, because float instructions cannot read the matrix unit's registers. A stored
    product can be loaded only after the store has retired, so products are computed AHEAD of their use, also
    across tile boundaries: `tiles` tiles are contiguous.
    """

    def __init__(self, builder: ir.IRBuilder, isa: Isa, args: list[Any]) -> None:
        super().__init__(builder, MATRIX_ROWS, isa, args)
        assert isa.product is not None
        self.product, self.tiles = isa.product, args[-1]
        # of the weights' format, by `unpacked_tiles`
        self.group_bytes = self.depth = self.parts_of_group = self.groups_ahead = 0
        self.ring: Any = None  # address of the products that are ahead
        self.first_weights, self.first_out, self.first_bias = self.weights, self.out, self.bias
        self.groups_before: Any = I64(0)  # those of the tiles before this one
        # of the next product: its number, and its group within a tile
        self.number, self.next_group = (cgutils.alloca_once(builder, I64) for _ in range(2))

    @contextmanager
    def unpacked_tiles(self, group_bytes: int, depth: int) -> Iterator[None]:
        self.group_bytes, self.depth, self.parts_of_group = group_bytes, depth, GROUP // depth
        builder = self.builder
        with builder.goto_entry_block():  # not `alloca_once`, which zero-initializes
            place = builder.alloca(ir.ArrayType(self.ints, RING * MATRIX_ROWS))
            place.align = 64
        self.ring = builder.ptrtoint(place, I64)
        for counter in (self.number, self.next_group):
            builder.store(I64(0), counter)
        self.product.begin(builder, depth)
        self.groups_ahead = AHEAD // self.parts_of_group
        for _ in range(self.groups_ahead):
            self.multiply()
        with cgutils.for_range(builder, self.tiles) as loop:
            self.begin_tile(loop.index)
            yield
            super().finish()
        self.product.end(builder)

    def begin_tile(self, index: Any) -> None:
        """Start a tile: set its weights, its columns of the output and its bias."""
        builder, columns = self.builder, self.builder.mul(index, I64(4 * self.columns))
        self.groups_before = builder.mul(index, self.groups)
        self.weights = self.weights_of(self.groups_before)
        self.out = builder.add(self.first_out, columns)
        is_none = builder.icmp_signed("==", self.first_bias, I64(0))
        self.bias = builder.select(is_none, I64(0), builder.add(self.first_bias, columns))
        for place in self.sums.values():
            builder.store(self.constant(self.floats, 0.0), place)

    def weights_of(self, group: Any) -> Any:
        """The address of the weights of a group, numbered from the first tile's first."""
        size = I64(self.group_bytes * self.columns)
        return self.builder.add(self.first_weights, self.builder.mul(group, size))

    def multiply(self) -> None:
        """Compute the products of the next group; after the last one, the last one's again."""
        builder = self.builder
        number, group = builder.load(self.number), builder.load(self.next_group)
        last = builder.sub(builder.mul(self.tiles, self.groups), I64(1))
        is_group = builder.icmp_signed("<", number, last)
        weights, records = self.weights_of(builder.select(is_group, number, last)), self.record(group, 0)
        is_odd = builder.icmp_unsigned("!=", builder.and_(number, I64(1)), I64(0))
        with builder.if_else(is_odd) as branches:
            for register, branch in zip((self.parts_of_group, 0), branches, strict=True):
                with branch:
                    for part in range(self.parts_of_group):
                        at = part * self.depth
                        self.product.multiply(
                            builder,
                            register + part,
                            builder.add(records, I64(at)),
                            RECORD,
                            builder.add(weights, I64(self.columns * at)),
                            self.depth,
                            self.place(number, part),
                        )
        after = builder.add(group, I64(1))
        is_inside = builder.icmp_signed("<", after, self.groups)
        builder.store(builder.select(is_inside, after, I64(0)), self.next_group)
        builder.store(builder.add(number, I64(1)), self.number)

    def place(self, number: Any, part: int) -> Any:
        """The address of the product of a group or half group, numbered from the first tile's first."""
        index = self.builder.and_(number, I64(RING // self.parts_of_group - 1))
        size = 4 * self.columns * MATRIX_ROWS
        offset = self.builder.mul(index, I64(self.parts_of_group * size))
        return self.builder.add(self.ring, self.builder.add(offset, I64(part * size)))

    def products_of(self, group: Any) -> list[Any]:
        """The addresses of the products of a group of this tile; starts the next products."""
        self.multiply()
        number = self.builder.add(self.groups_before, group)
        return [self.place(number, part) for part in range(self.parts_of_group)]

    def unpacked_dots(self, group: Any, address: Any, start: int) -> Iterator[tuple[int, Any]]:
        (product,) = self.products_of(group)
        for row in range(self.rows):
            yield row, self.row_of(product, row)

    def unpacked_scaled_dots(
        self, group: Any, address: Any, start: int, scales: Sequence[Callable[[], Any]]
    ) -> Iterator[tuple[int, Any]]:
        first, second = self.products_of(group)
        for row in range(self.rows):
            scaled = self.builder.fmul(self.row_of(first, row), scales[0]())
            yield row, self.fma(self.row_of(second, row), scales[1](), scaled)

    def row_of(self, product: Any, row: int) -> Any:
        """A row of a product as floats."""
        ints = load_at(self.builder, product, self.ints, 4 * self.columns * row)
        return self.builder.sitofp(ints, self.floats)

    def finish(self) -> None:
        """Does nothing: `unpacked_tiles` has finished each tile."""
