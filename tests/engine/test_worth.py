"""Drafts of the host are waited for where passes with them bring more tokens in the same time."""

from __future__ import annotations

import pytest

from paceline.engine.stats import DraftFacts, StepStats
from paceline.engine.worth import Worth


def drafts(count: int, tokens: int, right: int) -> tuple[DraftFacts, ...]:
    return tuple(DraftFacts(str(n), "", "ngram", tokens, tokens, accepted=right) for n in range(count))


def seen(worth: Worth, seconds: float, own: tuple[DraftFacts, ...] = (), ahead: bool = True) -> None:
    worth.observe(StepStats(requests=16, ahead=ahead, drafts=own, forward_time=seconds))


def known(given: float, right: int = 2, ahead: bool = True) -> Worth:
    """Plain passes take 1, those with drafts of 4 tokens for all, of which so many are right, `given`."""
    worth = Worth()
    for _ in range(60):
        seen(worth, 1.0)
        seen(worth, 1.0)
        seen(worth, given, drafts(16, 4, right), ahead)
    return worth


def test_before_anything_was_seen_a_token_for_each_is_worth_a_pass_and_four_are_worth_a_step():
    assert Worth().waits(16, 16, ahead=True)
    assert not Worth().waits(15, 16, ahead=True)
    assert Worth().waits(64, 16, ahead=False)
    assert not Worth().waits(63, 16, ahead=False)
    assert not Worth().waits(0, 16, ahead=True)


@pytest.mark.parametrize("ahead", [True, False])
def test_what_passes_take_decides(ahead):
    assert known(1.1, ahead=ahead).waits(8, 16, ahead)
    assert known(2.0, ahead=ahead).waits(34, 16, ahead)
    assert not known(2.0, ahead=ahead).waits(30, 16, ahead)
    assert not known(4.0, ahead=ahead).waits(64, 16, ahead)


def test_what_drafts_brought_decides():
    assert known(1.8, right=4).waits(16, 16, ahead=True)
    assert not known(1.8, right=0).waits(64, 16, ahead=True)


def test_it_holds_for_as_many_requests_only():
    worth = known(4.0)
    assert not worth.waits(32, 16, ahead=True)
    assert worth.waits(2, 2, ahead=True)


def test_what_was_not_worth_it_is_tried_again_some_day():
    worth = known(3.0, right=1)
    assert not worth.waits(64, 16, ahead=True)
    assert any(worth.waits(64, 16, ahead=True) for _ in range(400))


def test_passes_beside_prompts_and_the_first_behind_others_tell_nothing():
    worth = known(2.0)
    before = dict(worth._seconds)
    worth.observe(StepStats(requests=16, ahead=True, prefill_tokens=9, forward_time=50.0))
    seen(worth, 50.0)
    assert worth._seconds == before
