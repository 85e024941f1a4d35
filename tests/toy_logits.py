"""The logits of the toy model: a hash of a path, cached, because tests repeat the same paths."""

from __future__ import annotations

import functools

import numpy as np
import numpy.typing as npt

_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)


@functools.lru_cache(maxsize=1 << 15)
def hashed_logits(path: bytes, vocab: int) -> npt.NDArray[np.float32]:
    """Logits [vocab] after a path of 64-bit numbers, a read-only array."""
    items = np.frombuffer(path, dtype=np.uint64)
    state = _mix(_mix(items * _MULTIPLIER) + np.arange(len(items), dtype=np.uint64)).sum(dtype=np.uint64)
    bits = _mix(state + np.arange(vocab, dtype=np.uint64) * _MULTIPLIER)
    logits = ((bits >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-24)) ** 8 * np.float32(12)
    logits.flags.writeable = False
    return logits


def _mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
