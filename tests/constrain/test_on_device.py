"""Constrained requests stay in the passes on the device, and get the bytes that the host gives them.

The toy's device samples when it gets the masks of a pass, with the pages of its launch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.constrain import StructuredOutputsParams
from paceline.constrain.constraint import Constraint
from paceline.control.controller import FixedController
from paceline.core.params import SamplingParams
from paceline.core.request import Request
from paceline.core.sampling import SamplingState
from paceline.core.trees import PLAIN, DraftPlan
from paceline.engine.engine import Engine
from paceline.engine.executors.device_plans import FEW_FORCED
from paceline.engine.executors.token_masks import TokenMasks
from paceline.errors import GrammarError
from tests.constrain.engines import TOKENIZER, VOCAB, make_engine, requests, result, served
from tests.engine.mixed_requests import Hosted
from tests.toy import ToyBackend, drain, play

pytest.importorskip("llguidance", reason="needs `pip install 'paceline[serve]'`; make test installs it")

SUFFIX = DraftPlan("suffix", 5)
CONTROLLERS = {
    "plain": PLAIN,
    "suffix": SUFFIX,
    "ngram": DraftPlan("ngram", 3),
}


def device(**options: Any) -> ToyBackend:
    return ToyBackend(max_rows=256, vocab=VOCAB, on_device=True, **options)


def device_engine(plan: DraftPlan = PLAIN, backend: ToyBackend | None = None, **options: Any):  # type: ignore[no-untyped-def]
    return make_engine(backend=backend or device(), controller=FixedController(plan), **options)


def plain_requests(count: int, **options: Any) -> Iterator[tuple[list[int], SamplingParams]]:
    """Unconstrained ones, some with token bans, others with a stop string."""
    some: list[dict[str, Any]] = [{}, {"stop": "abc"}, {"bad_words": ["a", "b"]}, {"min_tokens": 9}]
    for number in range(count):
        ids = np.random.default_rng(100 + number).integers(3, VOCAB - 5, 4 + 3 * number).tolist()
        params = {"seed": number, "temperature": [0.0, 0.8][number % 2], "max_tokens": 40, **some[number % 4]}
        yield ids, SamplingParams(**{**params, **options})


def wanted(speculative: Any = None) -> list[tuple[list[int], SamplingParams]]:
    """Constrained requests with all options, every second one with log-probabilities, beside others."""
    with_logprobs, without = list(requests(speculative)), list(requests(speculative, logprobs=None))
    mixed = [with_logprobs[n] if n % 2 == 0 else each for n, each in enumerate(without)]
    return [*mixed, *plain_requests(8, speculative=speculative)]


@pytest.fixture(scope="module")
def truth() -> list[object]:
    """The results on the host, without drafts."""
    return [result(request) for request in served(make_engine(), wanted("off"))]


@pytest.mark.parametrize("plan", CONTROLLERS.values(), ids=list(CONTROLLERS))
def test_the_bytes_are_those_of_the_host(truth: list[object], plan: DraftPlan) -> None:
    backend = device()
    ended = served(device_engine(plan, backend), wanted())
    assert [result(request) for request in ended] == truth
    assert backend.num_masks > 200


@pytest.mark.parametrize("name", ["off", "grammar", "suffix"])
def test_and_so_they_are_if_requests_name_a_method(truth: list[object], name: str) -> None:
    ended = served(device_engine(), wanted(name))
    assert [result(request) for request in ended] == truth


def test_and_if_pages_are_short_and_requests_are_preempted(truth: list[object]) -> None:
    engine = device_engine(SUFFIX, num_pages=110, max_num_seqs=6)
    ended = served(engine, wanted())
    assert [result(request) for request in ended] == truth
    assert engine.scheduler.num_preemptions > 0
    assert engine.kv.pages.num_available == engine.kv.pages.num_pages


def scripted(batch: Any, expected: Any, style: str) -> Engine:
    """A device engine whose host drafts mostly right tokens."""
    answers = {tuple(ids): tokens for (ids, _), (tokens, *_) in zip(batch, expected, strict=True)}
    return device_engine(DraftPlan("scripted", 4), drafters={"scripted": Hosted(answers, style)})


def outcomes(engine: Engine, batch: Any) -> tuple[list[Request], list[object]]:
    ended = served(engine, batch)
    return ended, [result(request) for request in ended]


@pytest.mark.parametrize("style", ["right", "wrong", "partly"])
def test_and_if_most_drafts_are_accepted_or_none(truth: list[object], style: str) -> None:
    ended, found = outcomes(scripted(wanted(), truth, style), wanted())
    assert found == truth
    accepted = sum(request.speculative.num_accepted_draft_tokens for request in ended)
    assert accepted > 100 or style == "wrong"


def decoding(backend: ToyBackend, wanted: list[tuple[list[int], SamplingParams]], **options: Any):  # type: ignore[no-untyped-def]
    """An engine whose requests all decode; the first device passes are done."""
    engine = device_engine(backend=backend, **options)
    added = [request for ids, params in wanted for request in engine.add_request(ids, params)]
    while any(request.num_output < 2 for request in added):
        engine.step()
    return engine, added


LETTERS = StructuredOutputsParams(regex="[abc ]{200,400}")  # nothing is forced
MASKED = {"structured_outputs": LETTERS, "temperature": 0.0, "max_tokens": 60}


def test_one_constrained_request_keeps_no_request_from_the_device() -> None:
    """Each step launches one pass over all requests, before it reads the last one."""
    backend = device()
    batch = [*plain_requests(3, max_tokens=80, ignore_eos=True), ([5, 6], SamplingParams(**MASKED))]
    engine, added = decoding(backend, batch)
    for _ in range(20):
        launched, lengths = backend.num_launched, [len(request.token_ids) for request in added]
        deltas = engine.step()
        assert engine.stats.overlapped
        assert backend.num_launched == launched + 1
        assert [len(delta.token_ids) for delta in deltas] == [1] * 4
        assert [len(request.token_ids) - 1 for request in added] == lengths
        assert engine._pipeline.num_decodes == 1  # the pass behind the one that was read


def test_masks_are_sent_once_the_pass_before_was_read_and_before_the_next_launch() -> None:
    backend = device()
    engine, _ = decoding(backend, [([5, 6], SamplingParams(**MASKED))])
    for _ in range(5):
        assert engine._device.waits_for_masks
        masks = backend.num_masks
        engine.step()
        assert backend.num_masks == masks + 1


def test_a_pass_over_other_requests_than_the_one_in_flight_gets_its_masks_at_once() -> None:
    """Nothing in flight decides what its first tokens are."""
    backend = device()
    engine = device_engine(backend=backend)
    (request,) = engine.add_request([5, 6], SamplingParams(**MASKED))
    while not backend.num_launched:
        engine.step()
    assert backend.num_masks == 1
    assert backend.num_launched == 1 + engine._device.waits_for_masks
    drain(engine)
    assert request.error is None


def test_forced_tokens_are_drafted_in_device_passes_where_they_double_the_tokens() -> None:
    forced = StructuredOutputsParams(choice=["triangle_area", "not triangle_area"])
    params = [SamplingParams(structured_outputs=forced, temperature=0.7, seed=seed) for seed in range(8)]
    backend = device()
    ended = served(device_engine(backend=backend), [([7, 8, 9], each) for each in params])
    counts = [request.speculative for request in ended]
    assert all(set(count.drafters) == {"grammar"} for count in counts if count.num_spec_steps)
    assert sum(count.num_accepted_draft_tokens for count in counts) >= 16
    assert all(count.num_accepted_draft_tokens == count.num_draft_tokens for count in counts)
    off = served(device_engine(), [([7, 8, 9], replace(each, speculative="off")) for each in params])
    assert [result(request) for request in ended] == [result(request) for request in off]
    assert not any(request.speculative.num_spec_steps for request in off)


LONG_RUN = StructuredOutputsParams(regex="[ab] triangle_area not triangle_area,triangle_area")


@pytest.mark.parametrize(
    ("count", "constrained", "pays"),
    [(FEW_FORCED, 1, True), (FEW_FORCED + 2, 1, False), (FEW_FORCED + 2, 2, True)],
    ids=["doubled for few", "doubled for more", "tripled for more"],
)
def test_with_more_requests_forced_tokens_are_drafted_only_where_they_triple_the_tokens(
    count: int, constrained: int, pays: bool
) -> None:
    """Each constrained request has a run of more than seven tokens, which is the longest chain."""
    forced = SamplingParams(structured_outputs=LONG_RUN, temperature=0.0)
    others = plain_requests(count - constrained, max_tokens=60, ignore_eos=True)
    backend = device()
    engine, added = decoding(backend, [([5, 6], forced)] * constrained + list(others))
    drain(engine)
    assert backend.num_launched > 0
    drafted = [request.speculative.num_draft_tokens for request in added[:constrained]]
    assert (min(drafted) >= 7) if pays else (drafted == [0] * constrained)


def test_without_memory_for_chains_forced_tokens_come_one_by_one() -> None:
    backend = device()
    backend.has_room = False
    forced = SamplingParams(structured_outputs=StructuredOutputsParams(choice=["triangle_area"]))
    (request,) = served(device_engine(backend=backend), [([7, 8, 9], forced)])
    assert request.detokenizer.text == "triangle_area"
    assert not request.speculative.num_spec_steps


def test_a_few_forced_tokens_make_no_rows_for_all_the_others() -> None:
    forced = StructuredOutputsParams(regex="(ab|ba) triangle_area [abc]{60,90}")
    batch = [*plain_requests(15, max_tokens=60), ([5, 6], SamplingParams(structured_outputs=forced))]
    backend = device()
    engine, _ = decoding(backend, batch)
    while engine.has_unfinished:
        engine.step()
        assert engine.stats.drafted == 0


EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(0, 25)),
        st.tuples(st.just("step"), st.integers(1, 6)),
        st.tuples(st.just("abort"), st.integers(0, 10)),
    ),
    max_size=20,
)


@settings(max_examples=40)
@given(EVENTS, st.sampled_from([60, 400]), st.sampled_from([*CONTROLLERS.values()]), st.booleans())
def test_arriving_ending_and_aborted_requests_get_the_tokens_of_the_host(
    truth: list[object], events: list[tuple[str, int]], pages: int, plan: DraftPlan, supports_masks: bool
) -> None:
    engine = device_engine(plan, device(supports_masks=supports_masks), num_pages=pages, max_num_seqs=4)
    added = play(engine, events, wanted())
    drain(engine)
    for request, number in added:
        if request.finish_reason == "abort":
            assert request.output_token_ids == truth[number][0][: request.num_output]  # type: ignore[index]
        else:
            assert result(request) == truth[number]
    assert engine.kv.pages.num_available == engine.kv.pages.num_pages


def test_a_grammar_that_fails_ends_its_own_request_only(monkeypatch: pytest.MonkeyPatch) -> None:
    original = Constraint.packed_mask

    def limited(self: Constraint) -> Any:
        if self._matcher.get_error() == "" and len(done) > 12:
            raise GrammarError("it grew too large")
        done.append(1)
        return original(self)

    done: list[int] = []
    batch = [*plain_requests(3), ([5, 6], SamplingParams(**MASKED))]
    expected = [result(request) for request in served(device_engine(), batch)]
    monkeypatch.setattr(Constraint, "packed_mask", limited)
    ended = served(device_engine(), batch)
    assert [result(request) for request in ended[:3]] == expected[:3]
    assert "it grew too large" in str(ended[3].error)
    assert ended[3].output_token_ids == expected[3][0][: ended[3].num_output]
    assert ended[3].num_output > 5


def test_options_that_leave_no_token_end_their_own_request_only() -> None:
    banned = SamplingParams(
        allowed_token_ids=TOKENIZER.encode("a", add_special_tokens=False), bad_words=["a"], max_tokens=4
    )
    few = SamplingParams(
        allowed_token_ids=[100, 101], bad_words=["d"], temperature=0, max_tokens=9, min_tokens=9
    )
    on_device, on_host = (
        served(make(), [([5], few), ([6], banned), *plain_requests(2)])
        for make in (device_engine, make_engine)
    )
    assert [result(request) for request in on_device] == [result(request) for request in on_host]
    assert on_device[1].error is not None


def test_a_device_that_cannot_send_masks_fails_the_pass_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = device()
    engine, added = decoding(backend, [([5, 6], SamplingParams(**MASKED)), *plain_requests(1, max_tokens=80)])

    def broken(*_: object) -> None:
        raise RuntimeError("the copy failed")

    monkeypatch.setattr(engine._device.decoder, "send_masks", broken)
    drain(engine)
    assert [str(request.error) for request in added] == ["the copy failed"] * 2
    monkeypatch.undo()
    (later,) = engine.add_request([5, 6], SamplingParams(**MASKED))
    drain(engine)
    assert later.error is None
    assert later.num_output == 60


def test_masks_that_are_a_token_late_are_noticed(plant: Any) -> None:
    """A negative control: the mask of each drafted row is that of the request's last known token."""

    def late(self: TokenMasks, request: Request, tokens: Any, parents: Any) -> Any:
        mask = request.sampling.token_mask(request.num_output, VOCAB)
        return [(node, mask) for node in range(len(parents))]

    # every second token has more choices than the one before: the wrong mask gives other text that fits
    prompt, structure = TOKENIZER.encode("abab bab ab"), StructuredOutputsParams(regex="([ab][abcd ]){9,40}")
    batch = [
        ([*prompt, seed + 3], SamplingParams(seed=seed, max_tokens=40, structured_outputs=structure))
        for seed in range(24)
    ]
    expected = [result(request) for request in served(make_engine(), batch)]
    assert outcomes(scripted(batch, expected, "partly"), batch)[1] == expected
    plant(TokenMasks, "_of_request", late)
    ended, found = outcomes(scripted(batch, expected, "partly"), batch)
    plant.assert_noticed(ended, found, expected, beside=GrammarError)


def test_endings_that_the_device_does_not_forbid_are_noticed(plant: Any, truth: list[object]) -> None:
    """A negative control: masked requests have their endings forbidden by the mask."""

    def unforbidden(self: SamplingState, num_output: int, vocab_size: int) -> Any:
        return (
            self.constraint.packed_mask() if self.constraint else np.full(-(-vocab_size // 32), -1, np.int32)
        )

    plant(SamplingState, "token_mask", unforbidden)
    ended = served(device_engine(), wanted())
    plant.assert_noticed(ended, [result(request) for request in ended], truth, beside=GrammarError)
