"""Trees of a calibrated shape."""

from __future__ import annotations

import numpy as np
import pytest

from paceline.core.tree_shapes import ROOT
from paceline.core.trees import DraftPlan
from paceline.draft.base import DraftSampling
from paceline.draft.growing_tree import Scoring
from paceline.draft.growth import to_draft_trees
from paceline.draft.heads.ranked import make_ranked_tree, shape_of
from paceline.draft.model.vocabulary import trimmed_vocabulary
from paceline.verify.sampling import Sampler
from tests.draft.test_growth import context_of, request_of

PATHS = ((0,), (0, 0), (1,), (0, 1), (2,), (0, 0, 0), (1, 0))
LEVELS = np.array([[0, 1, 2, 3, 4, 5], [5, 4, 3, 2, 1, 0], [0, 9, 0, 0, 0, 0]], dtype=np.float32)


def grown(plan: DraftPlan, sampling: DraftSampling = DraftSampling.COUPLED, temperature: float = 0.0):
    request = request_of(vocab=6, temperature=temperature, max_tokens=20, seed=3, ignore_eos=True)
    scoring = Scoring(trimmed_vocabulary(None, 6), Sampler(6))
    tree = make_ranked_tree(context_of(request), plan, scoring, sampling, PATHS)
    for level in LEVELS:
        if tree.frontier:
            tree.grow(np.stack([level] * len(tree.frontier)))
    assert not tree.frontier
    return to_draft_trees([tree])


@pytest.mark.parametrize(
    ("plan", "tokens", "parents"),
    [
        (DraftPlan("medusa", 3, 3), [5, 4, 0], [-1, -1, 0]),
        (DraftPlan("medusa", 9, 3), [5, 4, 3, 0, 1, 0, 1], [-1, -1, -1, 0, 0, 1, 3]),
        (DraftPlan("medusa", 9, 2), [5, 4, 0, 1, 0, 1], [-1, -1, 0, 0, 1, 2]),
        (DraftPlan("medusa", 9, 3, 1), [5, 4, 3], [-1, -1, -1]),
    ],
)
def test_the_first_paths_that_a_plan_allows_become_nodes(plan, tokens, parents):
    assert grown(plan).tree_lists(0) == (tokens, parents)


def test_chances_are_those_of_paths():
    trees = grown(DraftPlan("medusa", 9, 3))
    trees.check([DraftPlan("medusa", 9, 3)], 6)
    roots = np.sqrt(np.exp(LEVELS[0]) / np.exp(LEVELS[0]).sum())
    second = np.sqrt(np.exp(LEVELS[1]) / np.exp(LEVELS[1]).sum())
    assert trees.chances_of(0)[:5] == pytest.approx(
        [roots[5], roots[4], roots[3], roots[5] * second[0], roots[5] * second[1]]
    )


def test_heads_that_guess_a_part_of_the_vocabulary_name_its_tokens():
    request = request_of(vocab=9, temperature=0.0, max_tokens=20, ignore_eos=True)
    scoring = Scoring(trimmed_vocabulary(np.array([8, 2, 4, 6], dtype=np.int32), 9), Sampler(9))
    plan = DraftPlan("medusa", 9, 2, 1)
    tree = make_ranked_tree(context_of(request), plan, scoring, DraftSampling.COUPLED, PATHS)
    tree.grow(np.array([[3.0, 0.0, 0.0, 2.0]], dtype=np.float32))
    assert to_draft_trees([tree]).tree_lists(0) == ([8, 6], [-1, -1])


def test_drawn_nodes_have_the_same_shape():
    trees = grown(DraftPlan("medusa", 9, 3), DraftSampling.INDEPENDENT, temperature=1.0)
    assert trees.draws is not None
    trees.check([DraftPlan("medusa", 9, 3)], 6)
    assert sorted(trees.tree_lists(0)[1]) == [-1, -1, -1, 0, 0, 1, 3]


def test_paths_are_numbered_in_their_order():
    assert shape_of(PATHS) == {ROOT: [0, 2, 4], 0: [1, 3], 1: [5], 2: [6]}
