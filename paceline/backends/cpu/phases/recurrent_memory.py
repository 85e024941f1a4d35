"""The recurrent state (memory) of 16 columns of a value head, [key_dim][16] floats: update and output.

Every sum has a fixed order, so the bits are the same on every CPU.
"""

from __future__ import annotations

import math

import numpy as np

from paceline.backends.cpu.primitives.compiled import compiled
from paceline.backends.cpu.primitives.simd import (
    add,
    divide,
    exponential,
    fma,
    fma_float,
    larger,
    load,
    load_float,
    multiply,
    spread,
    store,
    sum_lanes,
)

BLOCK = 16  # columns of a memory that are scanned together


@compiled
def softplus(x):  # type: ignore[no-untyped-def]
    """log(1 + exp(x)) = max(x, 0) + log(1 + y) with y = exp(-|x|), by the series of atanh(y / (2 + y))."""
    zero, one = spread(np.float32(0)), spread(np.float32(1))
    minus = multiply(x, spread(np.float32(-1)))
    y = exponential(multiply(larger(x, minus), spread(np.float32(-1))))
    z = divide(y, add(y, add(one, one)))  # at most 1 / 3
    square = multiply(z, z)
    series = spread(np.float32(2 / 17))
    for odd in (15, 13, 11, 9, 7, 5, 3, 1):
        series = fma(series, square, spread(np.float32(2) / np.float32(odd)))
    return fma(z, series, larger(x, zero))


@compiled
def inverse_length(values, width):  # type: ignore[no-untyped-def]
    """1 / |values|."""
    return np.float32(1) / np.float32(math.sqrt(sum_of_squares(values, width) + np.float32(1e-6)))


@compiled
def sum_of_squares(values, width):  # type: ignore[no-untyped-def]
    """The sum of squares of `width` floats, which need not be a multiple of 16."""
    whole, squares = width // 16 * 16, spread(np.float32(0))
    for k in range(0, whole, 16):
        squares = fma(load(values + 4 * k), load(values + 4 * k), squares)
    total = sum_lanes(squares)
    for k in range(whole, width):
        total = fma_float(load_float(values + 4 * k), load_float(values + 4 * k), total)
    return total


@compiled
def product(memory, vector, width):  # type: ignore[no-untyped-def]
    """memory [width][16] times a vector [width], in four sums, which do not wait for each other."""
    zero, whole = spread(np.float32(0)), width // 4 * 4
    first, second, third, fourth = zero, zero, zero, zero
    for k in range(0, whole, 4):
        line, value = memory + 64 * k, vector + 4 * k
        first = fma(spread(load_float(value)), load(line), first)
        second = fma(spread(load_float(value + 4)), load(line + 64), second)
        third = fma(spread(load_float(value + 8)), load(line + 128), third)
        fourth = fma(spread(load_float(value + 12)), load(line + 192), fourth)
    for k in range(whole, width):
        first = fma(spread(load_float(vector + 4 * k)), load(memory + 64 * k), first)
    return add(add(first, second), add(third, fourth))


@compiled
def _update_line(before, memory, key, query, decay, added, total):  # type: ignore[no-untyped-def]
    """One line of `update`; returns `total` plus the line times the query."""
    value = fma(spread(load_float(key)), added, multiply(load(before), decay))
    store(memory, value)
    return fma(spread(load_float(query)), value, total)


@compiled
def update(before, memory, key, query, width, decay, added):  # type: ignore[no-untyped-def]
    """memory = decay * before + key added^T, of [width][16]; returns the product of it and the query."""
    factor, first, second = spread(decay), spread(np.float32(0)), spread(np.float32(0))
    for k in range(0, width // 2 * 2, 2):
        old, new, line = before + 64 * k, memory + 64 * k, 4 * k
        first = _update_line(old, new, key + line, query + line, factor, added, first)
        second = _update_line(old + 64, new + 64, key + line + 4, query + line + 4, factor, added, second)
    if width % 2:
        old, new, line = before + 64 * (width - 1), memory + 64 * (width - 1), 4 * (width - 1)
        first = _update_line(old, new, key + line, query + line, factor, added, first)
    return add(first, second)
