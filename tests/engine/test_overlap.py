"""Passes that are launched before earlier ones are read change nothing but the time.

The toy's passes run when they are begun, over the page table of that moment, so they see what a device would
see. Free pages are filled with rubbish between steps.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.control.controller import FixedController, StepPlan
from paceline.core.trees import PLAIN, DraftPlan
from paceline.engine.engine import Engine
from paceline.engine.executors import device_plans
from paceline.engine.executors.device_plans import MAX_DRAFTS
from tests.engine.mixed_requests import (
    REQUESTS,
    Changing,
    Hosted,
    Led,
    LookedUp,
    alone,
    expected,
    outcome,
    params,
)
from tests.engine.test_exactness import prompt
from tests.toy import ToyBackend, drain, play, scribble_free_pages, toy_engine
from tests.toy_drafter import ScriptedDrafter

EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(0, len(REQUESTS) - 1)),
        st.tuples(st.just("step"), st.integers(1, 6)),
        st.tuples(st.just("abort"), st.integers(0, 10)),
    ),
    max_size=25,
)


LENGTHS = st.one_of(st.just([]), st.just([3]), st.lists(st.integers(0, 3), min_size=2, max_size=4))


@settings(max_examples=80)
@given(
    EVENTS,
    st.sampled_from([20, 400]),
    st.sampled_from([1, 4, 16]),
    st.booleans(),
    LENGTHS,
    st.integers(1, 4),
    st.sampled_from([ScriptedDrafter, Hosted, Led, LookedUp]),
)
def test_arriving_ending_and_aborted_requests_get_the_tokens_of_host_steps(
    events, num_pages, page_size, caching, lengths, hold, kind
):
    backend = ToyBackend(page_size=page_size, on_device=True)
    pages = max(num_pages * 4 // page_size, 3)
    drafter = None
    if lengths:
        truth = {tuple(ids): expected(number)[0] for number, (ids, _) in enumerate(REQUESTS)}
        drafter = kind(truth, "partly")
    engine = toy_engine(
        backend,
        num_pages=pages,
        max_model_len=48,
        max_num_seqs=4,
        enable_prefix_caching=caching,
        drafter=drafter,
        controller=Changing(lengths, hold) if lengths else None,
    )
    added = play(engine, events, REQUESTS)
    drain(engine)
    for request, number in added:
        tokens, *rest = expected(number)
        if request.finish_reason == "abort":
            assert request.output_token_ids == tokens[: request.num_output]
        else:
            assert outcome(request) == (tokens, *rest)
    assert engine.kv.pages.num_available == engine.kv.pages.num_pages, "pages leaked"


def steady_engine(count: int = 3, **options: object) -> tuple[Engine, ToyBackend]:
    """An engine whose requests all decode on the device; the first steps are done."""
    backend = ToyBackend(on_device=True)
    engine = toy_engine(backend, **options)
    added = [
        engine.add_request(prompt(number, 5), params(number, max_tokens=60, ignore_eos=True))[0]
        for number in range(count)
    ]
    while any(request.num_output < 2 for request in added):
        engine.step()
    return engine, backend


def test_while_requests_decode_a_pass_is_launched_before_the_last_is_read():
    engine, backend = steady_engine()
    before = len(backend.batches)
    deltas = engine.step()
    assert len(backend.batches) == before + 1
    assert [len(delta.token_ids) for delta in deltas] == [1, 1, 1]
    in_flight = [request.num_computed for request in engine.scheduler.running]
    assert backend.contexts[-1] == in_flight  # it continues after what was just read


def test_no_pass_is_launched_beyond_max_tokens():
    backend = ToyBackend(on_device=True)
    engine = toy_engine(backend)
    (request,) = engine.add_request(prompt(1, 5), params(1, max_tokens=10, ignore_eos=True))
    drain(engine)
    assert request.num_output == 10
    assert sum(rows for _, rows in backend.batches) == 5 + 9


def test_no_pass_is_launched_when_those_in_flight_will_probably_finish_all_requests():
    """Chains of 3 have 0 to 3 right tokens, so two passes are estimated to give four."""
    drafter = ScriptedDrafter({tuple(prompt(1, 5)): []}, "right")
    backend = ToyBackend(on_device=True)
    engine = toy_engine(backend, drafter=drafter, budget=3, branching=1)
    (request,) = engine.add_request(prompt(1, 5), params(1, max_tokens=40, ignore_eos=True))
    while engine.has_unfinished:
        engine.step()
        in_flight = engine._pipeline.num_decodes
        assert request.finished or in_flight < 2 or request.num_output + 2 < 40
    assert request.num_output == 40


class TreeDrafter(ScriptedDrafter):
    """Drafts trees on the device, of which the toy's decoder finds one path."""

    def device_draft(self, plan):
        chain = super().device_draft(replace(plan, branching=1, depth=plan.levels))
        return replace(chain, branching=plan.branching, nodes=plan.nodes) if plan.branching > 1 else chain


@pytest.mark.parametrize("most_rows", [128, 8])
def test_a_tree_on_the_device_has_pages_for_all_nodes_and_is_a_chain_where_its_buffers_end(
    most_rows, monkeypatch
):
    monkeypatch.setattr(device_plans, "MAX_TREE_ROWS", most_rows)
    drafter = TreeDrafter({tuple(prompt(number, 9)): [] for number in range(3)}, "right")
    plan = DraftPlan("scripted", 7, branching=3, depth=2)
    engine = toy_engine(
        ToyBackend(on_device=True), drafter=drafter, num_pages=40, controller=FixedController(plan)
    )
    prepared = set(engine._controller.device_plans())  # graphs are captured for these at start-up
    requests = [engine.add_request(prompt(number, 9), params(number))[0] for number in range(3)]
    shapes = set()
    while engine.has_unfinished:
        engine.step()
        scribble_free_pages(engine)
        shapes |= {(draft.nodes, draft.depth) for draft in engine.stats.drafts}
    assert [outcome(request) for request in requests] == [
        alone(prompt(number, 9), params(number)) for number in range(3)
    ]
    assert {nodes for nodes, _ in shapes} == ({7} if most_rows == 128 else {2, 7})  # 7 for the last request
    assert set(engine._device.plans._drafts) <= prepared


def test_step_stats_are_those_of_the_pass_that_was_read():
    engine, _ = steady_engine()
    contexts = sum(request.num_computed for request in engine.scheduler.running)
    engine.step()
    stats = engine.stats
    assert (stats.requests, stats.rows, stats.new_tokens, stats.drafted) == (3, 3, 3, 0)
    assert (stats.attended, stats.prefill_tokens, stats.running) == (contexts, 0, 3)
    assert stats.total_time > 0


@pytest.mark.parametrize("drafting", [False, True])
def test_decoding_continues_while_a_new_request_is_prefilled(drafting):
    drafter = ScriptedDrafter({tuple(prompt(number, 5)): [] for number in range(3)}, "right")
    options = {"drafter": drafter, "budget": 2, "branching": 1} if drafting else {}
    engine, _ = steady_engine(max_num_batched_tokens=8, max_num_seqs=8, **options)
    others = list(engine.scheduler.running)
    drafter.truth[tuple(prompt(9, 20))] = []
    (late,) = engine.add_request(prompt(9, 20), params(9))
    tokens = []  # of each step: of the others, and of the late one
    while late.num_output == 0:
        deltas = {delta.request: len(delta.token_ids) for delta in engine.step()}
        tokens.append([deltas.get(others[0], 0) > 0, late in deltas])
    # what was in flight is read, and behind each chunk of 8 rows the two passes that follow it
    chunk, others_go_on = [False, True], [True, False]
    turns = [chunk, others_go_on, others_go_on]
    assert tokens == [others_go_on, *turns, *turns, chunk]
    assert drafter.attached == (set(others) if drafting else set())  # they have not been taken back
    drain(engine)
    assert late.output_token_ids == alone(prompt(9, 20), params(9))[0]


def test_the_next_prefill_of_a_burst_is_launched_before_the_first_is_read():
    backend = ToyBackend(on_device=True)
    engine = toy_engine(backend, max_num_batched_tokens=8, max_num_seqs=8)
    added = [engine.add_request(prompt(number, 8), params(number))[0] for number in range(4)]
    deltas = engine.step()
    assert [delta.request for delta in deltas] == added[:1]
    assert [rows for _, rows in backend.batches] == [8, 8]
    drain(engine)
    assert [outcome(own) for own in added] == [alone(prompt(n, 8), params(n)) for n in range(4)]


def test_prefill_ahead_gets_the_requests_whose_prefill_ends_in_this_pass():
    prefilled_ahead = []

    class RecordsPrefillAhead(ScriptedDrafter):
        def prefill_ahead(self, requests):
            prefilled_ahead.extend((request, request.num_output) for request in requests)

    drafter = RecordsPrefillAhead({tuple(prompt(number, 5)): [] for number in range(3)}, "right")
    engine, _ = steady_engine(max_num_batched_tokens=8, drafter=drafter, budget=2, branching=1)
    running = list(engine.scheduler.running)
    assert prefilled_ahead == [(request, 0) for request in running]
    drafter.truth |= {tuple(prompt(9, 20)): [], tuple(prompt(8, 6)): []}
    (late,) = engine.add_request(prompt(9, 20), params(9))
    drain(engine)
    (early,) = engine.add_request(prompt(8, 6), params(9))  # no request decodes
    drain(engine)
    assert prefilled_ahead[len(running) :] == [(late, 0), (early, 0)]


def test_undrafted_requests_share_passes_with_drafted_ones():
    drafter = ScriptedDrafter({}, "right")
    backend = ToyBackend(on_device=True)
    engine = toy_engine(backend, drafter=drafter, budget=3, branching=1)
    off = params(2, ignore_eos=True, speculative="off", max_tokens=20)
    (plain,) = engine.add_request(prompt(2, 5), off)
    (drafted,) = engine.add_request(*REQUESTS[9])
    gained = []
    while engine.has_unfinished:
        gained += [len(delta.token_ids) for delta in engine.step() if delta.request is plain]
    assert outcome(plain) == alone(prompt(2, 5), off)
    assert outcome(drafted) == expected(9)
    assert gained == [1] * 20
    assert plain.speculative.num_spec_steps == 0
    assert plain not in drafter.attached
    assert drafted.speculative.num_accepted_draft_tokens > 0


def test_with_few_pages_requests_are_preempted_and_all_finish():
    backend = ToyBackend(on_device=True)
    engine = toy_engine(backend, num_pages=9, max_model_len=32)
    added = [engine.add_request(prompt(number, 4), params(number, max_tokens=20))[0] for number in range(3)]
    drain(engine)
    assert engine.scheduler.num_preemptions > 0
    for number, request in enumerate(added):
        assert request.output_token_ids == alone(prompt(number, 4), params(number, max_tokens=20))[0]


def test_requests_that_wait_for_a_slot_do_not_delay_others():
    engine, backend = steady_engine(max_num_seqs=3)
    engine.add_request(prompt(9, 6), params(9))
    before = backend.num_launched
    engine.step()
    engine.step()
    assert backend.num_launched == before + 2


def test_a_pass_that_fails_ends_its_requests_and_the_engine_continues():
    engine, backend = steady_engine()
    requests = list(engine.scheduler.running)
    backend.fail_next = RuntimeError("lost")
    engine.step()  # what was in flight before the lost pass is theirs
    assert [delta.request for delta in engine.step()] == requests
    assert [request.finish_reason for request in requests] == ["error"] * 3
    assert engine.stats.failed
    (after,) = engine.add_request(*REQUESTS[0])
    drain(engine)
    assert outcome(after) == expected(0)


def test_unusable_logits_end_their_own_request():
    backend = ToyBackend(on_device=True, nan_after=11)
    engine = toy_engine(backend)
    added = [
        engine.add_request(prompt(number, 5), params(number, max_tokens=40, ignore_eos=True))[0]
        for number in range(6)
    ]
    drain(engine)
    assert {request.finish_reason for request in added} == {"error", "length"}
    for request in added:
        assert (11 in request.token_ids) == (request.finish_reason == "error")


def test_device_drafts_give_several_tokens_per_step_and_are_counted():
    drafter = ScriptedDrafter({}, "right")
    engine = toy_engine(ToyBackend(on_device=True), drafter=drafter, budget=3, branching=1)
    added = [engine.add_request(*REQUESTS[number])[0] for number in (2, 9)]
    drafter.truth = {tuple(request.prompt_token_ids): [] for request in added}
    drain(engine)
    for request, number in zip(added, (2, 9), strict=True):
        assert outcome(request) == expected(number)
        counts = request.speculative
        assert counts.num_draft_tokens == 3 * counts.num_spec_steps > 0
        assert counts.num_spec_steps + counts.num_accepted_draft_tokens >= request.num_output - 1
        assert 0 < counts.num_accepted_draft_tokens < request.num_output


@pytest.mark.parametrize("branching", [1, 2])
def test_every_change_of_the_controllers_plan_is_followed(branching):
    """Plain passes overlap. Drafted ones wait for the passes in flight; then chains overlap too."""
    number = 2
    drafter = ScriptedDrafter({tuple(REQUESTS[number][0]): expected(number)[0]}, "right")
    backend = ToyBackend(on_device=True)
    engine = toy_engine(backend, drafter=drafter, budget=3)
    planned = []

    def plan(running, load):
        planned.append(len(planned) % 4 == 3)
        return StepPlan([DraftPlan("scripted", 3, branching) if planned[-1] else PLAIN for _ in running])

    engine._controller.plan = plan
    (request,) = engine.add_request(*REQUESTS[number])
    drafted = 0
    while engine.has_unfinished:
        engine.step()
        drafted += engine.stats.drafted > 0
    assert outcome(request) == expected(number)
    assert drafted > 0
    assert backend.num_launched > 3
    if branching > 1:
        assert drafted in (sum(planned), sum(planned[:-1]))  # the last may have been made too late
        assert drafter.seen[request] == request.num_output  # it has observed every pass


def test_the_decoder_has_buffers_for_a_bounded_number_of_plans():
    drafter = ScriptedDrafter({tuple(prompt(number, 5)): [] for number in range(MAX_DRAFTS + 3)}, "right")
    backend = ToyBackend(on_device=True)
    engine = toy_engine(backend, drafter=drafter, budget=3)
    launched = []
    for length in range(1, MAX_DRAFTS + 3):
        before = backend.num_launched
        engine._controller = FixedController(DraftPlan("scripted", length))
        engine.add_request(prompt(length, 5), params(length, max_tokens=9, ignore_eos=True))
        drain(engine)
        launched.append(backend.num_launched > before)
    assert launched == [True] * MAX_DRAFTS + [False] * 2


@pytest.mark.parametrize("kind", [ScriptedDrafter, Hosted, Led, LookedUp])
def test_requests_that_ask_for_chains_of_other_lengths_share_the_passes(kind) -> None:
    """A pass has the rows of the longest. No request gets more than it has asked for."""
    lengths = [1, 3, 5, None, 3]
    asked = [
        params(
            number,
            max_tokens=40,
            ignore_eos=True,
            speculative=None if length is None else {"method": "scripted", "num_speculative_tokens": length},
        )
        for number, length in enumerate(lengths)
    ]
    batch = [(prompt(number, 5), options) for number, options in enumerate(asked)]
    answers = [alone(ids, replace(options, speculative="off")) for ids, options in batch]
    backend = ToyBackend(on_device=True)
    truth = {tuple(ids): tokens for (ids, _), (tokens, *_) in zip(batch, answers, strict=True)}
    drafter = kind(truth, "right") if kind is not LookedUp else LookedUp(truth, "")
    plan = DraftPlan("scripted", 4)
    engine = toy_engine(backend, drafter=drafter, controller=FixedController(plan), plans={"scripted": plan})
    added = [engine.add_request(*each)[0] for each in batch]
    device_steps = 0
    while engine.has_unfinished:
        engine.step()
        if engine.stats.overlapped:
            device_steps += 1
            assert engine.stats.plan == DraftPlan("scripted", 5) or added[2].finished
    assert device_steps > 6
    assert [outcome(request) for request in added] == answers
    for request, length in zip(added, lengths, strict=True):
        most = 5 if length is None else length
        histogram = request.speculative.acceptance_histogram
        assert len(histogram) <= 1 + most
        assert kind is LookedUp or len(histogram) == 1 + most


def test_a_plan_begins_those_of_longer_chains_by_the_same_drafter() -> None:
    chain = DraftPlan("ngram", 3)
    assert chain.begins(DraftPlan("ngram", 3))
    assert chain.begins(DraftPlan("ngram", 5))
    assert chain.begins(DraftPlan("ngram", 9, depth=4))
    others = [PLAIN, DraftPlan("ngram", 2), DraftPlan("suffix", 5), DraftPlan("ngram", 5, branching=2)]
    assert not any(chain.begins(other) for other in others)
    cascade = replace(chain, otherwise=DraftPlan("suffix", 3), enough=1.0)
    assert not cascade.begins(replace(cascade, budget=5))
    assert not PLAIN.begins(chain)
