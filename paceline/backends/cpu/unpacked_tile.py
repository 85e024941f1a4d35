"""Tiles of weights that are unpacked once for many rows: how they are written, and multiplied by AMX.

Where there are no matrix instructions, the tiles of fewer rows in register_tile.py read them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from llvmlite import ir

from paceline.backends.cpu.dots import Dot
from paceline.backends.cpu.emit import I64
from paceline.backends.cpu.isa import Isa
from paceline.backends.cpu.products import MATRIX_ROWS
from paceline.backends.cpu.register_tile import (
    GROUP,
    RECORD,
    UNPACKED4_BYTES,
    UNPACKED6_BYTES,
    Tile,
    load_at,
)


class UnpackedTile(Tile):
    """Writes the weights and scales of a tile to `out` as the tiles of unpacked formats read them.

    Many rows then meet weights that were unpacked once.
    """

    def __init__(self, builder: ir.IRBuilder, isa: Isa, args: list[Any]) -> None:
        super().__init__(builder, 0, isa, args)

    def write(
        self, group: Any, start: int, weights: Callable[[int], Any], scales: list[Any], size: int
    ) -> None:
        """The weights of a group and part of the columns, and floats of each column behind those."""
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
        """4 w of weights w + 32: those in the upper bits, without the 128 that is too much."""
        shifted = self.builder.shl(weights(step), self.constant(self.bytes, 2))
        return self.builder.xor(shifted, self.constant(self.bytes, 0x80))


class MatrixTile(Tile):
    """16 rows of unpacked weights by matrix instructions: an integer product for each group, or half of one.

    It goes through memory: float instructions cannot read the matrix unit's registers.
    """

    def __init__(self, builder: ir.IRBuilder, isa: Isa, args: list[Any]) -> None:
        super().__init__(builder, MATRIX_ROWS, isa, args)
        with builder.goto_entry_block():  # not by `alloca_once`, which fills them with zeros for every tile
            self.products = [builder.alloca(ir.ArrayType(self.ints, MATRIX_ROWS)) for _ in range(2)]
        for place in self.products:
            place.align = 64
        assert isa.product is not None
        isa.product.begin(builder)

    def unpacked_dots(self, group: Any, address: Any, start: int) -> Iterator[tuple[int, Any]]:
        product = self.multiply(group, address, 0, GROUP)
        for row in range(self.rows):
            yield row, self.row_of(product, row)

    def unpacked_scaled_dots(
        self, group: Any, address: Any, start: int, scales: Sequence[Callable[[], Any]]
    ) -> Iterator[tuple[int, Any]]:
        half = GROUP // 2
        first, second = (self.multiply(group, address, at, half) for at in (0, half))
        for row in range(self.rows):
            scaled = self.builder.fmul(self.row_of(first, row), scales[0]())
            yield row, self.fma(self.row_of(second, row), scales[1](), scaled)

    def multiply(self, group: Any, address: Any, first: int, depth: int) -> Any:
        """The address of the product of `depth` k of a group, from `first` on."""
        builder = self.builder
        weights = builder.add(address, I64(self.columns * first))
        activations = builder.add(self.record(group, 0), I64(first))
        out = builder.ptrtoint(self.products[first // depth], I64)
        assert self.isa.product is not None
        self.isa.product.multiply(builder, activations, RECORD, weights, depth, out)
        return out

    def row_of(self, product: Any, row: int) -> Any:
        """A row of a product as floats."""
        ints = load_at(self.builder, product, self.ints, 4 * self.columns * row)
        return self.builder.sitofp(ints, self.floats)

    def finish(self) -> None:
        assert self.isa.product is not None
        self.isa.product.end(self.builder)
        super().finish()
