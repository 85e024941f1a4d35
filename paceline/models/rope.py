"""Rotary position embedding: the frequencies of a RopeConfig."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from paceline.models.config import RopeConfig

Float32Array = npt.NDArray[np.float32]


def rope_frequencies(rope: RopeConfig, head_dim: int) -> Float32Array:
    """Radians per position of each rotated pair: float32 [head_dim // 2]."""
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
    return frequencies


def _llama3_frequencies(rope: RopeConfig, frequencies: Float32Array) -> Float32Array:
    """Divide low frequencies by `factor`, keep high ones, and interpolate between the two."""
    waves_in_context = rope.original_max_position * frequencies / (2 * math.pi)
    ramp = (waves_in_context - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    kept_share = np.clip(ramp, 0, 1)
    blended: Float32Array = (1 - kept_share) * frequencies / rope.factor + kept_share * frequencies
    return blended
