"""Constrained requests under the classic rules in the engine: drafts that know nothing of the grammar."""

from __future__ import annotations

import re

import pytest

from paceline.control.controller import FixedController
from paceline.core.params import SamplingParams
from paceline.core.trees import DraftPlan
from paceline.verify.rules import RULES
from tests.constrain.engines import VOCAB, make_engine, requests, result, served
from tests.lossless.test_classic_in_engine import CLASSIC, SHAPES, HazyDrafter
from tests.toy import ToyBackend


class Hazy(HazyDrafter):
    """Draws some nodes from blurred logits and chooses others, most of them forbidden."""

    def __init__(self, parents: list[int]) -> None:
        super().__init__(parents)
        self.toy = ToyBackend(vocab=VOCAB)


def engine_with(rule: str):
    drafter = Hazy(SHAPES[RULES[rule].trees])
    plan = DraftPlan(drafter.name, len(drafter.parents), branching=2)
    return make_engine(rule, drafters={drafter.name: drafter}, controller=FixedController(plan))


def wanted():
    """Not where tokens are forced: there the drafter, which does not follow them, is not asked."""
    for number in range(10):
        structure = {"regex": ["[a-z ]*", "([a-z][0-9]?)+", "[^x]{5,}"][number % 3]}
        options = {"temperature": 1.0 + number % 3 / 2, "seed": number, "max_tokens": 12, "logprobs": 1}
        yield [7, 8, 9 + number], SamplingParams(structured_outputs=structure, **options)


@pytest.mark.parametrize("rule", CLASSIC)
def test_texts_follow_their_grammar_and_not_their_neighbours(rule):
    together = served(engine_with(rule), wanted())
    for request, alone in zip(together, wanted(), strict=True):
        (other,) = served(engine_with(rule), [alone])
        assert result(request) == result(other)
        assert request.error is None
        assert not request.failed_drafters
        pattern = request.params.structure.regex.replace("{5,}", "*")
        assert re.fullmatch(pattern, request.detokenizer.text)
    assert sum(request.speculative.num_accepted_draft_tokens for request in together) > 5


@pytest.mark.parametrize("rule", CLASSIC)
def test_greedy_texts_and_forced_tokens_are_those_of_plain_decoding(rule):
    greedy = [(ids, params) for ids, params in requests() if params.greedy]
    plain = make_engine(drafters={}, draft_forced=False)
    truth = [result(request) for request in served(plain, greedy)]
    assert [result(request) for request in served(engine_with(rule), greedy)] == truth
