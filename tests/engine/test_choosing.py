"""A backend that samples gives the tokens that the host would have sampled from its logits."""

from __future__ import annotations

import pytest

from paceline.core.params import SamplingParams
from tests.engine.test_exactness import OPTIONS, prompt
from tests.toy import ToyBackend, drain, toy_engine
from tests.toy_drafter import ScriptedDrafter

REST = [{"logprobs": 2}, {"top_p": 0.9}, {"prompt_logprobs": 1, "logprobs": 0}]


def plain(seed):
    return SamplingParams(temperature=0.8, seed=seed, max_tokens=9)


def requests():
    """Requests that sample plainly, between others that need their logits."""
    for number, options in enumerate([*OPTIONS, *REST]):
        yield prompt(number, 3 + 5 * number), SamplingParams(**{"seed": number, "max_tokens": 12} | options)
        yield prompt(number, 9), plain(number)


def results(backend, drafter=None):
    engine = toy_engine(backend, drafter=drafter, budget=4, max_num_batched_tokens=40)
    added = [engine.add_request(ids, params)[0] for ids, params in requests()]
    drain(engine)
    return [
        (one.output_token_ids, one.finish_reason, one.logprobs, one.prompt_logprobs, str(one.error))
        for one in added
    ]


@pytest.fixture(scope="module")
def sampled():
    return results(ToyBackend())


def test_tokens_are_those_of_the_host_and_logits_come_only_for_rows_that_need_them(sampled):
    backend = ToyBackend(chooses=True)
    assert results(backend) == sampled
    racing = [own for own, (_, params) in zip(sampled, requests(), strict=True) if params.temperature == 0.8]
    assert backend.num_chosen >= sum(len(tokens) for tokens, *_ in racing) > 80
    asked = [ids for ids, params in requests() if params.prompt_logprobs is not None]
    all_tokens, prompt_rows = sum(len(tokens) for tokens, *_ in sampled), sum(len(ids) - 1 for ids in asked)
    assert backend.num_logits + backend.num_chosen == all_tokens + prompt_rows


@pytest.mark.parametrize("style", ["right", "partly", "tree"])
def test_drafts_are_walked_along_chosen_tokens(sampled, style):
    truth = {tuple(ids): own[0] for (ids, _), own in zip(requests(), sampled, strict=True)}
    backend = ToyBackend(chooses=True)
    assert results(backend, ScriptedDrafter(truth, style)) == sampled
    assert backend.num_chosen > backend.num_logits / 4


def test_unusable_logits_end_their_own_request_with_the_same_error():
    backends = [ToyBackend(nan_after=11, chooses=chooses) for chooses in (False, True)]
    sampled, chosen = (results(backend) for backend in backends)
    assert chosen == sampled
    assert sum(reason == "error" for _, reason, *_ in chosen) >= 2
