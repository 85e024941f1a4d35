"""Tables of angles: accurate, and the same bits on every machine."""

from __future__ import annotations

import hashlib
import math

import numpy as np
import torch

from paceline.models.config import RopeConfig, Temperature
from paceline.models.transformer.attention import query_factors
from paceline.models.transformer.rope import (
    cosine_and_sine,
    query_factor_table,
    rope_frequencies,
    rope_tables,
)


def digest(*arrays: np.ndarray) -> str:
    return hashlib.sha256(b"".join(array.astype("<f4").tobytes() for array in arrays)).hexdigest()[:16]


def test_cosines_and_sines_are_accurate_to_the_last_bits_of_a_double() -> None:
    small, large = np.linspace(0, 7, 2001), np.float32(1e6) * np.linspace(0, 1, 2001, dtype=np.float32)
    quarters = np.float32(math.pi / 2) * np.arange(2001, dtype=np.float32)  # where one of the two vanishes
    for angles in (small, large.astype(np.float64), quarters.astype(np.float64)):
        cosines, sines = cosine_and_sine(angles)
        np.testing.assert_allclose(cosines, [math.cos(angle) for angle in angles], rtol=0, atol=2.3e-16)
        np.testing.assert_allclose(sines, [math.sin(angle) for angle in angles], rtol=0, atol=2.3e-16)


def test_tables_hold_the_angle_of_each_position_and_frequency() -> None:
    rope = RopeConfig(theta=1000.0)
    cosines, sines = rope_tables(rope, 20, 3000)  # several slabs of positions
    angles = np.arange(3000, dtype=np.float32)[:, None] * rope_frequencies(rope, 20)
    np.testing.assert_allclose(cosines, np.cos(angles.astype(np.float64)), rtol=0, atol=6e-8)
    np.testing.assert_allclose(sines, np.sin(angles.astype(np.float64)), rtol=0, atol=6e-8)


def test_tables_have_the_same_bits_everywhere() -> None:
    llama3 = RopeConfig(
        theta=500000.0, scaling="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
        original_max_position=8192,
    )  # fmt: skip
    assert digest(*rope_tables(RopeConfig(theta=100000.0), 64, 2048)) == "3f0006661c3c0111"
    assert digest(*rope_tables(llama3, 128, 2048)) == "8fe14ebed295b4d0"


def test_the_factors_of_queries_are_those_of_torch() -> None:
    temperature = Temperature(strength=0.3, period=11, offset=1, with_rope=True)
    expected = query_factors(temperature, torch.arange(500)).numpy()
    np.testing.assert_allclose(query_factor_table(temperature, 500), expected, rtol=1e-6)
