"""The compiled rules with the engine's own noise: chi-squared of 100,000 texts over 16 tokens.

Seeds are fixed, so the numbers are always the same. Noise that is used twice is planted, and is seen.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from paceline.verify.kernels import uniforms
from paceline.verify.noise import lane
from paceline.verify.rule_kernels import BLOCK, REJECTION, TRAVERSAL, decide
from tests.large import LARGE, in_turn
from tests.lossless.enumeration import drawn_chain
from tests.lossless.simulation import Noise, adversarial_tables, deviation, simulate

D, C = "drawn", "chosen"
TRIALS = 200_000 if LARGE else 100_000
TABLES = adversarial_tables(1)
CHAIN = drawn_chain(3)
MIXED = ((-1, D), (-1, C), (0, D), (0, D), (1, D))
RULES = {
    "rejection, chain": (partial(decide, REJECTION), CHAIN),
    "rejection, tree": (partial(decide, REJECTION), MIXED),
    "block": (partial(decide, BLOCK), CHAIN),
    "traversal, tree": (partial(decide, TRAVERSAL), MIXED),
}


@pytest.mark.parametrize(("decide", "shape"), RULES.values(), ids=RULES)
def test_texts_of_three_tokens_are_distributed_as_the_targets(decide, shape):
    assert abs(deviation(TABLES, simulate(decide, TABLES, shape, TRIALS, 3))) < 4


class OneCoinForAllNodes(Noise):
    def coin(self, node, depth):
        return super().coin(0, 0)


class LastTokenByACoin(Noise):
    def final(self):
        return self.coin(0, 0)


class CoinOfTheDraw(Noise):
    def coin(self, node, depth):
        return self.draft(node, depth)


class OneDrawForAllNodes(Noise):
    def draft(self, node, depth):
        return super().draft(0, 0)


TWICE = {
    "last token by a coin": (LastTokenByACoin, 20_000),
    "coin of the draw": (CoinOfTheDraw, 20_000),
    "one coin": (OneCoinForAllNodes, 60_000),  # block verification hardly shows it
    "one draw": (OneDrawForAllNodes, 20_000),
}


@pytest.mark.parametrize(("rule", "twice"), in_turn(RULES, TWICE))
def test_noise_used_twice_in_a_step_is_seen(rule, twice):
    (decide, shape), (noise, trials) = rule, twice
    assert deviation(TABLES, simulate(decide, TABLES, shape, trials, 2, noise)) > 10


class KeyedByOwnPosition(Noise):
    """The noise of a drafted token is keyed by the token's position: in the next step it comes again."""

    def of(self, stream, node, depth):
        lanes = np.full_like(self.seeds, lane(stream, 0))
        return uniforms(self.seeds, self.positions + np.uint64(depth), lanes)


def test_noise_of_a_thrown_away_token_used_again_in_the_next_step_is_seen():
    """Why noise is keyed by the first new position: block verification looks at tokens it throws away."""
    again = simulate(partial(decide, BLOCK), TABLES, drawn_chain(2), 450_000, 2, KeyedByOwnPosition)
    assert deviation(TABLES, again) > 15
