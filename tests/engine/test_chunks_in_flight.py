"""The next chunk of a prompt is launched before the one in flight is read: nothing changes but the time."""

from __future__ import annotations

import numpy as np
import pytest

from paceline.core.params import SamplingParams
from paceline.core.request import Request
from paceline.engine.engine import Engine
from tests.engine.mixed_requests import alone, outcome, params
from tests.engine.simulated_device import Machine, fixed, seconds_of, simulated_engine, small_gpu_pass
from tests.engine.test_disturbances import LOSSES, Disturbed
from tests.engine.test_exactness import prompt
from tests.toy import ToyBackend, drain, scribble_free_pages, toy_engine
from tests.toy_drafter import ScriptedDrafter

LONG = prompt(1, 30)  # four chunks of 8 rows


def chunked_engine(backend: ToyBackend | None = None, **options: object) -> tuple[Engine, ToyBackend]:
    backend = backend or ToyBackend(on_device=True)
    return toy_engine(backend, max_num_batched_tokens=8, **options), backend


def add(engine: Engine, ids: list[int], number: int, **options: object) -> Request:
    return engine.add_request(ids, params(number, **options))[0]


def is_right(request: Request) -> bool:
    return outcome(request) == alone(request.prompt_token_ids, request.params)


def test_the_next_chunk_is_launched_before_the_first_is_read() -> None:
    engine, backend = chunked_engine()
    request = add(engine, LONG, 1)
    read = []
    while not request.num_output:
        engine.step()
        read.append((request.num_computed, [rows for _, rows in backend.batches]))
        scribble_free_pages(engine)
    assert read == [(8, [8, 8]), (16, [8, 8, 8]), (24, [8, 8, 8, 6]), (30, [8, 8, 8, 6])]
    drain(engine)
    assert is_right(request)


def test_the_device_waits_for_the_host_before_the_first_chunk_only() -> None:
    machine = Machine(small_gpu_pass, host_pass=1e-3)
    engine = simulated_engine(machine, lambda slot: 0.0, fixed(0))
    tokens = 2048 + 2000
    seconds = seconds_of(engine, machine, 1, tokens, lambda number: 1)
    assert seconds == pytest.approx(tokens * machine.per_row + machine.host_pass + machine.host_request)


def test_a_pass_has_the_end_of_one_prompt_and_the_start_of_the_next() -> None:
    engine, backend = chunked_engine()
    first, second = add(engine, prompt(1, 12), 1), add(engine, prompt(2, 10), 2)
    engine.step()
    assert backend.batches == [(1, 8), (2, 8)]
    assert (first.num_computed, second.num_computed) == (8, 0)
    assert backend.contexts == [[0], [8, 0]]
    drain(engine)
    assert is_right(first)
    assert is_right(second)


@pytest.mark.parametrize("is_waiting", [False, True])
def test_a_request_that_decodes_on_the_host_gets_a_token_with_every_chunk(is_waiting: bool) -> None:
    """Without its row in each chunk's pass, it would get a token with every second chunk only."""
    engine, backend = chunked_engine(ToyBackend(on_device=True, supports_masks=False))
    on_host = add(engine, prompt(2, 5), 2, max_tokens=30, bad_words=["HI"])
    while on_host.num_output < 3:
        engine.step()
    long = add(engine, LONG, 1)
    while not long.num_output:
        before = on_host.num_output
        if is_waiting:  # not admitted before the long prompt ends
            add(engine, prompt(3, 5), 3)
        engine.step()
        assert on_host.num_output == before + 1
        assert backend.batches[-1][0] >= 2
    drain(engine)
    assert is_right(on_host)
    assert is_right(long)


def test_drafters_that_read_features_on_the_host_get_each_chunk_before_the_next() -> None:
    engine, backend = chunked_engine(drafter=ScriptedDrafter({tuple(LONG): []}, "right"), budget=2)
    request = add(engine, LONG, 1)
    engine.step()
    assert (request.num_computed, len(backend.batches)) == (8, 1)


def test_prompt_logprobs_are_those_of_chunks_that_are_read_first() -> None:
    options = SamplingParams(temperature=0, max_tokens=3, prompt_logprobs=2)
    (expected,) = (reference := toy_engine(ToyBackend())).add_request(LONG, options)
    drain(reference)
    engine, _ = chunked_engine()
    (request,) = engine.add_request(LONG, options)
    drain(engine)
    assert len(request.prompt_logprobs) == len(LONG)
    assert request.prompt_logprobs == expected.prompt_logprobs
    assert request.output_token_ids == expected.output_token_ids


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_a_request_is_aborted_with_a_chunk_in_flight(steps: int) -> None:
    engine, backend = chunked_engine(num_pages=12, max_model_len=48)  # the next ones take its pages
    aborted, other = add(engine, LONG, 1), add(engine, prompt(2, 13), 2)
    for _ in range(steps):
        engine.step()
        scribble_free_pages(engine)
    in_flight = sum(rows for _, rows in backend.batches) - aborted.num_computed - other.num_computed
    assert in_flight > 0
    engine.abort(aborted.request_id)
    third = add(engine, LONG[:20] + prompt(3, 9), 3, max_tokens=9)
    drain(engine)
    assert is_right(other)
    assert is_right(third)
    assert engine.kv.usage == 0


@pytest.mark.parametrize("how", LOSSES)
@pytest.mark.parametrize("chunk", [0, 1, 2, 3])
def test_a_lost_chunk_ends_its_own_requests(how: str, chunk: int) -> None:
    """The chunk after it was launched before the loss is known, and has read what the lost one has left."""
    backend = Disturbed(on_device=True, max_rows=8, nan_after=-666)
    engine, _ = chunked_engine(backend)
    lost, other = add(engine, LONG, 1, prompt_logprobs=0), add(engine, prompt(2, 13), 2)
    while len(backend.batches) < chunk:
        engine.step()
    backend.lose_next = how
    while backend.lose_next is not None:
        engine.step()
        scribble_free_pages(engine)
    drain(engine)
    assert backend.lost == 1
    failed = [request for request in (lost, other) if request.finish_reason == "error"]
    assert failed
    assert all(request in failed or is_right(request) for request in (lost, other))
    if lost in failed:
        assert len(lost.prompt_logprobs) in (0, 1, 9, 17, 25), "only those of the chunks before"
    again, other = add(engine, LONG, 1), add(engine, prompt(2, 13), 2)  # none of it is in the prefix cache
    drain(engine)
    assert is_right(again)
    assert is_right(other)
    assert engine.kv.usage == 0


def test_nothing_is_preempted_while_a_chunk_is_in_flight() -> None:
    engine, _ = chunked_engine(num_pages=12, max_model_len=44)
    requests = [add(engine, prompt(number, 20), number, max_tokens=16) for number in range(3)]
    preempted = []
    while engine.has_unfinished:
        before, in_flight = engine.scheduler.num_preemptions, len(engine._pipeline)
        engine.step()
        scribble_free_pages(engine)
        preempted += [in_flight] * (engine.scheduler.num_preemptions - before)
    assert preempted
    assert set(preempted) == {0}
    assert all(is_right(request) for request in requests)


def test_a_prompt_that_was_computed_meanwhile_is_found_in_the_prefix_cache() -> None:
    """Two equal prompts in flight: the second's pages are duplicates, and replaced when they are read."""
    engine, backend = chunked_engine()
    first, second = add(engine, LONG, 1), add(engine, LONG, 3)
    drain(engine)
    third = add(engine, LONG, 5)
    drain(engine)
    assert third.num_cached_tokens == 28
    for request in (first, second, third):
        assert is_right(request)
    assert np.sum([rows for _, rows in backend.batches]) < 3 * len(LONG) + 60
