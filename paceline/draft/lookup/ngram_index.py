"""An n-gram index over a token stream, and the search in it: the compiled side of `occurrences.py`.

A stream and its index are one table, int32 [2 + 2 * levels, capacity], the capacity a power of two: passing
one array to a compiled function takes a fraction of the time that several take. Position p of the stream is
column p modulo capacity. The rows:

    0                    the tokens
    1 + level            link: the previous position whose n-gram has the same hash
    1 + levels + level   head, by hash: the newest position
    1 + 2 * levels       the namespace of each token: a search finds only tokens of its own namespace

`levels` holds the n of each level, ascending. Position 0 is never used, so 0 means "nowhere" and a new table
is all zeros.

A namespace is a number that stands for a request's cache salt. All namespaces share the table, and a search
finds the same whether the others are there or not: hashes start from the namespace, and positions of other
namespaces with an equal hash are skipped and not counted as visits. That is less than one position per
level on average, as long as no client can guess another's number; so they are random (`suffix_store.py`).

`tests/draft/reference.py` has the same in plain Python.
"""

from __future__ import annotations

import numpy as np

from paceline.compiling import compiled
from paceline.core.arrays import Int32Array, Int64Array

GAP = -1  # separates two texts in a stream: no match and no draft crosses it
MAX_VISITS = 12  # occurrences examined per level, newest first
SHARED_NAMESPACE = 0  # of responses without a salt; also of a request's own text, which has its own table
NO_NAMESPACE = -1  # of a salt without stored responses: nothing to search
_HASH_MULTIPLIER = -7046029254386353131  # 2^64 / golden ratio
_NAMESPACE_MULTIPLIER = 0x2545F4914F6CDD1D  # spreads namespaces over 64 bits, further apart than token ids


@compiled
def append_tokens(
    table: Int32Array, levels: Int64Array, oldest: int, end: int, new: Int32Array, namespace: int
) -> None:
    """Append `new` to the stream, from position `end` on, and index the n-grams that end in it."""
    mask = table.shape[1] - 1
    run_length = 0  # tokens since the last gap, at most the longest n
    while (
        run_length < levels[-1]
        and end - 1 - run_length >= oldest
        and table[0, (end - 1 - run_length) & mask] != GAP
    ):
        run_length += 1
    for token in new:
        column = end & mask
        table[0, column] = token
        table[-1, column] = namespace
        run_length = 0 if token == GAP else run_length + 1
        state = namespace * _NAMESPACE_MULTIPLIER
        hashed = 0
        for level in range(len(levels)):
            table[1 + level, column] = 0
            if levels[level] > run_length:
                continue
            while hashed < levels[level]:
                state = (state ^ table[0, (end - hashed) & mask]) * _HASH_MULTIPLIER
                hashed += 1
            slot = (state >> 24) & mask
            table[1 + level, column] = table[1 + len(levels) + level, slot]
            table[1 + len(levels) + level, slot] = end
        end += 1


@compiled
def take_suffix(table: Int32Array, oldest: int, end: int, suffix: Int32Array) -> int:
    """The number of tokens written to `suffix`: those before `end`, newest first, up to its size or a gap."""
    mask = table.shape[1] - 1
    count = 0
    while count < len(suffix) and end - 1 - count >= oldest:
        token = table[0, (end - 1 - count) & mask]
        if token == GAP:
            break
        suffix[count] = token
        count += 1
    return count


@compiled
def _newest(table: Int32Array, levels: Int64Array, level: int, suffix: Int32Array, namespace: int) -> int:
    """The newest position where an n-gram with this namespace's hash of the suffix ends; 0: none."""
    state = namespace * _NAMESPACE_MULTIPLIER
    for index in range(levels[level]):
        state = (state ^ suffix[index]) * _HASH_MULTIPLIER
    return int(table[1 + len(levels) + level, (state >> 24) & (table.shape[1] - 1)])


@compiled
def _match_length(table: Int32Array, oldest: int, position: int, suffix: Int32Array, max_length: int) -> int:
    """The number of tokens that end at `position` and equal the suffix. Equal hashes are not proof."""
    mask = table.shape[1] - 1
    length = 0
    while (
        length < max_length
        and position - length >= oldest
        and table[0, (position - length) & mask] == suffix[length]
    ):
        length += 1
    return length


@compiled
def _copy_continuation(table: Int32Array, end: int, position: int, count: int, row: Int32Array) -> int:
    """The number of tokens after `position` that were written to `row`: `count`, or fewer up to a gap.

    A continuation that reaches the end of the stream wraps around: a repetition is taken to repeat again.
    """
    mask = table.shape[1] - 1
    period = end - 1 - position
    for depth in range(count):
        token = table[0, (position + 1 + depth) & mask] if depth < period else row[depth - period]
        if token == GAP:
            return depth
        row[depth] = token
    return count


@compiled
def copy_longest(table: Int32Array, levels: Int64Array, oldest: int, end: int, chain: Int32Array) -> int:
    """The number of tokens written to `chain`: those after the newest occurrence of the longest n-gram.

    The n-grams that are looked up are the suffixes of the stream with the sizes of the levels.
    """
    suffix = np.empty(levels[-1], np.int32)
    suffix_length = take_suffix(table, oldest, end, suffix)
    for level in range(len(levels) - 1, -1, -1):
        size = levels[level]
        if size > suffix_length:
            continue
        position = _newest(table, levels, level, suffix, SHARED_NAMESPACE)
        while position >= oldest:
            if position < end - 1 and _match_length(table, oldest, position, suffix, size) == size:
                return _copy_continuation(table, end, position, len(chain), chain)
            position = int(table[1 + level, position & (table.shape[1] - 1)])
    return 0


@compiled
def find_occurrences(
    table: Int32Array,
    levels: Int64Array,
    oldest: int,
    end: int,
    namespace: int,
    suffix: Int32Array,
    suffix_length: int,
    factor: float,
    count: int,
    lengths: Int64Array,
    continuations: Int32Array,
) -> int:
    """The new number of occurrences: those of the suffix in one namespace of this stream were added.

    Row `count` and on of `lengths` get their match lengths, and of `continuations` the tokens that follow,
    up to `factor` * length and padded with GAP. The longest n-grams come first; an occurrence that is found
    again with a shorter n is skipped.
    """
    mask = table.shape[1] - 1
    max_length = suffix_length + 1
    for level in range(len(levels) - 1, -1, -1):
        size = levels[level]
        if size > suffix_length:
            continue
        position = _newest(table, levels, level, suffix, namespace)
        visits = 0
        while position >= oldest and visits < MAX_VISITS:
            if table[-1, position & mask] != namespace:
                position = int(table[1 + level, position & mask])
                continue
            visits += 1
            if position < end - 1:
                length = _match_length(table, oldest, position, suffix, suffix_length)
                if size <= length < max_length:
                    max_copied = min(continuations.shape[1], int(factor * length))
                    copied = _copy_continuation(table, end, position, max_copied, continuations[count])
                    for depth in range(copied, continuations.shape[1]):
                        continuations[count, depth] = GAP
                    lengths[count] = length
                    count += 1
            position = int(table[1 + level, position & mask])
        max_length = size
    return count
