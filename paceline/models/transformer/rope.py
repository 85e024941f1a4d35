"""Rotary position embedding: the frequencies of a RopeConfig, and tables of cosines and sines.

The C library and numpy's vector units each round powers, sines and cosines in their own way, and one bit of
an angle changes logits. Here they are computed by operations that IEEE 754 defines to the last bit, so that
every CPU has the same tables.
"""

from __future__ import annotations

import decimal
import math

import numpy as np
import numpy.typing as npt

from paceline.models.config import RopeConfig, Temperature

Float32Array = npt.NDArray[np.float32]
Float64Array = npt.NDArray[np.float64]

# pi / 2 in three parts: the first two have 33 bits, so their products with counts up to 2 ** 20 are exact
HALF_PI = (1.57079632673412561417, 6.07710050630396597660e-11, 2.02226624879595063154e-21)
# sin(r) = r - r^3/3! + ..., cos(r) = 1 - r^2/2! + ... with |r| <= pi / 4: these terms reach 1e-17
SINE = [(-1) ** term / math.factorial(2 * term + 1) for term in range(9)]
COSINE = [(-1) ** term / math.factorial(2 * term) for term in range(9)]
_TABLE_VALUES = 1 << 15  # computed at a time: they stay in the L2 cache


def rope_frequencies(rope: RopeConfig, head_dim: int) -> Float32Array:
    """Radians per position of each rotated pair: float32 [rotated values of a head // 2]."""
    head_dim = rope.dim or head_dim
    # float32 from the first step, because models were trained with this rounding
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    theta = _dynamic_theta(rope, head_dim) if rope.scaling == "dynamic" else rope.theta
    powers = np.array([_power(theta, float(exponent)) for exponent in exponents], dtype=np.float32)
    frequencies: Float32Array = np.float32(1) / powers
    if listed := _divisors(rope):
        divisors: Float32Array = np.array(listed, dtype=np.float32)
        return frequencies / divisors
    if rope.scaling == "linear":
        return frequencies / rope.factor
    if rope.scaling == "llama3":
        return _llama3_frequencies(rope, frequencies)
    if rope.scaling == "yarn":
        return _yarn_frequencies(rope, frequencies, head_dim)
    if rope.scaling == "proportional":
        frequencies[rope.angles :] = 0
        return frequencies / np.float32(rope.factor)
    return frequencies


def rope_tables(rope: RopeConfig, head_dim: int, positions: int) -> tuple[Float32Array, Float32Array]:
    """Cosines and sines of all angles, times yarn's factor: float32 [positions, rotated values // 2] each."""
    frequencies, factor = rope_frequencies(rope, head_dim), np.float32(rope.attention_factor)
    cosines = np.empty((positions, len(frequencies)), dtype=np.float32)
    sines = np.empty_like(cosines)
    step = max(1, _TABLE_VALUES // max(1, len(frequencies)))
    for start in range(0, positions, step):
        rows = slice(start, min(start + step, positions))
        angles = np.arange(rows.start, rows.stop, dtype=np.float32)[:, None] * frequencies
        cosines[rows], sines[rows] = cosine_and_sine(angles.astype(np.float64))
    return cosines * factor, sines * factor


def cosine_and_sine(angles: Float64Array) -> tuple[Float64Array, Float64Array]:
    """Cosines and sines of angles up to a million, accurate to about 1e-16."""
    quarters = np.rint(angles / (math.pi / 2))
    rest = angles
    for part in HALF_PI:
        rest = rest - quarters * part
    square = rest * rest
    sine, cosine = _series(SINE, square) * rest, _series(COSINE, square)
    turn = quarters.astype(np.int64) & 3
    swapped = (turn & 1) == 1
    first, second = np.where(swapped, sine, cosine), np.where(swapped, cosine, sine)
    return np.where((turn == 1) | (turn == 2), -first, first), np.where(turn >= 2, -second, second)


def _series(coefficients: list[float], square: Float64Array) -> Float64Array:
    total = np.full_like(square, coefficients[-1])
    for coefficient in coefficients[-2::-1]:
        total = total * square + coefficient
    return total


def _power(base: float, exponent: float) -> float:
    """base ** exponent, rounded once."""
    with decimal.localcontext(prec=40):
        return float(decimal.Decimal(base) ** decimal.Decimal(exponent))


def _logarithm(value: float) -> float:
    """The natural logarithm, rounded once."""
    with decimal.localcontext(prec=40):
        return float(decimal.Decimal(value).ln())


def _divisors(rope: RopeConfig) -> tuple[float, ...]:
    """What each frequency is divided by, if a file lists it."""
    if rope.scaling != "longrope":
        return rope.frequency_divisors
    return rope.long_divisors if rope.context > rope.original_max_position else rope.short_divisors


def _dynamic_theta(rope: RopeConfig, head_dim: int) -> float:
    """The RoPE base, raised for a context that is longer than the original one (dynamic NTK scaling)."""
    if rope.context <= rope.original_max_position:
        return rope.theta
    scale = rope.factor * rope.context / rope.original_max_position - (rope.factor - 1)
    return rope.theta * _power(scale, head_dim / (head_dim - 2))


def longrope_attention_factor(factor: float, original_max_position: int) -> float:
    """The factor of cosines and sines that longrope has if a configuration does not say."""
    if factor <= 1:
        return 1.0
    return math.sqrt(1 + _logarithm(factor) / _logarithm(original_max_position))


def _llama3_frequencies(rope: RopeConfig, frequencies: Float32Array) -> Float32Array:
    """Divide low frequencies by `factor`, keep high ones, and interpolate between the two."""
    waves_in_context = rope.original_max_position * frequencies / (2 * math.pi)
    ramp = (waves_in_context - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    kept_share = np.clip(ramp, 0, 1)
    blended: Float32Array = (1 - kept_share) * frequencies / rope.factor + kept_share * frequencies
    return blended


def _yarn_frequencies(rope: RopeConfig, frequencies: Float32Array, head_dim: int) -> Float32Array:
    """Divide low frequencies by `factor`, keep high ones, and interpolate by their index between the two."""

    def index_of(rotations: float) -> float:
        """The (fractional) index of the frequency that turns so often within the original context."""
        wave = rope.original_max_position / (rotations * 2 * math.pi)
        return head_dim * _logarithm(wave) / (2 * _logarithm(rope.theta))

    low, high = index_of(rope.beta_fast), index_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    ramp = (np.arange(head_dim // 2, dtype=np.float32) - low) / max(high - low, 0.001)
    divided_share = np.clip(ramp, 0, 1)
    blended: Float32Array = (1 - divided_share) * frequencies + divided_share * frequencies / rope.factor
    return blended


def yarn_attention_factor(factor: float, mscale: float = 0.0, mscale_all_dim: float = 0.0) -> float:
    """The factor of cosines and sines that yarn has if a configuration does not say."""
    if mscale and mscale_all_dim:
        return yarn_mscale(factor, mscale) / yarn_mscale(factor, mscale_all_dim)
    return yarn_mscale(factor, 1)


def yarn_mscale(factor: float, weight: float) -> float:
    """How much larger queries and keys are in a context that is `factor` times as long."""
    return 0.1 * weight * _logarithm(factor) + 1 if factor > 1 else 1.0


def query_factor_table(temperature: Temperature, positions: int) -> npt.NDArray[np.float32]:
    """The factor of the queries at each position, by decimal arithmetic: libraries differ in the last bit."""
    periods = (np.arange(positions) + temperature.offset) // temperature.period
    strength = decimal.Decimal(temperature.strength)
    by_period = [
        float(1 + strength * decimal.Decimal(period + 1).ln()) for period in range(int(periods[-1]) + 1)
    ]
    return np.array(by_period, dtype=np.float32)[periods]
