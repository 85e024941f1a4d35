"""A logarithm and an exponential with the same bits on every machine.

The C library, numpy's vector units and a GPU each round log and exp in their own way, and one different
bit in a Gumbel draw can be a different token. These two use only additions, multiplications and one
division of IEEE doubles in a fixed order, so every implementation gives the same bits. Both are accurate to
about one unit in the last place.

Here are their constants. `kernels.py` has the functions, and `tests/verify/reference.py` the same in numpy.
"""

from __future__ import annotations

import math

import numpy as np

# ln 2 in two parts: the first has 32 bits, so that its product with an exponent is exact
LN2_HIGH = 2977044471 / 2**32
LN2_LOW = 1.9082149292705877e-10
LOG2_E = 1.4426950408889634
SQRT_HALF = 0.7071067811865476

# log((1 + s) / (1 - s)) = 2 s (1 + s^2/3 + s^4/5 + ...) with |s| < 0.172: twelve terms reach 1e-18
ATANH = np.array([1.0 / (2 * term + 1) for term in range(12)])
# exp(r) = 1 + r + r^2/2 + ... with |r| < 0.347: fourteen terms reach 1e-17
TAYLOR = np.array([1.0 / math.factorial(term) for term in range(14)])

EXP_LOWEST = -700.0  # smaller arguments are clamped to it: exp is 1e-304, still a normal double
ROUNDER = 1.5 * 2.0**52  # adding and subtracting it rounds to an integer
POWERS = np.array([2.0**-power for power in range(1020)])
