"""Requests that name other drafters: the host drafts for them, and all others stay on the device."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.backends.async_decoding import NgramLookup
from paceline.control.controller import Controller, FixedController, Load, StepPlan
from paceline.core.request import Request
from paceline.core.trees import PLAIN, DraftPlan
from paceline.draft.base import DrafterNeeds
from paceline.draft.device import TextDrafts
from paceline.engine.engine import Engine
from paceline.engine.executors import device_plans
from tests.engine.mixed_requests import Hosted, alone, outcome, params
from tests.engine.test_exactness import prompt
from tests.toy import ToyBackend, drain, scribble_free_pages, toy_engine
from tests.toy_drafter import ScriptedDrafter

HEAD, OTHER_HEAD = DraftPlan("scripted", 3), DraftPlan("other head", 3)
TEXTS, NGRAM, UNLOADED = DraftPlan("texts", 4), DraftPlan("ngram", 3), DraftPlan("unloaded", 6)
DEEP = DraftPlan("deep", 3)
TREE = DraftPlan("scripted", 6, branching=2)
LONG = {"max_tokens": 40, "ignore_eos": True}


class Head(ScriptedDrafter):
    """As on a GPU: passes write its features to its own pool."""

    needs = DrafterNeeds(bytes_per_page=1)

    def observe(self, requests: object, verdicts: object, features: object) -> None:
        assert features is None


class OtherHead(Head):
    name = "other head"


class FromTexts(Hosted):
    """The host drafts while passes run; where it was wrong, the device looks chains up."""

    name = "texts"
    device = TextDrafts(NgramLookup(1, 4))


class LookedUp(Hosted):
    """The device looks chains up. Asked on the host, it knows the text."""

    name = "ngram"
    device = TextDrafts(NgramLookup(1, 4), optimistic=False)


class Unloaded(Hosted):
    """Reads texts and has no buffers on the device, like `suffix` where the engine does not load it."""

    name = "unloaded"
    device = None


class InTargetPages(Hosted):
    name = "deep"
    needs = DrafterNeeds(target_pages=True)
    device = None


KINDS = (Head, OtherHead, FromTexts, LookedUp, Unloaded, InTargetPages)
PLANS = {plan.drafter: plan for plan in (HEAD, OTHER_HEAD, TEXTS, NGRAM, UNLOADED, DEEP)}
ANSWERS: dict[int, Any] = {}


def answer(number: int) -> Any:
    """The outcome of a request alone, on the host and without drafts."""
    if number not in ANSWERS:
        ANSWERS[number] = alone(prompt(number, 5), params(number, **LONG))
    return ANSWERS[number]


def engine_of(plan: DraftPlan | Controller, backend: ToyBackend, style: str = "right") -> Engine:
    """An engine with all drafters, whose requests draft by this plan unless they name one."""
    truth = {tuple(prompt(number, 5)): answer(number)[0] for number in range(8)}
    return toy_engine(
        backend,
        drafters=[kind(truth, style) for kind in KINDS],
        controller=FixedController(plan) if isinstance(plan, DraftPlan) else plan,
        plans=PLANS,
    )


def asking(plan: DraftPlan | None) -> object:
    """The option of a request that names this plan."""
    if plan is None:
        return None
    if not plan.budget:
        return "off"
    options = {"method": plan.drafter, "num_speculative_tokens": plan.budget}
    return options if plan.branching == 1 else {**options, "branching": plan.branching}


def add(engine: Engine, number: int, plan: DraftPlan | None = None) -> Request:
    return engine.add_request(prompt(number, 5), params(number, **LONG, speculative=asking(plan)))[0]


class Passes:
    """Steps an engine, and counts the passes that gave each request its tokens while others ran too."""

    def __init__(self, engine: Engine, added: list[Request]) -> None:
        self.on_device = dict.fromkeys(added, 0)
        self.on_host = dict.fromkeys(added, 0)  # without the prefill
        while len(engine.scheduler.running) > 1 or not added[-1].num_output:
            outputs = {request: request.num_output for request in added}
            deltas = engine.step()
            for delta in deltas:
                if engine.stats.overlapped:
                    self.on_device[delta.request] += 1
                elif outputs[delta.request]:
                    self.on_host[delta.request] += 1
        drain(engine)


@pytest.mark.parametrize(
    ("plan", "named"),
    [(TEXTS, UNLOADED), (TEXTS, NGRAM), (NGRAM, TEXTS)],
    ids=["not loaded", "looked up", "beside look-ups"],
)
def test_drafts_of_the_host_enter_passes_that_take_them(plan: DraftPlan, named: DraftPlan) -> None:
    """Every request decodes on the device, and each with the drafter that it named."""
    backend = ToyBackend(on_device=True)
    engine = engine_of(plan, backend)
    others = [add(engine, number) for number in range(3)]
    one = add(engine, 3, named)
    passes = Passes(engine, [*others, one])
    assert [outcome(request) for request in [*others, one]] == [answer(number) for number in range(4)]
    assert not any(passes.on_host.values())
    assert set(one.speculative.drafters) == {named.drafter}
    assert one.speculative.num_accepted_draft_tokens > 20
    assert all(set(request.speculative.drafters) == {plan.drafter} for request in others)
    assert len(one.speculative.acceptance_histogram) <= 1 + min(named.budget, TEXTS.budget)


@pytest.mark.parametrize(
    ("plan", "named"),
    [
        (HEAD, TEXTS),
        (HEAD, UNLOADED),
        (HEAD, OTHER_HEAD),
        (HEAD, TREE),
        (NGRAM, HEAD),
        (NGRAM, UNLOADED),
        (TEXTS, HEAD),
        (PLAIN, HEAD),
        (PLAIN, TEXTS),
    ],
    ids=lambda plan: plan.label,
)
def test_a_request_that_no_pass_can_draft_for_leaves_the_others_on_the_device(
    plan: DraftPlan, named: DraftPlan
) -> None:
    """It decodes in host passes between theirs, with the drafter that it named."""
    backend = ToyBackend(on_device=True)
    engine = engine_of(plan, backend)
    others = [add(engine, number) for number in range(3)]
    one = add(engine, 3, named)
    passes = Passes(engine, [*others, one])
    assert [outcome(request) for request in [*others, one]] == [answer(number) for number in range(4)]
    assert not any(passes.on_host[request] for request in others)
    assert passes.on_host[one] >= 4
    assert set(one.speculative.drafters) == {named.drafter}
    assert one.speculative.num_accepted_draft_tokens >= 15


def test_a_length_without_buffers_is_drafted_by_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chains from texts enter passes of a shorter length, and are cut; a head's need host passes."""
    monkeypatch.setattr(device_plans, "MAX_DRAFTS", 1)
    for plan, needs_host in ((TEXTS, False), (HEAD, True)):
        engine = engine_of(plan, ToyBackend(on_device=True))
        others = [add(engine, number) for number in range(3)]
        while any(request.num_output < 2 for request in others):
            engine.step()
        one = add(engine, 3, replace(plan, budget=9))
        passes = Passes(engine, [*others, one])
        assert [outcome(request) for request in [*others, one]] == [answer(number) for number in range(4)]
        assert not any(passes.on_host[request] for request in others)
        assert (passes.on_host[one] > 0) == needs_host
        (_, nodes, _, _), _ = max(one.speculative.drafts.items(), key=lambda each: each[1])
        assert nodes == (9 if needs_host else TEXTS.budget)


class BySlot(Controller):
    """Gives each request a plan by its slot."""

    def __init__(self, plans: list[DraftPlan]) -> None:
        self._plans = plans

    def plan(self, running: Any, load: Load) -> StepPlan:
        return StepPlan([self._plans[request.slot % len(self._plans)] for request in running])


def test_a_controller_may_give_a_batch_several_drafters() -> None:
    engine = engine_of(BySlot([HEAD, HEAD, TEXTS]), ToyBackend(on_device=True))
    added = [add(engine, number) for number in range(6)]
    passes = Passes(engine, added)
    assert [outcome(request) for request in added] == [answer(number) for number in range(6)]
    for request in added:
        (drafter,) = request.speculative.drafters
        assert (passes.on_host[request] > 0) == (drafter == "texts")


@pytest.mark.parametrize(
    ("plan", "named", "count"),
    [(HEAD, TEXTS, 2), (TEXTS, DEEP, 1)],
    ids=["half of the requests", "writes to the target's pages"],
)
def test_host_passes_serve_all_where_host_and_device_cannot_take_turns(
    plan: DraftPlan, named: DraftPlan, count: int
) -> None:
    backend = ToyBackend(on_device=True)
    engine = engine_of(plan, backend)
    added = [add(engine, number, named if number < count else None) for number in range(4)]
    while all(request.num_output < 5 for request in added):
        engine.step()
    assert backend.num_launched == 0
    drain(engine)
    assert [outcome(request) for request in added] == [answer(number) for number in range(4)]


def test_requests_that_the_controller_would_not_draft_for_share_the_passes_of_most() -> None:
    """Alone they would be plain. In host passes between the others' they would be slower."""
    engine = engine_of(PLAIN, ToyBackend(on_device=True))
    added = [add(engine, number, HEAD if number else None) for number in range(4)]
    passes = Passes(engine, added)
    assert [outcome(request) for request in added] == [answer(number) for number in range(4)]
    assert not any(passes.on_host.values())


def test_a_request_moves_between_host_and_device_as_others_come_and_go() -> None:
    """The device drafts with whichever drafter most requests want."""
    engine = engine_of(HEAD, ToyBackend(on_device=True))
    one = add(engine, 0, OTHER_HEAD)
    others: list[Request] = []
    turns = []  # where the tokens of `one` came from
    while engine.has_unfinished:
        if one.num_output > 5 and not others:
            others = [add(engine, number) for number in (1, 2)]
        if one.num_output > 20:
            for request in others:
                engine.abort(request.request_id)
        if one in [delta.request for delta in engine.step()] and turns[-1:] != [engine.stats.overlapped]:
            turns.append(engine.stats.overlapped)
    prefill, device, host = False, True, False
    assert turns == [prefill, device, host, device]
    assert outcome(one) == answer(0)
    assert set(one.speculative.drafters) == {"other head"}


EVENTS = st.lists(
    st.one_of(
        st.tuples(
            st.just("add"),
            st.integers(0, 7),
            st.sampled_from([None, PLAIN, HEAD, TREE, OTHER_HEAD, TEXTS, NGRAM, UNLOADED, DEEP]),
        ),
        st.tuples(st.just("step"), st.integers(1, 6), st.none()),
        st.tuples(st.just("abort"), st.integers(0, 10), st.none()),
    ),
    max_size=25,
)


@settings(max_examples=80)
@given(EVENTS, st.sampled_from([PLAIN, HEAD, TEXTS, NGRAM]), st.sampled_from(["right", "partly", "wrong"]))
def test_whatever_drafters_requests_name_they_get_the_same_bytes(
    events: list[tuple[str, int, DraftPlan | None]], plan: DraftPlan, style: str
) -> None:
    engine = engine_of(plan, ToyBackend(on_device=True), style)
    added = []
    for event, number, named in events:
        if event == "add":
            added.append((add(engine, number, named), number))
        elif event == "abort" and added:
            engine.abort(added[number % len(added)][0].request_id)
        elif event == "step":
            for _ in range(number):
                engine.step()
                scribble_free_pages(engine)
    drain(engine)
    for request, number in added:
        if request.finish_reason == "abort":
            assert request.output_token_ids == answer(number)[0][: request.num_output]
        else:
            assert outcome(request) == answer(number)
        assert not request.failed_drafters
    assert engine.kv.pages.num_available == engine.kv.pages.num_pages, "pages leaked"
