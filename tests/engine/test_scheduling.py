"""First come, first served: no request starves or is lost, and budgets only shrink."""

from __future__ import annotations

import pytest

from paceline.core.params import SamplingParams
from paceline.core.trees import PLAIN, DraftPlan
from paceline.engine.scheduler import Scheduler
from tests.toy import ToyBackend, drain, toy_engine
from tests.toy_drafter import ScriptedDrafter

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


def finish_order(engine):
    order = []
    while engine.has_unfinished:
        order += [delta.request.request_id for delta in engine.step() if delta.request.finished]
    return order


def test_decodes_and_prefill_chunks_share_a_pass():
    engine = toy_engine(max_num_batched_tokens=10, max_num_seqs=4)
    engine.add_request([5], GREEDY)
    engine.step()
    engine.add_request([6] * 25, GREEDY)
    engine.step()
    assert engine.stats.rows == 10
    assert (engine.stats.requests, engine.stats.prefill_tokens, engine.stats.new_tokens) == (2, 9, 1)


def test_a_decoding_request_gets_a_token_in_every_step_of_a_neighbours_long_prefill():
    engine = toy_engine(max_num_batched_tokens=4, max_num_seqs=4)
    (first,) = engine.add_request([5], GREEDY)
    engine.step()
    engine.add_request([6] * 60, GREEDY)
    for expected in range(2, 9):
        engine.step()
        assert first.num_output == expected


def test_a_large_request_is_not_passed_by_small_ones():
    engine = toy_engine(num_pages=12, max_model_len=48)
    engine.add_request([3] * 10, SamplingParams(temperature=0, max_tokens=20, ignore_eos=True), "first")
    engine.step()
    engine.add_request([4] * 40, GREEDY, "large")
    for number in range(6):
        engine.add_request([5 + number] * 3, GREEDY, f"small {number}")
    order = finish_order(engine)
    assert order[:2] == ["first", "large"]
    assert len(order) == 8


def test_small_requests_are_not_starved_by_a_stream_of_large_ones():
    engine = toy_engine(num_pages=24, max_model_len=48)
    for number in range(4):
        engine.add_request([number + 2] * 40, GREEDY, f"large {number}")
    engine.add_request([9], GREEDY, "small")
    for number in range(4, 8):
        engine.add_request([number + 2] * 40, GREEDY, f"large {number}")
    order = finish_order(engine)
    assert order.index("small") <= 4
    assert len(order) == 9


def test_the_youngest_is_preempted_and_the_oldest_never():
    engine = toy_engine(num_pages=10, max_model_len=40)
    long = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    oldest, *younger = [engine.add_request([number + 3] * 8, long)[0] for number in range(4)]
    drain(engine)
    assert oldest.num_preemptions == 0
    assert sum(request.num_preemptions for request in younger) == engine.scheduler.num_preemptions > 0
    assert all(request.num_output == 24 for request in [oldest, *younger])


def test_no_more_than_max_num_seqs_run():
    engine = toy_engine(max_num_seqs=3)
    for number in range(9):
        engine.add_request([number + 2], GREEDY)
    drain(engine)
    assert max(count for count, _ in engine.backend.batches) == 3


def test_an_empty_engine_does_nothing():
    engine = toy_engine()
    assert engine.step() == []
    assert not engine.has_unfinished


def prepared(
    budget, *, max_num_batched_tokens=64, max_model_len=256, num_pages=400, max_tokens=50, branching=2
):
    """The plan that a decoding request is left with."""
    engine = toy_engine(
        max_num_batched_tokens=max_num_batched_tokens, max_model_len=max_model_len, num_pages=num_pages
    )
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    engine.add_request([5] * 8, params)
    while engine.scheduler.running == [] or engine.scheduler.running[0].num_output == 0:
        engine.step()
    scheduler: Scheduler = engine.scheduler
    (part,) = scheduler.schedule([DraftPlan("any", budget, branching)])
    return part.plan


def test_budgets_shrink_to_rows_pages_context_and_use():
    assert prepared(7).budget == 7
    assert prepared(30, max_num_batched_tokens=16).budget == 15
    assert prepared(30, max_model_len=20).budget == 11
    assert prepared(30, num_pages=15).budget == 30
    assert prepared(60, num_pages=15).budget == 51
    assert prepared(7, max_tokens=4, branching=1).budget == 2
    assert prepared(7, max_tokens=2) is PLAIN


def test_prefill_comes_before_drafts():
    engine = toy_engine(max_num_batched_tokens=8, max_num_seqs=2)
    engine.add_request([5] * 3, GREEDY)
    engine.step()
    engine.add_request([6] * 50, GREEDY)
    parts = engine.scheduler.schedule([DraftPlan("any", 5)])
    assert [(part.num_tokens, part.plan.budget) for part in parts] == [(1, 0), (7, 0)]


def test_step_stats_tell_what_happened():
    truth = [7] * 40
    engine = toy_engine(drafter=ScriptedDrafter({(5, 5, 5): truth}, "wrong"), budget=3)
    engine.add_request([5, 5, 5], GREEDY)
    engine.step()
    assert (engine.stats.rows, engine.stats.prefill_tokens, engine.stats.drafted) == (3, 3, 0)
    engine.step()
    stats = engine.stats
    assert (stats.rows, stats.requests, stats.prefill_tokens, stats.new_tokens) == (
        4,
        1,
        0,
        1 + stats.accepted,
    )
    assert (stats.drafted, stats.running, stats.waiting) == (3, 1, 0)
    assert 0 < stats.kv_usage < 1
    assert stats.total_time >= stats.forward_time > 0


@pytest.mark.parametrize("page_size", [4, 16])
def test_kv_is_all_free_when_all_is_done(page_size):
    engine = toy_engine(ToyBackend(page_size=page_size))
    for number in range(10):
        engine.add_request([number + 2] * (number * 7 + 1), GREEDY)
    drain(engine)
    assert engine.kv.usage == 0
