"""The compiled side of the model-free drafters: index n-grams, find them again, grow trees from them.

A stream of tokens and the index of its n-grams are one table, int32 [2 + 2 * levels, capacity], the
capacity a power of two: handing one array to a compiled function takes a fraction of the time that
several take. Position p of the stream is at column p modulo capacity. The rows:

    0                    the tokens
    1 + level            from each position to the one before it whose n-gram has the same hash
    1 + levels + level   by hash: the newest position
    1 + 2 * levels       the owner of each token: only who has the same number may find it

`levels` has the n of each level, ascending. Position 0 is never used, so that 0 can say "nowhere"
and a new table is all zeros.

Owners share the table, and what one finds is the same whether the others are there or not: hashes
begin with the owner, and positions of others that have the same hash are passed over without being
counted. On average that is less than one position for each level, whoever wrote what, as long as
nobody knows the numbers of others; so they are drawn at random (`suffix_store.py`).

`tests/draft/reference.py` says the same in plain Python, slowly.

All compiled functions of these drafters are in this file, because numba's disk cache looks only at
the file of the function it loads.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from numba import carray

from paceline.compiling import compiled, pointer_to

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]
Float32Array = npt.NDArray[np.float32]
Float64Array = npt.NDArray[np.float64]

GAP = -1  # stands between two texts in a stream: no match and no draft reaches across it
MOST_VISITS = 12  # occurrences that are looked at on each level, newest first
OWN_DOUBT = 3.0  # occurrences that the shorter match counts for: in the request's own text,
PAST_DOUBT = 8.0  # and in past responses, which say less about this request
_ODD = -7046029254386353131  # 2^64 / golden ratio
_OTHER_ODD = 0x2545F4914F6CDD1D  # spreads owners over 64 bits, so that they differ in more than a token does
_ROOT = -1
COLUMNS = 10  # of a request, see draft_trees
SHARED = 0  # the owner of what everyone may find; also of a request's own text, in a table of its own
NOBODY = -1  # owns nothing: there is nothing to be found


@compiled
def append_tokens(
    table: Int32Array, levels: Int64Array, oldest: int, end: int, new: Int32Array, owner: int
) -> None:
    """Put `new` into the stream at position `end` and on, and index the n-grams that end there."""
    mask = table.shape[1] - 1
    run = 0  # tokens since the last gap, as far as the longest n-gram reaches
    while run < levels[-1] and end - 1 - run >= oldest and table[0, (end - 1 - run) & mask] != GAP:
        run += 1
    for token in new:
        place = end & mask
        table[0, place] = token
        table[-1, place] = owner
        run = 0 if token == GAP else run + 1
        state = owner * _OTHER_ODD
        hashed = 0
        for level in range(len(levels)):
            table[1 + level, place] = 0
            if levels[level] > run:
                continue
            while hashed < levels[level]:
                state = (state ^ table[0, (end - hashed) & mask]) * _ODD
                hashed += 1
            slot = (state >> 24) & mask
            table[1 + level, place] = table[1 + len(levels) + level, slot]
            table[1 + len(levels) + level, slot] = end
        end += 1


@compiled
def _take_suffix(table: Int32Array, oldest: int, end: int, suffix: Int32Array) -> int:
    """How many tokens before `end`, newest first, were written to `suffix`: up to its size or a gap."""
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
def _newest(table: Int32Array, levels: Int64Array, level: int, suffix: Int32Array, owner: int) -> int:
    """The newest position where an n-gram with the hash of the owner's suffix ends."""
    state = owner * _OTHER_ODD
    for index in range(levels[level]):
        state = (state ^ suffix[index]) * _ODD
    return int(table[1 + len(levels) + level, (state >> 24) & (table.shape[1] - 1)])


@compiled
def _match_length(table: Int32Array, oldest: int, position: int, suffix: Int32Array, most: int) -> int:
    """How many tokens up to `position` are those of the suffix. Hashes only propose."""
    mask = table.shape[1] - 1
    length = 0
    while (
        length < most
        and position - length >= oldest
        and table[0, (position - length) & mask] == suffix[length]
    ):
        length += 1
    return length


@compiled
def _copy_continuation(table: Int32Array, end: int, position: int, count: int, row: Int32Array) -> int:
    """How many tokens after `position` were written to `row`: `count`, or fewer up to a gap.

    At the end of the stream they go on with themselves: what repeats is taken to repeat again.
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
    """How many tokens were written to `chain`: those after the newest occurrence of the longest suffix.

    The suffixes looked for are those of the levels.
    """
    suffix = np.empty(levels[-1], np.int32)
    known = _take_suffix(table, oldest, end, suffix)
    for level in range(len(levels) - 1, -1, -1):
        size = levels[level]
        if size > known:
            continue
        position = _newest(table, levels, level, suffix, SHARED)
        while position >= oldest:
            if position < end - 1 and _match_length(table, oldest, position, suffix, size) == size:
                return _copy_continuation(table, end, position, len(chain), chain)
            position = int(table[1 + level, position & (table.shape[1] - 1)])
    return 0


@compiled
def _find(
    table: Int32Array,
    levels: Int64Array,
    oldest: int,
    end: int,
    owner: int,
    suffix: Int32Array,
    known: int,
    factor: float,
    count: int,
    lengths: Int64Array,
    continuations: Int32Array,
) -> int:
    """The new count of candidates after the owner's of this stream: how long they match, and what follows.

    The longest n-grams come first. What is found again with a shorter one is left out.
    """
    mask = table.shape[1] - 1
    longer = known + 1
    for level in range(len(levels) - 1, -1, -1):
        size = levels[level]
        if size > known:
            continue
        position = _newest(table, levels, level, suffix, owner)
        visits = 0
        while position >= oldest and visits < MOST_VISITS:
            if table[-1, position & mask] != owner:
                position = int(table[1 + level, position & mask])
                continue
            visits += 1
            if position < end - 1:
                length = _match_length(table, oldest, position, suffix, known)
                if size <= length < longer:
                    most = min(continuations.shape[1], int(factor * length))
                    copied = _copy_continuation(table, end, position, most, continuations[count])
                    for depth in range(copied, continuations.shape[1]):
                        continuations[count, depth] = GAP
                    lengths[count] = length
                    count += 1
            position = int(table[1 + level, position & mask])
        longer = size
    return count


@compiled
def _shortest_first(lengths: Int64Array, count: int) -> Int64Array:
    """The candidates in the order of how long they match; equals stay in place."""
    longest = 0
    for candidate in range(count):
        longest = max(longest, lengths[candidate])
    places = np.zeros(longest + 2, np.int64)
    for candidate in range(count):
        places[lengths[candidate] + 1] += 1
    for length in range(longest):
        places[length + 1] += places[length]
    order = np.empty(count, np.int64)
    for candidate in range(count):
        order[places[lengths[candidate]]] = candidate
        places[lengths[candidate]] += 1
    return order


@compiled
def _child_probabilities(
    node: int,
    standing: Int64Array,
    lengths: Int64Array,
    nexts: Int32Array,
    num_own: int,
    order: Int64Array,
    tokens: Int32Array,
    probabilities: Float64Array,
) -> int:
    """How many different tokens may follow a node, written with their probabilities.

    A match of n tokens gives its followers their shares, and as many votes as its source's doubt to
    what the match of n - 1 tokens says; past responses speak first, the request's own text last.
    """
    kinds = 0
    longest = 0
    counts = np.zeros((2, len(order)), np.int64)  # [source, kind] occurrences; source 0 is the past
    totals = np.zeros(2, np.int64)
    for candidate in order:
        if standing[candidate] != node or nexts[candidate] == GAP:
            continue
        kind = 0
        while kind < kinds and tokens[kind] != nexts[candidate]:
            kind += 1
        if kind == kinds:
            tokens[kind] = nexts[candidate]
            probabilities[kind] = 0.0
            kinds += 1
        source = 1 if candidate < num_own else 0
        counts[source, kind] += 1
        totals[source] += 1
        longest = max(longest, lengths[candidate])
    shorter = 0
    for length in range(1, longest + 1):
        while lengths[order[shorter]] < length:
            candidate = order[shorter]
            shorter += 1
            if standing[candidate] == node and nexts[candidate] != GAP:
                source = 1 if candidate < num_own else 0
                totals[source] -= 1
                kind = 0
                while tokens[kind] != nexts[candidate]:
                    kind += 1
                counts[source, kind] -= 1
        for source in range(2):
            if totals[source]:
                doubt = OWN_DOUBT if source else PAST_DOUBT
                for kind in range(kinds):
                    votes = counts[source, kind] + doubt * probabilities[kind]
                    probabilities[kind] = votes / (totals[source] + doubt)
    return kinds


@compiled
def _grow(
    count: int,
    num_own: int,
    lengths: Int64Array,
    continuations: Int32Array,
    branching: int,
    least: float,
    tokens: Int32Array,
    parents: Int32Array,
    path_chances: Float32Array,
) -> int:
    """How many nodes were written with the chances of their paths: the likeliest, the likeliest first."""
    budget = len(tokens)
    order = _shortest_first(lengths, count)
    standing = np.full(count, _ROOT, np.int64)  # the node a candidate's continuation has reached
    nexts = continuations[:count, 0].copy()
    kind_tokens = np.empty(count, np.int32)
    chances = np.empty(count, np.float64)
    depths = np.zeros(budget + 1, np.int64)
    most_open = (budget + 1) * min(branching, count)
    open_tokens = np.empty(most_open, np.int32)
    open_parents = np.empty(most_open, np.int64)
    survivals = np.empty(most_open, np.float64)  # probability that the path down to here is accepted
    num_open = 0
    node, survival = _ROOT, 1.0
    for nodes in range(budget + 1):
        kinds = _child_probabilities(node, standing, lengths, nexts, num_own, order, kind_tokens, chances)
        for _ in range(min(branching, kinds)):
            kind = np.argmax(chances[:kinds])
            if survival * chances[kind] < least:
                break
            open_tokens[num_open], open_parents[num_open] = kind_tokens[kind], node
            survivals[num_open] = survival * chances[kind]
            num_open += 1
            chances[kind] = -1.0
        if nodes == budget or num_open == 0:
            return nodes
        best = np.argmax(survivals[:num_open])
        if survivals[best] < 0.0:
            return nodes
        node, parent, survival = nodes, open_parents[best], survivals[best]
        tokens[node], parents[node], path_chances[node] = open_tokens[best], parent, survival
        survivals[best] = -1.0
        depths[node] = depths[parent] + 1 if parent >= 0 else 1
        for candidate in range(count):
            if standing[candidate] == parent and nexts[candidate] == tokens[node]:
                standing[candidate] = node
                deeper = depths[node] < continuations.shape[1]
                nexts[candidate] = continuations[candidate, depths[node]] if deeper else GAP
    return budget


@compiled
def draft_trees(
    requests: Int64Array,
    new: Int32Array,
    leasts: Float64Array,
    past: Int32Array,
    past_oldest: int,
    past_end: int,
    levels: Int64Array,
    longest: int,
    factor: float,
) -> tuple[Int32Array, Int32Array, Int32Array, Float32Array]:
    """Tokens, parents, offsets and chances of the trees of all requests, as `draft_tree` drafts each.

    A line of `requests` is what its index says of itself (`Occurrences.described`), how many of the `new`
    tokens are to be appended to that, the budget, branching and levels of its tree, and whose past
    responses it may find.
    """
    most = requests[:, 6].sum()
    tokens, parents = np.empty(most, np.int32), np.empty(most, np.int32)
    chances, offsets = np.empty(most, np.float32), np.zeros(len(requests) + 1, np.int32)
    read = 0
    for request in range(len(requests)):
        address, columns, capacity, oldest, end, unread, budget, branching, depth, owner = requests[request]
        own = carray(pointer_to(address), (2 + 2 * len(levels), columns), np.int32)
        append_tokens(own, levels, oldest, end, new[read : read + unread], SHARED)
        read, end, first = read + unread, end + unread, offsets[request]
        room = slice(first, first + budget)
        offsets[request + 1] = first + draft_tree(
            own,
            max(oldest, end - capacity),
            end,
            past,
            past_oldest,
            past_end,
            owner,
            levels,
            longest,
            factor,
            leasts[request],
            branching,
            depth,
            tokens[room],
            parents[room],
            chances[room],
        )
    return tokens[: offsets[-1]], parents[: offsets[-1]], offsets, chances[: offsets[-1]]


@compiled
def draft_tree(
    own: Int32Array,
    own_oldest: int,
    own_end: int,
    past: Int32Array,
    past_oldest: int,
    past_end: int,
    past_owner: int,
    levels: Int64Array,
    longest: int,
    factor: float,
    least: float,
    branching: int,
    depth: int,
    tokens: Int32Array,
    parents: Int32Array,
    chances: Float32Array,
) -> int:
    """How many nodes were written to `tokens`, `parents` and `chances`.

    The request's own text and the past responses of `past_owner` are searched for the end of the former,
    up to `longest` tokens of it. A match of n tokens is followed for up to `factor` * n. Nodes whose
    path is accepted with a probability below `least` are left out.
    """
    suffix = np.empty(longest, np.int32)
    known = _take_suffix(own, own_oldest, own_end, suffix)
    most = 2 * len(levels) * MOST_VISITS
    lengths = np.empty(most, np.int64)
    continuations = np.empty((most, depth), np.int32)
    count = num_own = _find(
        own, levels, own_oldest, own_end, SHARED, suffix, known, factor, 0, lengths, continuations
    )
    if past_owner != NOBODY:
        count = _find(
            past,
            levels,
            past_oldest,
            past_end,
            past_owner,
            suffix,
            known,
            factor,
            num_own,
            lengths,
            continuations,
        )
    if count == 0:
        return 0
    return _grow(count, num_own, lengths, continuations, branching, least, tokens, parents, chances)
