"""Draft trees are flat, topological and checked."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from paceline.draft.trees import PLAIN, DraftPlan, DraftTrees, Draws


def test_a_chain_is_a_tree_whose_parents_count_up():
    trees = DraftTrees.chains([[5, 6, 7], [], [8]])
    assert trees.tokens.tolist() == [5, 6, 7, 8]
    assert trees.parents.tolist() == [-1, 0, 1, -1]
    assert trees.offsets.tolist() == [0, 3, 3, 4]
    assert trees.tree_lists(2) == ([8], [-1])
    trees.check([DraftPlan("ngram", 3), PLAIN, DraftPlan("ngram", 1)], vocab_size=9)


@pytest.mark.parametrize(
    ("tokens", "parents", "problem"),
    [
        ([1, 2, 3], [-1, 0, 1], "budget is 2"),
        ([1, 2], [0, -1], "topological"),
        ([1, 2], [-1, -2], "topological"),
        ([1, 9], [-1, 0], "outside"),
        ([1, -1], [-1, 0], "outside"),
        ([1, 1], [-1, -1], "siblings"),
    ],
)
def test_unsound_trees_are_named(tokens, parents, problem):
    with pytest.raises(ValueError, match=problem):
        DraftTrees.from_lists([(tokens, parents)]).check([DraftPlan("suffix", 2, branching=2)], vocab_size=9)


def test_a_plan_for_a_chain_takes_no_tree():
    tree = DraftTrees.from_lists([([1, 2], [-1, -1])])
    tree.check([DraftPlan("suffix", 2, branching=2)], vocab_size=9)
    with pytest.raises(ValueError, match="branches, its plan is a chain"):
        tree.check([DraftPlan("suffix", 2)], vocab_size=9)


def test_a_plan_shrinks_and_never_grows():
    plan = DraftPlan("ngram", 4)
    assert plan.shrunk(9) is plan
    assert plan.shrunk(2) == DraftPlan("ngram", 2)
    assert plan.shrunk(0) is PLAIN


def test_trees_of_several_drafters_become_one_with_their_draws():
    probs = np.array([[0.5, 0.5], [0.25, 0.75]])
    drawn = replace(
        DraftTrees.chains([[3], [4, 5]]), draws=Draws(probs, np.array([0, -1, 1], dtype=np.int32))
    )
    chosen = DraftTrees.from_lists([([6, 7], [-1, -1])])
    also_drawn = replace(DraftTrees.chains([[8]]), draws=Draws(probs[:1], np.array([0], dtype=np.int32)))
    merged = DraftTrees.merged(5, [([3, 0], drawn), ([1], chosen), ([4], also_drawn)])
    assert [merged.tree_lists(request) for request in range(5)] == [
        ([4, 5], [-1, 0]),
        ([6, 7], [-1, -1]),
        ([], []),
        ([3], [-1]),
        ([8], [-1]),
    ]
    assert merged.draws_of(1) is None
    assert merged.draws_of(2) is None
    assert merged.draws_of(0).rows.tolist() == [-1, 1]
    assert merged.draws_of(3).rows.tolist() == [0]
    assert merged.draws_of(4).rows.tolist() == [2]
    assert merged.draws.draft_probs.tolist() == [*probs.tolist(), probs[0].tolist()]


@pytest.mark.parametrize(
    ("draft_probs", "rows", "complaint"),
    [
        ([[0.5, 0.5]], [0, -1], None),
        ([[0.5, 0.5, 0.0]], [0, -1], "float64"),
        ([[0.5, 0.5]], [0], "for each node"),
        ([[0.5, 0.5]], [1, -1], "one of 1"),
        ([[0.0, 1.0]], [0, -1], "probability 0"),
        ([[np.nan, 1.0]], [0, -1], "probability 0"),
    ],
)
def test_tokens_must_be_ones_that_can_have_been_drawn(draft_probs, rows, complaint):
    draws = Draws(np.array(draft_probs), np.array(rows, dtype=np.int32))
    trees = replace(DraftTrees.chains([[0, 1]]), draws=draws)
    if complaint is None:
        trees.check([DraftPlan("suffix", 2, branching=2)], vocab_size=2)
    else:
        with pytest.raises(ValueError, match=complaint):
            trees.check([DraftPlan("suffix", 2, branching=2)], vocab_size=2)


def test_a_plan_has_as_many_levels_as_its_budget_and_depth_allow():
    assert DraftPlan("ngram", 4).levels == 4
    assert DraftPlan("suffix", 8, branching=2, depth=3).levels == 3
    assert DraftPlan("suffix", 8, branching=2, depth=3).shrunk(2).levels == 2
    assert DraftPlan("suffix", 8).shrunk(0) == PLAIN
