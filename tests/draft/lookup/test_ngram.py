"""Prompt lookup copies what followed the newest occurrence of the longest n-gram."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.trees import DraftPlan
from paceline.draft.lookup.ngram import NgramDrafter
from paceline.errors import ConfigError
from tests.draft import reference
from tests.draft.requests import chains, make_request


def draft(tokens, budget=8, **options):
    drafter = NgramDrafter(NgramDrafter.Options(**options))
    return chains(drafter.propose([make_request(tokens)], [DraftPlan("ngram", budget)]))[0]


def test_the_longest_match_wins_over_a_newer_one():
    assert draft([1, 2, 3, 40, 9, 2, 3, 50, 1, 2, 3], budget=1) == [40]


def test_of_equal_matches_the_newest_wins():
    assert draft([2, 3, 40, 9, 2, 3, 50, 7, 2, 3], budget=1) == [50]


def test_matches_outside_min_and_max_do_not_count():
    assert draft([1, 2, 3, 40, 9, 1, 2, 3], prompt_lookup_min=4) == []
    assert draft([5, 40, 9, 5], prompt_lookup_min=2) == []
    tokens = [1, 2, 3, 40, 9, 3, 50, 1, 2, 3]
    assert draft(tokens, budget=1, prompt_lookup_max=1) == [50]
    assert draft(tokens, budget=1, prompt_lookup_max=3) == [40]


def test_a_repetition_is_drafted_beyond_the_end_of_the_text():
    assert draft([7, 1, 2, 3, 1, 2, 3, 1, 2], budget=7) == [3, 1, 2, 3, 1, 2, 3]


def test_the_plan_bounds_the_chain():
    tokens = [*range(20), *range(5)]
    assert draft(tokens, budget=3) == [5, 6, 7]
    drafter = NgramDrafter(NgramDrafter.Options())
    assert chains(drafter.propose([make_request(tokens)], [DraftPlan("ngram", 6, depth=2)])) == [[5, 6]]


def test_a_text_without_repeats_or_of_one_token_gets_no_draft():
    assert draft(range(50)) == []
    assert draft([3]) == []


@settings(max_examples=100)
@given(
    st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=12), min_size=2, max_size=12),
    st.integers(1, 4),
    st.integers(0, 2),
    st.booleans(),
)
def test_a_growing_request_drafts_as_a_search_of_its_whole_text_would(parts, shortest, more, late):
    """Also when the drafter meets it late, and beside another request."""
    drafter = NgramDrafter(
        NgramDrafter.Options(prompt_lookup_min=shortest, prompt_lookup_max=shortest + more)
    )
    other = make_request([1, 2, 1, 2])
    request = make_request(parts[0], max_output=200)
    plans = [DraftPlan("ngram", 3), DraftPlan("ngram", 5)]
    for number, part in enumerate(parts[1:]):
        request.token_ids.extend(part)
        if not (late and number < 3):
            drafted = chains(drafter.propose([other, request], plans))[1]
            assert drafted == reference.ngram_chain(request.token_ids, shortest, shortest + more, 5)


def test_nothing_is_kept_of_requests_that_ended():
    drafter = NgramDrafter(NgramDrafter.Options())
    request = make_request([1, 2, 1, 2])
    drafter.propose([request], [DraftPlan("ngram", 3)])
    assert len(drafter._indexes._indexes) == 1
    drafter.forget(request)
    drafter.forget(make_request([1]))  # never proposed for
    assert len(drafter._indexes._indexes) == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prompt_lookup_max": 0}, "prompt_lookup_max must be an integer from 1"),
        ({"prompt_lookup_min": 5}, "prompt_lookup_min must be an integer from 1 to 4, got 5"),
        ({"prompt_lookup_min": 0}, "prompt_lookup_min"),
        ({"prompt_lookup_maximum": 3}, "did you mean 'prompt_lookup_max'"),
    ],
)
def test_wrong_options_are_named(options, message):
    with pytest.raises(ConfigError, match=message):
        NgramDrafter.Options(**options)


def test_one_option_may_be_given_alone():
    assert NgramDrafter.Options(prompt_lookup_max=1).shortest == 1
