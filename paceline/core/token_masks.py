"""Token masks: the ids that may come next, one bit each, in the layout of llguidance and xgrammar.

A mask is int32 [ceil(vocab / 32)]; bit `id % 32` of word `id // 32` is set if the id is allowed. Bits beyond
the vocabulary are not set. Masks are shared: whoever changes one copies it first.
"""

from __future__ import annotations

import numpy as np

from paceline.core.arrays import BoolArray, Int32Array, Int64Array


def num_words(vocab_size: int) -> int:
    """The words of a mask over so many ids."""
    return -(-vocab_size // 32)


def packed(allowed: BoolArray) -> Int32Array:
    """The mask of `allowed` [vocab]."""
    bits = np.zeros(4 * num_words(len(allowed)), dtype=np.uint8)
    filled = np.packbits(allowed, bitorder="little")
    bits[: len(filled)] = filled
    return bits.view(np.int32)


def packed_ids(ids: Int64Array, vocab_size: int) -> Int32Array:
    """The mask that allows these ids and no others."""
    allowed = np.zeros(vocab_size, dtype=np.bool_)
    allowed[ids] = True
    return packed(allowed)


def packed_id(token: int, vocab_size: int) -> Int32Array:
    """The mask that allows one id."""
    bits = np.zeros(4 * num_words(vocab_size), dtype=np.uint8)
    bits[token >> 3] = 1 << (token & 7)
    return bits.view(np.int32)


def unpacked(mask: Int32Array, vocab_size: int) -> BoolArray:
    """Whether each id is allowed: bool [vocab]."""
    return np.unpackbits(mask.view(np.uint8), count=vocab_size, bitorder="little").view(np.bool_)


def all_tokens(vocab_size: int) -> Int32Array:
    """A new mask that allows every id."""
    mask = np.full(num_words(vocab_size), -1, dtype=np.int32)
    if vocab_size % 32:
        mask[-1] = (1 << (vocab_size % 32)) - 1
    return mask


def forbid(mask: Int32Array, ids: Int64Array) -> None:
    """Forbid these ids, in place."""
    bits = mask.view(np.uint8)
    # `at`: several ids may share a byte
    np.bitwise_and.at(bits, ids >> 3, ~(1 << (ids & 7)).astype(np.uint8))
