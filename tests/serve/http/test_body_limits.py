"""Bodies with too many values are refused before they are parsed, and invalid lists at their first error."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings, strategies
from pydantic import BaseModel, ValidationError

from paceline.errors import RequestError
from paceline.serve.http import bodies
from paceline.serve.http.bodies import MAX_CONTAINERS, MAX_DIGITS, MAX_KEYS, MAX_VALUES, parse_json
from paceline.serve.http.errors import FieldError
from paceline.serve.http.scanning import MAX_DEPTH, Shape, shape_of
from paceline.serve.openai.chat_protocol import ChatRequest
from paceline.serve.openai.completions import CompletionRequest
from paceline.serve.openai.responses_protocol import ResponseRequest
from paceline.serve.openai.tokens import DetokenizeRequest, TokenizeRequest
from paceline.serve.tools.conversation import MAX_ARGUMENT_VALUES, with_objects
from tests.serve.api import Api
from tests.toy import roomy_engine

MEBIBYTE = 1 << 20

# Limits, checked before parsing ----------------------------------------------------------------------------


def many(item: str, count: int, start: str = "[", end: str = "]") -> bytes:
    """A JSON list or object of items; # in an item is replaced by its number."""
    items = [item.replace("#", str(number)) for number in range(count)] if "#" in item else [item] * count
    return (start + ",".join(items) + end).encode()


TOO_MUCH: dict[str, tuple[Callable[[], bytes], str]] = {
    "empty texts": (lambda: many('""', 1_390_000, '{"tokens":[', "]}"), "values"),
    "token ids": (lambda: many("7", 1_900_000, '{"tokens":[', "]}"), "values"),
    "unknown fields": (lambda: many('"u#":1', 300_000, "{", "}"), "300000 keys"),
    "wrong biases": (lambda: many('"#":"x"', 100_000, '{"prompt":"a","logit_bias":{', "}}"), "100000 keys"),
    "one field many times": (lambda: many('"a":1', 100_000, "{", "}"), "keys"),
    "empty lists": (lambda: many("[]", 30_000), "lists and objects"),
    "messages": (
        lambda: many('{"role":"x","content":1}', 25_000, '{"messages":[', "]}"),
        "lists and objects",
    ),
    "depth": (lambda: b"[" * 2_000_000 + b"]" * 2_000_000, "in each other"),
    "digits": (lambda: many("9" * 4000, 1000), "4000 digits"),
}


@pytest.mark.parametrize("bomb", TOO_MUCH)
def test_bodies_above_a_limit_are_refused_before_parsing(bomb: str, monkeypatch: Any) -> None:
    make, message = TOO_MUCH[bomb]
    body = make()

    def parsed(*_: object, **__: object) -> None:
        raise AssertionError("it was parsed")

    monkeypatch.setattr(bodies.json, "loads", parsed)
    with pytest.raises(FieldError, match=message) as refused:
        parse_json(body)
    assert refused.value.param == "body"


def test_a_batch_of_long_prompts_is_accepted() -> None:
    prompts = [[49_000] * 4096] * 64
    assert parse_json(json.dumps({"prompt": prompts}).encode()) == {"prompt": prompts}


def test_json_inside_strings_is_not_counted() -> None:
    text = '[{,:}]"\\' * MAX_VALUES
    assert parse_json(json.dumps([text]).encode()) == [text]


@pytest.mark.parametrize(
    "bound",
    [
        many("1", MAX_VALUES - 2),
        many("[]", MAX_CONTAINERS - 1),
        many('"#":1', MAX_KEYS, "{", "}"),
        b"[" * MAX_DEPTH + b"]" * MAX_DEPTH,
        b"9" * MAX_DIGITS,
    ],
    ids=["values", "containers", "keys", "depth", "digits"],
)
def test_bodies_at_a_limit_are_accepted(bound: bytes) -> None:
    parse_json(bound)


values = strategies.recursive(
    strategies.none() | strategies.booleans() | strategies.integers() | strategies.text(),
    lambda inner: strategies.lists(inner) | strategies.dictionaries(strategies.text(), inner),
)


@settings(max_examples=30)
@given(values, strategies.booleans())
def test_the_shape_equals_that_of_the_parsed_value(value: Any, ascii_only: bool) -> None:
    text = json.dumps(value, ensure_ascii=ascii_only)
    shape, reference = shape_of(text.encode()), reference_shape(value)
    assert shape._replace(values=reference.values) == reference
    assert reference.values <= shape.values <= 2 * reference.values  # a container counts for its first value


def reference_shape(value: Any) -> Shape:
    """The shape of a parsed value."""
    if isinstance(value, list | dict):
        inner = [reference_shape(one) for one in (value.values() if isinstance(value, dict) else value)]
        keys = len(value) if isinstance(value, dict) else 0
        return Shape(
            values=1 + keys + sum(one.values for one in inner),
            containers=1 + sum(one.containers for one in inner),
            keys=max([keys, *(one.keys for one in inner)]),
            depth=1 + max((one.depth for one in inner), default=0),
            digits=max((one.digits for one in inner), default=0),
            lone_surrogates=False,
        )
    digits = len(str(abs(value))) if type(value) is int else 0
    return Shape(1, 0, 0, 0, digits, lone_surrogates=False)


ESCAPES = strategies.sampled_from(["\\ud83d", "\\uDE00", "\\u00e9", "\\\\", '\\"', "\\n", "d", "ud83d", "é"])


@settings(max_examples=60)
@given(strategies.lists(strategies.lists(ESCAPES).map("".join)))
def test_lone_surrogates_are_found(texts: list[str]) -> None:
    body = "[" + ",".join(f'"{text}"' for text in texts) + "]"
    is_lone = any(re.search("[\ud800-\udfff]", text) for text in json.loads(body))
    assert shape_of(body.encode()).lone_surrogates == is_lone


# Validation, which ends at the first error -----------------------------------------------------------------

HELLO = {"messages": [{"role": "user", "content": "a"}]}
WRONG = 5000
WRONG_LISTS: list[tuple[type[BaseModel], dict[str, Any]]] = [
    (ChatRequest, {"messages": [{"role": "x", "content": 1, "bad": 1}] * 19_000}),
    (ChatRequest, {"messages": [{"role": "user", "content": [1] * WRONG}]}),
    (ChatRequest, {"messages": [{"role": "assistant", "tool_calls": [1] * WRONG}]}),
    (ChatRequest, {**HELLO, "tools": [1] * WRONG}),
    (ChatRequest, {**HELLO, "modalities": ["x"] * WRONG}),
    (ChatRequest, {**HELLO, "stop_token_ids": ["x"] * WRONG}),
    (
        ChatRequest,
        {
            **HELLO,
            "tool_choice": {
                "type": "allowed_tools",
                "allowed_tools": {"mode": "auto", "tools": [1] * WRONG},
            },
        },
    ),
    (CompletionRequest, {"prompt": "a", "structured_outputs": {"choice": [1] * WRONG}}),
    (CompletionRequest, {"prompt": [[]] * WRONG}),
    (CompletionRequest, {"prompt": "a", "stop": [1] * WRONG}),
    (ResponseRequest, {"input": [1] * WRONG}),
    (ResponseRequest, {"input": [{"type": "x"}] * WRONG}),
    (ResponseRequest, {"input": [{"role": "user", "content": [1] * WRONG}]}),
    (ResponseRequest, {"input": "a", "tools": [1] * WRONG}),
    (ResponseRequest, {"input": "a", "include": ["x"] * WRONG}),
    (TokenizeRequest, {"messages": [1] * WRONG}),
    (DetokenizeRequest, {"tokens": [""] * WRONG}),
]


@pytest.mark.parametrize(("model", "data"), WRONG_LISTS, ids=lambda one: str(one)[:60])
def test_a_list_is_refused_at_its_first_invalid_item(model: type[BaseModel], data: Any) -> None:
    with pytest.raises(ValidationError) as refused:
        model.model_validate(data)
    assert refused.value.error_count() <= 12  # one for each member of a union


def test_token_ids_may_be_integral_floats() -> None:
    assert DetokenizeRequest.model_validate({"tokens": [1, 2.0, 3]}).tokens == [1, 2, 3]
    for wrong in ("1", 1.5, True, None, -1, [1]):
        with pytest.raises(ValidationError):
            DetokenizeRequest.model_validate({"tokens": [5, wrong]})


def test_an_error_does_not_quote_a_long_name_in_full(api: Api) -> None:
    error = api.refusal("/v1/completions", {"prompt": "a", "x" * MEBIBYTE: 1})
    assert len(json.dumps(error)) < 2000


def test_the_arguments_of_a_tool_call_are_bounded() -> None:
    def message(count: int) -> dict[str, Any]:
        function = {"name": "f", "arguments": json.dumps({"a": [1] * count})}
        return {"role": "assistant", "tool_calls": [{"function": function}]}

    (taken,) = with_objects([message(1000)])
    assert taken["tool_calls"][0]["function"]["arguments"] == {"a": [1] * 1000}
    with pytest.raises(RequestError, match=f"at most {MAX_ARGUMENT_VALUES} values"):
        with_objects([message(MAX_ARGUMENT_VALUES)])


def test_log_probabilities_of_prompts_are_bounded() -> None:
    api = Api(roomy_engine())
    body = {"prompt": [5] * 10_000, "echo": True, "logprobs": 20, "n": 8, "max_tokens": 1}
    error = api.refusal("/v1/completions", body)
    assert error["param"] == "prompt_logprobs"
    assert "1680000" in error["message"]
    api.close()
