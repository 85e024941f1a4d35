"""Noise as a pure function of (seed, position, token id): Philox4x32-10 and the Gumbel noise made of it.

The generator (Salmon et al. 2011) is counter-based and has no state, so a drafter, a preempted request or
another device recomputes the noise of a position with the same bits:

    counter = (id // 2, position low, position high, lane)     key = (seed low, seed high)
    lane    = stream | node << 8       what the noise is for; the target's own choice is lane 0
    an even id takes output words 0 and 1, an odd id words 2 and 3; their upper 52 bits are k
    uniform = (k + 0.5) / 2**52        exact, never 0 nor 1
    gumbel  = -log(-log(uniform))      with the logarithm of floats.py

`kernels.py` has it compiled. `tests/verify/reference.py` has it in numpy, to be read; a test compares the
two bit for bit.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

MASK64 = (1 << 64) - 1
STREAM_TOKENS = 0  # the target's own choice
STREAM_SEEDS = 1  # seeds derived from seeds
STREAM_DRAFT = 2  # tokens that a drafter samples
STREAM_ACCEPT = 3  # accept or reject, for each drafted node
STREAM_RESIDUAL = 4  # the token after the accepted path

MASK32 = np.uint64(0xFFFFFFFF)
MULTIPLIER_0 = np.uint64(0xD2511F53)
MULTIPLIER_1 = np.uint64(0xCD9E8D57)
WEYL_0 = 0x9E3779B9
WEYL_1 = 0xBB67AE85
SHIFT_32 = np.uint64(32)
SHIFT_12 = np.uint64(12)
ONE = np.uint64(1)
UNIT = 2.0**-52
_MULTIPLIER_0, _MULTIPLIER_1 = int(MULTIPLIER_0), int(MULTIPLIER_1)


def lane(stream: int, node: int) -> int:
    """The last word of the counter for one drafted node (or number) of a stream."""
    assert 0 <= node < 1 << 24
    return stream | node << 8


def derive_seed(seed: int, index: int) -> int:
    """A 64-bit seed for the index-th descendant of a seed: the noise of token id 0 in its own stream.

    In plain integers, because every request derives one: numpy takes 14 times as long for a single number.
    """
    word_0, word_1, word_2, word_3 = 0, index & 0xFFFFFFFF, index >> 32, STREAM_SEEDS
    for key_0, key_1 in _round_keys(seed & MASK64):  # Philox, as in kernels.pair_bits
        product_0, product_1 = _MULTIPLIER_0 * word_0, _MULTIPLIER_1 * word_2
        word_0, word_1 = (product_1 >> 32) ^ word_1 ^ key_0, product_1 & 0xFFFFFFFF
        word_2, word_3 = (product_0 >> 32) ^ word_3 ^ key_1, product_0 & 0xFFFFFFFF
    return word_0 | word_1 << 32


@lru_cache(maxsize=16)  # an engine derives all seeds from its own
def _round_keys(seed: int) -> list[tuple[int, int]]:
    """The two words of the key in each of the ten rounds of Philox."""
    return [
        (((seed & 0xFFFFFFFF) + number * WEYL_0) & 0xFFFFFFFF, ((seed >> 32) + number * WEYL_1) & 0xFFFFFFFF)
        for number in range(10)
    ]
