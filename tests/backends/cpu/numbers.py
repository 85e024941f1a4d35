"""What the compiled kernels must compute, in plain numpy, to the last bit."""

from __future__ import annotations

import numpy as np

GROUP = 32  # values that share a scale


def fma(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """a * b + c of float32 arrays with one rounding, as the processor's own instruction does it.

    The product of two floats is exact in double precision; the sum may not be. Rounding it to odd,
    which keeps a trace of what was lost, makes the second rounding, to float32, the right one.
    """
    a, b, c = np.broadcast_arrays(*(np.asarray(x, np.float32).astype(np.float64) for x in (a, b, c)))
    product = a * b
    total = product + c
    back = total - product
    lost = (product - (total - back)) + (c - back)
    bits = total.copy().view(np.int64)
    even_and_inexact = (lost != 0) & (bits & 1 == 0)
    bits += np.where(even_and_inexact, np.where((lost > 0) == (total > 0), 1, -1), 0)
    return bits.view(np.float64).astype(np.float32)


def quantize(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """int8 values and float32 scales of groups of 32: [..., groups, 32] and [..., groups].

    The scale is the largest magnitude / 127; a value is the integer nearest to its share of it, ties to even.
    """
    groups = values.astype(np.float32).reshape(*values.shape[:-1], -1, GROUP)
    largest = np.abs(groups).max(axis=-1)
    scale = largest / np.float32(127)
    inverse = np.divide(np.float32(127), largest, out=np.zeros_like(largest), where=largest > 0)
    # the product of two floats is exact in double precision, so there is one rounding, as in the kernel
    integers = np.rint(groups.astype(np.float64) * inverse[..., None])
    return integers.astype(np.int8), scale


def assert_same_bits(found: np.ndarray, expected: np.ndarray) -> None:
    """Equal bit for bit: stricter than equality, which holds zeros of either sign for equal and no NaN."""
    assert found.dtype == expected.dtype == np.float32
    assert found.shape == expected.shape
    different = np.flatnonzero(np.ravel(found.view(np.uint32) != expected.view(np.uint32)))
    if len(different):
        first = different[0]
        where = tuple(int(i) for i in np.unravel_index(first, found.shape))
        raise AssertionError(
            f"{len(different)} of {found.size} floats differ; the first at {where}: "
            f"{found.flat[first]!r}, expected {expected.flat[first]!r}"
        )
