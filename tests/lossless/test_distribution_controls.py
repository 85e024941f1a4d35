"""Negative controls: each known way to get verification wrong is planted, and the exact test sees it.

`test_distribution.py` asks for less than 1e-12; here the same error must be far above.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from paceline.core.sampling import SamplingState
from tests.lossless.enumeration import WORLDS, drawn_chain, error, grow
from tests.lossless.real_targets import grow_through_samplers, sampled_world
from tests.verify import reference_rules
from tests.verify.reference_rules import Drafted, block, rejection, residual, stop_probability, traversal

FAR = 1e-3
D, C = "drawn", "chosen"
CHOSEN = ((-1, C), (0, C))
PAIR = ((-1, D), (-1, D))
TREE = ((-1, D), (-1, D), (0, D), (0, D), (1, D))
CHAIN_RULES = [rejection, block, traversal]
TREE_RULES = [rejection, traversal]


def worst(shape, rule, grow=grow):
    """The error of a rule in the world that shows it best."""
    return max(error(world, shape, rule, grow) for world in WORLDS.values())


def grown_as(planted: type[Drafted]):
    """A drafter whose drafts are of a planted kind."""

    def grow_planted(world, shape, oracle):
        draft = grow(world, shape, oracle)
        return planted(draft.target_probs, draft.tokens, draft.parents, draft.draft_probs, draft.draft_rows)

    return grow_planted


class SoftmaxOfChosen(Drafted):
    def proposed(self, node):
        return self.draft_probs[node]  # grow() keeps one line for each node, chosen or drawn


@pytest.mark.parametrize("rule", CHAIN_RULES)
def test_the_drafters_softmax_in_the_ratio_of_a_chosen_token(rule):
    assert worst(CHOSEN, rule, grown_as(SoftmaxOfChosen)) > FAR


@pytest.mark.parametrize("rule", CHAIN_RULES)
def test_drawn_tokens_of_low_confidence_dropped(rule):
    def grow_dropping(world, shape, oracle):
        draft = grow(world, shape, oracle)
        if draft.draft_probs[0][draft.tokens[0]] >= 0.3:
            return draft
        return Drafted(draft.target_probs[:1], [], [], draft.draft_probs, [])

    assert worst(drawn_chain(1), rule, grow_dropping) > FAR


@pytest.mark.parametrize("rule", CHAIN_RULES)
def test_the_better_of_two_samples_kept(rule):
    def grow_choosy(world, shape, oracle):
        one, other = grow(world, shape, oracle), grow(world, shape, oracle)
        return max(one, other, key=lambda draft: draft.draft_probs[0][draft.tokens[0]])

    assert worst(drawn_chain(1), rule, grow_choosy) > FAR


@pytest.mark.parametrize("shape", [drawn_chain(2), TREE])
def test_the_residual_taken_from_the_target_itself(shape, plant):
    plant(reference_rules, "residual", lambda weight, target, proposed: (target, 1.0))
    assert worst(shape, rejection) > FAR


@pytest.mark.parametrize("rule", TREE_RULES)
@pytest.mark.filterwarnings("ignore:invalid value")
def test_siblings_drawn_with_replacement_but_treated_as_without(rule):
    def grow_repeating(world, shape, oracle):
        draft_probs = world.draft(())
        tokens = [oracle.choose(draft_probs) for _ in shape]
        target_probs = np.array([world.target(path) for path in [(), *((token,) for token in tokens)]])
        return Drafted(target_probs, tokens, [-1] * len(shape), draft_probs[None], [0] * len(shape))

    assert worst(PAIR, rule, grow_repeating) > FAR


class SiblingsLeftIn(Drafted):
    def proposed(self, node):
        return self.draft_probs[self.draft_rows[node]]


class NotRenormalized(Drafted):
    def proposed(self, node):
        probs = self.draft_probs[self.draft_rows[node]].copy()
        probs[
            [self.tokens[sibling] for sibling in range(node) if self.parents[sibling] == self.parents[node]]
        ] = 0
        return probs


@pytest.mark.parametrize("rule", TREE_RULES)
@pytest.mark.parametrize("planted", [SiblingsLeftIn, NotRenormalized])
def test_the_drafters_distribution_not_that_of_what_was_left(rule, planted):
    assert worst(PAIR, rule, grown_as(planted)) > FAR


def planted_block(draft, accept, weight_of_residual, chance_of_all):
    """Block verification with another weight in S, and another chance for the whole chain."""
    length = len(draft.tokens)
    weights = [1.0]
    for node, token in enumerate(draft.tokens):
        weights.append(
            min(weights[node] * draft.target_probs[node][token] / draft.proposed(node)[token], 1.0)
        )
    if accept(length - 1, chance_of_all(weights)):
        return length - 1, draft.target_probs[length]
    for end in range(length - 2, -2, -1):
        weight = weight_of_residual(weights[end + 1])
        target, total = residual(weight, draft.target_probs[end + 1], draft.proposed(end + 1))
        if end == -1 or accept(end, stop_probability(weights[end + 1], total)):
            return end, target
    raise AssertionError


@pytest.mark.parametrize(
    ("weight_of_residual", "chance_of_all", "seen"),
    [
        pytest.param(lambda weight: weight, lambda weights: weights[-1], False, id="as it should be"),
        pytest.param(lambda weight: 1.0, lambda weights: weights[-1], True, id="residual without weight"),
        pytest.param(
            lambda weight: weight,
            lambda weights: weights[-1] / max(weights[-2], 1e-9),
            True,
            id="whole chain by its last token",
        ),
        pytest.param(lambda weight: weight, lambda weights: 1.0, True, id="whole chain always"),
    ],
)
def test_the_chances_of_block_verification_wrong(weight_of_residual, chance_of_all, seen):
    def rule(draft, accept):
        return planted_block(draft, accept, weight_of_residual, chance_of_all)

    assert (worst(drawn_chain(3), rule) > FAR) == seen


def test_the_weight_of_a_node_recomputed_from_above(plant):
    """Traversal that forgets, when a leaf is taken away, what that says of the path above it."""
    plant(reference_rules, "stop_probability", lambda weight, total: weight)
    assert worst(TREE, traversal) > FAR
    assert worst(drawn_chain(2), traversal) > FAR


@pytest.mark.parametrize("rule", [block, traversal])
def test_a_residual_that_sums_to_zero_taken_for_a_certain_one(rule, plant):
    def careless(weight, total):
        return total / (total + 1.0 - weight) if total > 0 else 1.0

    plant(reference_rules, "stop_probability", careless)
    assert worst(drawn_chain(3), rule) > FAR


@pytest.mark.parametrize("rule", CHAIN_RULES)
def test_a_text_that_continues_after_its_end(rule):
    world = sampled_world(3, 0, {})
    blind = grow_through_samplers({}, ending=-1)
    assert error(world, drawn_chain(3), rule, blind) > FAR


@pytest.mark.parametrize("rule", CHAIN_RULES)
@pytest.mark.parametrize("options", [{"presence_penalty": 1.9}, {"bad_tokens": [[0, 2], [2, 0]]}])
def test_options_of_the_request_instead_of_the_nodes_path(rule, options, plant):
    world, grow_case = sampled_world(3, 0, options), grow_through_samplers(options)
    assert error(world, drawn_chain(2), rule, grow_case) < 1e-12
    plant(SamplingState, "branch", lambda self, tokens: self)
    assert error(world, drawn_chain(2), rule, grow_case) > FAR


@pytest.mark.parametrize("rule", CHAIN_RULES)
def test_probabilities_in_half_precision(rule):
    def grow_coarse(world, shape, oracle):
        draft = grow(world, shape, oracle)
        coarse = draft.target_probs.astype(np.float16).astype(np.float64)
        return replace(draft, target_probs=coarse / coarse.sum(axis=1, keepdims=True))

    assert worst(drawn_chain(2), rule, grow_coarse) > 1e-6
