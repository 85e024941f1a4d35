"""The small numeric functions of the compiled pass, held to numpy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from llvmlite import ir
from numba import types

from paceline.backends.cpu.primitives.compiled import compiled
from paceline.backends.cpu.primitives.halves import float_to_half_bits, store_halves
from paceline.backends.cpu.primitives.rows import (
    ACTIVATIONS,
    center,
    gate,
    normalize,
    normalize_head,
    rotate,
    soft_cap,
    write_record,
)
from paceline.backends.cpu.primitives.simd import (
    exponential,
    load,
    operation,
    store,
    write_at,
)
from paceline.backends.cpu.primitives.simd import floats as simd_floats
from paceline.backends.cpu.tiles.weight_tile import GROUP, RECORD
from paceline.models.transformer import blocks
from paceline.models.transformer import model as transformer
from tests.backends.cpu.numbers import assert_same_bits, fma, quantize


@compiled(cached=True)
def _exponentials(values, out, count):  # type: ignore[no-untyped-def]
    for i in range(0, count, 16):
        store(out + 4 * i, exponential(load(values + 4 * i)))


@compiled(cached=True)
def _record(values, record, quantized):  # type: ignore[no-untyped-def]
    write_record(values, record, quantized)


@compiled(cached=True)
def _rotate(values, cosines, sines, half):  # type: ignore[no-untyped-def]
    rotate(values, cosines, sines, half)


@compiled(cached=True)
def _normalize(values, weight, out, width, padded, epsilon):  # type: ignore[no-untyped-def]
    normalize(values, weight, out, width, padded, epsilon)


@compiled(cached=True)
def _normalize_head(values, weight, width, epsilon):  # type: ignore[no-untyped-def]
    normalize_head(values, weight, width, epsilon)


@compiled(cached=True)
def _center(values, out, width, padded):  # type: ignore[no-untyped-def]
    center(values, out, width, padded)


@compiled(cached=True)
def _soft_cap(values, cap, padded):  # type: ignore[no-untyped-def]
    soft_cap(values, cap, padded)


@compiled(cached=True)
def _gate(gates, ups, activation):  # type: ignore[no-untyped-def]
    gate(gates, ups, activation)


def random_floats(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


# Half floats --------------------------------------------------------------------------------------


@operation(types.void, types.int64, simd_floats)
def _store_plain_halves(builder, address, value):  # type: ignore[no-untyped-def]
    bits = float_to_half_bits(builder, value, ir.VectorType(ir.IntType(32), 16))
    write_at(builder, address, builder.trunc(bits, ir.VectorType(ir.IntType(16), 16)), 2)


@compiled(cached=True)
def _to_halves(values, plain, native, count):  # type: ignore[no-untyped-def]
    for i in range(0, count, 16):
        _store_plain_halves(plain + 2 * i, load(values + 4 * i))
        store_halves(native + 2 * i, load(values + 4 * i))


def test_halves_without_an_instruction_are_those_of_numpy_and_of_the_instruction() -> None:
    every = np.arange(0x10000, dtype=np.uint16).view(np.float16)
    every = every[~np.isnan(every)].astype(np.float32)
    random = np.random.default_rng(3).integers(0, 2**32, 2**16, dtype=np.uint32).view(np.float32)
    with np.errstate(over="ignore"):
        middles = (every[:-1] + every[1:]) / 2  # ties, and their neighbours
        values = np.concatenate([every, middles, np.nextafter(middles, 9), np.nextafter(middles, -9), random])
        values = values[~np.isnan(values)]
        values = np.concatenate([values, np.full(-len(values) % 16, np.inf, np.float32)])
        expected = values.astype(np.float16)
    plain, native = np.zeros((2, len(values)), np.float16)
    _to_halves(values.ctypes.data, plain.ctypes.data, native.ctypes.data, len(values))
    np.testing.assert_array_equal(plain.view(np.uint16), expected.view(np.uint16))
    np.testing.assert_array_equal(native.view(np.uint16), expected.view(np.uint16))
    nans = np.full(16, np.nan, np.float32)
    _to_halves(nans.ctypes.data, plain.ctypes.data, native.ctypes.data, 16)
    np.testing.assert_array_equal(plain[:16].view(np.uint16), native[:16].view(np.uint16))


# The exponential -----------------------------------------------------------------------------------


def exp(values: np.ndarray) -> np.ndarray:
    padded = np.zeros(-(-len(values) // 16) * 16, np.float32)
    padded[: len(values)] = values
    out = np.empty_like(padded)
    _exponentials(padded.ctypes.data, out.ctypes.data, len(padded))
    return out[: len(values)]


def test_the_exponential_is_that_of_numpy_to_a_millionth() -> None:
    values = np.linspace(-87, 88, 400_000, dtype=np.float32)
    expected = np.exp(values.astype(np.float64))
    assert np.max(np.abs(exp(values) - expected) / expected) < 1e-6


def test_the_exponential_does_not_fall_where_its_argument_grows() -> None:
    values = np.linspace(-20, 0, 300_000, dtype=np.float32)
    # two units in the last place of slack, where one polynomial ends and the next begins
    assert np.all(np.diff(exp(values)) >= -3e-7 * exp(values)[1:])


def test_the_exponential_of_nothing_is_one_and_of_very_little_exactly_zero() -> None:
    found = exp(np.array([0, -0.0, -87.01, -88, -1000, -3e38, -np.inf], np.float32))
    np.testing.assert_array_equal(found, [1, 1, 0, 0, 0, 0, 0])


def test_the_exponential_of_the_largest_arguments_stays_large() -> None:
    assert np.all(exp(np.array([88.0, 88.5, 100, 3e38, np.inf], np.float32)) >= np.float32(1.6e38))


# Quantized activations -------------------------------------------------------------------------------

random = np.random.default_rng(4)
GROUPS = {
    "random": random.standard_normal(GROUP),
    "zeros": np.zeros(GROUP),
    "one spike": np.eye(1, GROUP, 5)[0] * -3e30,
    "all equal": np.full(GROUP, 0.1),
    "ties": np.array([127.0, *np.arange(-15, 16) + 0.5]),
    "both signs of the largest": np.array([2.0, -2.0] * 16),
    "tiny": random.standard_normal(GROUP) * 1e-30,
    "huge": random.standard_normal(GROUP) * 1e37,
    "wide range": 2.0 ** np.linspace(-40, 3, GROUP),
}


def record_of(values: np.ndarray) -> tuple[np.ndarray, float, float, int]:
    """The int8 values, the scale, the scaled sum, and -128 times the sum, of a written record."""
    inputs, record = values.astype(np.float32), np.full(RECORD, 99, np.uint8)
    _record(inputs.ctypes.data, record.ctypes.data, 1)
    scale, scaled_sum = record[32:40].view(np.float32)
    return record[:32].view(np.int8), scale, scaled_sum, int(record[40:44].view(np.int32)[0])


@pytest.mark.parametrize("values", GROUPS.values(), ids=GROUPS)
def test_a_record_has_the_bits_of_numpy(values: np.ndarray) -> None:
    integers, scale, scaled_sum, offset = record_of(values)
    expected, expected_scale = quantize(values)
    np.testing.assert_array_equal(integers, expected[0])
    total = expected.sum(dtype=np.int64)
    assert_same_bits(
        np.array([scale, scaled_sum]), np.array([expected_scale[0], expected_scale[0] * np.float32(total)])
    )
    assert offset in (-128 * total, 0)  # 0 where the weights are signed


def test_a_record_has_the_sums_of_its_halves_for_weights_with_a_scale_for_each() -> None:
    inputs, record = np.full(GROUP, 2, np.float32), np.full(RECORD, 99, np.uint8)
    inputs[16:] = -1
    _record(inputs.ctypes.data, record.ctypes.data, 1)
    assert record[44:].view(np.int16).tolist() == [-16 * 127, 16 * 64]


@pytest.mark.parametrize("seed", range(5))
def test_a_record_is_within_half_a_step_of_its_values(seed: int) -> None:
    values = random_floats(GROUP, seed=seed) * np.float32(10.0 ** (seed - 2))
    integers, scale, _, _ = record_of(values)
    assert np.abs(integers).max() == 127
    assert np.all(np.abs(integers * np.float64(scale) - values) <= 0.5001 * scale)


@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf, -np.inf])
def test_a_record_of_a_value_that_is_not_finite_is_not_finite(bad: float) -> None:
    values = random_floats(GROUP)
    values[11] = bad
    _, scale, scaled_sum, _ = record_of(values)
    assert not np.isfinite(scale)
    assert not np.isfinite(scaled_sum)


def test_without_quantization_a_record_is_its_values() -> None:
    values, record = random_floats(GROUP), np.zeros(GROUP, np.float32)
    _record(values.ctypes.data, record.ctypes.data, 0)
    assert_same_bits(record, values)


# Rope, norms, SwiGLU ---------------------------------------------------------------------------------


@pytest.mark.parametrize("half", [1, 7, 16, 20, 32, 64])
def test_rope_turns_pairs_with_the_bits_of_numpy(half: int) -> None:
    angles = random_floats(half, seed=2) * 10
    cosines, sines = np.cos(angles), np.sin(angles)
    values = random_floats(2 * half + 3, seed=3)
    first, second = values[:half].copy(), values[half : 2 * half].copy()
    rest = values[2 * half :].copy()
    _rotate(values.ctypes.data, cosines.ctypes.data, sines.ctypes.data, half)
    assert_same_bits(values[:half].copy(), fma(-second, sines, first * cosines))
    assert_same_bits(values[half : 2 * half].copy(), fma(first, sines, second * cosines))
    assert_same_bits(values[2 * half :].copy(), rest)  # the next head is left alone


@pytest.mark.parametrize("width", [1, 16, 60, 96, 576])
def test_rms_norm(width: int) -> None:
    padded = -(-width // 32) * 32
    values, weight, out = (np.zeros(padded, np.float32) for _ in range(3))
    values[:width], weight[:width] = random_floats(width, seed=1) * 3, 1 + random_floats(width, seed=2)
    _normalize(values.ctypes.data, weight.ctypes.data, out.ctypes.data, width, padded, np.float32(1e-5))
    wide = values[:width].astype(np.float64)
    expected = wide / np.sqrt(np.mean(wide**2) + 1e-5) * weight[:width]
    np.testing.assert_allclose(out[:width], expected, rtol=1e-6)
    assert not np.any(out[width:])


@pytest.mark.parametrize("width", [2, 14, 64])
def test_rms_norm_of_a_head(width: int) -> None:
    values, weight = random_floats(width + 1, seed=5), 1 + random_floats(width, seed=6)
    wide, after = values[:width].astype(np.float64), values[width]
    _normalize_head(values.ctypes.data, weight.ctypes.data, width, np.float32(1e-6))
    np.testing.assert_allclose(values[:width], wide / np.sqrt(np.mean(wide**2) + 1e-6) * weight, rtol=1e-6)
    assert values[width] == after


def gated(gates: np.ndarray, ups: np.ndarray, activation: str) -> np.ndarray:
    out = gates.astype(np.float32).copy()
    _gate(out.ctypes.data, ups.astype(np.float32).ctypes.data, ACTIVATIONS[activation])
    return out


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations_are_those_of_torch(activation: str) -> None:
    gates, ups = random_floats(GROUP, seed=7) * 6, random_floats(GROUP, seed=8) * 6
    wide = [torch.from_numpy(values.astype(np.float64)) for values in (gates, ups)]
    expected = blocks.ACTIVATIONS[activation](*wide).numpy()
    first = ups if activation == "relu2" else gates  # it has no gate: `up` takes its place
    np.testing.assert_allclose(gated(first, ups, activation), expected, rtol=2e-6, atol=1e-7)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_activations_of_extreme_values(activation: str) -> None:
    gates = np.zeros(GROUP, np.float32)
    gates[:6] = [np.nan, np.inf, -200, 200, -3e38, 3e38]
    found = gated(gates, np.ones(GROUP, np.float32), activation)
    assert np.isnan(found[0])
    assert found[1] == np.inf
    np.testing.assert_allclose(found[2:5], [0, 200, 0], atol=3)
    assert found[5] > 1e38
    assert not np.any(found[6:])


def test_a_soft_cap_is_that_of_torch() -> None:
    values = np.concatenate(
        (random_floats(58) * 40, np.array([0, -1e-3, 500, -500, np.inf, -np.inf]))
    ).astype(np.float32)
    expected = transformer.soft_cap(torch.from_numpy(values).double(), 30.0).numpy()
    _soft_cap(values.ctypes.data, np.float32(30), len(values))
    np.testing.assert_allclose(values, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("width", [64, 70, 5])
def test_centering_subtracts_the_mean_and_leaves_the_padding_zero(width: int) -> None:
    padded = -(-width // GROUP) * GROUP
    values, out = np.zeros(padded, np.float32), np.full(padded, np.nan, np.float32)
    values[:width] = random_floats(width, seed=3) + 2
    _center(values.ctypes.data, out.ctypes.data, width, padded)
    np.testing.assert_allclose(out[:width], values[:width] - values[:width].mean(dtype=np.float64), atol=1e-6)
    assert not np.any(out[width:])


def test_a_record_of_the_smallest_numbers_agrees_with_itself() -> None:
    """Near the smallest float the inverse of the scale is no number; the parts must still fit."""
    for magnitude in (1e-36, 1e-37, 1e-38, 1e-40, 1e-44):
        values = random_floats(GROUP) * np.float32(magnitude)
        integers, scale, scaled_sum, offset = record_of(values)
        total = int(integers.sum(dtype=np.int64))
        assert scaled_sum == scale * np.float32(total)
        assert offset in (-128 * total, 0)
