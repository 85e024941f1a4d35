"""Growing trees: their shape, the rows of their passes, and the distributions of drawn ones."""

from __future__ import annotations

import numpy as np
import pytest

from paceline.core.params import SamplingParams
from paceline.core.tree_shapes import ROOT, static_shape
from paceline.core.trees import DraftPlan
from paceline.draft.growing_tree import Scoring
from paceline.draft.growth import ChosenTree, DrawnTree
from paceline.draft.model.draft_cache import Context
from paceline.engine.admission import Limits, make_requests
from paceline.verify.sampling import Sampler
from tests.draft.draft_models import path_of, same_ids
from tests.toy import VOCAB, ToyBackend, ToyTokenizer

PROMPT = [5, 2, 3, 4]


def request_of(vocab: int = VOCAB, **params):
    (request,) = make_requests(
        "name",
        0,
        PROMPT,
        SamplingParams(**params),
        limits=Limits(vocab, 64, 1, 64),
        tokenizer=ToyTokenizer(),
        engine_seed=0,
        pool_tokens=100,
        now=0.0,
    )
    return request


def context_of(request, room: int = 60) -> Context:
    return Context(request, request.token_ids, np.zeros(20, dtype=np.int32), room)


def toy_logits(path, vocab: int = VOCAB):
    tokens = np.array([*PROMPT, *path])
    return ToyBackend(vocab=vocab).logits_of(tokens, np.arange(len(tokens)))


def grown(tree, logits_of=toy_logits):
    """The parts of all passes until the tree is complete."""
    tree.grow(logits_of(())[None])
    parts = []
    while tree.frontier:
        parts.append(tree.part())
        tree.grow(np.stack([logits_of(path_of(tree, node)) for node in tree.frontier]))
    return parts


def paths_of(tree) -> list[tuple[int, ...]]:
    finished = tree.finished()
    paths: list[tuple[int, ...]] = []
    for token, parent in zip(finished.tokens, finished.parents, strict=True):
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    return paths


def eagle2_reference(request, budget: int, branching: int, levels: int) -> set[tuple[int, ...]]:
    """Expand the best `branching` of each level; keep the best `budget` of all, ties to the shallower."""
    pool: list[tuple[float, int, tuple[int, ...]]] = []
    frontier: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
    for level in range(1, levels + 1):
        found = []
        for score, path in frontier:
            logits = toy_logits(path).astype(np.float64)
            log_probs = logits - np.log(np.exp(logits).sum())
            for token in np.argsort(-log_probs, kind="stable")[:branching].tolist():
                found.append((score + log_probs[token], (*path, token)))
        pool += [(-score, level, path) for score, path in found]
        open_ends = [(score, path) for score, path in found if path[-1] not in request.ending_ids]
        frontier = sorted(open_ends, key=lambda end: -end[0])[:branching]
    return {path for _, _, path in sorted(pool)[:budget]}


@pytest.mark.parametrize(
    ("budget", "branching", "depth"), [(1, 3, None), (7, 2, None), (16, 3, 4), (30, 5, 3), (12, 12, 2)]
)
def test_chosen_trees_have_the_shape_of_eagle_2(budget, branching, depth):
    request = request_of(temperature=0)
    plan = DraftPlan("draft_model", budget, branching, depth)
    tree = ChosenTree(context_of(request), plan, Scoring(same_ids(), Sampler(VOCAB)), coupled=True)
    parts = grown(tree)
    paths = paths_of(tree)
    assert set(paths) == eagle2_reference(request, budget, branching, plan.levels)
    assert len(paths) == budget
    # rows stay within the room that the engine reserves
    assert all(part.start + len(part.tokens) <= len(PROMPT) + budget for part in parts)


def test_a_chain_costs_one_row_a_level():
    plan = DraftPlan("draft_model", 6)
    tree = ChosenTree(context_of(request_of()), plan, Scoring(same_ids(), Sampler(VOCAB)), coupled=True)
    parts = grown(tree)
    assert [(part.start, len(part.tokens), part.parents) for part in parts] == [
        (len(PROMPT) + place, 1, [-1]) for place in range(5)
    ]
    assert [part.tokens[0] for part in parts] == tree.finished().tokens[:5] == tree.chain_in_place()


def test_a_pass_computes_what_the_frontier_does_not_have_in_common():
    """Token 20 is certain, until after three of them 21 is nearly as good."""

    def logits_of(path):
        logits = np.zeros(VOCAB, dtype=np.float32)
        logits[20] = 30.0
        logits[21] = 29.0 if len(path) == 3 else 0.0
        return logits

    plan = DraftPlan("draft_model", 24, branching=2, depth=7)
    scoring = Scoring(same_ids(), Sampler(VOCAB))
    tree = ChosenTree(context_of(request_of(temperature=0, ignore_eos=True)), plan, scoring, coupled=False)
    passes = [(part.start - len(PROMPT), part.tokens, part.parents) for part in grown(tree, logits_of)]
    assert passes == [
        (0, [20, 0], [-1, -1]),
        (1, [20, 0], [-1, -1]),
        (2, [20, 0], [-1, -1]),
        (3, [20, 21], [-1, -1]),
        (3, [20, 21, 20, 20], [-1, -1, 0, 1]),
        (3, [20, 21, 20, 20, 20, 20], [-1, -1, 0, 1, 2, 3]),
    ]
    assert tree.chain_in_place() == [20] * 4


@pytest.mark.parametrize("coupled", [True, False])
def test_penalties_follow_the_nodes_own_path(coupled):
    request = request_of(temperature=0.5, seed=3, frequency_penalty=2.0, repetition_penalty=1.5, top_k=5)
    plan = DraftPlan("draft_model", 12, branching=3)
    tree = ChosenTree(context_of(request), plan, Scoring(same_ids(), Sampler(VOCAB)), coupled)

    def flat(path):  # without penalties tokens would repeat along a path
        logits = np.zeros(VOCAB, dtype=np.float32)
        logits[[30, 40, 50]] = 2.0
        return logits

    grown(tree, flat)
    for path in paths_of(tree):
        expected = request.sampling.branch(path[:-1])
        place = (flat(path), len(PROMPT) + len(path) - 1, len(path) - 1)
        best, _ = Sampler(VOCAB).candidates(expected, *place, 3, coupled)
        assert path[-1] in best
        assert len(set(path)) == len(path)


def test_a_coupled_tree_holds_what_a_target_with_equal_logits_chooses():
    plan = DraftPlan("draft_model", 8, branching=3)
    found = 0
    for seed in range(40):
        request = request_of(temperature=1.0, seed=seed)
        tree = ChosenTree(context_of(request), plan, Scoring(same_ids(), Sampler(VOCAB)), coupled=True)
        grown(tree)
        path: tuple[int, ...] = ()
        while path in {(), *paths_of(tree)}:
            place = (toy_logits(path), len(PROMPT) + len(path), len(path))
            path = (*path, Sampler(VOCAB).sample(request.sampling, *place))
        assert len(path) > 1, "the target's first token is always drafted"
        found += len(path) - 1
    assert found > 40 * 2


@pytest.mark.parametrize(("share", "length"), [(0.9, 9), (0.72, 5), (0.5, 3), (0.4, 2), (0.17, 1), (0.1, 0)])
def test_a_chain_ends_where_it_is_unlikely_to_be_right(share, length):
    """With a token of this share at every node, the chance of a chain of n is the n-th power of its root.

    A guess is kept from 0.35 on, and another one follows it from 0.49 on.
    """

    def likely(path):
        logits = np.zeros(VOCAB, dtype=np.float32)
        logits[20 + len(path)] = np.log(share / (1 - share) * (VOCAB - 1))
        return logits

    plan, scoring = DraftPlan("eagle3", 9), Scoring(same_ids(), Sampler(VOCAB), least_chance=0.35)
    tree = ChosenTree(context_of(request_of(temperature=0)), plan, scoring, coupled=True)
    grown(tree, likely)
    assert paths_of(tree) == [tuple(range(20, 20 + depth)) for depth in range(1, length + 1)]


@pytest.mark.parametrize("branching", [1, 2])
def test_a_node_has_the_chance_of_its_path_and_is_left_out_below_the_plans_minimum(branching):
    scoring = Scoring(same_ids(), Sampler(VOCAB))

    def likely(path):  # token 20 has half, the next a fifth
        logits = np.full(VOCAB, np.log(0.3 / (VOCAB - 2)), dtype=np.float32)
        logits[20:22] = np.log([0.5, 0.2])
        return logits

    plan = DraftPlan("eagle3", 6, branching, depth=4, least_chance=0.28)
    tree = ChosenTree(context_of(request_of(temperature=0)), plan, scoring, coupled=True)
    grown(tree, likely)
    chances = dict(zip(paths_of(tree), tree.finished().chances, strict=True))
    chain = {(20,) * depth: 0.5 ** (depth / 2) for depth in (1, 2, 3)}  # 0.35 is too unlikely to go on from
    beside = {(21,): 0.2**0.5, (20, 21): 0.1**0.5, (21, 20): 0.1**0.5}
    assert chances == pytest.approx(chain if branching == 1 else chain | beside)


def test_chances_that_are_not_needed_are_not_computed():
    scoring = Scoring(same_ids(), Sampler(VOCAB))
    for plan, known in [(DraftPlan("draft_model", 3), False), (DraftPlan("draft_model", 3, 2), True)]:
        tree = ChosenTree(context_of(request_of(temperature=0)), plan, scoring, coupled=True)
        grown(tree)
        assert [np.isfinite(chance) for chance in tree.finished().chances] == [known] * 3


@pytest.mark.parametrize("branching", [1, 2])
def test_drawn_tokens_are_never_left_out_and_trees_have_the_size_they_were_asked_for(branching):
    """Whether a drawn token is verified must not depend on which one it is."""
    scoring = Scoring(same_ids(), Sampler(VOCAB), least_chance=0.9)
    plan = DraftPlan("eagle3", 6, branching)
    drawn = DrawnTree(context_of(request_of(temperature=1.0, seed=3)), plan, scoring)
    grown(drawn)
    assert len(drawn.finished().tokens) == 6
    assert np.isnan(drawn.finished().chances).all(), "so that none is left out for being unlikely"
    if branching > 1:
        chosen = ChosenTree(context_of(request_of(temperature=0)), plan, scoring, coupled=True)
        grown(chosen)
        assert len(chosen.finished().tokens) == 6


@pytest.mark.parametrize(
    ("budget", "branching", "levels"), [(1, 1, 1), (5, 1, 5), (9, 2, 9), (20, 4, 3), (50, 2, 3)]
)
def test_static_shapes_keep_to_their_plan(budget, branching, levels):
    children = static_shape(budget, branching, levels)
    numbers = [number for family in children.values() for number in family]
    assert sorted(numbers) == list(range(len(numbers)))
    assert len(numbers) == min(budget, sum(branching**level for level in range(1, levels + 1)))
    depths = {ROOT: 0}
    for number in range(len(numbers)):
        parent = next(parent for parent, family in children.items() if number in family)
        depths[number] = depths[parent] + 1
    assert max(depths.values()) <= levels
    assert max(map(len, children.values())) <= branching


def test_a_static_shape_prefers_depth_to_breadth_while_that_is_likelier():
    assert static_shape(4, 1, 4) == {ROOT: [0], 0: [1], 1: [2], 2: [3]}
    assert static_shape(4, 2, 4) == {ROOT: [0], 0: [1], 1: [2], 2: [3]}
    assert static_shape(5, 2, 4) == {ROOT: [0, 4], 0: [1], 1: [2], 2: [3]}


SMALL = 7


def drawn(seed: int, **params) -> DrawnTree:
    request = request_of(SMALL, temperature=1.0, seed=seed, ignore_eos=True, **params)
    plan = DraftPlan("draft_model", 6, branching=2, depth=2)
    tree = DrawnTree(context_of(request), plan, Scoring(same_ids(SMALL, SMALL), Sampler(SMALL)))
    grown(tree, lambda path: toy_logits(path, SMALL) / 4)
    return tree


def test_children_are_drawn_from_the_distributions_they_name_without_replacement():
    """Chi-squared over 2,500 seeds: first children follow q, second ones what is left of it."""
    root = toy_logits((), SMALL).astype(np.float64) / 4
    probabilities = np.exp(root) / np.exp(root).sum()
    counts = np.zeros((SMALL, SMALL))
    trials = 2500
    for seed in range(trials):
        finished = drawn(seed).finished()
        assert list(finished.parents) == [-1, -1, 0, 0, 1, 1], "the shape does not depend on what is drawn"
        assert list(finished.rows) == [0, 0, 1, 1, 2, 2]
        counts[finished.tokens[0], finished.tokens[1]] += 1
    assert np.allclose(finished.distributions[0], probabilities, atol=1e-6)
    expected = probabilities[:, None] * probabilities[None] / (1 - probabilities[:, None])
    np.fill_diagonal(expected, 0.0)
    assert (counts[expected == 0] == 0).all()
    likely = expected * trials > 5
    statistic = (((counts - expected * trials) ** 2) / (expected * trials + 1e-300))[likely].sum()
    freedom = likely.sum() - 1
    assert statistic < freedom + 5 * np.sqrt(2 * freedom)


def test_each_distribution_is_that_of_the_nodes_own_path_with_all_options():
    tree = drawn(5, frequency_penalty=1.5, top_k=5, logit_bias={2: 1.0})
    finished = tree.finished()
    request = tree.context.request
    for node, row in enumerate(finished.rows):
        path = path_of(tree, tree.parents[node])
        logits = toy_logits(path, SMALL) / 4
        expected = Sampler(SMALL).probabilities(request.sampling.branch(path), logits, len(path))
        assert (finished.distributions[row] == expected).all()
        assert expected[finished.tokens[node]] > 0


def test_a_distribution_with_fewer_tokens_than_branches_gives_fewer_children():
    finished = drawn(1, top_k=1).finished()
    assert list(finished.parents) == [-1, 0]
    assert [probabilities.max() for probabilities in finished.distributions] == [1.0, 1.0]


def test_noise_of_a_draw_is_apart_for_each_step_and_node():
    request = request_of(SMALL, temperature=1.0, seed=1, ignore_eos=True, max_tokens=60)
    seen = set()
    for _ in range(20):
        plan = DraftPlan("draft_model", 8)
        tree = DrawnTree(context_of(request), plan, Scoring(same_ids(SMALL, SMALL), Sampler(SMALL)))
        grown(tree, lambda path: np.zeros(SMALL, dtype=np.float32))
        seen.add(tuple(tree.tokens))
        request.token_ids.append(3)
    assert len(seen) == 20
