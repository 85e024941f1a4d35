"""The model-free drafters in an engine: the same results, in fewer steps."""

from __future__ import annotations

from dataclasses import replace

import pytest

from paceline.draft.lookup.ngram import NgramDrafter
from paceline.draft.lookup.suffix import SuffixDrafter
from tests.engine.test_exactness import requests, result
from tests.toy import ToyBackend, drain, toy_engine

MAKERS = {
    "ngram": lambda: NgramDrafter(NgramDrafter.Options(prompt_lookup_min=1)),
    "suffix": lambda: SuffixDrafter(
        SuffixDrafter.Options(suffix_decoding_min_token_prob=0.01, share_suffix_cache="prompts")
    ),
}


def run(drafter, passes=1, **options):
    """All requests on a toy with a vocabulary of 5, which repeats itself; those of the last pass."""
    engine = toy_engine(ToyBackend(max_rows=64, vocab=5), drafter=drafter, budget=4, **options)
    no_ids = {"logit_bias": None, "allowed_token_ids": None, "bad_words": None}  # they name larger ids
    for _ in range(passes):
        added = [
            engine.add_request([token % 5 for token in ids], replace(params, **no_ids, ignore_eos=True))[0]
            for ids, params in requests()
        ]
        drain(engine)
    assert not any(request.failed_drafters for request in added)
    return added


@pytest.fixture(scope="module")
def plain():
    return [result(request) for request in run(None)]


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("num_pages", [400, 40])
def test_results_are_those_of_plain_decoding(plain, name, num_pages):
    """With 40 pages requests are preempted in the middle of it."""
    drafted = run(MAKERS[name](), num_pages=num_pages)
    assert [result(request) for request in drafted] == plain
    assert sum(request.speculative.num_accepted_draft_tokens for request in drafted) > 10
    assert any(request.num_preemptions for request in drafted) == (num_pages == 40)


def test_the_second_time_past_responses_are_drafted(plain):
    drafted = run(MAKERS["suffix"](), passes=2)
    assert [result(request) for request in drafted] == plain
    accepted = sum(request.speculative.num_accepted_draft_tokens for request in drafted)
    assert accepted > 0.6 * sum(request.num_output for request in drafted)
