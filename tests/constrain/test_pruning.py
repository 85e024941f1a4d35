"""Drafts fitted to a grammar: no forbidden node, all forced tokens, nothing else changed."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.constrain.pruning import Draft, fit_draft
from tests.constrain.tables import Path, TableConstraint

A, B, C, D = range(4)


def words(*texts: str) -> TableConstraint:
    """The words over a, b, c and d."""
    spelled = [tuple("abcd".index(letter) for letter in text) for text in texts]

    def allowed(path: Path) -> set[int]:
        return {word[len(path)] for word in spelled if len(word) > len(path) and word[: len(path)] == path}

    return TableConstraint(4, allowed)


def chain(*tokens: int, row: int = -1) -> Draft:
    return Draft(tokens, range(-1, len(tokens) - 1), [row] * len(tokens))


def paths(draft: Draft) -> list[Path]:
    """The path to each node."""
    found: list[Path] = []
    for token, parent in zip(draft.tokens, draft.parents, strict=True):
        found.append((*(found[parent] if parent >= 0 else ()), token))
    return found


NOTHING = Draft((), (), ())


def test_forbidden_nodes_are_removed_with_all_below_them():
    tree = Draft((A, B, C, A, D), (-1, -1, 0, 1, 3), (-1,) * 5)
    fitted = fit_draft(tree, words("acab", "acd", "caa"), (), budget=5, levels=5)
    assert paths(fitted) == [(A,), (A, C)]


def test_a_path_is_continued_by_what_is_forced_after_its_last_node():
    tree = Draft((A, B), (-1, -1), (-1, -1))
    fitted = fit_draft(tree, words("acab", "bdd", "bdc"), (), budget=9, levels=9)
    assert paths(fitted) == [(A,), (B,), (A, C), (A, C, A), (A, C, A, B), (B, D)]


def test_the_draft_follows_the_forced_tokens():
    grammar = words("abcd", "abdd")
    assert grammar.forced() == (A, B)
    fitted = fit_draft(chain(D, A), grammar, grammar.forced(), budget=9, levels=9)
    assert paths(fitted) == [(A,), (A, B), (A, B, D), (A, B, D, D)]
    assert grammar.path == (), "the request's own place is left alone"


def test_chances_stay_with_their_nodes_and_what_is_forced_is_as_sure_as_what_it_follows():
    tree = Draft((D, A, C), (-1, 0, -1), (-1,) * 3, (0.5, 0.25, 0.125))
    fitted = fit_draft(tree, words("abddc", "abcd", "aba"), (A, B), budget=9, levels=9)
    assert dict(zip(paths(fitted), fitted.chances, strict=True)) == {
        (A,): 1.0,
        (A, B): 1.0,
        (A, B, D): 0.5,
        (A, B, C): 0.125,
        (A, B, D, D): 0.5,
        (A, B, D, D, C): 0.5,
        (A, B, C, D): 0.125,
    }


def test_forced_tokens_alone_are_a_draft():
    assert paths(fit_draft(NOTHING, words("abc"), (A, B), budget=2, levels=2)) == [(A,), (A, B)]


def test_neither_budget_nor_levels_are_exceeded():
    grammar = words("abcdabcd", "b")
    assert len(fit_draft(chain(A), grammar, (), budget=4, levels=9).tokens) == 4
    assert len(fit_draft(chain(A), grammar, (), budget=9, levels=3).tokens) == 3
    assert len(fit_draft(NOTHING, words("abcd"), (A, B, C), budget=2, levels=9).tokens) == 2


def test_drawn_nodes_stay_and_nothing_below_a_forbidden_one():
    """A rule of verification must see what was drawn and refused, and in which order."""
    tree = Draft((B, A, D, C, A), (-1, -1, -1, 0, 1), (0, 0, -1, 1, 2))
    fitted = fit_draft(tree, words("ab", "ac", "d"), (), budget=9, levels=9)
    assert (fitted.tokens, fitted.parents, fitted.rows) == ([B, A, D, A], [-1, -1, -1, 1], [0, 0, -1, 2])


def test_a_grammar_that_allows_everything_changes_nothing():
    free = TableConstraint(4, lambda path: {A, B, C, D})
    tree = Draft((A, B, C), (-1, -1, 1), (-1, 0, -1))
    same = Draft([A, B, C], [-1, -1, 1], [-1, 0, -1], forced=[False] * 3)
    assert fit_draft(tree, free, (), budget=3, levels=3) == same


@st.composite
def trees(draw):
    size = draw(st.integers(0, 7))
    parents = [draw(st.integers(-1, node - 1)) for node in range(size)]
    tokens: list[int] = []
    for node, parent in enumerate(parents):
        taken = {tokens[other] for other in range(node) if parents[other] == parent}
        free = [token for token in range(4) if token not in taken]
        if not free:
            parents, tokens = parents[:node], tokens[:node]
            break
        tokens.append(draw(st.sampled_from(free)))
    return Draft(tokens, parents, [-1] * len(tokens))


@settings(max_examples=200)
@given(trees(), st.lists(st.text("abcd", min_size=1, max_size=7), min_size=1, max_size=5), st.integers(0, 9))
def test_all_that_was_legal_stays_in_order_and_all_that_is_added_is_forced(tree, texts, room):
    grammar = words(*texts)
    forced = grammar.forced()[:room]
    behind = words(*texts)
    for token in forced:
        behind.advance(token)
    draft = fit_draft(tree, grammar, forced, len(forced) + len(tree.tokens) + room, 99)
    fitted = paths(draft)
    spelled = [tuple("abcd".index(letter) for letter in text) for text in texts]
    legal = [
        (*forced, *path)
        for path in paths(tree)
        if any(word[: len(forced) + len(path)] == (*forced, *path) for word in spelled)
    ]
    own = fitted[len(forced) : len(forced) + len(legal)]
    assert own == legal
    for path in fitted[len(forced) + len(legal) :]:
        assert grammar.allowed(path[:-1]) == {path[-1]}
    added = len(fitted) - len(forced) - len(legal)
    assert draft.forced == [True] * len(forced) + [False] * len(legal) + [True] * added
    assert len(set(fitted)) == len(fitted)
