"""What `ngram_index.py` and `suffix_trees.py` compute, in plain Python: slow, without rings and links.

A stream is a list of tokens with -1 between texts. Its newest tokens are those that are searched.
"""

from __future__ import annotations

import numpy as np

from paceline.draft.lookup.ngram_index import GAP, MAX_VISITS, SHARED_NAMESPACE
from paceline.draft.lookup.suffix_trees import OWN_TEXT_PRIOR, PAST_RESPONSES_PRIOR


def ending(stream, size):
    """The last `size` tokens of the last text, newest first; fewer if it is shorter."""
    taken = []
    for token in reversed(stream):
        if token == GAP or len(taken) == size:
            break
        taken.append(token)
    return taken


def match_length(stream, position, suffix):
    """How many tokens up to `position` are those of the suffix."""
    length = 0
    while length < min(len(suffix), position + 1) and stream[position - length] == suffix[length]:
        length += 1
    return length


def continuation(stream, position, count):
    """Up to `count` tokens after `position`; past the end of the stream they repeat themselves."""
    tokens = []
    for depth in range(count):
        after = position + 1 + depth
        token = stream[after] if after < len(stream) else tokens[after - len(stream)]
        if token == GAP:
            break
        tokens.append(token)
    return tokens


def ngram_chain(stream, shortest, longest, budget):
    """What followed the newest occurrence of the longest suffix of shortest..longest tokens."""
    for size in range(longest, shortest - 1, -1):
        suffix = ending(stream, size)
        if len(suffix) < size:
            continue
        for position in range(len(stream) - 2, -1, -1):
            if match_length(stream, position, suffix) == size:
                return continuation(stream, position, budget)
    return []


def host_draft_chain(text, start, tokens, budget):
    """What a host draft that starts at this place in the text says next; nothing if it was wrong before."""
    known = len(text) - start
    if start < 0 or known < 0 or tokens[:known] != text[start:]:
        return []
    return tokens[known:][:budget]


def slot(newest_first, ring_size, namespace):
    """The place of an n-gram in a table of this size."""
    with np.errstate(over="ignore"):
        state = np.int64(namespace) * np.int64(0x2545F4914F6CDD1D)
        for token in newest_first:
            state = (state ^ np.int64(token)) * np.int64(-7046029254386353131)
    return int((state >> np.int64(24)) & np.int64(ring_size - 1))


def candidates(stream, suffix, levels, factor, depth, ring_size, namespace=SHARED_NAMESPACE):
    """(match length, continuation) of the occurrences that are looked at, longest n-grams first.

    The stream has the texts of one namespace: those of others do not matter.
    """
    found = []
    longer = len(suffix) + 1
    for size in reversed([level for level in levels if level <= len(suffix)]):
        wanted = slot(suffix[:size], ring_size, namespace)
        visits = 0
        for position in range(len(stream) - 1, -1, -1):
            ngram = ending(stream[: position + 1], size)
            if len(ngram) < size or slot(ngram, ring_size, namespace) != wanted:
                continue
            visits += 1
            if visits > MAX_VISITS:
                break
            length = match_length(stream, position, suffix)
            if position < len(stream) - 1 and size <= length < longer:
                found.append((length, continuation(stream, position, min(depth, int(factor * length)))))
        longer = size
    return found


def child_probabilities(own, past):
    """The probability of each next token, by the candidates that are still alive."""
    both = sorted([*own, *past], key=lambda candidate: candidate[0])
    probabilities = {rest[0]: 0.0 for _, rest in both if rest}
    longest = max((length for length, rest in both if rest), default=0)
    for length in range(1, longest + 1):
        for source, prior in ((past, PAST_RESPONSES_PRIOR), (own, OWN_TEXT_PRIOR)):
            followers = [rest[0] for matched, rest in source if rest and matched >= length]
            if followers:
                for token, shorter in probabilities.items():
                    votes = followers.count(token) + prior * shorter
                    probabilities[token] = votes / (len(followers) + prior)
    return probabilities


def suffix_tree(own, past, budget, branching, least):
    """(tokens, parents, chances of the paths) of the likeliest nodes, the likeliest first."""
    tokens, parents, chances = [], [], []
    leaves = []  # open children: [survival, parent, token, candidates below it]
    node, survival = -1, 1.0
    while True:
        probabilities = child_probabilities(own, past)
        for token in sorted(probabilities, key=lambda token: -probabilities[token])[:branching]:
            if survival * probabilities[token] >= least:
                below = [
                    [(length, rest[1:]) for length, rest in source if rest[:1] == [token]]
                    for source in (own, past)
                ]
                leaves.append((survival * probabilities[token], node, token, below))
        if len(tokens) == budget or not leaves:
            return tokens, parents, chances
        best = max(leaves, key=lambda leaf: leaf[0])
        leaves.remove(best)
        survival, parent, token, (own, past) = best
        chances.append(survival)
        tokens.append(token)
        parents.append(parent)
        node = len(tokens) - 1
