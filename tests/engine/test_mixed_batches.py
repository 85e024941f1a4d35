"""Requests that the device cannot sample decode on the host, beside those that stay on the device."""

from __future__ import annotations

import re
from collections.abc import Sequence

import pytest

from paceline.control.controller import Controller, Load, StepPlan
from paceline.core.params import SamplingParams
from paceline.core.request import Request
from paceline.core.trees import PLAIN, DraftPlan, DraftTrees
from paceline.draft.base import DrafterNeeds
from paceline.draft.device import TextDrafts
from paceline.engine.engine import Engine
from tests.engine.mixed_requests import alone, outcome, params
from tests.engine.test_exactness import prompt
from tests.toy import ToyBackend, drain, toy_engine
from tests.toy_drafter import ScriptedDrafter

NEEDS_HOST = {"logprobs": 2, "bad_words": ["HI"]}  # of a device that supports no token masks


def make_backend() -> ToyBackend:
    return ToyBackend(on_device=True, supports_masks=False)


def add_device_requests(engine: Engine, count: int, max_tokens: int = 30) -> list[Request]:
    options = {"max_tokens": max_tokens, "ignore_eos": True}
    return [engine.add_request(prompt(number, 5), params(number, **options))[0] for number in range(count)]


@pytest.mark.parametrize(
    "options",
    [
        NEEDS_HOST,
        {"allowed_token_ids": range(9, 40)},
        {"logprobs": 1, "logit_bias": {3: 1.5}, "structured_outputs": {"regex": "[A-F]{4}[0-9]{5}"}},
    ],
    ids=lambda options: "+".join(options),
)
def test_requests_that_need_the_host_leave_the_others_on_the_device(options) -> None:
    """Token masks, where the device supports none: decoded in host passes."""
    backend = make_backend()
    engine = toy_engine(backend)
    others = add_device_requests(engine, 3)
    needy = params(3, max_tokens=9, ignore_eos=True, **options)
    (on_host,) = engine.add_request(prompt(3, 5), needy)
    drain(engine)
    assert outcome(on_host) == alone(prompt(3, 5), needy)
    assert on_host.num_output == 9
    for request in others:
        assert outcome(request) == alone(request.prompt_token_ids, request.params)
    assert backend.num_launched >= 29
    assert [requests for requests, _ in backend.batches].count(1) >= 8  # host passes


def test_tokens_that_a_grammar_forces_are_drafted_beside_device_passes() -> None:
    backend = make_backend()
    engine = toy_engine(backend)
    others = add_device_requests(engine, 3)
    grammar = 'root ::= "NAME=" [A-F] [A-F] ",AGE=" [0-9] [0-9] ",END"'
    form = SamplingParams(max_tokens=40, seed=5, logprobs=1, structured_outputs={"grammar": grammar})
    (on_host,) = engine.add_request(prompt(3, 5), form)
    while not on_host.finished:
        engine.step()
    assert on_host.speculative.num_accepted_draft_tokens >= 10
    assert backend.num_launched >= 4
    assert re.fullmatch("NAME=[A-F]{2},AGE=[0-9]{2},END", on_host.detokenizer.text)
    assert outcome(on_host) == alone(prompt(3, 5), form)
    assert not any(request.finished for request in others)


def test_host_passes_serve_all_if_most_requests_need_the_host() -> None:
    backend = make_backend()
    engine = toy_engine(backend)
    for number in range(3):
        engine.add_request(prompt(number, 5), params(number, max_tokens=9, **NEEDS_HOST))
    engine.add_request(prompt(3, 5), params(3, max_tokens=9, ignore_eos=True))
    while any(request.num_output < 5 for request in engine.scheduler.running) or engine.scheduler.waiting:
        engine.step()
    assert backend.num_launched == 0


def test_penalties_count_the_tokens_of_device_passes_when_the_host_takes_over() -> None:
    backend = make_backend()
    engine = toy_engine(backend)
    penalized = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, frequency_penalty=2.0)
    (request,) = engine.add_request(prompt(0, 5), penalized)
    while request.num_output < 20:
        engine.step()
    launched = backend.num_launched
    assert launched >= 19
    for number in (1, 2):  # now most requests need the host
        engine.add_request(prompt(number, 5), params(number, max_tokens=60, ignore_eos=True, **NEEDS_HOST))
    while not request.finished:
        engine.step()
    assert backend.num_launched <= launched + 2, "the rest was sampled on the host"
    assert outcome(request) == alone(prompt(0, 5), penalized)


class Recording(ScriptedDrafter):
    """A head that notes the requests that the host asks it to draft for."""

    def __init__(self) -> None:
        super().__init__({}, "right")
        self.asked: list[Request] = []

    def propose(self, requests: Sequence[Request], plans: Sequence[DraftPlan]) -> DraftTrees:
        self.asked += requests
        return DraftTrees.chains([[]] * len(requests))

    def observe(self, requests: object, verdicts: object, features: object) -> None:
        return


class FromTexts(Recording):
    name = "texts"
    needs = DrafterNeeds()
    device = TextDrafts()


class InTargetPages(Recording):
    name = "deep"
    needs = DrafterNeeds(target_pages=True)
    device = None


class ByNeeds(Controller):
    """One plan for the request that needs the host, and plain decoding for the others."""

    def __init__(self, plan: DraftPlan) -> None:
        self._plan = plan

    def plan(self, running: Sequence[Request], load: Load) -> StepPlan:
        return StepPlan([self._plan if request.params.logprobs else PLAIN for request in running])


@pytest.mark.parametrize(
    ("plan", "asked"),
    [
        (DraftPlan("texts", 3), {"texts"}),
        (DraftPlan("scripted", 3), set()),
        (DraftPlan("deep", 3), set()),
        (DraftPlan("texts", 3, otherwise=DraftPlan("scripted", 3), enough=9.0), set()),
    ],
    ids=["texts", "head", "target's pages", "cascade to a head"],
)
def test_only_drafters_that_read_texts_draft_on_the_host_beside_device_passes(plan, asked) -> None:
    """The proposal of another runs on the device after the passes in flight, and the host would wait."""
    backend, drafters = make_backend(), [Recording(), FromTexts(), InTargetPages()]
    engine = toy_engine(backend, drafters=drafters, controller=ByNeeds(plan))
    others = add_device_requests(engine, 3)
    needy = params(3, max_tokens=9, ignore_eos=True, **NEEDS_HOST)
    (on_host,) = engine.add_request(prompt(3, 5), needy)
    while not on_host.finished:
        engine.step()
    assert {drafter.name for drafter in drafters if on_host in drafter.asked} == asked
    assert outcome(on_host) == alone(prompt(3, 5), needy)
    assert backend.num_launched >= 8
    assert not any(request.finished for request in others)


@pytest.mark.parametrize("num_pages", [16, 26])
def test_a_request_in_a_pass_in_flight_is_not_preempted_by_one_of_the_host(num_pages) -> None:
    """The oldest needs the host, and more pages; the youngest is on the device, which writes to its pages."""

    def outputs(on_device):
        backend = ToyBackend(on_device=on_device, supports_masks=False)
        engine = toy_engine(backend, num_pages=num_pages)
        added = [
            engine.add_request(prompt(number, 9), params(number, max_tokens=40, ignore_eos=True, **own))[0]
            for number, own in enumerate((NEEDS_HOST, {}, {}))
        ]
        drain(engine)
        assert engine.scheduler.num_preemptions > 0
        return [request.output_token_ids for request in added]

    assert outputs(on_device=True) == outputs(on_device=False)


@pytest.mark.parametrize("share", [1, 3], ids=["beside others", "all"])
@pytest.mark.parametrize(
    "options",
    [
        {"bad_words": ["HI"]},
        {"allowed_token_ids": range(9, 40), "top_k": 6},
        {"structured_outputs": {"regex": "[A-F ]{4}[0-9]{5}"}, "top_p": 0.8},
        {"logit_bias": {3: 1.5}, "min_p": 0.05},
        {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.4},
        {"min_tokens": 7, "stop_token_ids": list(range(5, 60)), "ignore_eos": False},
        {"bad_words": ["HI"], "logit_bias": {3: 1.5}, "frequency_penalty": 0.4},
    ],
    ids=lambda options: "+".join(options),
)
def test_log_probabilities_of_masked_or_edited_logits_need_no_host_pass(options, share: int) -> None:
    """They are those of the raw logits, as the host gives them."""
    engine = toy_engine(ToyBackend(on_device=True))
    added = []
    for number in range(3):
        own = {"logprobs": 3, **options} if number < share else {}
        ids, needy = prompt(number, 5), params(number, **{"max_tokens": 9, "ignore_eos": True, **own})
        added += engine.add_request(ids, needy)
    while engine.has_unfinished:
        is_decoding = all(request.num_output for request in added)
        engine.step()
        assert engine.stats.overlapped or not is_decoding
    for request in added:
        assert outcome(request) == alone(request.prompt_token_ids, request.params)
    assert sum(len(request.logprobs) for request in added) >= 7
