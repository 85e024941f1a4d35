"""Optimistic host drafts: made while a pass runs, and used by the next one."""

from __future__ import annotations

import pytest

from paceline.backends.async_decoding import NgramLookup
from paceline.control.controller import FixedController
from paceline.core.trees import DraftPlan, DraftTrees
from paceline.draft.base import DrafterNeeds
from paceline.draft.device import OPTIMISTIC_PASSES, TextDrafts
from paceline.draft.lookup.ngram import NgramDrafter
from paceline.draft.lookup.suffix import SuffixDrafter, SuffixOptions
from paceline.engine.executors.optimistic import MAX_DRAFTED
from tests.engine.mixed_requests import REQUESTS, Hosted, alone, expected, outcome, params
from tests.engine.test_exactness import prompt
from tests.engine.test_lookup import Repeating
from tests.toy import ToyBackend, drain, toy_engine
from tests.toy_decoder import ToyDecoder
from tests.toy_tokenizer import VOCAB

LEVELS = 3
REACH = OPTIMISTIC_PASSES * (1 + LEVELS)
LONG = {"max_tokens": 42, "ignore_eos": True}


@pytest.fixture
def given(monkeypatch):
    """The host's drafts of all passes that were begun, None of a plain one, with their slots."""
    lines = []
    launch = ToyDecoder.launch

    def recorded(self, slots, page_tables, draft, host_drafts=None):
        lines.append((list(slots), None if host_drafts is None else host_drafts.tolist()))
        launch(self, slots, page_tables, draft, host_drafts)

    monkeypatch.setattr(ToyDecoder, "launch", recorded)
    return lines


def truth_of(numbers, **options):
    """The true tokens of requests with these prompts."""
    return {tuple(prompt(n, 5)): alone(prompt(n, 5), params(n, **LONG, **options))[0] for n in numbers}


def added(engine, numbers, **options):
    return [engine.add_request(prompt(n, 5), params(n, **LONG, **options))[0] for n in numbers]


class Counting(Hosted):
    """Records the requests that it was asked for, and their numbers of tokens."""

    def __init__(self, truth, style="right"):
        super().__init__(truth, style)
        self.asked = []  # of each call

    def propose(self, requests, plans):
        self.asked.append([(request, request.num_output) for request in requests])
        return super().propose(requests, plans)


def test_right_optimistic_drafts_are_accepted_whole():
    truth = truth_of([2])
    drafter, backend = Counting(truth), ToyBackend(on_device=True)
    engine = toy_engine(backend, drafter=drafter, budget=LEVELS, branching=1)
    (request,) = added(engine, [2])
    in_flight, gained = [], []
    while engine.has_unfinished:
        gained += [len(delta.token_ids) for delta in engine.step()]
        in_flight.append(len(engine._pipeline))
    assert request.output_token_ids == truth[tuple(prompt(2, 5))]
    assert gained == [1, *[1 + LEVELS] * 10, 1]
    counts = request.speculative
    assert counts.num_accepted_draft_tokens == counts.num_draft_tokens == 10 * LEVELS
    assert backend.num_launched == 11
    # another pass was always begun behind the one that was read, and the host has drafted behind that one
    assert in_flight == [0, *[1] * 10, 0]
    assert [number for ((_, number),) in drafter.asked] == [1, 5, 9, 13, 17, 21, 25, 29, 33, 37]


def test_optimistic_drafts_have_their_position_and_cover_two_passes(given):
    truth = truth_of([2])
    engine = toy_engine(
        ToyBackend(on_device=True), drafter=Hosted(truth, "right"), budget=LEVELS, branching=1
    )
    added(engine, [2])
    drain(engine)
    (whole,) = truth.values()
    lines = [host_drafts[0] for _, host_drafts in given]
    assert [start for start, *_ in lines] == [6, 6, 10, 14, 18, 22, 26, 30, 34, 38, 42]
    for start, *tokens in lines:
        known = start - 5
        left = whole[known:][: min(2 * (1 + LEVELS), len(whole) - known - 1)]  # the last token comes anyway
        assert tokens == left + [-1] * (REACH - len(left))


@pytest.mark.parametrize("look_up", [None, NgramLookup(1, 4)])
@pytest.mark.parametrize("style", ["right", "partly", "wrong"])
def test_optimistic_drafts_of_any_quality_give_the_same_tokens(style, look_up):
    truth = {tuple(ids): expected(number)[0] for number, (ids, _) in enumerate(REQUESTS)}
    drafter = Hosted(truth, style)
    drafter.device = TextDrafts(look_up)
    engine = toy_engine(
        ToyBackend(on_device=True), drafter=drafter, budget=LEVELS, branching=1, max_num_seqs=4
    )
    requests = [engine.add_request(*REQUESTS[number])[0] for number in range(len(REQUESTS))]
    drain(engine)
    assert [outcome(request) for request in requests] == [expected(n) for n in range(len(REQUESTS))]


def test_prompt_lookup_is_used_where_optimistic_drafts_are_wrong():
    """Of a drafter that is always wrong, every pass but the first uses what ngram finds."""

    def run(drafter, on_device=True):
        engine = toy_engine(Repeating(on_device=on_device), drafter=drafter, budget=LEVELS, branching=1)
        (request,) = added(engine, [2])
        drain(engine)
        own = request.speculative
        counts = own.num_spec_steps, own.num_draft_tokens, own.num_accepted_draft_tokens
        return request.output_token_ids, counts

    ngram = NgramDrafter(NgramDrafter.Options())
    whole, (steps, tokens, accepted) = run(ngram, on_device=False)
    assert accepted > 15
    lost = Hosted({tuple(prompt(2, 5)): whole}, "wrong")
    assert run(lost) == (whole, (1, LEVELS, 0))
    lost.device = TextDrafts(ngram.device.look_up)
    assert run(lost) == (whole, (steps + 1, tokens + LEVELS, accepted))
    silent = Hosted({tuple(prompt(2, 5)): []}, "right")
    silent.device = TextDrafts(ngram.device.look_up)
    assert run(silent) == (whole, (steps, tokens, accepted))


def test_drafts_of_an_ended_request_are_not_used_by_the_next_in_its_slot(given):
    truth = truth_of([2])
    truth[tuple(prompt(3, 5))] = []  # nothing is expected of it
    engine = toy_engine(
        ToyBackend(on_device=True), drafter=Hosted(truth, "right"), budget=LEVELS, branching=1, max_num_seqs=1
    )
    first, second = added(engine, [2, 3])
    while not first.finished:
        engine.step()
    before = len(given)
    drain(engine)
    assert first.speculative.num_accepted_draft_tokens == 10 * LEVELS
    assert second.speculative.num_draft_tokens == 0
    assert {tuple(slots) for slots, _ in given} == {(0,)}
    assert len(given) > before
    assert all(host_drafts == [[-1] * (1 + REACH)] for _, host_drafts in given[before:])
    assert list(engine._device._optimistic._drafts) == [second]


def test_many_requests_are_drafted_for_in_turn():
    """Meanwhile each uses its previous draft, which is long enough for that many passes."""
    count = 3 * MAX_DRAFTED
    truth = truth_of(range(count), temperature=0.0)
    drafter, backend = Counting(truth), ToyBackend(on_device=True, max_rows=256)
    engine = toy_engine(
        backend,
        drafter=drafter,
        budget=LEVELS,
        branching=1,
        max_num_seqs=count,
        max_num_batched_tokens=256,
        num_pages=2000,
    )
    requests = added(engine, range(count), temperature=0.0)
    drain(engine)
    assert [request.output_token_ids for request in requests] == list(truth.values())
    assert {len(asked) for asked in drafter.asked} == {MAX_DRAFTED}
    assert len(drafter.asked) <= backend.num_launched
    for first in range(0, len(drafter.asked) - 2, 3):
        turn = [request for asked in drafter.asked[first : first + 3] for request, _ in asked]
        assert turn == requests
    for request in requests[:MAX_DRAFTED]:  # the others' first pass or two found nothing
        assert request.speculative.num_accepted_draft_tokens == 10 * LEVELS
    assert backend.num_launched <= 14


class Failing(Counting):
    """Raises when it is asked for the third time."""

    def propose(self, requests, plans):
        trees = super().propose(requests, plans)
        if len(self.asked) >= 3:
            raise RuntimeError("lost")
        return trees


def test_an_optimistic_drafter_that_raises_is_not_asked_again(given):
    truth = truth_of([2, 4])
    drafter = Failing(truth)
    backend = ToyBackend(on_device=True)
    engine = toy_engine(backend, drafter=drafter, budget=LEVELS, branching=1)
    requests = added(engine, [2, 4])
    drain(engine)
    assert [request.output_token_ids for request in requests] == list(truth.values())
    assert all(request.failed_drafters == {"scripted"} for request in requests)
    assert len(drafter.asked) == 3  # of both
    assert engine._drafting.faults.count == 1
    drafted = [host_drafts for _, host_drafts in given if host_drafts is not None]
    assert drafted[-1] == [[-1] * (1 + REACH)] * 2  # the pass that it was asked for
    assert given[-1][1] is None  # then they are plain


def test_undrafted_requests_get_no_optimistic_drafts(given):
    truth = truth_of([2, 4])
    drafter = Counting(truth)
    engine = toy_engine(ToyBackend(on_device=True), drafter=drafter, budget=LEVELS, branching=1)
    (off,) = added(engine, [4], speculative="off")
    (drafted,) = added(engine, [2])
    drain(engine)
    assert [own.output_token_ids for own in (drafted, off)] == list(truth.values())
    assert {request for asked in drafter.asked for request, _ in asked} == {drafted}
    assert off.speculative.num_spec_steps == 0
    assert all(
        host_drafts[0] == [-1] * (1 + REACH)
        for _, host_drafts in given
        if host_drafts is not None and len(host_drafts) == 2
    )


def test_drafts_that_cannot_run_on_the_device_get_host_passes():
    """A decoder cannot follow drafts of the host, or guesses are in the target's pages."""
    truth = truth_of([2])

    class InPages(Hosted):
        needs = DrafterNeeds(target_pages=True)

    plan = DraftPlan("scripted", LEVELS)
    for backend, kind, controller in (
        (ToyBackend(on_device=True, supports_lookup=False), Hosted, FixedController(plan)),
        (ToyBackend(on_device=True), InPages, FixedController(plan)),
    ):
        engine = toy_engine(backend, drafter=kind(truth, "right"), controller=controller)
        (request,) = added(engine, [2])
        drain(engine)
        assert request.output_token_ids == truth[tuple(prompt(2, 5))]
        assert backend.num_launched == 0
        assert request.speculative.num_accepted_draft_tokens == 10 * LEVELS


def test_suffix_drafts_a_past_response_again():
    drafter, backend = SuffixDrafter(SuffixOptions()), ToyBackend(on_device=True)
    engine = toy_engine(backend, drafter=drafter, budget=LEVELS, branching=1)
    launched, counts = [], []
    for _ in range(2):
        before = backend.num_launched
        (request,) = added(engine, [2])
        drain(engine)
        assert request.output_token_ids == truth_of([2])[tuple(prompt(2, 5))]
        launched.append(backend.num_launched - before)
        counts.append(request.speculative)
    assert launched[1] <= 12 < launched[0]
    assert counts[1].num_accepted_draft_tokens >= 10 * LEVELS - 2


def test_a_drafter_with_invalid_drafts_is_excluded():
    class Nonsense(Counting):
        def propose(self, requests, plans):
            super().propose(requests, plans)
            return DraftTrees.chains([[VOCAB + 3] * plan.budget for plan in plans])

    truth = truth_of([2])
    drafter = Nonsense(truth)
    engine = toy_engine(ToyBackend(on_device=True), drafter=drafter, budget=LEVELS, branching=1)
    (request,) = added(engine, [2])
    drain(engine)
    assert request.output_token_ids == truth[tuple(prompt(2, 5))]
    assert len(drafter.asked) == 1
