"""How requests end (stop, length, abort, error), and which are refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.params import SamplingParams
from paceline.engine.output_processor import append_one_by_one, append_tokens
from paceline.errors import RequestError
from tests.toy import VOCAB, ToyBackend, drain, toy_engine
from tests.toy_drafter import ScriptedDrafter

IDS = [5, 6, 7]
FREE = {"temperature": 0, "ignore_eos": True}


def run(engine, ids=IDS, **options):
    (request,) = engine.add_request(ids, SamplingParams(**{"temperature": 0} | options))
    drain(engine)
    return request


@pytest.fixture(scope="module")
def tokens():
    """Thirty greedy tokens after IDS."""
    return run(toy_engine(), max_tokens=30, ignore_eos=True).output_token_ids


def test_max_tokens_ends_with_length():
    request = run(toy_engine(), max_tokens=4, ignore_eos=True)
    assert (request.num_output, request.finish_reason, request.stop_reason) == (4, "length", None)


def test_the_contexts_end_ends_with_length():
    for max_tokens in (None, 100):
        request = run(toy_engine(max_model_len=20), max_tokens=max_tokens, ignore_eos=True)
        assert (len(request.token_ids), request.finish_reason) == (20, "length")


def test_a_stop_id_ends_and_is_named(tokens):
    request = run(toy_engine(), max_tokens=30, ignore_eos=True, stop_token_ids=[tokens[6]])
    end = tokens.index(tokens[6]) + 1
    assert request.output_token_ids == tokens[:end]
    assert (request.finish_reason, request.stop_reason) == ("stop", tokens[6])


def test_end_of_sequence_ends_unless_ignored():
    engine = toy_engine()
    request = run(engine, max_tokens=50, logit_bias={0: 100})
    assert (request.output_token_ids, request.finish_reason, request.stop_reason) == ([0], "stop", None)
    assert request.detokenizer.text == ""
    assert run(engine, max_tokens=5, logit_bias={0: 100}, ignore_eos=True).output_token_ids == [0] * 5


def test_the_ending_tokens_text_appears_only_if_asked():
    shown = {"max_tokens": 9, "logit_bias": {0: 100}, "skip_special_tokens": False}
    assert run(toy_engine(), **shown).detokenizer.text == ""
    assert run(toy_engine(), **shown, include_stop_str_in_output=True).detokenizer.text == "<eos>"


def test_min_tokens_holds_back_the_end():
    request = run(toy_engine(), max_tokens=9, min_tokens=5, logit_bias={0: 100})
    assert request.num_output == 6
    assert request.output_token_ids[-1] == 0


@pytest.mark.parametrize("style", ["right", "tree"])
@pytest.mark.parametrize("kind", ["stop", "stop_token_ids", "eos"])
def test_an_ending_inside_an_accepted_draft_ends_there(tokens, style, kind):
    truth = {tuple(IDS): tokens}
    options = {"max_tokens": 30, "ignore_eos": True}
    if kind == "stop_token_ids":
        options["stop_token_ids"] = [tokens[4]]
    elif kind == "stop":
        plain_text = run(toy_engine(), **options).detokenizer.text
        options["stop"] = plain_text[4:6]
    else:
        options = {"max_tokens": 30, "min_tokens": 4, "logit_bias": {0: 100}}
        truth = {tuple(IDS): run(toy_engine(), **options).output_token_ids + [9] * 5}
    plain = run(toy_engine(), **options)
    engine = toy_engine(drafter=ScriptedDrafter(truth, style), budget=8)
    drafted = run(engine, **options)
    assert drafted.output_token_ids == plain.output_token_ids
    assert drafted.detokenizer.text == plain.detokenizer.text
    assert (drafted.finish_reason, drafted.stop_reason) == (plain.finish_reason, plain.stop_reason)
    assert plain.finish_reason == "stop"
    assert engine.kv.usage == 0


def test_abort_at_any_time_frees_everything():
    for steps in range(6):
        engine = toy_engine(max_num_batched_tokens=16, max_num_seqs=2)
        (request,) = engine.add_request([5] * 40, SamplingParams(max_tokens=30), "gone")
        (other,) = engine.add_request([6] * 3, SamplingParams(**FREE, max_tokens=3), "stays")
        for _ in range(steps):
            engine.step()
        assert engine.abort("gone") == [request]
        assert engine.abort("gone") == []
        drain(engine)
        assert (request.finish_reason, other.finish_reason) == ("abort", "length")
        assert engine.kv.usage == 0


def test_abort_of_an_unknown_request_does_nothing():
    assert toy_engine().abort("never was") == []


def test_nan_logits_fail_their_own_request_only():
    engine = toy_engine(ToyBackend(nan_after=90))
    (bad,) = engine.add_request([5, 90, 7], SamplingParams(temperature=0))
    (sampled,) = engine.add_request([5, 90, 8], SamplingParams(temperature=1))
    (asked,) = engine.add_request([5, 90, 8], SamplingParams(prompt_logprobs=1))
    (good,) = engine.add_request([5, 6, 7], SamplingParams(**FREE, max_tokens=3, logit_bias={90: -100}))
    drain(engine)
    for request in (bad, sampled, asked):
        assert request.finish_reason == "error"
        assert "NaN" in str(request.error)
        assert request.output_token_ids == []
    assert good.finish_reason == "length"
    assert engine.kv.usage == 0


def test_pages_of_a_failed_request_are_not_shared():
    backend = ToyBackend(nan_after=90)
    engine = toy_engine(backend)
    ids = [5] * 12 + [90]
    run(engine, ids)
    backend.nan_after = None
    assert run(engine, ids, max_tokens=2, ignore_eos=True).num_cached_tokens == 0


def test_a_pass_that_raises_fails_its_requests_and_the_engine_lives():
    backend = ToyBackend()
    engine = toy_engine(backend, max_num_seqs=2)
    added = [engine.add_request([number + 2], SamplingParams(**FREE, max_tokens=3))[0] for number in range(4)]
    backend.fail_next = MemoryError("no memory")
    drain(engine)
    assert [request.finish_reason for request in added] == ["error", "error", "length", "length"]
    assert isinstance(added[0].error, MemoryError)
    assert engine.kv.usage == 0


def test_an_invalid_draft_fails_no_request():
    engine = toy_engine(drafter=ScriptedDrafter({tuple(IDS): [VOCAB + 5] * 9}, "right"), budget=3)
    request = run(engine, max_tokens=9)
    assert request.output_token_ids == run(toy_engine(), max_tokens=9).output_token_ids
    assert request.failed_drafters == {"scripted"}
    assert request.speculative.num_draft_tokens == 0


@pytest.mark.parametrize(
    ("ids", "options", "message"),
    [
        ([], {}, "empty"),
        ([1, 2, VOCAB], {}, f"token id {VOCAB} .* 0 to {VOCAB - 1}"),
        ([1, -1], {}, "token id -1"),
        ([1, "a"], {}, "list of integers"),
        ([1.5], {}, "list of integers"),
        (None, {}, "list of integers"),
        ([5] * 64, {}, "64 tokens .* holds 64.*Shorten the prompt by 1 "),
        ([5], {"logit_bias": {VOCAB: 1}}, f"logit_bias names token id {VOCAB}"),
        ([5], {"stop_token_ids": [VOCAB]}, f"stop_token_ids names token id {VOCAB}"),
    ],
)
def test_what_cannot_be_served_is_refused_with_the_remedy(ids, options, message):
    engine = toy_engine(max_model_len=64)
    with pytest.raises(RequestError, match=message):
        engine.add_request(ids, SamplingParams(**options))
    assert not engine.has_unfinished


def test_a_request_that_could_never_fit_the_pool_is_refused_with_numbers():
    engine = toy_engine(num_pages=8, max_model_len=100)
    with pytest.raises(RequestError, match=r"40 tokens \(30 of prompt, 10 of output\).* holds 32"):
        engine.add_request([5] * 30, SamplingParams(max_tokens=10))
    engine.add_request([5] * 22, SamplingParams(max_tokens=10))
    drain(engine)


def test_a_name_in_use_is_refused():
    engine = toy_engine()
    engine.add_request([5], SamplingParams(), "same")
    with pytest.raises(RequestError, match="same"):
        engine.add_request([5], SamplingParams(), "same")
    drain(engine)
    engine.add_request([5], SamplingParams(), "same")


@given(
    st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=8).map(tuple), min_size=1, max_size=6),
    st.integers(1, 20),
    st.sets(st.integers(0, 9), max_size=2),
    st.booleans(),
)
def test_tokens_that_only_their_ids_can_end_are_appended_together(passes, max_tokens, stop_ids, is_included):
    """As one by one: the tokens, the reason, what is named, and the text."""
    options = {"max_tokens": max_tokens, "ignore_eos": True, "stop_token_ids": sorted(stop_ids)}
    params = SamplingParams(**options, include_stop_str_in_output=is_included)
    requests = [toy_engine().add_request(IDS, params)[0] for _ in range(2)]
    for tokens in passes:
        together, single = append_tokens(requests[0], tokens), append_one_by_one(requests[1], tokens)
        assert together == single
        if together[1] is not None:
            break
    for request in requests:
        request.detokenizer.finish()
    first, second = [
        (request.token_ids, request.stop_reason, request.detokenizer.text) for request in requests
    ]
    assert first == second
