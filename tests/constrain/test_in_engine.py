"""Constrained requests in the engine: the same bytes with every drafter and option."""

from __future__ import annotations

import json
from dataclasses import replace

import jsonschema
import numpy as np
import pytest

from paceline.constrain import GrammarCompiler, GrammarLimits
from paceline.control.controller import FixedController
from paceline.core.params import SamplingParams
from paceline.core.trees import DraftPlan
from paceline.errors import RequestError
from paceline.verify.logprobs import token_logprobs
from tests.constrain.engines import PLANS, VOCAB, make_engine, requests, result, served
from tests.constrain.walks import CALL, TOKENIZER
from tests.toy import ToyBackend, drain
from tests.toy_drafter import ScriptedDrafter


@pytest.fixture(scope="module")
def truth():
    """Each request alone, without speculation."""
    found = []
    for ids, params in requests("off"):
        (request,) = served(make_engine(draft_forced=False, drafters={}), [(ids, params)])
        assert request.speculative.num_draft_tokens == 0
        found.append(result(request))
    return found


@pytest.mark.parametrize("plan", PLANS)
def test_the_bytes_are_those_of_plain_decoding(truth, plan):
    together = served(make_engine(), requests(PLANS[plan]))
    assert [result(request) for request in together] == truth
    assert not any(request.failed_drafters for request in together)
    drafted = sum(request.speculative.num_draft_tokens for request in together)
    assert (drafted > 0) == (plan != "off")


def test_a_second_drafter_drafts_behind_what_is_forced_too(truth):
    plan = DraftPlan("suffix", 6, otherwise=DraftPlan("ngram", 3, depth=2), enough=1.5)
    engine = make_engine(controller=FixedController(plan))
    added = [request for ids, params in requests() for request in engine.add_request(ids, params)]
    drafters, drafts = set(), []
    while engine.has_unfinished:
        engine.step()
        drafts += engine.stats.drafts
        drafters |= {draft.drafter for draft in engine.stats.drafts}
    assert [result(request) for request in added] == truth
    assert not any(request.failed_drafters for request in added)
    assert drafters >= {"suffix", "ngram"}
    # forced tokens are counted apart: those before a guess are always accepted, and no guess is one of them
    assert any(0 < draft.forced < draft.nodes for draft in drafts)
    assert any(0 < draft.accepted_forced < draft.accepted for draft in drafts)
    assert all(draft.accepted_forced <= min(draft.forced, draft.accepted) for draft in drafts)


@pytest.mark.parametrize(
    "tight",
    [
        pytest.param({"num_pages": 70}, id="preemption"),
        pytest.param({"max_num_batched_tokens": 40}, id="few rows"),
        pytest.param({"enable_prefix_caching": False}, id="no prefix cache"),
    ],
)
def test_the_bytes_are_the_same_whatever_the_scheduler_does(truth, tight):
    engine = make_engine(**tight)
    plans = list(PLANS.values())
    mixed = [
        (ids, replace(params, speculative=plans[number % len(plans)]))
        for number, (ids, params) in enumerate(requests())
    ]
    for _ in range(2):  # the second time with full caches
        assert [result(request) for request in served(engine, mixed)] == truth
    assert ("num_pages" in tight) == (engine.scheduler.num_preemptions > 0)


def test_right_and_wrong_trees_of_a_drafter_give_the_same_bytes(truth):
    wanted = list(requests())
    known = {tuple(ids): tokens[0] for (ids, _), tokens in zip(wanted, truth, strict=True)}
    for style in ("right", "wrong", "partly", "tree"):
        drafter = ScriptedDrafter(known, style)
        engine = make_engine(
            drafters={"scripted": drafter}, controller=FixedController(DraftPlan("scripted", 6, branching=2))
        )
        assert [result(request) for request in served(engine, wanted)] == truth


def test_answers_that_come_to_their_end_fit_their_schema(truth):
    ended = 0
    for (_, params), (_, reason, stop, text, *_) in zip(requests(), truth, strict=True):
        if params.structure.json == CALL and reason == "stop" and stop is None:
            jsonschema.validate(json.loads(text), CALL)
            ended += 1
    assert ended


def ask(engine, structure, **options):
    params = SamplingParams(**({"max_tokens": 60, "seed": 3, "structured_outputs": structure} | options))
    return engine.add_request([5, 6, 7], params)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_forced_tokens_are_drafted_unless_drafting_is_off_and_always_accepted(temperature):
    engine = make_engine(drafters={})
    for plan in (None, "auto", "grammar"):
        (request,) = ask(engine, {"json": CALL}, speculative=plan, temperature=temperature)
        drain(engine)
        counts = request.speculative
        assert counts.num_accepted_draft_tokens == counts.num_draft_tokens > 10
    (request,) = ask(engine, {"json": CALL}, speculative="off", temperature=temperature)
    drain(engine)
    assert request.speculative.num_draft_tokens == 0


def test_a_request_may_bound_how_many_forced_tokens_a_pass_has():
    engine = make_engine(drafters={})
    (request,) = ask(engine, {"json": CALL}, speculative={"method": "grammar", "num_speculative_tokens": 3})
    drain(engine)
    assert len(request.speculative.drafts_per_position) == 3


def test_a_text_that_is_forced_altogether_takes_two_passes():
    engine = make_engine(drafters={})
    (request,) = ask(engine, {"choice": ["triangle_area"]})
    steps = 0
    while engine.has_unfinished:
        engine.step()
        steps += 1
    assert (request.detokenizer.text, request.finish_reason, steps) == ("triangle_area", "stop", 2)


def test_drafters_continue_after_forced_tokens():
    """The second answer copies the first one's values behind the keys, which are forced."""
    engine = make_engine()
    first, second = (
        (ask(engine, {"json": CALL}, speculative="suffix")[0], drain(engine))[0] for _ in range(2)
    )
    assert first.output_token_ids == second.output_token_ids
    assert second.speculative.num_spec_steps < first.speculative.num_spec_steps


def test_each_of_n_outputs_has_a_place_of_its_own_in_the_grammar():
    engine = make_engine()
    children = ask(engine, {"regex": "(ab|no)+c"}, n=4, temperature=1.5)
    drain(engine)
    texts = {child.detokenizer.text for child in children}
    assert len(texts) > 1
    for child, alone in zip(children, range(4), strict=True):
        (request,) = ask(engine, {"regex": "(ab|no)+c"}, seed=child.seed, temperature=1.5)
        drain(engine)
        assert request.output_token_ids == children[alone].output_token_ids


def test_an_ending_is_put_off_as_long_as_anything_else_may_follow():
    engine = make_engine()
    for options in ({"ignore_eos": True}, {"min_tokens": 60, "max_tokens": 60}):
        (endless,) = ask(engine, {"regex": "(yes|no)*"}, **options)
        (word,) = ask(engine, {"choice": ["yes"]}, **options)
        (needed,) = ask(engine, {"choice": ["yes"]}, stop_token_ids=[TOKENIZER.encode("yes")[1]], **options)
        drain(engine)
        assert endless.finish_reason == "length"
        assert (word.detokenizer.text, word.finish_reason) == ("yes", "stop")
        assert (needed.finish_reason, needed.error) == ("stop", None)


def test_a_bias_cannot_make_a_token_legal_and_log_probabilities_are_the_raw_ones():
    backend = ToyBackend(vocab=VOCAB)
    engine = make_engine()
    (request,) = ask(engine, {"choice": ["yes", "no"]}, logit_bias={70: 100.0}, logprobs=3, temperature=0)
    drain(engine)
    assert request.detokenizer.text in ("yes", "no")
    for place, entry in enumerate(request.logprobs):
        path = np.array([5, 6, 7, *request.output_token_ids[:place]])
        logits = backend.logits_of(path, np.arange(len(path))).copy()  # writable, as those that are served
        expected = token_logprobs(logits, request.output_token_ids[place], 3)
        assert {token: one.logprob for token, one in entry.items()} == {
            token: one.logprob for token, one in expected.items()
        }


def test_a_request_that_is_aborted_or_cut_leaves_nothing_behind():
    engine = make_engine()
    (request,) = ask(engine, {"json_object": True}, max_tokens=100)
    for _ in range(4):
        engine.step()
    engine.abort(request.request_id)
    (cut,) = ask(engine, {"json": CALL}, max_tokens=5)
    drain(engine)
    assert (cut.finish_reason, cut.num_output) == ("length", 5)
    assert engine.kv.pages.num_available == engine.kv.pages.num_pages


def test_what_cannot_be_compiled_is_refused_before_it_is_queued():
    engine = make_engine()
    with pytest.raises(RequestError, match="uniqueItems"):
        ask(engine, {"json": {"type": "array", "uniqueItems": True}})
    assert not engine.has_unfinished


def test_a_grammar_that_grows_too_large_ends_its_own_request_only():
    engine = make_engine()
    engine.grammars = GrammarCompiler(TOKENIZER, VOCAB, GrammarLimits(max_lexer_states=60))
    (large,) = ask(engine, {"regex": r"(\w+\s*){1,500}\p{L}{1,500}"}, temperature=1.5)
    (small,) = ask(engine, {"choice": ["yes", "no"]})
    (free,) = engine.add_request([5, 6, 7], SamplingParams(max_tokens=30, seed=3, ignore_eos=True))
    drain(engine)
    assert large.finish_reason == "error"
    assert "allows no next token" in str(large.error)
    assert (small.error, free.error, free.num_output) == (None, None, 30)
