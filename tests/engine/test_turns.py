"""Passes look up where that gives more tokens in the same time, and the other kind is tried now and then."""

from __future__ import annotations

import numpy as np

from paceline.core.stats import StepStats
from paceline.engine.turns import EXPECTED, MOST_LOST, USUAL, Turns

LEVELS = 5


def seen(
    turns: Turns, looks_up: bool, seconds: float, tokens: float, requests: int = 16, **other: object
) -> None:
    drafted = LEVELS * requests if looks_up else 0
    facts = {"requests": requests, "ahead": True, "drafted": drafted, "forward_time": seconds}
    turns.observe(StepStats(**{**facts, "new_tokens": tokens * requests, **other}))


def run(turns: Turns, looking: float, tokens: float, passes: int = 1500, requests: int = 16) -> list[bool]:
    """Which of so many passes look up, where that takes `looking` plain passes and brings so many tokens."""
    kinds = []
    for _ in range(passes):
        kinds.append(turns.looks_up(requests))
        seconds = looking if kinds[-1] else 1.0
        seen(turns, kinds[-1], seconds, tokens if kinds[-1] else 1.0, requests)
    return kinds


def test_what_passes_take_and_bring_decides():
    assert np.mean(run(Turns(), 1.2, 1.5)[500:]) > 0.95
    assert np.mean(run(Turns(), 1.2, 1.0)[500:]) < 0.05
    assert np.mean(run(Turns(), 2.5, 1.5)[500:]) < 0.05
    assert np.mean(run(Turns(), 1.02, 1.2, requests=1)[500:]) > 0.9


def test_tries_cost_little():
    """Of all the time, beside the better of both kinds alone."""
    for looking, tokens in ((1.2, 1.0), (2.0, 1.0), (1.2, 3.0), (1.03, 1.0)):
        for requests in (1, 16):
            kinds = run(Turns(), looking, tokens, passes=3000, requests=requests)[1000:]
            taken = sum(looking if kind else 1.0 for kind in kinds)
            given = sum(tokens if kind else 1.0 for kind in kinds)
            assert given / taken > (1 - 1.2 * MOST_LOST) * max(1.0, tokens / looking)


def test_a_text_that_begins_to_repeat_is_noticed_and_so_is_one_that_ceases_to():
    turns = Turns()
    for tokens, often in ((1.0, False), (2.5, True), (1.0, False)):
        kinds = run(turns, 1.3, tokens)
        assert (np.mean(kinds[700:]) > 0.9) == often
        assert (np.mean(kinds[700:]) < 0.1) == (not often)


def test_before_anything_was_seen_times_are_those_of_the_preparation():
    assert Turns().looks_up(16) == (EXPECTED >= USUAL)
    turns = Turns()
    turns.expect(False, {1: 4.0, 16: 4.3})
    turns.expect(True, {1: 4.1, 16: 7.0})
    assert turns.looks_up(1)
    assert not turns.looks_up(16)
    seen(turns, False, 8.6, 1.0)
    seen(turns, False, 8.6, 1.0)
    assert turns._times(16) == (8.6, 8.6 * 7.0 / 4.3)


def test_passes_beside_prompts_ordinary_steps_and_the_first_behind_others_tell_no_time():
    turns = Turns()
    for _ in range(3):
        seen(turns, True, 1.0, 1.0)
        seen(turns, True, 1.0, 1.0)
    before = dict(turns._seconds)
    seen(turns, True, 50.0, 1.0, prefill_tokens=9)
    seen(turns, True, 50.0, 1.0)
    seen(turns, True, 50.0, 1.0, ahead=False)
    seen(turns, False, 50.0, 1.0)
    assert turns._seconds == before
