"""Draft trees are flat, topological and checked."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.trees import PLAIN, DraftPlan, DraftTrees, Draws


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
def test_invalid_trees_are_refused_with_the_fault(tokens, parents, problem):
    with pytest.raises(ValueError, match=problem):
        DraftTrees.from_lists([(tokens, parents)]).check([DraftPlan("suffix", 2, branching=2)], vocab_size=9)


numbers = st.integers(-2, 4)


@settings(max_examples=200)
@given(
    tokens=st.lists(numbers, max_size=5),
    parents=st.lists(numbers, max_size=5),
    chances=st.none() | st.lists(st.sampled_from([-0.1, 0.2, 0.5, 1.0, 1.1, np.nan]), max_size=5),
    offsets=st.lists(numbers, min_size=2, max_size=4),
    branching=st.integers(1, 2),
)
def test_the_compiled_check_agrees_with_the_plain_one(tokens, parents, chances, offsets, branching):
    size = len(tokens)
    offsets = [0, *offsets[1:-1], size] if offsets[0] >= 0 else offsets  # half of them begin and end well
    arrays = [np.array(values, dtype=np.int32) for values in (tokens, (parents + [0] * 5)[:size], offsets)]
    if len(parents) == 3:
        arrays[1] = arrays[1][:-1]  # a parent is missing
    known = None if chances is None else np.array(chances + [0.2] * (size - len(chances)), dtype=np.float32)
    trees = DraftTrees(*arrays, chances=known)
    plans = [DraftPlan("suffix", 3, branching)] * (len(offsets) - 1)
    try:
        trees._name_fault(plans, 4)
        is_sound = True
    except ValueError:
        is_sound = False
    assert trees._are_sound(plans, 4) == is_sound


def test_a_plan_for_a_chain_takes_no_tree():
    tree = DraftTrees.from_lists([([1, 2], [-1, -1])])
    tree.check([DraftPlan("suffix", 2, branching=2)], vocab_size=9)
    with pytest.raises(ValueError, match="branches, its plan is a chain"):
        tree.check([DraftPlan("suffix", 2)], vocab_size=9)


def test_the_labels_of_plans_tell_them_apart():
    tree = DraftPlan("eagle3", 7, branching=3, depth=4)
    cascade = DraftPlan("ngram", 7, otherwise=DraftPlan("eagle3", 5), enough=0.5)
    plans = PLAIN, DraftPlan("eagle3", 7), tree, cascade
    assert [plan.label for plan in plans] == ["off", "eagle3 7", "eagle3 7 (3, 4)", "ngram 7 + eagle3 5"]


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


def test_a_group_without_chances_gets_nan_when_merged():
    sure = DraftTrees.chains([[1, 2], []], [[0.5, 0.25], []])
    merged = DraftTrees.merged(4, [([0, 2], DraftTrees.chains([[3], [4]])), ([3, 1], sure)])
    assert np.array_equal(merged.chances, [np.nan, np.nan, 0.5, 0.25], equal_nan=True)
    assert merged.chances_of(3) == [0.5, 0.25]
    assert np.array_equal(merged.expected(), [np.nan, 0.0, np.nan, 0.75], equal_nan=True)
    assert DraftTrees.merged(2, [([0], DraftTrees.chains([[3]]))]).chances is None


def test_a_request_of_two_groups_has_the_tree_of_the_later():
    merged = DraftTrees.merged(
        2, [([0, 1], DraftTrees.chains([[1, 2], [3]])), ([0], DraftTrees.chains([[4]]))]
    )
    assert [merged.tree_lists(request)[0] for request in range(2)] == [[4], [3]]
    assert DraftTrees.merged(2, []).offsets.tolist() == [0, 0, 0]


trees_of_nodes = (
    st.lists(  # of each request: how far above its own place a node's parent lies, and whether it is kept
        st.lists(st.tuples(st.integers(1, 4), st.booleans()), max_size=6), min_size=1, max_size=4
    )
)


@given(nodes=trees_of_nodes)
def test_kept_nodes_keep_their_paths(nodes):
    parents = [[max(place - above, -1) for place, (above, _) in enumerate(tree)] for tree in nodes]
    keep = []
    for tree, above in zip(nodes, parents, strict=True):
        own: list[bool] = []
        for (_, wanted), parent in zip(tree, above, strict=True):
            own.append(wanted and (parent < 0 or own[parent]))
        keep.append(own)
    tokens = [[10 * number + place for place in range(len(tree))] for number, tree in enumerate(nodes)]
    trees = DraftTrees.from_lists(
        list(zip(tokens, parents, strict=True)), [[token / 100 for token in line] for line in tokens]
    )
    rows = np.arange(trees.num_nodes, dtype=np.int32)
    trees = replace(trees, draws=Draws(np.eye(60)[trees.tokens], rows))
    flat = np.array([wanted for own in keep for wanted in own], dtype=bool)
    kept = trees.kept(flat)
    for request, own in enumerate(keep):
        left, above = kept.tree_lists(request)
        assert left == [token for token, wanted in zip(tokens[request], own, strict=True) if wanted]
        for token, parent in zip(left, above, strict=True):
            before = parents[request][token % 10]
            assert (left[parent] if parent >= 0 else -1) == (tokens[request][before] if before >= 0 else -1)
        assert kept.chances_of(request) == [float(np.float32(token / 100)) for token in left]
    assert kept.draws is not None
    assert kept.draws.draft_probs[kept.draws.rows].argmax(axis=1).tolist() == kept.tokens.tolist()
    assert kept.parents.dtype == kept.offsets.dtype == np.int32


@pytest.mark.parametrize(
    ("chances", "complaint"),
    [
        ([0.5, 0.5, 1.0], None),
        ([np.nan, np.nan, 0.0], None),
        ([0.5, 0.6, 0.1], "above"),
        ([1.1, 0.5, 0.1], "above"),
        ([0.5, -0.1, 0.1], "between 0"),
        ([0.5, 0.5], "each of 3 nodes"),
    ],
)
def test_a_child_is_never_likelier_than_its_parent(chances, complaint):
    trees = replace(DraftTrees.chains([[1, 2], [3]]), chances=np.array(chances, dtype=np.float32))
    if complaint is None:
        trees.check([DraftPlan("suffix", 2)] * 2, vocab_size=9)
    else:
        with pytest.raises(ValueError, match=complaint):
            trees.check([DraftPlan("suffix", 2)] * 2, vocab_size=9)


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


def test_a_plan_has_as_many_nodes_as_its_budget_and_levels_allow():
    assert DraftPlan("ngram", 4).nodes == 4
    assert DraftPlan("ngram", 8, depth=3).nodes == 3
    assert DraftPlan("suffix", 8, branching=2, depth=3).nodes == 8
    assert DraftPlan("suffix", 20, branching=2, depth=3).nodes == 2 + 4 + 8
    assert PLAIN.nodes == 0
    assert DraftPlan("suffix", 8).shrunk(0) == PLAIN
