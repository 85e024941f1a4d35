"""Draft trees are flat, topological and checked."""

from __future__ import annotations

import pytest

from paceline.draft.trees import PLAIN, DraftPlan, DraftTrees


def test_a_chain_is_a_tree_whose_parents_count_up():
    trees = DraftTrees.chains([[5, 6, 7], [], [8]])
    assert trees.tokens.tolist() == [5, 6, 7, 8]
    assert trees.parents.tolist() == [-1, 0, 1, -1]
    assert trees.offsets.tolist() == [0, 3, 3, 4]
    assert trees.tree_lists(2) == ([8], [-1])
    trees.check([3, 0, 1], vocab_size=9)


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
        DraftTrees.from_lists([(tokens, parents)]).check([2], vocab_size=9)


def test_a_plan_shrinks_and_never_grows():
    plan = DraftPlan("ngram", 4)
    assert plan.shrunk(9) is plan
    assert plan.shrunk(2) == DraftPlan("ngram", 2)
    assert plan.shrunk(0) is PLAIN
