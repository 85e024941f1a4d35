"""Exactness: nothing else that happens in the engine changes a bit of a request's output.

The toy's logits hash everything it reads back from its pool, so equal log-probabilities mean that
every page, move, prefix hit and recomputation was right.
"""

from __future__ import annotations

import numpy as np
import pytest

from paceline.core.params import SamplingParams
from tests.large import in_turn, repeated
from tests.toy import VOCAB, ToyBackend, drain, toy_engine
from tests.toy_drafter import ScriptedDrafter

OPTIONS = [
    {"temperature": 0.0},
    {"temperature": 1.0, "seed": 7},
    {"temperature": 0.7, "top_k": 20, "top_p": 0.9, "seed": 1},
    {"temperature": 1.3, "min_p": 0.02, "repetition_penalty": 1.3, "seed": 2},
    {"temperature": 0.9, "presence_penalty": 1.0, "frequency_penalty": 0.5, "seed": 3},
    {"temperature": 0.0, "logit_bias": {5: 4.0, 9: -50.0}, "frequency_penalty": 1.0},
    {"temperature": 1.0, "min_tokens": 10, "max_tokens": 23, "seed": 4},
    # ids 10 to 16 are the letters H to N
    {"temperature": 1.0, "allowed_token_ids": range(10, 17), "bad_words": ["HI", "IJ", "JJ", "KLM", "N"]},
]


def prompt(number: int, length: int) -> list[int]:
    return np.random.default_rng(number).integers(2, VOCAB, length).tolist()


def requests():
    """Prompts of many lengths, each with options of its own, all with log-probabilities."""
    for number in range(18):
        most = 5 + 3 * (number % 7)
        options = {"max_tokens": most, "logprobs": 3, **OPTIONS[number % len(OPTIONS)]}
        length = [1, 3, 4, 5, 17, 40, 70][(number * 3) % 7]
        yield prompt(number, length), SamplingParams(**{"seed": number} | options)


def result(request):
    return (
        request.output_token_ids,
        request.finish_reason,
        request.stop_reason,
        request.detokenizer.text,
        request.logprobs,
        request.prompt_logprobs,
    )


def together(engine, **drain_options):
    added = [engine.add_request(ids, params)[0] for ids, params in requests()]
    texts = drain(engine, **drain_options)
    for request in added:
        assert texts[request] == request.detokenizer.text
    assert engine.kv.pages.num_available == engine.kv.pages.num_pages, "pages leaked"
    return added


def test_same_bytes_in_a_batch(alone):
    engine = toy_engine()
    assert [result(request) for request in together(engine)] == alone
    assert max(count for count, _ in engine.backend.batches) == 16


@pytest.mark.parametrize("rows", [1, 3, 7, *repeated(2)])
def test_same_bytes_with_tiny_prefill_chunks(alone, rows):
    engine = toy_engine(max_num_seqs=min(rows, 5), max_num_batched_tokens=rows)
    assert [result(request) for request in together(engine)] == alone
    assert max(count for _, count in engine.backend.batches) <= rows


@pytest.mark.parametrize("caching", [True, False])
def test_same_bytes_with_preemptions(alone, caching):
    engine = toy_engine(num_pages=26, max_model_len=100, enable_prefix_caching=caching)
    added = together(engine)
    assert [result(request) for request in added] == alone
    assert engine.scheduler.num_preemptions > 3
    assert sum(request.num_preemptions for request in added) == engine.scheduler.num_preemptions


def test_same_bytes_with_prefix_hits(alone):
    engine = toy_engine()
    together(engine)
    again = together(engine)
    assert [result(request) for request in again] == alone
    assert sum(request.num_cached_tokens for request in again) > 300
    assert engine.kv.prefix_hits > 300


@pytest.mark.parametrize("page_size", [1, 16, 64, *repeated(2)])
def test_same_bytes_with_any_page_size(alone, page_size):
    engine = toy_engine(ToyBackend(page_size=page_size), num_pages=1600 // page_size)
    assert [result(request) for request in together(engine)] == alone


def test_same_bytes_when_requests_arrive_one_by_one(alone):
    engine = toy_engine(max_num_batched_tokens=20)
    added = []
    for ids, params in requests():
        added.append(engine.add_request(ids, params)[0])
        engine.step()
        engine.step()
    drain(engine)
    assert [result(request) for request in added] == alone


def test_same_bytes_beside_requests_that_are_aborted_or_fail(alone):
    engine = toy_engine(ToyBackend(nan_after=96), num_pages=60, max_model_len=128)
    added = []
    for number, (ids, params) in enumerate(requests()):
        usable = [token if token != 96 else 95 for token in ids]
        engine.add_request(prompt(100 + number, 30), SamplingParams(max_tokens=50), f"aborted {number}")
        engine.add_request([*usable[:3], 96], SamplingParams(max_tokens=50), f"failing {number}")
        if usable == ids:
            added.append((number, engine.add_request(ids, params)[0]))
        engine.step()
        engine.abort(f"aborted {number}")
    drain(engine)
    survivors = [(number, request) for number, request in added if request.finish_reason != "error"]
    assert len(survivors) > 8
    assert all(result(request) == alone[number] for number, request in survivors)


STYLES = {style: style for style in ("right", "wrong", "partly", "tree")}


@pytest.mark.parametrize(("style", "budget"), in_turn(STYLES, {"4": 4, "1": 1, "7": 7}))
def test_same_bytes_with_right_and_wrong_drafts(alone, style, budget):
    truth = {tuple(ids): alone[number][0] for number, (ids, _) in enumerate(requests())}
    drafter = ScriptedDrafter(truth, style)
    engine = toy_engine(drafter=drafter, budget=budget)
    added = together(engine)
    assert [result(request) for request in added] == alone
    drafted = sum(request.speculative.num_draft_tokens for request in added)
    accepted = sum(request.speculative.num_accepted_draft_tokens for request in added)
    assert drafted > 0 or (style == "tree" and budget == 1)
    if style == "right":  # nothing is accepted below a token that ends the request
        assert drafted - len(added) <= accepted <= drafted
    if style == "wrong":
        assert accepted == 0
    assert (engine.backend.moved > 0) == (style == "tree" and budget > 1)
    assert all(drafter.seen[request] == request.num_output for request in added)
    assert set(drafter.forgotten) == set(added)


def test_drafts_take_fewer_passes(alone):
    truth = {tuple(ids): alone[number][0] for number, (ids, _) in enumerate(requests())}
    plain, drafted = toy_engine(), toy_engine(drafter=ScriptedDrafter(truth, "right"), budget=3)
    together(plain)
    together(drafted)
    assert len(drafted.backend.batches) < 0.6 * len(plain.backend.batches)


@pytest.mark.parametrize("style", ["partly", "tree"])
@pytest.mark.parametrize("num_pages", [26, 200])
def test_same_bytes_with_everything_at_once(alone, style, num_pages):
    truth = {tuple(ids): alone[number][0] for number, (ids, _) in enumerate(requests())}
    engine = toy_engine(
        drafter=ScriptedDrafter(truth, style),
        budget=6,
        num_pages=num_pages,
        max_model_len=100,
        max_num_seqs=7,
        max_num_batched_tokens=17,
    )
    for _ in range(2):
        assert [result(request) for request in together(engine)] == alone
    assert engine.scheduler.num_preemptions > 0 or num_pages > 26
    assert engine.kv.prefix_hits > 0 or num_pages == 26


def test_children_of_n_share_the_prompt_and_are_their_own_requests():
    params = SamplingParams(n=4, seed=11, max_tokens=12, logprobs=0)
    engine = toy_engine()
    children = engine.add_request(prompt(3, 21), params)
    drain(engine)
    assert [child.num_cached_tokens for child in children] == [0, 20, 20, 20]
    assert len({tuple(child.output_token_ids) for child in children}) == 4
    for child in children:
        single = toy_engine()
        (request,) = single.add_request(
            prompt(3, 21), SamplingParams(seed=child.seed, max_tokens=12, logprobs=0)
        )
        drain(single)
        assert result(request) == result(child)
    assert children[0].seed == 11


def test_requests_without_a_seed_repeat_by_order_of_arrival():
    def run(seed):
        engine = toy_engine(seed=seed)
        added = [engine.add_request(prompt(1, 5), SamplingParams())[0] for _ in range(3)]
        drain(engine)
        return [request.output_token_ids for request in added]

    assert run(0) == run(0)
    assert run(0) != run(1)
    assert len({tuple(tokens) for tokens in run(0)}) == 3


@pytest.mark.parametrize("rows", [64, 5, 1])
def test_prompt_logprobs_survive_chunks_prefix_hits_and_preemption(rows):
    params = SamplingParams(prompt_logprobs=2, max_tokens=8, temperature=0)
    engine = toy_engine(max_num_batched_tokens=rows, max_num_seqs=1)
    first, second = (engine.add_request(prompt(5, 30), params)[0] for _ in range(2))
    drain(engine)
    assert first.prompt_logprobs == second.prompt_logprobs
    assert first.prompt_logprobs[0] is None
    assert second.num_cached_tokens == 0
    backend = ToyBackend()
    for position, entries in enumerate(first.prompt_logprobs[1:], start=1):
        logits = backend.logits_of(np.array(prompt(5, 30)[:position]), np.arange(position)).astype(np.float64)
        expected = logits - np.log(np.exp(logits).sum())
        assert prompt(5, 30)[position] in entries
        assert all(abs(entry.logprob - expected[token]) < 1e-12 for token, entry in entries.items())


def test_logprobs_of_the_output_are_those_of_its_own_path():
    ids = prompt(9, 6)
    engine = toy_engine()
    (request,) = engine.add_request(ids, SamplingParams(logprobs=1, max_tokens=5, seed=0))
    drain(engine)
    for position, token in enumerate(request.output_token_ids, start=6):
        logits = ToyBackend().logits_of(np.array(request.token_ids[:position]), np.arange(position))
        expected = logits.astype(np.float64) - np.log(np.exp(logits.astype(np.float64)).sum())
        assert abs(request.logprobs[position - 6][token].logprob - expected[token]) < 1e-12
