"""Suffix decoding: drafts what followed before, here and in past responses, as far as it is likely."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.trees import DraftPlan
from paceline.draft.lookup import suffix_store
from paceline.draft.lookup.ngram_index import GAP, NO_NAMESPACE, SHARED_NAMESPACE
from paceline.draft.lookup.suffix import LEVELS, SuffixDrafter
from paceline.draft.lookup.suffix_store import USUAL_RESPONSE, ResponseCache
from paceline.errors import ConfigError
from tests.draft import reference
from tests.draft.requests import chains, make_request


def suffix_drafter(**options):
    named = {
        "depth": "suffix_decoding_max_tree_depth",
        "cached": "suffix_decoding_max_cached_requests",
        "factor": "suffix_decoding_max_spec_factor",
        "least": "suffix_decoding_min_token_prob",
        "share": "share_suffix_cache",
    }
    return SuffixDrafter(SuffixDrafter.Options(**{named[name]: value for name, value in options.items()}))


def draft(drafter, tokens, budget=8, salt=""):
    return chains(drafter.propose([make_request(tokens, salt=salt)], [DraftPlan("suffix", budget)]))[0]


def ended(drafter, prompt, output, error=None, salt=""):
    request = make_request(prompt, output, salt=salt)
    request.error = error
    drafter.forget(request)


def test_a_long_match_is_followed_far_and_a_short_one_is_not():
    text = list(range(30))
    assert draft(suffix_drafter(), [*text, 77, *text[:20]]) == text[20:28]
    assert len(draft(suffix_drafter(), [*text, 77, *text[18:20]])) < 4


def test_what_is_less_likely_than_the_plan_asks_for_is_not_drafted():
    text = [1, 2, 3, 7, 8, 1, 2]
    long = suffix_drafter(least=0.05).propose([make_request(text)], [DraftPlan("suffix", 8)]).chances_of(0)
    for plan_least, own_least, least in [(0.3, 0.05, 0.3), (0.05, 0.3, 0.05), (0.0, 0.3, 0.3)]:
        plan = DraftPlan("suffix", 8, least_chance=plan_least)
        drafted = suffix_drafter(least=own_least).propose([make_request(text)], [plan]).chances_of(0)
        assert drafted == [chance for chance in long if chance >= least]
        assert 0 < len(drafted) <= len(long)


def test_a_branch_where_the_past_disagrees_is_not_drafted():
    disagreeing = [token for follower in range(40, 48) for token in (5, follower)]
    assert draft(suffix_drafter(), [*disagreeing, 5]) == []


def test_many_short_matches_that_agree_outvote_a_single_newer_one():
    assert draft(suffix_drafter(), [*[5, 6] * 8, 5, 7, 5], budget=1) == [6]


def test_with_prompts_the_first_answer_token_is_found_by_the_end_of_the_prompt():
    drafter = suffix_drafter(share="prompts")
    prompt, output = [*range(100, 150)], [*range(10)]
    assert draft(drafter, prompt) == []
    ended(drafter, prompt, output)
    assert draft(drafter, prompt) == output[:8]
    assert draft(drafter, [*prompt, *output[:5]]) == output[5:]


def test_answers_from_before_the_start_are_drafted_for_requests_without_a_salt():
    drafter, output = suffix_drafter(), [*range(40)]
    drafter.remember([7, 8], output)
    assert draft(drafter, output[:20]) == output[20:28]
    assert draft(drafter, output[:20], salt="ann") == []


def test_nothing_of_a_prompt_is_kept_across_requests():
    drafter = suffix_drafter(least=0.0)
    prompt, output = [*range(100, 150)], [*range(10)]
    ended(drafter, prompt, output)
    for size in range(1, len(prompt) + 1):
        assert draft(drafter, prompt[:size]) == []
    assert draft(drafter, [*prompt, *output[:5]]) == output[5:]
    assert drafter._past.occurrences.tokens().tolist() == [*output, GAP]


@pytest.mark.parametrize("share", ["responses", "prompts"])
def test_only_requests_of_the_same_salt_draft_from_a_response(share):
    drafter = suffix_drafter(share=share, least=0.0)
    text = [*range(20)]
    for salt in ("", "ann", "bob"):
        assert draft(drafter, text[:10], salt=salt) == []
    ended(drafter, [99], text, salt="ann")
    assert draft(drafter, text[:10], salt="ann") == text[10:18]
    assert draft(drafter, text[:10], salt="bob") == draft(drafter, text[:10]) == []
    ended(drafter, [98], [*text[:10], 70, 71], salt="bob")
    ended(drafter, [97], [*text[:10], 80, 81])
    assert draft(drafter, text[:10], salt="ann") == text[10:18]
    assert draft(drafter, text[:10], salt="bob") == [70, 71]
    assert draft(drafter, text[:10]) == [80, 81]


def test_requests_of_several_salts_in_one_batch_are_kept_apart():
    drafter = suffix_drafter()
    text = [*range(20)]
    ended(drafter, [99], text, salt="ann")
    requests = [make_request(text[:10], salt=salt) for salt in ("bob", "ann", "")]
    assert chains(drafter.propose(requests, [DraftPlan("suffix", 4)] * 3)) == [[], text[10:14], []]


def test_drafts_do_not_run_from_one_response_into_the_next():
    drafter = suffix_drafter(share="prompts")
    ended(drafter, [1, 2, 3], [4, 5])
    ended(drafter, [6, 7, 8], [9, 9])
    assert draft(drafter, [1, 2, 3, 4]) == [5]
    assert draft(drafter, [1, 2, 3, 4, 5]) == []


@pytest.mark.parametrize(
    ("prompt", "output", "error", "cached"),
    [
        ([1, 2, 3], [4, 5, 6], None, 1),
        ([1, 2, 3], [], None, 0),  # aborted before its first token
        ([1, 2, 3], [4, 5, 6], RuntimeError("failed"), 0),
    ],
)
def test_only_responses_that_did_not_fail_are_kept(prompt, output, error, cached):
    drafter = suffix_drafter()
    ended(drafter, prompt, output, error)
    assert len(drafter._past) == cached


@pytest.mark.parametrize("options", [{"cached": 0}, {"share": "off"}])
def test_the_cache_can_be_turned_off(options):
    drafter = suffix_drafter(**options)
    ended(drafter, [1, 2, 3], [4, 5, 6, 7, 8, 9])
    assert draft(drafter, [4, 5, 6, 7, 8]) == []
    assert draft(drafter, [1, 2, 3, 4, 1, 2, 3]) != []


def test_options_bound_the_match_the_length_and_the_probability():
    text = [*range(30), 77, *range(20)]
    assert draft(suffix_drafter(factor=0.1), text) == [20, 21]  # a match of 20
    assert draft(suffix_drafter(depth=10, factor=0.1), text) == [20]  # of which 10 are looked at
    assert draft(suffix_drafter(least=1.0), text) == []
    assert len(draft(suffix_drafter(least=0.0), text, budget=30)) == 30


def test_a_tree_holds_both_continuations():
    drafter = suffix_drafter(least=0.05)
    request = make_request([1, 2, 3, 7, 7, 1, 2, 4, 8, 8, 1, 2])
    trees = drafter.propose([request], [DraftPlan("suffix", 4, branching=2)])
    trees.check([DraftPlan("suffix", 4, branching=4)], 100)
    tokens, parents = trees.tree_lists(0)
    assert {token for token, parent in zip(tokens, parents, strict=True) if parent == -1} == {3, 4}


def test_plans_of_a_batch_are_kept_apart():
    drafter = suffix_drafter()
    text = [*range(30), 77, *range(20)]
    plans = [DraftPlan("suffix", 2), DraftPlan("suffix", 6, depth=3), DraftPlan("suffix", 5)]
    drafted = chains(drafter.propose([make_request(text), make_request(text), make_request([3])], plans))
    assert drafted == [[20, 21], [20, 21, 22], []]


@settings(max_examples=60)
@given(
    responses=st.lists(
        st.tuples(st.sampled_from(["", "ann", "bob"]), st.lists(st.integers(0, 3), min_size=1, max_size=30)),
        max_size=6,
    ),
    salt=st.sampled_from(["", "ann", "eve"]),
    prompt=st.lists(st.integers(0, 3), min_size=1, max_size=30),
    parts=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=6), min_size=1, max_size=5),
    cached=st.integers(1, 4),
)
def test_a_growing_request_drafts_as_a_search_of_all_of_its_salt_would(
    responses, salt, prompt, parts, cached
):
    drafter = suffix_drafter(cached=cached, least=0.02)
    kept: list[tuple[str, list[int]]] = []
    for whose, output in responses:
        ended(drafter, [1], output, salt=whose)
        entry = (whose, [*output, GAP])
        kept = (kept if entry in kept else [*kept, entry])[-cached:]
    past = [token for whose, entry in kept for token in entry if whose == salt]
    namespace = drafter._past.namespace_of(salt)
    request = make_request(prompt, max_output=50, salt=salt)
    for part in parts:
        request.token_ids.extend(part)
        trees = drafter.propose([request], [DraftPlan("suffix", 6, branching=2)])
        own_index, past_index = drafter._indexes.of(request), drafter._past.occurrences
        suffix = reference.ending(request.token_ids, 24)
        sources = [
            reference.candidates(stream, suffix, LEVELS, 4.0, 6, index.table.shape[1], whose)
            for stream, index, whose in (
                (request.token_ids, own_index, SHARED_NAMESPACE),
                (past, past_index, namespace),
            )
        ]
        tokens, parents, chances = reference.suffix_tree(*sources, budget=6, branching=2, least=0.02)
        assert trees.tree_lists(0) == (tokens, parents)
        assert trees.chances_of(0) == np.float32(chances).tolist()


class TestResponseCache:
    def entries(self, cache):
        """The responses that are kept, with the ends of their prompts."""
        found = [[]]
        for token in cache.occurrences.tokens().tolist():
            if token == GAP:
                found.append([])
            else:
                found[-1].append(token)
        assert found.pop() == []
        assert len(found) == len(cache)
        return found

    def test_the_oldest_response_goes_first(self):
        cache = ResponseCache(LEVELS, 2, with_prompts=True)
        for number in range(5):
            cache.add([number], [number + 10])
        assert self.entries(cache) == [[3, 13], [4, 14]]

    def test_the_same_response_is_kept_once_for_each_salt(self):
        cache = ResponseCache(LEVELS, 10)
        for salt in ("", "ann", "ann", "", "bob", "ann"):
            cache.add([1, 2], [3, 4], salt)
        cache.add([1, 2], [3, 5], "ann")
        assert self.entries(cache) == [[3, 4], [3, 4], [3, 4], [3, 5]]

    def test_a_client_that_invents_salts_gets_no_more_memory(self):
        cache = ResponseCache(LEVELS, 8)
        size = cache.occurrences.table.nbytes
        for number in range(1000):
            cache.add([], [number] * 300, f"salt {number}")
            assert len(cache) == len(cache._salts) <= 8
            assert len(cache.occurrences) <= 8 * 289
        assert cache.occurrences.table.nbytes == size
        assert len(cache._keys) == len(cache._namespaces) == len(cache._salts)
        assert cache.namespace_of("salt 0") == NO_NAMESPACE
        for _ in range(3):  # the last of the others go too
            cache.add([], [*range(900 + _, 1600 + _)])
        assert len(cache._salts) == 1
        assert not cache._namespaces

    def test_no_two_salts_have_the_same_owner(self, monkeypatch):
        drawn = iter([0, 5, 5, 0, 5, 6])
        monkeypatch.setattr(suffix_store.secrets, "randbelow", lambda most: next(drawn))
        cache = ResponseCache(LEVELS, 8)
        for salt in ("", "ann", "bob"):
            cache.add([], [1], salt)
        assert [cache.namespace_of(salt) for salt in ("", "ann", "bob")] == [SHARED_NAMESPACE, 5, 6]

    def test_a_response_that_was_evicted_can_come_back(self):
        cache = ResponseCache(LEVELS, 1)
        for output in ([3], [4], [3]):
            cache.add([1], output)
        assert self.entries(cache) == [[3]]

    def test_long_responses_push_out_more_than_one(self):
        cache = ResponseCache(LEVELS, 4)
        for number in range(4):
            cache.add([], [number] * 10)
        cache.add([], [7] * (4 * USUAL_RESPONSE))
        assert [entry[0] for entry in self.entries(cache)] == [1, 2, 3, 7]
        cache.add([], [8] * (2 * USUAL_RESPONSE))
        assert [entry[0] for entry in self.entries(cache)] == [8]

    def test_of_a_response_too_long_for_the_cache_the_end_is_kept(self):
        cache = ResponseCache(LEVELS, 1)
        cache.add([], [1])
        cache.add([9], [*range(5000)])
        (entry,) = self.entries(cache)
        assert entry == [*range(5000)][-len(entry) :]
        assert len(entry) >= USUAL_RESPONSE

    def test_ten_thousand_responses_fit_in_300_megabytes(self):
        assert ResponseCache(LEVELS, 10_000).occurrences.table.nbytes < 200e6


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"suffix_decoding_max_tree_depth": 0}, "suffix_decoding_max_tree_depth must be"),
        ({"suffix_decoding_max_cached_requests": -1}, "0 turns it off"),
        ({"suffix_decoding_max_spec_factor": 0}, "suffix_decoding_max_spec_factor must be"),
        ({"suffix_decoding_min_token_prob": 1.5}, "suffix_decoding_min_token_prob must be"),
        ({"suffix_cache_path": ""}, "suffix_cache_path must be"),
        ({"suffix_cache_path": "x", "suffix_decoding_max_cached_requests": 0}, "Leave one of them out"),
        ({"suffix_cache_path": "x", "share_suffix_cache": "off"}, "share_suffix_cache is off. Leave one"),
        (
            {"share_suffix_cache": "all"},
            "share_suffix_cache must be one of responses, prompts, off, got 'all'",
        ),
        ({"suffix_min_prob": 0.1}, "unknown option 'suffix_min_prob'"),
    ],
)
def test_wrong_options_are_named(options, message):
    with pytest.raises(ConfigError, match=message):
        SuffixDrafter.Options(**options)
