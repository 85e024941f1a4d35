"""Packed weights are the file's own numbers: moved, and rounded only where the file had more than 8 bits."""

from __future__ import annotations

import gguf
import numpy as np
import pytest

from paceline.backends.cpu.tiles.weight_tile import (
    COLUMNS,
    FLOAT32,
    GROUP,
    INT4,
    INT4K,
    INT6K,
    INT8,
    tile_bytes,
)
from paceline.backends.cpu.weights import packing
from paceline.backends.cpu.weights.pack_kernels import DECODERS
from paceline.backends.cpu.weights.packing import address_of, choose_format, pack, pack_matrices
from paceline.models import quantizations
from paceline.models.checkpoint import Tensor
from paceline.models.gguf.blocks import FORMATS
from paceline.models.gguf.reader import GgufTensor
from paceline.models.quantizations import BLOCKS
from tests.backends.cpu.checkpoints import floats, quantized, random_blocks
from tests.backends.cpu.numbers import assert_same_bits
from tests.backends.cpu.unpacking import unpack

KEPT = {"Q4_0": INT4, "Q4_1": INT4, "Q4_K": INT4K, "Q6_K": INT6K, "Q8_0": INT8}
ROUNDED = [kind for kind in FORMATS if kind not in KEPT]


def assert_padded_with_zeros(values: np.ndarray, tensor: Tensor) -> None:
    rows, depth = tensor.shape
    assert not np.any(values[rows:])
    assert not np.any(values[:, depth:])


@pytest.mark.parametrize(("rows", "depth"), [(16, 256), (21, 768), (1, 512)])
@pytest.mark.parametrize("kind", KEPT)
def test_published_weights_are_kept_to_the_last_bit(kind: str, rows: int, depth: int) -> None:
    tensor = random_blocks(kind, rows, depth)
    matrix = pack(tensor, "native")
    assert matrix.weight_format == KEPT[kind]
    values = unpack(matrix)
    # a weight of zero may lose its sign: q * d - 8 d instead of (q - 8) d
    assert_same_bits(values[:rows] + np.float32(0), tensor.float32() + np.float32(0))
    assert_padded_with_zeros(values, tensor)


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0"])
def test_weights_quantized_by_the_gguf_package_are_kept(kind: str) -> None:
    values = np.random.default_rng(8).standard_normal((40, 96), dtype=np.float32)
    tensor = quantized(values, kind)
    found = unpack(pack(tensor, "native"))[:40]
    expected = gguf.quants.dequantize(tensor.data, gguf.GGMLQuantizationType[kind]).astype(np.float32)
    assert_same_bits(found + np.float32(0), expected + np.float32(0))


@pytest.mark.parametrize("quantization", ["native", "int8"])
@pytest.mark.parametrize("kind", ROUNDED)
def test_other_formats_are_rounded_to_8_bits_in_groups_of_32(kind: str, quantization: str) -> None:
    tensor = random_blocks(kind, rows=19, depth=512)
    matrix = pack(tensor, quantization)
    assert matrix.weight_format == INT8
    assert_rounded(unpack(matrix)[:19], tensor.float32())


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q4_K"])
def test_int8_rounds_4_bit_formats_too(kind: str) -> None:
    tensor = random_blocks(kind, rows=16, depth=256)
    matrix = pack(tensor, "int8")
    assert matrix.weight_format == INT8
    assert_rounded(unpack(matrix)[:16], tensor.float32())


@pytest.mark.parametrize("kind", DECODERS)
def test_compiled_decoders_give_the_bits_of_the_readable_ones(kind: str) -> None:
    tensor = random_blocks(kind, rows=32, depth=512)
    found = np.empty(tensor.shape, dtype=np.float32)
    DECODERS[kind](address_of(tensor.data), found.size // FORMATS[kind].block_size, address_of(found))
    assert_same_bits(found, tensor.float32())


def rounded_to_int8(values: np.ndarray) -> np.ndarray:
    """The readable reference of `round_to_int8`, as floats: w = d q with a half d and q from -127 to 127."""
    groups = values.reshape(len(values), -1, GROUP)
    scale = (np.abs(groups).max(axis=2, keepdims=True) / np.float32(127)).astype(np.float16)
    inverse = np.divide(1, scale, out=np.zeros(scale.shape, np.float32), where=scale != 0, dtype=np.float32)
    quants = np.clip(np.rint(groups * inverse), -127, 127)
    return (quants * scale.astype(np.float32)).reshape(values.shape)


def test_rounding_gives_the_bits_of_its_readable_reference() -> None:
    random = np.random.default_rng(5)
    values = random.standard_normal((64, 256), dtype=np.float32)
    # halves that are normal, subnormal, zero; ties; and groups of zeros
    values *= np.exp2(random.integers(-40, 12, (64, 1))).astype(np.float32)
    values[3, :64] = 0
    values[5, :32] = np.arange(32, dtype=np.float32) * np.float32(0.5) * 2.0**-3
    values[5, 31] = 127 * 2.0**-3
    assert_same_bits(
        unpack(pack(floats(values), "int8")) + np.float32(0), rounded_to_int8(values) + np.float32(0)
    )


@pytest.mark.parametrize("threads", [1, 3])
def test_matrices_are_packed_together_as_they_are_alone(
    threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packing, "_PART_VALUES", 40 * 256)  # so that threads share a matrix
    tensors: dict[str, Tensor] = {
        "a": random_blocks("Q4_K", rows=173, depth=256),
        "b": random_blocks("Q6_K", rows=64, depth=512),
        "c": random_blocks("F16", rows=5, depth=70),
    }
    for name, matrix in pack_matrices(tensors, "native", threads).items():
        alone = pack(tensors[name], "native")
        np.testing.assert_array_equal(matrix.data, alone.data)
        assert (matrix.rows, matrix.depth, matrix.weight_format) == (
            alone.rows,
            alone.depth,
            alone.weight_format,
        )


def test_int8_keeps_what_the_file_has_in_8_bits() -> None:
    tensor = random_blocks("Q8_0", rows=16, depth=64)
    assert_same_bits(unpack(pack(tensor, "int8"))[:16] + np.float32(0), tensor.float32() + np.float32(0))


def assert_rounded(found: np.ndarray, values: np.ndarray) -> None:
    """Every value within half a step of the 127 steps to its group's largest magnitude.

    The step itself is a half float: of 11 bits, and no finer than the smallest half.
    """
    groups = values.reshape(len(values), -1, GROUP)
    largest = np.abs(groups).max(axis=2, keepdims=True)
    step = largest / 127
    step_error = np.maximum(step * 2.0**-11, 2.0**-25)
    error = np.abs(found.reshape(groups.shape) - groups)
    assert np.all(error <= 0.5 * (step + step_error) + 127 * step_error)
    assert np.any(error > 0.25 * step)  # and a value between two steps does move: this is no copy


@pytest.mark.parametrize(("rows", "depth"), [(19, 512), (40, 96), (3, 70)])
def test_int4_rounds_to_15_steps_between_the_smallest_and_the_largest_of_a_group(
    rows: int, depth: int
) -> None:
    tensor = random_blocks("F32", rows, depth)
    matrix = pack(tensor, "int4")
    assert matrix.weight_format == INT4
    values = np.pad(tensor.float32(), ((0, 0), (0, -depth % GROUP)))
    groups = values.reshape(rows, -1, GROUP)
    step = (groups.max(axis=2, keepdims=True) - groups.min(axis=2, keepdims=True)) / 15
    error = np.abs(unpack(matrix)[:rows].reshape(groups.shape) - groups)
    assert np.all(error <= 0.51 * step + 2e-3)  # both ends are half floats
    assert np.any(error > 0.25 * step)


def test_what_is_in_the_middle_of_a_group_does_not_reach_its_neighbours() -> None:
    values = np.zeros((16, 96), np.float32)
    values[:, 32:64] = np.random.default_rng(2).standard_normal((16, 32))
    found = unpack(pack(floats(values), "int8"))
    assert not np.any(found[:, :32])
    assert not np.any(found[:, 64:])
    assert np.any(found[:, 32:64])


@pytest.mark.parametrize(("rows", "depth"), [(1, 1), (16, 32), (17, 33), (173, 60), (5, 100)])
@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_odd_sizes_are_padded_with_zeros(quantization: str, rows: int, depth: int) -> None:
    tensor = random_blocks("F32", rows, depth)
    values = unpack(pack(tensor, quantization))
    assert values.shape == (-(-rows // 32) * 32, -(-depth // 32) * 32)
    assert_padded_with_zeros(values, tensor)
    if quantization == "none":
        assert_same_bits(values[:rows, :depth].copy(), tensor.float32())
    else:
        np.testing.assert_allclose(values[:rows, :depth], tensor.float32(), atol=0.03)


@pytest.mark.parametrize("kind", FORMATS)
def test_without_quantization_every_format_is_its_float32_self(kind: str) -> None:
    tensor = random_blocks(kind, rows=18, depth=256)
    matrix = pack(tensor, "none")
    assert matrix.weight_format == FLOAT32
    assert_same_bits(unpack(matrix)[:18], tensor.float32())


@pytest.mark.parametrize("kind", ["Q4_K", "F16"])
def test_a_matrix_of_many_chunks_is_packed_like_its_parts(kind: str) -> None:
    """A matrix is packed 1024 rows of 256 values at a time; no row may notice where a slab ends."""
    tensor = random_blocks(kind, rows=2 * 1024 + 5, depth=256)
    whole = pack(tensor, "native").data
    chunk = 1024 // COLUMNS  # tiles
    for tile in (0, chunk - 1, chunk, chunk + 1, 2 * chunk - 1, 2 * chunk):
        part = tensor.blocks()[COLUMNS * tile : COLUMNS * (tile + 1)]
        alone = pack(GgufTensor((len(part), 256), kind, part), "native").data
        np.testing.assert_array_equal(whole[tile], alone[0])


def test_the_formats_of_the_quantizations() -> None:
    assert {kind: choose_format(kind, "native") for kind in KEPT} == KEPT
    assert {choose_format(kind, "int8") for kind in FORMATS} == {INT8}
    assert {choose_format(kind, "none") for kind in FORMATS} == {FLOAT32}
    assert {choose_format(kind, "int4") for kind in FORMATS} == {INT4}


def test_the_memory_that_a_model_is_said_to_need_is_that_of_its_tiles() -> None:
    for kind in FORMATS:
        size = tile_bytes(choose_format(kind, "native"), 256) / (COLUMNS * 256)
        assert size == BLOCKS["cpu"].get(kind, quantizations.INT8), kind


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q4_K", "Q8_0"])
def test_a_scale_that_is_not_finite_gives_values_that_are_not(kind: str, bad: float) -> None:
    data = random_blocks(kind, 16, 256).data.copy().reshape(-1, FORMATS[kind].block_bytes)
    data[7, :2] = np.array([bad], np.float16).view(np.uint8)
    tensor = GgufTensor((16, 256), kind, data.reshape(16, -1))
    with np.errstate(all="ignore"):
        found, expected = unpack(pack(tensor, "native"))[:16], tensor.float32()
    assert np.isfinite(found[np.isfinite(expected)]).all()
    assert not np.isfinite(found[~np.isfinite(expected)]).any()
