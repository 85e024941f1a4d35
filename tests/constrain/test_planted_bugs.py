"""Negative controls: each of these bugs must show, or the tests of constrained requests prove nothing."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from paceline.constrain.constraint import Constraint
from paceline.core.params import SamplingParams
from paceline.core.request import Request
from paceline.core.sampling import SamplingState
from paceline.core.token_masks import packed
from paceline.errors import GrammarError
from paceline.verify import sampling
from tests.constrain.engines import PLANS, TOKENIZER, VOCAB, make_engine, requests, result, served


def texts(plan: Any) -> Iterator[tuple[list[int], SamplingParams]]:
    """Requests of which a wrong place in the grammar makes other text, not text that the grammar forbids."""
    prompt = TOKENIZER.encode("abcabc abcab cabca bcabc abcbc abcab abc ab")
    for number in range(24):
        least = {"regex": f"[abc ]{{{4 + number % 2},400}}"}
        yield (
            prompt,
            SamplingParams(seed=number // 2, max_tokens=16, structured_outputs=least, speculative=plan),
        )


def drafted(plan: str) -> list[Request]:
    return served(make_engine(), [*requests(PLANS[plan]), *texts(PLANS[plan])])


def results(ended: list[Request]) -> list[object]:
    return [result(request) for request in ended]


@pytest.fixture(scope="module")
def truth():
    return results(drafted("off"))


def test_without_a_bug_all_agree(truth):
    assert results(drafted("suffix tree")) == truth


def test_a_branch_that_moves_the_request_itself_is_noticed(truth, plant):
    """The state is not put back after a draft that was refused."""
    plant(Constraint, "branch", lambda self: self)
    ended = drafted("suffix tree")
    plant.assert_noticed(ended, results(ended), truth, beside=GrammarError)


def test_siblings_that_share_a_state_are_noticed(truth, plant):
    plant(Constraint, "branch", lambda self: copy.copy(self))
    ended = drafted("suffix tree")
    plant.assert_noticed(ended, results(ended), truth, beside=GrammarError)


def test_the_mask_of_the_parent_used_for_the_child_is_noticed(truth, plant):
    """The place in the grammar is that of the request's last token all along a draft."""

    def late(self: SamplingState, token: int) -> None:
        waiting = self.__dict__.setdefault("waiting", [])
        for earlier in waiting:
            self.constraint.advance(earlier)
        self.waiting = [token]

    plant(SamplingState, "advance", late)
    ended = drafted("suffix tree")
    plant.assert_noticed(ended, results(ended), truth, beside=GrammarError)


def all_accepted(ended: list[Request]) -> list[bool]:
    counts = [request.speculative for request in ended]
    return [one.num_accepted_draft_tokens == one.num_draft_tokens for one in counts]


def test_a_forced_token_that_is_drafted_but_not_enforced_is_noticed(plant):
    """Where the sampler also takes other tokens that spell the same, not all that is forced is accepted."""

    def spelled_right(self: Constraint) -> list[bool]:
        mask = [self._matcher.validate_tokens([token]) == 1 for token in range(VOCAB)]
        mask[0] |= self._matcher.is_accepting()
        return mask

    assert all(all_accepted(drafted("grammar")))
    plant(sampling, "_forced", lambda state, logits: None)
    plant(Constraint, "packed_mask", lambda self: packed(np.array(spelled_right(self))))
    plant(Constraint, "allows", lambda self, token: bool(spelled_right(self)[token]))
    plant(Constraint, "advance", lambda self, token: self._take(token))
    ended = drafted("grammar")
    plant.assert_noticed(ended, all_accepted(ended), [True] * len(ended))
