"""Acceptance of a head's static trees: what accepted paths tell of chains, of siblings and of other trees."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from paceline.control.acceptance.chains import ChainAcceptance
from paceline.control.acceptance.fixed_trees import SiblingAcceptance, count_path
from paceline.control.config import CONFIG
from paceline.core.stats import DraftStats
from paceline.core.tree_shapes import ROOT, static_shape
from paceline.core.trees import DraftPlan

TREE = DraftPlan("head", 7, branching=3, depth=3)


def accepted_path(
    plan: DraftPlan,
    chance: float,
    random: np.random.Generator,
    younger: tuple[float, ...] = CONFIG.chains.sibling_chances,
) -> tuple[int, ...]:
    """The accepted path of one tree, walked from its root. `younger`: chances of the siblings of a first
    child."""
    children, node, path = static_shape(plan.budget, plan.branching, plan.levels), ROOT, list[int]()
    while siblings := children.get(node):
        chances = [chance, *younger][: len(siblings)]
        taken = next((rank for rank, each in enumerate(chances) if random.random() < each), None)
        if taken is None:
            break
        node = siblings[taken]
        path.append(node)
    return tuple(path)


def walked(plan: DraftPlan, *chances: Any) -> DraftStats:
    """The draft of a tree that is accepted by chance."""
    path = accepted_path(plan, *chances)
    return DraftStats("a", "", "head", plan.nodes, plan.levels, len(path), path=path)


@pytest.mark.parametrize("tree", [TREE, DraftPlan("head", 15, branching=4, depth=3)])
def test_trees_are_expected_to_give_what_walks_through_them_do(tree):
    random = np.random.default_rng(0)
    walks = [len(accepted_path(tree, 0.6, random)) for _ in range(20_000)]
    mean, square = ChainAcceptance(tree.levels, [0.6], 12).moments(tree)
    assert mean == pytest.approx(np.mean(walks), rel=0.02)
    assert square == pytest.approx(np.mean(np.square(walks)), rel=0.03)


def test_accepted_trees_tell_what_chains_would_give():
    random = np.random.default_rng(0)
    chances, found = ChainAcceptance(3, [0.9], 12), []
    for number in range(3000):
        chances.add([walked(TREE, 0.5, random) for _ in range(8)], 8, 3, TREE)
        if number > 500:
            found.append(chances.reached(3))
    assert np.mean(found, axis=0) == pytest.approx([0.5, 0.25, 0.125], rel=0.1)


def test_trees_tell_of_chains_and_other_trees_where_siblings_are_better_than_the_prior():
    random, measured = np.random.default_rng(0), (0.40, 0.22, 0.10)  # of smollm2-135m, in greedy mathematics
    tree, other = DraftPlan("head", 15, branching=4, depth=3), DraftPlan("head", 7, branching=3, depth=3)
    chances, found = ChainAcceptance(3, [0.6], 12), []
    for number in range(3000):
        drafts = [walked(tree, 0.6, random, measured) for _ in range(4)]
        chances.add(drafts, 4, 3, tree)
        if number > 500:
            found.append([*chances.reached(3), chances.moments(other)[0]])
    walks = [len(accepted_path(other, 0.6, random, measured)) for _ in range(20_000)]
    assert np.mean(found, axis=0) == pytest.approx([0.6, 0.36, 0.216, np.mean(walks)], rel=0.03)


def test_trees_that_are_accepted_whole_give_counts_that_a_later_server_takes():
    for nodes, branching, depth in CONFIG.device_planner.trees:
        tree = DraftPlan("head", nodes, branching, depth)
        acceptance = ChainAcceptance(depth, [0.5], weight=8)
        for _ in range(50):
            whole = accepted_path(tree, 1.0, np.random.default_rng(0))
            draft = DraftStats("1", "", "head", nodes, depth, accepted=depth, path=whole)
            acceptance.add([draft], 1, depth, tree)
            assert all(chance < 1.0 for chance in acceptance.estimate().chances)
        facts = acceptance.facts()
        assert all(hits <= tries for hits, tries in zip(facts["hits"], facts["tries"], strict=True))
        ChainAcceptance(depth, [0.5], weight=8).begin_with(facts)
        again = ChainAcceptance(depth, [0.5], weight=8)
        again.begin_with(facts)
        assert again.moments(tree) == pytest.approx(acceptance.moments(tree), rel=0.1)


def test_facts_of_a_version_without_siblings_are_taken_and_wrong_ones_refused():
    acceptance = ChainAcceptance(3, [0.5], weight=8)
    facts = acceptance.facts()
    acceptance.begin_with({name: counts for name, counts in facts.items() if name != "siblings"})
    for wrong in ([[1.0], [0.0]], [[1.0] * 3, [2.0] * 3]):
        with pytest.raises(ValueError, match="these are not counts of siblings"):
            acceptance.begin_with({**facts, "siblings": wrong})


# the children of ROOT are 0, 1 and 4, those of 0 are 2 and 3
SHAPE = {ROOT: [0, 1, 4], 0: [2, 3]}


@pytest.mark.parametrize(
    ("path", "has_ended", "tries", "hits", "second", "third"),
    [
        ((), False, [1, 0], [0, 0], (1, 0), (1, 0)),  # all three children are rejected
        ((0,), False, [1, 1], [1, 0], (1, 0), (0, 0)),  # then two
        ((0,), True, [1, 0], [1, 0], (0, 0), (0, 0)),  # the request ended: nothing of its children
        ((0, 2), False, [1, 1], [1, 1], (0, 0), (0, 0)),
        ((0, 3), False, [1, 1], [1, 0], (1, 1), (0, 0)),
        ((1,), False, [1, 0], [0, 0], (1, 1), (0, 0)),  # a node without children
        ((4,), False, [1, 0], [0, 0], (1, 0), (1, 1)),
    ],
)
def test_a_path_tells_of_first_children_and_of_siblings(
    path, has_ended, tries, hits, second, third, monkeypatch
):
    monkeypatch.setattr("paceline.control.acceptance.fixed_trees._children", lambda plan: SHAPE)
    first: tuple[list[int], list[int]] = [0, 0], [0, 0]
    siblings = SiblingAcceptance()
    count_path(DraftPlan("head", 5, branching=3, depth=2), path, has_ended, 1, first, siblings)
    assert first == (tries, hits)
    (tried, accepted) = siblings.facts()
    assert [*zip(tried, accepted, strict=True)] == [second, third, (0, 0)]
