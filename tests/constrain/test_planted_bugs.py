"""Negative controls: each of these bugs must show, or the tests of constrained requests prove nothing."""

from __future__ import annotations

import copy

import numpy as np
import pytest

from paceline.constrain.constraint import Constraint
from paceline.verify.sampling import Sampler
from tests.constrain.engines import PLANS, VOCAB, make_engine, requests, result, served


def outcome(plan: str, rule: str = "pathwise") -> list[object]:
    return [result(request) for request in served(make_engine(rule), requests(PLANS[plan]))]


@pytest.fixture(scope="module")
def truth():
    return outcome("off")


def test_without_a_bug_all_agree(truth):
    assert outcome("suffix tree") == truth


def test_a_branch_that_moves_the_request_itself_is_noticed(truth, monkeypatch):
    """The state is not put back after a draft that was refused."""
    monkeypatch.setattr(Constraint, "branch", lambda self: self)
    assert outcome("suffix tree") != truth


def test_siblings_that_share_a_state_are_noticed(truth, monkeypatch):
    monkeypatch.setattr(Constraint, "branch", copy.copy)
    assert outcome("suffix tree") != truth


def test_the_mask_of_the_parent_used_for_the_child_is_noticed(truth, monkeypatch):
    """The sampler's place in the grammar is that of the request's last token all along a draft."""

    def late(self: Sampler, token: int) -> None:
        waiting = self.__dict__.setdefault("waiting", [])
        for earlier in waiting:
            self.constraint.advance(earlier)
        self.waiting = [token]

    monkeypatch.setattr(Sampler, "advance", late)
    assert outcome("suffix tree") != truth


def all_accepted() -> bool:
    counts = [request.speculative for request in served(make_engine(), requests("grammar"))]
    return all(one.num_accepted_draft_tokens == one.num_draft_tokens for one in counts)


def test_a_forced_token_that_is_drafted_but_not_enforced_is_noticed(monkeypatch):
    """Where the sampler also takes other tokens that spell the same, not all that is forced is accepted."""

    def spelled_right(self: Constraint) -> np.ndarray:
        mask = [self._matcher.validate_tokens([token]) == 1 for token in range(VOCAB)]
        mask[0] |= self._matcher.is_accepting()
        return np.array(mask)

    assert all_accepted()
    monkeypatch.setattr(Sampler, "_forced", lambda self, logits: None)
    monkeypatch.setattr(Constraint, "mask", spelled_right)
    monkeypatch.setattr(Constraint, "allows", lambda self, token: spelled_right(self)[token])
    monkeypatch.setattr(Constraint, "advance", Constraint._take)
    assert not all_accepted()
