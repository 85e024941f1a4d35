"""Every tile, by every instruction set this machine can run, gives the floats numpy gives, bit for bit."""

from __future__ import annotations

import functools
import platform
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest

from paceline.backends.cpu.primitives.compiled import compiled, switch
from paceline.backends.cpu.primitives.isa import ISA, ISAS, Isa, emulated, target_features
from paceline.backends.cpu.tiles.weight_tile import (
    COLUMNS,
    FLOAT32,
    FORMAT_NAMES,
    GROUP,
    INT4,
    INT4K,
    INT6K,
    INT8,
    MATRIX_ROWS,
    RECORD,
    TILE_ARGUMENTS,
    UNPACKED4,
    UNPACKED6,
    UNPACKED_FORMATS,
    emit_tile,
    emit_unpacking,
    tile_bytes,
)
from paceline.machine import family
from tests.backends.cpu.numbers import assert_same_bits, fma
from tests.large import REPEATS

GROUPS = 16  # two of the largest blocks
ROWS = 17

NAMES = {**FORMAT_NAMES, UNPACKED4: "unpacked4", UNPACKED6: "unpacked6"}

# those this machine may lack, and their kernels by plain instructions, which it never lacks
EMULATED = [emulated(ISAS[name]) for name in ("amx", "avxvnni", "neon")]


def can_run(isa: Isa) -> bool:
    # without the instructions the CPU would stop at the first tile; 256-bit `vpdpbusd` is encoded in two ways
    needed = isa.needs if isa.family in ("", family(platform.machine())) else {"another machine"}
    same = {"avx512vnni", "avx512vl"} if isa.name == "avxvnni" else needed
    return isa not in ISAS.values() or needed <= target_features() or same <= target_features()


def marks(isa: Isa) -> list[pytest.MarkDecorator]:
    """What cannot run is skipped, and so are emulated instructions that this machine has."""
    own = [isa.name for isa in ISAS.values() if can_run(isa)]
    repeats = [REPEATS] if isa in EMULATED and isa.name.removesuffix("-emulated") in own else []
    return [pytest.mark.skipif(not can_run(isa), reason=f"this CPU has no {isa.name}"), *repeats]


def tile_rows(isa: Isa) -> list[int]:
    """All kinds of tile for the instruction set in use, the smallest and the largest of the others."""
    return sorted({1, 2, 3, isa.tile_rows - 1, isa.tile_rows}) if isa is ISA else [1, isa.tile_rows]


def unpacked_rows(isa: Isa) -> list[int]:
    """Rows of the tiles of weights that were unpacked first."""
    return [MATRIX_ROWS] if isa.product else tile_rows(isa)


def cases() -> list[object]:
    found = []
    for isa in (*ISAS.values(), *EMULATED):
        for weight_format, name in FORMAT_NAMES.items():
            for rows in tile_rows(isa):
                label = f"{isa.name}-{name}-{rows}"
                found.append(pytest.param(isa, weight_format, rows, id=label, marks=marks(isa)))
    return found


@dataclass(frozen=True)
class Weights:
    """The columns of a tile's weights, as the tile reads them and as numpy multiplies them."""

    stream: np.ndarray  # uint8 [bytes of a tile], 8-bit weights as signed bytes
    quants: np.ndarray  # [GROUPS, 32, 16]: int64, or float32 weights
    scale: np.ndarray  # float32 [GROUPS, 16]
    minimum: np.ndarray | None = None  # float32 [GROUPS, 16]


@dataclass(frozen=True)
class Activations:
    """Rows of activations, as records and as numbers."""

    records: np.ndarray  # uint8 [GROUPS, rows, record bytes]
    values: np.ndarray  # [rows, GROUPS, 32]: int64, or float32
    scale: np.ndarray  # float32 [rows, GROUPS]


def by_fours(values: np.ndarray) -> np.ndarray:
    """[groups, k, 16] bytes as [groups, k / 4, 16, 4], the order of a tile's stream, flat per group."""
    groups, depth, columns = values.shape
    return values.reshape(groups, depth // 4, 4, columns).swapaxes(2, 3).reshape(groups, -1)


def as_bytes(values: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(values).view(np.uint8).reshape(len(values), -1)


def random_halves(random: np.random.Generator, *shape: int) -> np.ndarray:
    return random.uniform(-2, 2, shape).astype(np.float16)


def int8_weights(random: np.random.Generator, columns: int) -> Weights:
    quants = random.integers(-128, 128, (GROUPS, GROUP, columns)).astype(np.int8)
    quants[0] = -128  # the largest sums there are: -128 * 127 * 32
    scale = random_halves(random, GROUPS, columns)
    stream = np.concatenate([by_fours(quants).view(np.uint8), as_bytes(scale)], axis=1)
    return Weights(stream.ravel(), quants.astype(np.int64), scale.astype(np.float32))


def nibbles(random: np.random.Generator, columns: int) -> tuple[np.ndarray, np.ndarray]:
    """4-bit weights [GROUPS, 32, 16] and their bytes [GROUPS, 256]: k in the low half, k + 16 in the high."""
    quants = random.integers(0, 16, (GROUPS, GROUP, columns)).astype(np.uint8)
    quants[0] = 15
    return quants.astype(np.int64), by_fours(quants[:, :16] | quants[:, 16:] << 4)


def int4_weights(random: np.random.Generator, columns: int) -> Weights:
    quants, packed = nibbles(random, columns)
    scale, minimum = random_halves(random, GROUPS, columns), random_halves(random, GROUPS, columns)
    stream = np.concatenate([packed, as_bytes(scale), as_bytes(minimum)], axis=1)
    return Weights(stream.ravel(), quants, scale.astype(np.float32), minimum.astype(np.float32))


def int4k_weights(random: np.random.Generator, columns: int) -> Weights:
    quants, packed = nibbles(random, columns)
    d, dmin = random_halves(random, GROUPS // 8, columns), random_halves(random, GROUPS // 8, columns)
    scales = random.integers(0, 64, (GROUPS, columns)).astype(np.uint8)
    minimums = random.integers(0, 64, (GROUPS, columns)).astype(np.uint8)
    parts = [packed.reshape(-1, 8 * 16 * columns), as_bytes(d), as_bytes(dmin)]
    parts += [scales.reshape(-1, 8 * columns), minimums.reshape(-1, 8 * columns)]
    scale = np.repeat(d.astype(np.float32), 8, axis=0) * scales
    minimum = -np.repeat(dmin.astype(np.float32), 8, axis=0) * minimums
    return Weights(np.concatenate(parts, axis=1).ravel(), quants, scale, minimum)


def int6k_weights(random: np.random.Generator, columns: int) -> Weights:
    """A scale for every 16 k belongs to the exact integers, so the quants here are scale * (q - 32)."""
    quants = random.integers(0, 64, (GROUPS, GROUP, columns)).astype(np.uint8)
    scales = random.integers(-128, 128, (GROUPS, 2, columns)).astype(np.int8)
    quants[0], scales[0] = 0, -128  # the largest sums there are
    quants[1], scales[1] = 63, 127
    steps = quants.reshape(GROUPS, 2, 4, 4, columns)
    high = (
        steps[:, :, 3:] >> np.array([0, 2, 4], np.uint8)[:, None, None]
    )  # of the fourth step, in the others'
    packed = by_fours((steps[:, :, :3] | high << 6).reshape(GROUPS, 24, columns))
    d = random_halves(random, GROUPS // 8, columns)
    pairs = scales.swapaxes(1, 2).reshape(-1, 8 * columns * 2)
    parts = [packed.reshape(-1, 8 * 24 * columns), as_bytes(d), pairs.view(np.uint8)]
    scaled = (quants.astype(np.int64) - 32) * np.repeat(scales.astype(np.int64), 16, axis=1)
    return Weights(np.concatenate(parts, axis=1).ravel(), scaled, np.repeat(d.astype(np.float32), 8, axis=0))


def float32_weights(random: np.random.Generator, columns: int) -> Weights:
    values = random.standard_normal((GROUPS, GROUP, columns)).astype(np.float32)
    return Weights(values.view(np.uint8).ravel(), values, np.zeros(0, np.float32))


WEIGHTS: dict[int, Callable[[np.random.Generator, int], Weights]] = {
    INT8: int8_weights,
    INT4: int4_weights,
    INT4K: int4k_weights,
    INT6K: int6k_weights,
    FLOAT32: float32_weights,
}


def int8_activations(random: np.random.Generator) -> Activations:
    values = random.integers(-127, 128, (ROWS, GROUPS, GROUP)).astype(np.int8)
    values[0, 0], values[1, 0] = 127, -127
    scale = random.uniform(0.001, 3, (ROWS, GROUPS)).astype(np.float32)
    sums = values.sum(axis=2, dtype=np.int32)
    halves = values.reshape(ROWS, GROUPS, 2, 16).sum(axis=3, dtype=np.int16)
    words = (x[:, :, None] for x in (scale, scale * sums.astype(np.float32), -128 * sums))
    parts = [values, *words, -halves]
    records = np.concatenate([np.ascontiguousarray(part).view(np.uint8) for part in parts], axis=2)
    assert records.shape[2] == RECORD
    return Activations(np.ascontiguousarray(records.swapaxes(0, 1)), values.astype(np.int64), scale)


def float32_activations(random: np.random.Generator) -> Activations:
    values = random.standard_normal((ROWS, GROUPS, GROUP)).astype(np.float32)
    records = np.ascontiguousarray(values.swapaxes(0, 1)).view(np.uint8)
    return Activations(records, values, np.zeros(0, np.float32))


@functools.cache
def inputs(weight_format: int, columns: int) -> tuple[Weights, Activations]:
    random = np.random.default_rng(weight_format)
    make = float32_activations if weight_format == FLOAT32 else int8_activations
    return WEIGHTS[weight_format](random, columns), make(random)


@functools.cache
def expected(weight_format: int, columns: int) -> np.ndarray:
    """[ROWS, columns]: exact integer sums in a group, one chain of fused multiply-adds over the groups."""
    weights, activations = inputs(weight_format, columns)
    result = np.zeros((ROWS, columns), np.float32)
    if weight_format == FLOAT32:
        for group in range(GROUPS):
            for k in range(GROUP):
                result = fma(weights.quants[group, k], activations.values[:, group, k, None], result)
        return result
    dots = np.einsum("gkc,rgk->grc", weights.quants, activations.values).astype(np.float32)
    sums = activations.values.sum(axis=2).astype(np.float32)
    for group in range(GROUPS):
        scale = activations.scale[:, group, None]
        result = fma(dots[group], weights.scale[group] * scale, result)
        if weights.minimum is not None:
            result = fma(weights.minimum[group], scale * sums[:, group, None], result)
    return result


@functools.cache
def kernel(isa_name: str, weight_format: int) -> Callable[..., None]:
    """All tested tiles of a format, by their number of rows."""
    isa = {isa.name: isa for isa in (*ISAS.values(), *EMULATED)}[isa_name]
    all_rows = tile_rows(isa) if weight_format in FORMAT_NAMES else unpacked_rows(isa)
    tiles = {(rows,): emit_tile(weight_format, rows, isa) for rows in all_rows}
    if weight_format in UNPACKED_FORMATS and isa.unpack_rows:
        tiles[(0,)] = emit_unpacking(weight_format, isa)
    name = f"{isa_name}_{NAMES[weight_format]}".replace("-", "_")
    arguments = "rows, weights, records, group_stride, groups, out, out_stride, bias, added, tiles"
    # by its name, and without a closure, it is found in the cache by the next run
    scope = {"tile": switch(1, TILE_ARGUMENTS, tiles), "__name__": __name__}
    exec(compile(f"def {name}({arguments}):\n    tile({arguments})", __file__, "exec"), scope)
    return compiled(scope[name], cached=True)  # type: ignore[no-any-return]


def signed_six(stream: np.ndarray, columns: int) -> np.ndarray:
    """Bytes of 6-bit weights q as those of q - 32, in the upper bits of a byte."""
    flipped = stream.reshape(-1, 3, 4 * columns) ^ np.array([0x20, 0x20, 0xA0], np.uint8)[:, None]
    return (flipped << 2 | flipped >> 6).reshape(stream.shape)


def packed_stream(isa: Isa, weight_format: int) -> np.ndarray:
    """The bytes of the test's weights as this instruction set stores them."""
    stream = inputs(weight_format, isa.columns)[0].stream.copy()
    if weight_format == INT8 and isa.offset_weights:
        stream.reshape(GROUPS, -1)[:, : GROUP * isa.columns] ^= 0x80
    if weight_format == INT6K and isa.dot_scaled is None:
        weights_of_blocks = stream.reshape(GROUPS // 8, -1)[:, : 192 * isa.columns]
        weights_of_blocks[:] = signed_six(weights_of_blocks, isa.columns)
    return stream


def unpack(isa: Isa, weight_format: int, packed: np.ndarray) -> np.ndarray:
    """A tile as the tiles of many rows read it."""
    size = tile_bytes(UNPACKED_FORMATS[weight_format], GROUPS * GROUP) // COLUMNS * isa.columns
    stream = np.zeros(size, np.uint8)
    run = kernel(isa.name, weight_format)
    run(0, packed.ctypes.data, 0, 0, GROUPS, stream.ctypes.data, 0, 0, 0, 1)
    return stream


def multiply(
    isa: Isa,
    weight_format: int,
    rows: int,
    first: int = 0,
    bias: np.ndarray | None = None,
    before: np.ndarray | None = None,
    unpacked: bool = False,
) -> np.ndarray:
    """Rows first..first + rows of the activations times the weights, by one tile: [rows, columns]."""
    stream, records = packed_stream(isa, weight_format), inputs(weight_format, isa.columns)[1].records
    stride = 24  # floats between two rows of the output: the tile must leave the last 8 alone
    out = np.full((rows, stride), np.float32(77), np.float32)
    if before is not None:
        out[:, : isa.columns] = before
    if unpacked:
        stream = unpack(isa, weight_format, stream)
        weight_format = UNPACKED_FORMATS[weight_format]
    kernel(isa.name, weight_format)(
        rows,
        stream.ctypes.data,
        records.ctypes.data + first * records.strides[1],
        records.strides[0],
        GROUPS,
        out.ctypes.data,
        4 * stride,
        0 if bias is None else bias.ctypes.data,
        int(before is not None),
        1,
    )
    assert np.all(out[:, isa.columns :] == 77)
    return out[:, : isa.columns]


@pytest.mark.parametrize(("isa", "weight_format", "rows"), cases())
def test_a_tile_gives_the_bits_of_numpy(isa: Isa, weight_format: int, rows: int) -> None:
    # hence the same bits for a row alone and among others, and by every instruction set
    for first in range(0, ROWS - rows + 1, rows):
        found = multiply(isa, weight_format, rows, first)
        assert_same_bits(found, expected(weight_format, isa.columns)[first : first + rows])


@pytest.mark.parametrize("weight_format", UNPACKED_FORMATS, ids=lambda name: FORMAT_NAMES[name])
@pytest.mark.parametrize(
    "isa",
    [
        pytest.param(isa, id=isa.name, marks=marks(isa))
        for isa in (*ISAS.values(), *EMULATED)
        if isa.unpack_rows
    ],
)
def test_tiles_that_were_unpacked_first_give_the_same_bits(isa: Isa, weight_format: int) -> None:
    for rows in unpacked_rows(isa):
        found = multiply(isa, weight_format, rows, first=1, unpacked=True)
        assert_same_bits(found, expected(weight_format, isa.columns)[1 : 1 + rows])


@pytest.mark.parametrize("weight_format", UNPACKED_FORMATS, ids=lambda name: FORMAT_NAMES[name])
@pytest.mark.parametrize(
    "isa",
    [pytest.param(isa, id=isa.name, marks=marks(isa)) for isa in (*ISAS.values(), *EMULATED) if isa.product],
)
def test_matrix_instructions_go_on_to_the_next_tile(isa: Isa, weight_format: int) -> None:
    records = inputs(weight_format, isa.columns)[1].records
    tile = unpack(isa, weight_format, packed_stream(isa, weight_format))
    tiles = np.stack([tile, np.zeros_like(tile), tile])
    bias = np.random.default_rng(3).standard_normal(3 * isa.columns, dtype=np.float32)
    out = np.zeros((MATRIX_ROWS, 3 * isa.columns), np.float32)
    kernel(isa.name, UNPACKED_FORMATS[weight_format])(
        MATRIX_ROWS,
        tiles.ctypes.data,
        records.ctypes.data,
        records.strides[0],
        GROUPS,
        out.ctypes.data,
        out.strides[0],
        bias.ctypes.data,
        0,
        len(tiles),
    )
    single = expected(weight_format, isa.columns)[:MATRIX_ROWS]
    assert_same_bits(out, np.concatenate([single, np.zeros_like(single), single], axis=1) + bias)


@pytest.mark.parametrize("weight_format", FORMAT_NAMES, ids=FORMAT_NAMES.values())
def test_a_bias_is_added_to_every_row_and_the_result_to_what_was_there(weight_format: int) -> None:
    random = np.random.default_rng(9)
    bias = random.standard_normal(COLUMNS).astype(np.float32)
    before = random.standard_normal((3, COLUMNS)).astype(np.float32)
    product = expected(weight_format, COLUMNS)[2:5]
    assert_same_bits(multiply(ISA, weight_format, 3, first=2, bias=bias), product + bias)
    assert_same_bits(multiply(ISA, weight_format, 3, first=2, before=before), before + product)
    assert_same_bits(multiply(ISA, weight_format, 3, 2, bias, before), before + (product + bias))


@pytest.mark.parametrize("weight_format", FORMAT_NAMES, ids=FORMAT_NAMES.values())
def test_the_reference_is_the_product_itself(weight_format: int) -> None:
    """The emulated chain, held to double precision: float32 sums of 512 products are this near."""
    weights, activations = inputs(weight_format, COLUMNS)
    matrix, values = weights.quants.astype(np.float64), activations.values.astype(np.float64)
    if weight_format != FLOAT32:
        matrix = matrix * weights.scale[:, None, :]
        values = values * activations.scale[:, :, None]
    if weights.minimum is not None:
        matrix = matrix + weights.minimum[:, None, :]
    exact = np.einsum("gkc,rgk->rc", matrix, values)
    largest = np.einsum("gkc,rgk->rc", np.abs(matrix), np.abs(values))
    assert np.all(np.abs(expected(weight_format, COLUMNS) - exact) <= 1e-6 * largest)


def test_the_instruction_set_in_use_is_one_this_machine_can_run() -> None:
    assert can_run(ISA)
