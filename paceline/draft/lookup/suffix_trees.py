"""Suffix decoding's trees: the occurrences of a text's suffix vote on what follows, the likeliest paths grow.

    request's own text ----+
                           +-- find_occurrences --> continuations --> votes per node --> best nodes first
    past responses --------+

The compiled side of `suffix.py`. `tests/draft/reference.py` has the same in plain Python.
"""

from __future__ import annotations

import numpy as np
from numba import carray

from paceline.compiling import compiled, pointer_to
from paceline.core.arrays import Float32Array, Float64Array, Int32Array, Int64Array
from paceline.draft.lookup.ngram_index import (
    GAP,
    MAX_VISITS,
    NO_NAMESPACE,
    SHARED_NAMESPACE,
    append_tokens,
    find_occurrences,
    take_suffix,
)

# How many occurrences the estimate of the next shorter match counts for, when a longer match is mixed in.
OWN_TEXT_PRIOR = 3.0  # occurrences, in the request's own text
PAST_RESPONSES_PRIOR = 8.0  # occurrences, in past responses: they say less about this request
REQUEST_COLUMNS = 10  # int64 per request, see draft_trees
_ROOT = -1


@compiled
def _shortest_first(lengths: Int64Array, count: int) -> Int64Array:
    """The occurrences by match length, ascending: a stable counting sort."""
    longest = 0
    for occurrence in range(count):
        longest = max(longest, lengths[occurrence])
    starts = np.zeros(longest + 2, np.int64)
    for occurrence in range(count):
        starts[lengths[occurrence] + 1] += 1
    for length in range(longest):
        starts[length + 1] += starts[length]
    order = np.empty(count, np.int64)
    for occurrence in range(count):
        order[starts[lengths[occurrence]]] = occurrence
        starts[lengths[occurrence]] += 1
    return order


@compiled
def _child_probabilities(
    node: int,
    reached: Int64Array,
    lengths: Int64Array,
    next_tokens: Int32Array,
    num_own: int,
    order: Int64Array,
    tokens: Int32Array,
    probabilities: Float64Array,
) -> int:
    """The number of distinct tokens that may follow a node; they are written with their probabilities.

    Each occurrence of a match of n tokens has one vote. The estimate from matches of n - 1 tokens counts as
    a prior of 3 or 8 votes, by source. Past responses are mixed in before the request's own text.
    """
    num_children = 0
    longest = 0
    counts = np.zeros((2, len(order)), np.int64)  # [source, child] occurrences; source 0: past responses
    totals = np.zeros(2, np.int64)
    for occurrence in order:
        if reached[occurrence] != node or next_tokens[occurrence] == GAP:
            continue
        child = 0
        while child < num_children and tokens[child] != next_tokens[occurrence]:
            child += 1
        if child == num_children:
            tokens[child] = next_tokens[occurrence]
            probabilities[child] = 0.0
            num_children += 1
        source = 1 if occurrence < num_own else 0
        counts[source, child] += 1
        totals[source] += 1
        longest = max(longest, lengths[occurrence])
    shorter = 0
    for length in range(1, longest + 1):
        while lengths[order[shorter]] < length:
            occurrence = order[shorter]
            shorter += 1
            if reached[occurrence] == node and next_tokens[occurrence] != GAP:
                source = 1 if occurrence < num_own else 0
                totals[source] -= 1
                child = 0
                while tokens[child] != next_tokens[occurrence]:
                    child += 1
                counts[source, child] -= 1
        for source in range(2):
            if totals[source]:
                prior = OWN_TEXT_PRIOR if source else PAST_RESPONSES_PRIOR
                for child in range(num_children):
                    votes = counts[source, child] + prior * probabilities[child]
                    probabilities[child] = votes / (totals[source] + prior)
    return num_children


@compiled
def _grow(
    count: int,
    num_own: int,
    lengths: Int64Array,
    continuations: Int32Array,
    branching: int,
    min_chance: float,
    tokens: Int32Array,
    parents: Int32Array,
    path_chances: Float32Array,
) -> int:
    """The number of nodes written, with the chances of their paths: the likeliest nodes, best first."""
    budget = len(tokens)
    order = _shortest_first(lengths, count)
    reached = np.full(count, _ROOT, np.int64)  # [occurrences] the node that its continuation has reached
    next_tokens = continuations[:count, 0].copy()
    child_tokens = np.empty(count, np.int32)
    chances = np.empty(count, np.float64)
    depths = np.zeros(budget + 1, np.int64)
    max_open = (budget + 1) * min(branching, count)
    open_tokens = np.empty(max_open, np.int32)
    open_parents = np.empty(max_open, np.int64)
    path_probabilities = np.empty(max_open, np.float64)  # [open] that the path down to here is accepted
    num_open = 0
    node, path_probability = _ROOT, 1.0
    for nodes in range(budget + 1):
        num_children = _child_probabilities(
            node, reached, lengths, next_tokens, num_own, order, child_tokens, chances
        )
        for _ in range(min(branching, num_children)):
            child = np.argmax(chances[:num_children])
            if path_probability * chances[child] < min_chance:
                break
            open_tokens[num_open], open_parents[num_open] = child_tokens[child], node
            path_probabilities[num_open] = path_probability * chances[child]
            num_open += 1
            chances[child] = -1.0
        if nodes == budget or num_open == 0:
            return nodes
        best = np.argmax(path_probabilities[:num_open])
        if path_probabilities[best] < 0.0:
            return nodes
        node, parent, path_probability = nodes, open_parents[best], path_probabilities[best]
        tokens[node], parents[node], path_chances[node] = open_tokens[best], parent, path_probability
        path_probabilities[best] = -1.0
        depths[node] = depths[parent] + 1 if parent >= 0 else 1
        for occurrence in range(count):
            if reached[occurrence] == parent and next_tokens[occurrence] == tokens[node]:
                reached[occurrence] = node
                deeper = depths[node] < continuations.shape[1]
                next_tokens[occurrence] = continuations[occurrence, depths[node]] if deeper else GAP
    return budget


@compiled
def draft_trees(
    requests: Int64Array,
    new: Int32Array,
    min_chances: Float64Array,
    past_table: Int32Array,
    past_oldest: int,
    past_end: int,
    levels: Int64Array,
    max_match: int,
    factor: float,
) -> tuple[Int32Array, Int32Array, Int32Array, Float32Array]:
    """Tokens, parents, offsets and chances of the trees of all requests: `draft_tree` for each of them.

    The columns of `requests`: the fields of its text's index (`Occurrences.table_fields`), the number of
    `new` tokens to append to it first, the budget, branching and levels of its tree, and the namespace of
    the past responses that it may find.
    """
    max_nodes = requests[:, 6].sum()
    tokens, parents = np.empty(max_nodes, np.int32), np.empty(max_nodes, np.int32)
    chances, offsets = np.empty(max_nodes, np.float32), np.zeros(len(requests) + 1, np.int32)
    read = 0
    for request in range(len(requests)):
        address, columns, capacity, oldest, end, unread, budget, branching, depth, namespace = requests[
            request
        ]
        own_table = carray(pointer_to(address), (2 + 2 * len(levels), columns), np.int32)
        append_tokens(own_table, levels, oldest, end, new[read : read + unread], SHARED_NAMESPACE)
        read, end, first = read + unread, end + unread, offsets[request]
        room = slice(first, first + budget)
        offsets[request + 1] = first + draft_tree(
            own_table,
            max(oldest, end - capacity),
            end,
            past_table,
            past_oldest,
            past_end,
            namespace,
            levels,
            max_match,
            factor,
            min_chances[request],
            branching,
            depth,
            tokens[room],
            parents[room],
            chances[room],
        )
    return tokens[: offsets[-1]], parents[: offsets[-1]], offsets, chances[: offsets[-1]]


@compiled
def draft_tree(
    own_table: Int32Array,
    own_oldest: int,
    own_end: int,
    past_table: Int32Array,
    past_oldest: int,
    past_end: int,
    past_namespace: int,
    levels: Int64Array,
    max_match: int,
    factor: float,
    min_chance: float,
    branching: int,
    depth: int,
    tokens: Int32Array,
    parents: Int32Array,
    chances: Float32Array,
) -> int:
    """The number of nodes written to `tokens`, `parents` and `chances`.

    The suffix of the request's own text, up to `max_match` tokens, is looked up in that text and in the past
    responses of `past_namespace`. A match of n tokens is followed for up to `factor` * n tokens. Nodes whose
    path is accepted with a probability below `min_chance` are left out.
    """
    suffix = np.empty(max_match, np.int32)
    suffix_length = take_suffix(own_table, own_oldest, own_end, suffix)
    max_occurrences = 2 * len(levels) * MAX_VISITS
    lengths = np.empty(max_occurrences, np.int64)
    continuations = np.empty((max_occurrences, depth), np.int32)
    count = num_own = find_occurrences(
        own_table,
        levels,
        own_oldest,
        own_end,
        SHARED_NAMESPACE,
        suffix,
        suffix_length,
        factor,
        0,
        lengths,
        continuations,
    )
    if past_namespace != NO_NAMESPACE:
        count = find_occurrences(
            past_table,
            levels,
            past_oldest,
            past_end,
            past_namespace,
            suffix,
            suffix_length,
            factor,
            num_own,
            lengths,
            continuations,
        )
    if count == 0:
        return 0
    return _grow(count, num_own, lengths, continuations, branching, min_chance, tokens, parents, chances)
