"""Structured output on a real model: valid, and the same bytes with every drafter, alone and in a batch."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest

from paceline.build import LoadedModel
from paceline.core.params import SamplingParams
from paceline.core.request import Request
from paceline.engine.engine import Engine
from tests.large import repeated
from tests.lossless.conftest import MODEL
from tests.lossless.subject import PLANS, Configs, Outcome, make_engine

pytestmark = pytest.mark.real

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "city": {"enum": ["Lisbon", "Nairobi", "Oslo"]},
        "age": {"type": "integer", "minimum": 18, "maximum": 99},
        "married": {"type": ["boolean", "null"]},
    },
    "required": ["name", "city", "age", "married"],
    "additionalProperties": False,
}
PEOPLE = {"type": "array", "items": {"$ref": "#/$defs/person"}, "maxItems": 2, "$defs": {"person": PERSON}}
TOOL = 'start: "<tool_call>\\n" call "\\n</tool_call>"\ncall: %json ' + json.dumps(PERSON)
FORMS: dict[str, dict[str, Any]] = {
    "list": {"json": PEOPLE},
    "object": {"json": PERSON},
    "regex": {"regex": "(Ada|Ben|Chen) [A-Z][a-z]{1,9} is [0-9]{2}\\."},
    "choice": {"choice": ["Ada Moss", "Ben Okafor", "Chen Li, who lives in Oslo"]},
    "tool": {"grammar": TOOL},
    "words": {"grammar": 'root ::= word (", " word)? "."\nword ::= "Lisbon" | "Nairobi" | "Oslo"'},
}
SAMPLINGS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.8},
    {"temperature": 1.0, "top_p": 0.9, "presence_penalty": 0.5, "n": 2},
]
ASK = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Ada Moss is 36. Who is she?"}]
WANTED = [(form, sampling) for form in FORMS for sampling in SAMPLINGS]


def fits(form: str, text: str) -> bool:
    if form == "choice":
        return text in FORMS["choice"]["choice"]
    if form == "regex":
        return re.fullmatch(FORMS["regex"]["regex"], text) is not None
    if form == "words":
        return re.fullmatch(r"\w+(, \w+)*\.", text) is not None
    if form == "tool":
        text = text.removeprefix("<tool_call>\n").removesuffix("\n</tool_call>")
    jsonschema.validate(json.loads(text), PEOPLE if form == "list" else PERSON)
    return True


def add(engine: Engine, model: LoadedModel, number: int, plan: Any) -> list[Request]:
    form, sampling = WANTED[number]
    chat = model.tokenizer.apply_chat_template(ASK)
    params = SamplingParams(
        max_tokens=80, seed=number, logprobs=1, structured_outputs=FORMS[form], speculative=plan, **sampling
    )
    return engine.add_request(model.tokenizer.encode(chat, add_special_tokens=False), params)


def served(engine: Engine, model: LoadedModel, plans: list[Any]) -> list[Outcome]:
    outcomes = [Outcome(add(engine, model, number, plan)) for number, plan in enumerate(plans)]
    while engine.has_unfinished:
        engine.step()
    return outcomes


@pytest.fixture(scope="module")
def engine(model: LoadedModel, configs: Configs) -> Iterator[Engine]:
    made = make_engine(MODEL, model, configs.values(), max_num_seqs=32)
    yield made
    made.close()


@pytest.fixture(scope="module")
def truth(model: LoadedModel) -> list[Outcome]:
    plain = make_engine(MODEL, model, max_num_seqs=32)
    return served(plain, model, ["off"] * len(WANTED))


def test_every_answer_that_comes_to_its_end_has_its_form(truth: list[Outcome]) -> None:
    children = [
        (form, child) for (form, _), outcome in zip(WANTED, truth, strict=True) for child in outcome.children
    ]
    ended = [(form, child.detokenizer.text) for form, child in children if child.finish_reason == "stop"]
    assert len(ended) > len(children) // 2
    assert {form for form, _ in ended} == set(FORMS)
    assert all(fits(form, text) for form, text in ended)
    assert not any(child.speculative.num_draft_tokens for _, child in children)


# in one turn every method meets a form and every form three methods, in the others other ones
@pytest.mark.parametrize("turn", [0, *repeated(4, 8, 12)])
def test_a_batch_with_all_methods(
    model: LoadedModel, engine: Engine, truth: list[Outcome], turn: int
) -> None:
    methods = [*PLANS.values(), "grammar", "auto"]
    plans = [methods[(number + turn) % len(methods)] for number in range(len(WANTED))]
    outcomes = served(engine, model, plans)
    assert [outcome.bytes() for outcome in outcomes] == [outcome.bytes() for outcome in truth]
    assert not any(child.failed_drafters for outcome in outcomes for child in outcome.children)
    assert sum(outcome.count("num_accepted_draft_tokens") for outcome in outcomes) > 100


def test_alone_with_forced_tokens_only(model: LoadedModel, truth: list[Outcome]) -> None:
    engine = make_engine(MODEL, model, [{"method": "grammar"}])
    for number in (0, 4, 13):
        outcome = Outcome(add(engine, model, number, None))
        while engine.has_unfinished:
            engine.step()
        assert outcome.bytes() == truth[number].bytes()
        drafted = outcome.count("num_draft_tokens")
        assert outcome.count("num_accepted_draft_tokens") == drafted > 10
