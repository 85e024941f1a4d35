"""Every classic rule gives the target's distribution: all drafts, all coins and all texts are summed up.

The readable rules are summed up here; `tests/verify/test_rules.py` holds the compiled ones to them.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.lossless.enumeration import WORLDS, drawn_chain, error, grow, mean_accepted, random_world
from tests.lossless.real_targets import grow_through_samplers, sampled_world
from tests.verify.reference_rules import block, rejection, traversal

EXACT = 1e-12
D, C = "drawn", "chosen"
CHAINS = {
    "one": drawn_chain(1),
    "three": drawn_chain(3),
    "chosen": ((-1, C), (0, C), (1, C)),
    "drawn after chosen": ((-1, C), (0, D), (1, D)),
    "chosen between drawn": ((-1, D), (0, C), (1, D)),
}
DRAWN_TREES = {
    "pair": ((-1, D), (-1, D)),
    "three wide": ((-1, D), (-1, D), (-1, D)),
    "two levels": ((-1, D), (-1, D), (0, D), (0, D), (1, D)),
    "deep second": ((-1, D), (-1, D), (1, D), (2, D)),
    "depth first": ((-1, D), (0, D), (0, D), (-1, D), (3, D)),
}
MIXED_TREES = {
    "chosen": ((-1, C), (-1, C), (0, C), (0, C), (1, C)),
    "chosen first": ((-1, C), (-1, D), (1, D), (0, D)),
    "drawn first": ((-1, D), (-1, C), (0, D), (1, D)),
    "alternating": ((-1, C), (-1, D), (-1, C), (1, D), (1, C)),
    "alternating, drawn first": ((-1, D), (-1, C), (-1, D), (0, C), (0, D)),
}
CASES = [
    *(
        pytest.param(rule, shape, id=f"{rule.__name__}, chain: {name}")
        for rule in (rejection, block, traversal)
        for name, shape in CHAINS.items()
    ),
    *(
        pytest.param(rule, shape, id=f"{rule.__name__}, tree: {name}")
        for rule in (rejection, traversal)
        for name, shape in (DRAWN_TREES | MIXED_TREES).items()
    ),
]


@pytest.mark.parametrize(("rule", "shape"), CASES)
def test_the_text_has_the_targets_distribution(rule, shape):
    errors = {name: error(world, shape, rule) for name, world in WORLDS.items()}
    assert max(errors.values()) < EXACT, errors


@pytest.mark.parametrize("rule", [rejection, block, traversal])
@pytest.mark.parametrize(("vocab", "length"), [(2, 5), (4, 2)])
def test_longer_chains_and_other_vocabularies(rule, vocab, length):
    for seed in range(4):
        assert error(random_world(vocab, seed, sharpness=2.0), drawn_chain(length), rule) < EXACT


@pytest.mark.parametrize("rule", [rejection, traversal])
def test_wider_trees(rule):
    shape = ((-1, D), (-1, D), (-1, D), (0, D), (1, C))
    for seed in range(2):
        assert error(random_world(4, seed), shape, rule) < EXACT
    binary = ((-1, D), (-1, D), (0, D), (0, D), (1, D), (2, D), (2, D))
    assert error(random_world(2, 3), binary, rule) < EXACT


@pytest.mark.parametrize("rule", [rejection, block, traversal])
def test_a_draft_may_stop_after_any_drawn_token_that_it_keeps(rule):
    """Its length may depend on the tokens so far; whether a token is kept must not depend on that token."""

    def grow_where_sure(world, shape, oracle):
        sure = replace(world, ending=0)  # nothing is drafted after token 0
        return grow(sure, shape, oracle)

    shapes = list(CHAINS.values()) if rule is block else [*CHAINS.values(), *DRAWN_TREES.values()]
    for shape in shapes:
        assert error(random_world(3, 11), shape, rule, grow_where_sure) < EXACT


@pytest.mark.parametrize("rule", [rejection, block, traversal])
@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.7, "top_k": 2},
        {"top_p": 0.7, "min_p": 0.1},
        {"presence_penalty": 1.9, "frequency_penalty": 1.5, "repetition_penalty": 1.5},
        {"logit_bias": {0: 2.0, 2: -1.0}, "min_tokens": 2},
        {"bad_tokens": [[0, 0], [0, 2, 1], [2, 0]]},
        {"allowed_token_ids": [0, 2]},
    ],
)
def test_all_sampling_options_hold_along_every_path_and_texts_end(rule, options):
    """Here the target's distributions are those that the engine's rules compute from logits."""
    shape = drawn_chain(3) if rule is block else ((-1, D), (-1, C), (0, D), (0, D), (1, D))
    for seed in range(2):
        assert error(sampled_world(3, seed, options), shape, rule, grow_through_samplers(options)) < EXACT


def test_block_accepts_at_least_as_much_as_rejection():
    gains = []
    for seed in range(8):
        world = random_world(3, seed, sharpness=1 + seed % 4)
        shape = drawn_chain(2 + seed % 2)
        gains.append(mean_accepted(world, shape, block) - mean_accepted(world, shape, rejection))
    assert min(gains) > -EXACT
    assert max(gains) > 0.05


def test_traversal_accepts_at_least_as_much_as_rejection_on_drawn_trees():
    gains = []
    for seed in range(4):
        world = random_world(3, seed, sharpness=1 + seed % 4)
        for shape in DRAWN_TREES.values():
            gains.append(mean_accepted(world, shape, traversal) - mean_accepted(world, shape, rejection))
    assert min(gains) > -EXACT
    assert max(gains) > 0.05


def test_chosen_drafts_gain_nothing_from_block_or_traversal():
    for seed in range(5):
        world = random_world(3, seed)
        for rule, shape in ((block, CHAINS["chosen"]), (traversal, MIXED_TREES["chosen"])):
            assert np.isclose(mean_accepted(world, shape, rule), mean_accepted(world, shape, rejection))
