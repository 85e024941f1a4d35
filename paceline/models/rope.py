"""Rotary position embedding: the frequencies of a RopeConfig."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from paceline.models.config import RopeConfig

Float32Array = npt.NDArray[np.float32]


def rope_frequencies(rope: RopeConfig, head_dim: int) -> Float32Array:
    """Radians per position of each rotated pair: float32 [rotated values of a head // 2]."""
    head_dim = rope.dim or head_dim
    # float32 from the first step, because models were trained with this rounding
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    frequencies: Float32Array = 1 / np.power(rope.theta, exponents, dtype=np.float32)
    if rope.frequency_divisors:
        divisors: Float32Array = np.array(rope.frequency_divisors, dtype=np.float32)
        return frequencies / divisors
    if rope.scaling == "linear":
        return frequencies / rope.factor
    if rope.scaling == "llama3":
        return _llama3_frequencies(rope, frequencies)
    if rope.scaling == "yarn":
        return _yarn_frequencies(rope, frequencies, head_dim)
    return frequencies


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
        return head_dim * math.log(wave) / (2 * math.log(rope.theta))

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

    def scale(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1 if factor > 1 else 1.0

    return scale(mscale) / scale(mscale_all_dim) if mscale and mscale_all_dim else scale(1)
