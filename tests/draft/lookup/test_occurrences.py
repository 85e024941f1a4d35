"""The index finds what a plain search finds, whatever was forgotten and wherever the ring wraps."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.draft.lookup import occurrences
from paceline.draft.lookup.ngram_index import GAP, MAX_VISITS, NO_NAMESPACE, SHARED_NAMESPACE, copy_longest
from paceline.draft.lookup.occurrences import Occurrences, touch_pages
from paceline.draft.lookup.suffix_trees import draft_tree
from tests.draft import reference

tokens_of = st.integers(0, 2) | st.just(GAP)
# a token of theirs has one hash in tables of up to 128 columns, so that they meet all the time
MEETING = [
    namespace
    for namespace in range(600)
    if reference.slot([1], 128, namespace) == reference.slot([1], 128, SHARED_NAMESPACE)
]
namespaces = st.sampled_from(MEETING)
chunks = st.lists(st.lists(tokens_of, min_size=1, max_size=30), min_size=1, max_size=8)


def filled(levels, capacity, parts, keep=None):
    """An index that was given the parts one by one, and the tokens that it keeps."""
    index = Occurrences(levels, capacity)
    stream: list[int] = []
    for part in parts:
        index.append(part)
        stream = (stream + list(part))[-capacity:]
    if keep is not None:
        index.keep_newest(keep)
        stream = stream[len(stream) - min(keep, len(stream)) :]
    return index, stream


@given(
    chunks, st.integers(1, 70), st.integers(0, 70), st.integers(1, 3), st.integers(0, 3), st.integers(1, 9)
)
def test_the_longest_ngram_is_found_at_its_newest_place(parts, capacity, keep, shortest, more, budget):
    levels = range(shortest, shortest + more + 1)
    index, stream = filled(levels, capacity, parts, keep)
    chain = np.empty(budget, dtype=np.int32)
    size = copy_longest(index.table, index.levels, index.oldest, index.end, chain)
    assert chain[:size].tolist() == reference.ngram_chain(stream, shortest, shortest + more, budget)


@settings(max_examples=120)
@given(
    own_parts=chunks,
    past_parts=st.lists(
        st.tuples(namespaces, st.lists(tokens_of, min_size=1, max_size=30)), min_size=1, max_size=8
    ),
    namespace=namespaces | st.just(NO_NAMESPACE),
    past_capacity=st.integers(1, 70),
    keep=st.integers(0, 70),
    longest=st.integers(1, 9),
    factor=st.sampled_from([0.5, 1.0, 4.0]),
    least=st.sampled_from([0.0, 0.05, 0.2]),
    branching=st.integers(1, 3),
    budget=st.integers(1, 8),
    depth=st.integers(1, 8),
)
def test_trees_are_those_of_a_plain_search_of_the_own_text_and_the_namespace(
    own_parts, past_parts, namespace, past_capacity, keep, longest, factor, least, branching, budget, depth
):
    """Texts of several namespaces are in one index; it is as if the others' were not there."""
    levels = [level for level in (1, 3, 8) if level <= longest]
    own, own_stream = filled(levels, 240, own_parts)
    past = Occurrences(levels, past_capacity)
    whole: list[tuple[int, int]] = []
    for whose, part in past_parts:
        past.append([*part, GAP], whose)
        whole = [*whole, *((token, whose) for token in (*part, GAP))][-past_capacity:]
    past.keep_newest(keep)
    whole = whole[len(whole) - min(keep, len(whole)) :]
    past_stream = [token for token, whose in whole if whose == namespace]
    tokens, parents = np.empty(budget, dtype=np.int32), np.empty(budget, dtype=np.int32)
    chances = np.empty(budget, dtype=np.float32)
    depth = min(depth, budget)
    size = draft_tree(
        own.table, own.oldest, own.end, past.table, past.oldest, past.end, namespace, past.levels,
        longest, factor, least, branching, depth, tokens, parents, chances,
    )  # fmt: skip

    suffix = reference.ending(own_stream, longest)
    sources = [
        reference.candidates(stream, suffix, levels, factor, depth, index.table.shape[1], whose)
        for index, stream, whose in ((own, own_stream, SHARED_NAMESPACE), (past, past_stream, namespace))
    ]
    expected = reference.suffix_tree(*sources, budget, branching, least)
    expected_tokens, expected_parents, survivals = expected
    assert (tokens[:size].tolist(), parents[:size].tolist()) == (expected_tokens, expected_parents)
    assert chances[:size].tolist() == np.float32(survivals).tolist()


def test_newer_texts_of_other_namespaces_do_not_hide_a_match():
    mine, others = MEETING[:2]
    past, own = Occurrences([1], 100), Occurrences([1], 10)
    past.append([1, 7, GAP], mine)
    for _ in range(2 * MAX_VISITS):
        past.append([1, 8, GAP], others)
    own.append([1])
    for namespace, follower in ((mine, 7), (others, 8)):
        tokens, parents = np.empty(1, dtype=np.int32), np.empty(1, dtype=np.int32)
        size = draft_tree(
            own.table, own.oldest, own.end, past.table, past.oldest, past.end, namespace, past.levels,
            1, 1.0, 0.0, 1, 1, tokens, parents, np.empty(1, dtype=np.float32),
        )  # fmt: skip
        assert (size, tokens[0]) == (1, follower)


def test_what_was_forgotten_is_not_found():
    index, _ = filled([2], 100, [[1, 2, 3, 4, 5, 1, 2]])
    chain = np.empty(2, dtype=np.int32)
    assert copy_longest(index.table, index.levels, index.oldest, index.end, chain) == 2
    assert chain.tolist() == [3, 4]
    index.keep_newest(6)  # the first 1 is gone
    assert copy_longest(index.table, index.levels, index.oldest, index.end, chain) == 0


def test_a_stream_of_any_length_keeps_its_newest_tokens(monkeypatch):
    """When positions run out they are counted from the start again, and nothing is lost."""
    monkeypatch.setattr(occurrences, "LAST_POSITION", 1000)
    index = Occurrences([1, 2], 50)
    stream = np.random.default_rng(0).integers(0, 9, 5000).tolist()
    for start in range(0, len(stream), 7):
        index.append(stream[start : start + 7])
        assert index.end <= 1000
        assert index.tokens().tolist() == stream[: start + 7][-50:]
        chain = np.empty(3, dtype=np.int32)
        size = copy_longest(index.table, index.levels, index.oldest, index.end, chain)
        assert chain[:size].tolist() == reference.ngram_chain(stream[: start + 7][-50:], 1, 2, 3)


def test_texts_keep_their_namespaces_when_positions_restart(monkeypatch):
    monkeypatch.setattr(occurrences, "LAST_POSITION", 1000)
    index = Occurrences([1, 2], 50)
    expected: list[tuple[int, int]] = []
    for number in range(600):
        index.append([number % 9, number % 7, GAP], namespace=number % 4)
        expected = [*expected, *((token, number % 4) for token in (number % 9, number % 7, GAP))][-50:]
        assert [*zip(index.tokens().tolist(), index.namespaces().tolist(), strict=True)] == expected


def test_memory_is_taken_without_a_change() -> None:
    """A store may have been read from a file by then."""
    table = np.ones((3, 5000), np.int32)
    touch_pages(table)
    assert (table == 1).all()
