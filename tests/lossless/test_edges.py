"""Drafters that fail and drafts that do not fit: plain decoding or a clear error, never another text.

The toy's log-probabilities hash all that it reads back, so equal results mean that nothing was disturbed.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline import LLM, SamplingParams
from paceline.control.controller import Controller, Load, StepPlan
from paceline.core.features import Features
from paceline.core.request import Request
from paceline.core.trees import DraftPlan, DraftTrees
from paceline.core.verdict import Verdict
from paceline.draft.base import Drafter
from paceline.draft.lookup.ngram import NgramDrafter
from paceline.engine.admission import Limits
from paceline.engine.engine import Engine
from paceline.errors import ConfigError, RequestError
from tests.engines import new_engine
from tests.models.model_files import config_of, random_tensors, write_gguf
from tests.toy import VOCAB, ToyBackend, ToyTokenizer, drain, toy_engine
from tests.toy_drafter import ScriptedDrafter

PROMPTS = [np.random.default_rng(number).integers(2, VOCAB, 7 + number).tolist() for number in range(6)]


def params(number: int, **options: Any) -> SamplingParams:
    return SamplingParams(**{"seed": number, "max_tokens": 14, "logprobs": 1, "ignore_eos": True, **options})


def result(request: Request) -> tuple[Any, ...]:
    return (request.output_token_ids, request.detokenizer.text, request.logprobs, request.finish_reason)


@pytest.fixture(scope="module")
def alone() -> list[tuple[Any, ...]]:
    """Each request without drafters, by itself."""
    results = []
    for number, prompt in enumerate(PROMPTS):
        engine = toy_engine(enable_prefix_caching=False)
        (request,) = engine.add_request(prompt, params(number))
        drain(engine)
        results.append(result(request))
    return results


class Faulty(ScriptedDrafter):
    """Drafts correctly until the third call of one of its methods, and fails from then on."""

    name = "faulty"

    def __init__(self, truth: dict[tuple[int, ...], list[int]], where: str, tree: Any = None) -> None:
        super().__init__(truth, "right")
        self._where = where
        self._tree = tree  # proposed instead of raising
        self._calls = 0
        self.asked: list[Request] = []  # after it failed

    def _is_due(self, where: str) -> bool:
        self._calls += where == self._where
        return where == self._where and self._calls >= 3

    def propose(self, requests: Sequence[Request], plans: Sequence[DraftPlan]) -> DraftTrees:
        if self._is_due("propose"):
            if self._tree is None:
                raise RuntimeError("planted in propose")
            return self._tree(len(requests))
        if self._calls >= 3:
            self.asked += requests
        return super().propose(requests, plans)

    def observe(
        self, requests: Sequence[Request], verdicts: Sequence[Verdict], features: Features | None
    ) -> None:
        if self._is_due("observe"):
            raise ValueError("planted in observe")
        super().observe(requests, verdicts, features)

    def forget(self, request: Request) -> None:
        if self._is_due("forget"):
            raise KeyError("planted in forget")
        super().forget(request)


class ByRequest(Controller):
    """A controller that gives each request the drafter its id begins with."""

    def plan(self, running: Sequence[Request], load: Load) -> StepPlan:
        return StepPlan([DraftPlan(request.request_id.split()[0], 4, branching=2) for request in running])

    def observe(self, step: StepPlan, stats: object) -> None:
        pass


def run_beside_a_sound_drafter(faulty: Faulty, sound: Drafter) -> tuple[Engine, list[Request]]:
    """Even requests are drafted for by the faulty one, odd ones by the sound one, all together."""
    engine = new_engine(
        ToyBackend(),
        ToyTokenizer(),
        Limits(VOCAB, 256, 16, 64),
        num_pages=400,
        controller=ByRequest(),
        drafters={"faulty": faulty, "scripted": sound},
    )
    names = [f"{('faulty', 'scripted')[number % 2]} {number}" for number in range(len(PROMPTS))]
    requests = [
        engine.add_request(prompt, params(number), names[number])[0] for number, prompt in enumerate(PROMPTS)
    ]
    drain(engine)
    return engine, requests


def knowing(alone: Sequence[tuple[Any, ...]]) -> dict[tuple[int, ...], list[int]]:
    return {tuple(prompt): alone[number][0] for number, prompt in enumerate(PROMPTS)}


@pytest.mark.parametrize("where", ["propose", "observe", "forget"])
def test_a_drafter_that_raises_costs_its_requests_their_drafts_and_nothing_else(
    alone: list[tuple[Any, ...]], where: str
) -> None:
    faulty = Faulty(knowing(alone), where)
    engine, requests = run_beside_a_sound_drafter(faulty, ScriptedDrafter(knowing(alone), "right"))
    assert [result(request) for request in requests] == alone
    assert engine.kv.pages.num_available == engine.kv.pages.num_pages, "pages leaked"
    failed = [number for number, request in enumerate(requests) if request.failed_drafters]
    assert failed, "nothing failed"
    assert all(requests[number].failed_drafters == {"faulty"} for number in failed)
    if where == "propose":  # only those it was asked for; they are named, and not asked for again
        assert failed == [0, 2, 4]
        assert not faulty.asked
        assert all(0 < requests[number].speculative.num_spec_steps == 2 for number in failed)
    for request in requests[1::2]:
        assert request.speculative.num_accepted_draft_tokens >= 10, "the sound drafter was disturbed"


UNSOUND = {
    "more nodes than the budget": lambda count: DraftTrees.chains([[5, 6, 7, 8, 9]] * count),
    "a node before its parent": lambda count: DraftTrees.from_lists([([5, 6], [1, -1])] * count),
    "a node that is its own parent": lambda count: DraftTrees.from_lists([([5, 6], [-1, 1])] * count),
    "a token outside the vocabulary": lambda count: DraftTrees.chains([[VOCAB]] * count),
    "a negative token": lambda count: DraftTrees.chains([[-1]] * count),
    "equal siblings": lambda count: DraftTrees.from_lists([([5, 5], [-1, -1])] * count),
    "trees of other requests": lambda count: DraftTrees.chains([[5]] * (count + 1)),
    "no trees at all": lambda count: None,
}


@pytest.mark.parametrize("tree", UNSOUND.values(), ids=UNSOUND)
def test_an_invalid_tree_is_handled_like_a_drafter_that_raises(
    alone: list[tuple[Any, ...]], tree: Any
) -> None:
    faulty = Faulty(knowing(alone), "propose", tree)
    _, requests = run_beside_a_sound_drafter(faulty, ScriptedDrafter(knowing(alone), "right"))
    assert [result(request) for request in requests] == alone
    assert [sorted(request.failed_drafters) for request in requests] == [["faulty"], []] * 3


def test_a_failure_is_reported_to_the_user(alone: list[tuple[Any, ...]]) -> None:
    faulty = Faulty(knowing(alone), "propose")
    engine = toy_engine(drafter=faulty, budget=4)
    (output,) = LLM.from_engine(engine, ToyTokenizer()).generate([PROMPTS[0]], params(0))
    assert output.outputs[0].token_ids == alone[0][0]
    assert output.metrics.speculative.failed_drafters == ["faulty"]
    assert output.metrics.speculative.num_spec_steps == 2


def test_drafts_never_go_beyond_the_context(alone: list[tuple[Any, ...]]) -> None:
    prompt = PROMPTS[0]
    truth: list[tuple[Any, ...]] = []
    for drafter in (None, ScriptedDrafter({tuple(prompt): [*alone[0][0], *[7] * 50]}, "right")):
        engine = toy_engine(max_model_len=len(prompt) + 11, drafter=drafter, budget=12)
        (request,) = engine.add_request(prompt, params(0, max_tokens=None))
        drain(engine)
        truth.append(result(request))
    assert truth[0] == truth[1]
    assert len(truth[1][0]) == 11
    assert truth[1][3] == "length"


def ngram_engine(budget: int) -> Engine:
    plan = DraftPlan("ngram", budget)
    return new_engine(
        ToyBackend(),
        ToyTokenizer(),
        Limits(VOCAB, 256, 16, 32),
        num_pages=400,
        drafters={"ngram": NgramDrafter(NgramDrafter.Options())},
        plans={"ngram": plan},
    )


def test_a_budget_of_nothing_is_plain_decoding() -> None:
    prompt = [5, 6, 7, 8] * 4
    results = []
    for speculative in ("off", {"method": "ngram", "num_speculative_tokens": 0}, "ngram"):
        engine = ngram_engine(4)
        # the same token again and again, so that there is something to copy
        bias = {"temperature": 0, "logit_bias": {5: 100.0}}
        (request,) = engine.add_request(prompt, params(0, speculative=speculative, **bias))
        drain(engine)
        results.append(result(request))
        assert (request.speculative.num_draft_tokens > 0) == (speculative == "ngram")
    assert results[0] == results[1] == results[2]


def test_a_request_may_not_ask_for_more_than_a_pass_holds() -> None:
    engine = ngram_engine(4)
    speculative = {"method": "ngram", "num_speculative_tokens": 32}
    with pytest.raises(RequestError, match=r"at most 32 rows.*Use at most 31, or raise max_num_batched"):
        engine.add_request(PROMPTS[0], params(0, speculative=speculative))
    assert not engine.has_unfinished
    (request,) = engine.add_request(
        PROMPTS[0], params(0, speculative={**speculative, "num_speculative_tokens": 31})
    )
    drain(engine)
    assert request.finish_reason == "length"


@pytest.mark.parametrize(
    ("speculative", "message"),
    [
        ({"method": "suffix", "strict": True}, r"'suffix', which this engine has not loaded. It has ngram"),
        ({"method": "ngram", "branching": 2}, "ngram drafts chains"),
        ({"method": "ngram", "length": 2}, "unknown option 'length'"),
        ({"num_speculative_tokens": -1}, "num_speculative_tokens must be an integer from 0"),
    ],
)
def test_speculative_options_that_cannot_be_met_are_refused_at_once(speculative: Any, message: str) -> None:
    engine = ngram_engine(4)
    with pytest.raises(RequestError, match=message):
        engine.add_request(PROMPTS[0], params(0, speculative=speculative))
    assert not engine.has_unfinished


def test_an_engine_that_is_to_draft_more_than_a_pass_holds_is_refused(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", "llama", random_tensors(config_of("llama")))
    config = {"method": "ngram", "num_speculative_tokens": 64}
    with pytest.raises(ConfigError, match=r"at most 32 rows.*Use at most 31, or raise max_num_batched"):
        LLM(str(path), threads=1, max_num_batched_tokens=32, speculative_config=config)
