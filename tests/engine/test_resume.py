"""A request that another engine began continues token for token as if it had never been interrupted.

Requests are cut after any of their tokens, and the rest must be what an undisturbed run gives it: tokens,
text, log-probabilities, and why it ended.
"""

from __future__ import annotations

import pytest

from paceline.control.controller import FixedController
from paceline.core.params import SamplingParams
from paceline.core.request import Request
from paceline.core.trees import DraftPlan
from paceline.engine import admission
from paceline.engine.engine import Engine
from paceline.engine.outputs import request_output
from paceline.errors import RequestError
from tests.engine.mixed_requests import REQUESTS, Hosted, expected
from tests.engine.test_exactness import prompt
from tests.planted import Plant
from tests.toy import ToyBackend, drain, toy_engine
from tests.toy_drafter import ScriptedDrafter
from tests.toy_tokenizer import ToyTokenizer

DRAFTS = {
    "plain": None,
    "chain": (ScriptedDrafter, "partly", DraftPlan("scripted", 3)),
    "tree": (ScriptedDrafter, "tree", DraftPlan("scripted", 4, 2)),
    "hosted": (Hosted, "right", DraftPlan("scripted", 3)),
}


def engine_with(drafts: str, on_device: bool = False) -> Engine:
    if (given := DRAFTS[drafts]) is None:
        return toy_engine(ToyBackend(on_device=on_device))
    kind, style, plan = given
    truth = {tuple(ids): expected(number)[0] for number, (ids, _) in enumerate(REQUESTS)}
    return toy_engine(
        ToyBackend(on_device=on_device), drafter=kind(truth, style), controller=FixedController(plan)
    )


def resumed_everywhere(engine: Engine) -> dict[tuple[int, int], Request]:
    """Every request, cut after every fourth of its tokens; all of them at once."""
    made = {}
    for number, (ids, options) in enumerate(REQUESTS):
        tokens = expected(number)[0]
        for cut in range(number % 4, len(tokens), 4):
            (made[number, cut],) = engine.add_request(ids, options, resume={0: tokens[:cut]})
    texts = drain(engine)
    for request in made.values():  # streamed text is only the new text
        assert request.detokenizer.text.endswith(texts[request])
    return made


def differing(made: dict[tuple[int, int], Request]) -> list[tuple[int, int]]:
    wrong = []
    for (number, cut), request in made.items():
        tokens, finish, stop, text, logprobs = expected(number)
        got = (request.output_token_ids, request.finish_reason, request.stop_reason, request.detokenizer.text)
        if got != (tokens, finish, stop, text) or request.logprobs != logprobs[cut:]:
            wrong.append((number, cut))
    return wrong


@pytest.mark.parametrize("on_device", [False, True], ids=["host", "device"])
@pytest.mark.parametrize("drafts", DRAFTS)
def test_an_output_cut_after_any_token_continues_as_if_it_were_whole(drafts: str, on_device: bool) -> None:
    assert differing(resumed_everywhere(engine_with(drafts, on_device))) == []


def test_a_sampler_that_does_not_know_the_tokens_is_found_out(plant: Plant) -> None:
    def forgetful(request: Request, tokens: list[int], vocab_size: int) -> None:
        request.token_ids.extend(tokens)
        request.detokenizer.extend(tokens)
        request.detokenizer.take()

    plant(admission, "_replay", forgetful)
    made = resumed_everywhere(engine_with("plain"))
    plant.assert_ran()
    assert all(request.error is None for request in made.values())
    assert {number % 9 for number, _ in differing(made)} >= {7}  # penalties


def test_of_n_outputs_those_named_continue_each_with_its_own_tokens() -> None:
    params = SamplingParams(n=3, temperature=0.8, seed=5, max_tokens=12, ignore_eos=True, logprobs=1)
    ids = prompt(3, 17)
    engine = toy_engine()
    whole = engine.add_request(ids, params)
    drain(engine)
    cuts = {1: whole[1].output_token_ids[:4], 2: whole[2].output_token_ids[:7]}
    engine = toy_engine()
    resumed = engine.add_request(ids, params, resume=cuts)
    assert [request.child for request in resumed] == [1, 2]
    drain(engine)
    assert [request.output_token_ids for request in resumed] == [whole[n].output_token_ids for n in (1, 2)]
    output = request_output(None, resumed, ToyTokenizer()).outputs[0]
    assert output.cumulative_logprob == sum(
        entry[token].logprob
        for entry, token in zip(whole[1].logprobs[4:], whole[1].output_token_ids[4:], strict=True)
    )


@pytest.mark.parametrize(
    ("resume", "words"),
    [
        ({0: [5, 97]}, "outside the vocabulary"),
        ({0: [5, 0]}, "already ended"),
        ({0: [5] * 8}, "already ended"),
        ({0: [33, 34]}, "already ended"),  # AB, a stop string
        ({1: [5]}, "must name some of 0 to 0"),
        ({}, "must name some of 0 to 0"),
    ],
)
def test_what_cannot_be_resumed_is_refused(resume: dict[int, list[int]], words: str) -> None:
    params = SamplingParams(temperature=0, max_tokens=8, stop="AB")
    with pytest.raises(RequestError, match=words):
        toy_engine().add_request([3, 4], params, resume=resume)


def test_a_sampled_output_is_resumed_only_with_its_seed() -> None:
    with pytest.raises(RequestError, match="Set seed"):
        toy_engine().add_request([3, 4], SamplingParams(temperature=1), resume={0: [5]})


def test_what_was_begun_elsewhere_comes_before_what_was_not() -> None:
    """A reader waits for its next token; the others have seen nothing yet."""
    engine = toy_engine(max_num_seqs=1)
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    ended: list[Request] = []
    running, new = (engine.add_request(ids, params)[0] for ids in ([3, 4], [5, 6]))
    begun = [engine.add_request(ids, params, resume={0: [9]})[0] for ids in ([7, 8], [8, 9])]
    while engine.has_unfinished:
        ended += [delta.request for delta in engine.step() if delta.request.finished]
    assert ended == [*begun, running, new]  # nothing had run yet
