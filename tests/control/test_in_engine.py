"""The engine with the controller: the bytes of plain decoding, whatever it decides."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.config import EngineConfig
from paceline.control.auto import AutoController
from paceline.control.cost import StepCosts
from paceline.core.params import SamplingParams
from paceline.core.trees import DraftPlan
from paceline.draft.speculative_config import parse_speculative_config
from paceline.engine.admission import Limits
from paceline.errors import ConfigError
from tests.engines import new_engine
from tests.toy import VOCAB, ToyBackend, ToyTokenizer, drain, toy_engine
from tests.toy_drafter import ScriptedDrafter

PROMPTS = [[3 + index, 9, 33, 71 - index] for index in range(5)]


def params(index: int) -> SamplingParams:
    return SamplingParams(temperature=(0.0, 0.8)[index % 2], seed=index, max_tokens=60, ignore_eos=True)


def plain_outputs() -> list[list[int]]:
    engine = toy_engine()
    requests = [engine.add_request(prompt, params(index))[0] for index, prompt in enumerate(PROMPTS)]
    drain(engine)
    return [request.output_token_ids for request in requests]


@pytest.mark.parametrize("styles", [("right",), ("wrong",), ("partly", "right"), ("wrong", "partly")])
def test_same_bytes_as_plain_decoding(styles):
    outputs = plain_outputs()
    truth = {tuple(prompt): output for prompt, output in zip(PROMPTS, outputs, strict=True)}
    drafters: dict[str, Any] = {}
    for style in styles:
        drafters[style] = ScriptedDrafter(truth, style)
        drafters[style].name = style
    controller = AutoController(
        {style: DraftPlan(style, 5) for style in styles}, StepCosts([1, 64], [0.004, 0.02])
    )
    engine = new_engine(
        ToyBackend(),
        ToyTokenizer(),
        Limits(VOCAB, 128, 3, 32),  # fewer places than requests: they come and go
        num_pages=60,
        controller=controller,
        drafters=drafters,
    )
    requests = [engine.add_request(prompt, params(index))[0] for index, prompt in enumerate(PROMPTS)]
    drain(engine)
    assert [request.output_token_ids for request in requests] == outputs
    assert sum(controller.reasons.values()) > 10
    assert any(request.speculative.num_draft_tokens for request in requests)


def test_auto_names_the_drafters_to_choose_from():
    alone = parse_speculative_config("auto")
    assert alone.auto
    assert not alone.drafters
    both = parse_speculative_config([{"method": "auto"}, {"method": "ngram", "num_speculative_tokens": 3}])
    assert both.auto
    assert [config.plan.budget for config in both.drafters.values()] == [3]
    assert parse_speculative_config("auto,suffix,ngram").drafters.keys() == {"suffix", "ngram"}
    assert not parse_speculative_config("suffix").auto


def test_auto_has_no_length_of_its_own():
    with pytest.raises(ConfigError, match="num_speculative_tokens"):
        parse_speculative_config({"method": "auto", "num_speculative_tokens": 3})


def test_decisions_are_logged_only_where_some_are_made():
    EngineConfig.from_options(speculative_config="auto", log_decisions="decisions.jsonl")
    with pytest.raises(ConfigError, match="Use 'auto'"):
        EngineConfig.from_options(speculative_config="suffix", log_decisions="decisions.jsonl")


class Broken(ScriptedDrafter):
    """Raises when it is asked for the third time, and ever after."""

    name = "broken"
    asked = 0

    def propose(self, requests, plans):
        self.asked += 1
        if self.asked > 2:
            raise RuntimeError("planted")
        return super().propose(requests, plans)


def test_a_drafter_that_breaks_and_several_outputs_of_one_prompt_change_nothing():
    wish = SamplingParams(temperature=0.9, seed=4, max_tokens=40, ignore_eos=True, n=3)
    plain = toy_engine()
    expected = plain.add_request(PROMPTS[0], wish)
    drain(plain)
    broken = Broken({tuple(PROMPTS[0]): expected[1].output_token_ids}, "right")
    engine = new_engine(
        ToyBackend(),
        ToyTokenizer(),
        Limits(VOCAB, 128, 3, 32),
        num_pages=60,
        controller=AutoController({"broken": DraftPlan("broken", 5)}, StepCosts([1, 64], [0.004, 0.02])),
        drafters={"broken": broken},
    )
    requests = engine.add_request(PROMPTS[0], wish)
    drain(engine)
    assert [one.output_token_ids for one in requests] == [one.output_token_ids for one in expected]
