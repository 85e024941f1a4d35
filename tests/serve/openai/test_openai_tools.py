"""The official client against a real server: structured output, tool calls and the Responses API."""

from __future__ import annotations

import json
from typing import Any, Literal

import jsonschema
import openai
import pytest
from pydantic import BaseModel

from tests.large import in_turn
from tests.serve.conftest import MODEL

pytestmark = pytest.mark.real

ASK: list[Any] = [
    {"role": "user", "content": "Ann is 31 years old and lives in Oslo. What do you know of her?"}
]
WEATHER: list[Any] = [{"role": "user", "content": "What is the weather in Paris, in celsius?"}]
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "city": {"enum": ["Oslo", "Rome"]},
    },
    "required": ["name", "age", "city"],
    "additionalProperties": False,
}


class Person(BaseModel):
    age: Literal[30, 31, 32]
    city: Literal["Oslo", "Rome"]


def tool(name: str, **properties: Any) -> Any:
    parameters = {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }
    return {
        "type": "function",
        "function": {"name": name, "description": f"{name}.", "parameters": parameters},
    }


TOOLS = [
    tool("get_weather", city={"enum": ["Paris", "Rome"]}, unit={"enum": ["celsius", "fahrenheit"]}),
    tool("get_time", city={"enum": ["Paris", "Rome"]}),
]
SCHEMAS = {one["function"]["name"]: one["function"]["parameters"] for one in TOOLS}


# --- structured output ---


@pytest.mark.parametrize(
    ("temperature", "speculative"), in_turn({"0": 0, "0.8": 0.8}, {"off": "off", "suffix": "suffix"})
)
def test_json_schema(client: openai.OpenAI, temperature: float, speculative: str) -> None:
    answer = client.chat.completions.create(
        model=MODEL,
        messages=ASK,
        temperature=temperature,
        seed=3,
        max_tokens=60,
        response_format={"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}},
        extra_body={"speculative": speculative},
    )
    assert answer.choices[0].finish_reason == "stop"
    jsonschema.validate(json.loads(answer.choices[0].message.content or ""), SCHEMA)


def test_json_object(client: openai.OpenAI) -> None:
    chunks = client.chat.completions.create(
        model=MODEL,
        messages=ASK,
        temperature=0,
        max_tokens=120,
        response_format={"type": "json_object"},
        stream=True,
    )
    choices = [choice for chunk in chunks for choice in chunk.choices]
    text = "".join(choice.delta.content or "" for choice in choices)
    assert text.startswith("{")
    if choices[-1].finish_reason == "stop":
        assert isinstance(json.loads(text), dict)


@pytest.mark.parametrize(
    ("wanted", "allowed"),
    [
        ({"choice": ["positive", "negative"]}, {"positive", "negative"}),
        ({"regex": r"(yes|no)!{3}"}, {"yes!!!", "no!!!"}),
        ({"grammar": 'start: ("a" | "b") " and " ("c" | "d")'}, {"a and c", "a and d", "b and c", "b and d"}),
    ],
)
def test_choice_regex_and_grammar(client: openai.OpenAI, wanted: dict[str, Any], allowed: set[str]) -> None:
    settings: dict[str, Any] = {"model": MODEL, "max_tokens": 16, "temperature": 1, "seed": 2}
    extra = {"structured_outputs": wanted}
    chat = client.chat.completions.create(messages=ASK, extra_body=extra, **settings)
    assert chat.choices[0].message.content in allowed
    text = client.completions.create(prompt="Say it:", extra_body=extra, **settings)
    assert text.choices[0].text in allowed


def test_parse_gives_the_users_class(client: openai.OpenAI) -> None:
    answer = client.chat.completions.parse(
        model=MODEL, messages=ASK, max_tokens=40, temperature=0, response_format=Person
    )
    assert isinstance(answer.choices[0].message.parsed, Person)


def test_a_schema_that_cannot_be_served_is_a_bad_request(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(
            model=MODEL,
            messages=ASK,
            response_format={
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": {"type": "nonsense"}},
            },
        )
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(
            model=MODEL, messages=ASK, extra_body={"structured_outputs": {"regex": "(unclosed"}}
        )


# --- tools ---


def check_calls(calls: Any) -> None:
    for call in calls:
        assert call.id
        jsonschema.validate(json.loads(call.function.arguments), SCHEMAS[call.function.name])


@pytest.mark.parametrize("temperature", [0, 0.8])
def test_a_required_call_is_a_valid_one(client: openai.OpenAI, temperature: float) -> None:
    answer = client.chat.completions.create(
        model=MODEL,
        messages=WEATHER,
        tools=TOOLS,
        tool_choice="required",
        parallel_tool_calls=False,
        temperature=temperature,
        seed=1,
        max_tokens=80,
    )
    (choice,) = answer.choices
    assert choice.finish_reason == "tool_calls"
    assert len(choice.message.tool_calls or []) == 1
    check_calls(choice.message.tool_calls)


def test_a_named_call_is_of_that_function_and_its_result_can_be_sent_back(client: openai.OpenAI) -> None:
    named: Any = {"type": "function", "function": {"name": "get_time"}}
    settings: dict[str, Any] = {"model": MODEL, "tools": TOOLS, "temperature": 0}
    first = client.chat.completions.create(messages=WEATHER, tool_choice=named, max_tokens=60, **settings)
    (call,) = first.choices[0].message.tool_calls or []
    assert call.type == "function"
    assert call.function.name == "get_time"
    check_calls([call])
    turns = [*WEATHER, first.choices[0].message, {"role": "tool", "tool_call_id": call.id, "content": "noon"}]
    second = client.chat.completions.create(messages=turns, tool_choice="none", max_tokens=8, **settings)
    assert second.choices[0].message.content
    assert not second.choices[0].message.tool_calls


def test_a_streamed_call_is_the_whole_one_in_pieces(client: openai.OpenAI) -> None:
    settings: dict[str, Any] = {
        "model": MODEL,
        "messages": WEATHER,
        "tools": TOOLS,
        "tool_choice": "required",
        "temperature": 0.8,
        "seed": 6,
        "max_tokens": 80,
    }
    whole = client.chat.completions.create(**settings).choices[0].message.tool_calls or []
    names: dict[int, str] = {}
    arguments: dict[int, str] = {}
    last = None
    for chunk in client.chat.completions.create(stream=True, **settings):
        for choice in chunk.choices:
            last = choice.finish_reason or last
            for delta in choice.delta.tool_calls or []:
                assert delta.function is not None
                if delta.function.name:
                    assert delta.id
                    names[delta.index] = delta.function.name
                arguments[delta.index] = arguments.get(delta.index, "") + (delta.function.arguments or "")
    assert [call.function.name for call in whole if call.type == "function"] == list(names.values())
    assert [call.function.arguments for call in whole if call.type == "function"] == list(arguments.values())
    assert last == "tool_calls"


def test_with_auto_the_answer_is_text_or_valid_calls_and_with_none_it_is_text(client: openai.OpenAI) -> None:
    for seed in range(2):
        auto = client.chat.completions.create(
            model=MODEL, messages=WEATHER, tools=TOOLS, temperature=0.8, seed=seed, max_tokens=40
        ).choices[0]
        if auto.finish_reason == "tool_calls":
            check_calls(auto.message.tool_calls)
        else:
            assert auto.message.content
    none = client.chat.completions.create(
        model=MODEL, messages=WEATHER, tools=TOOLS, tool_choice="none", max_tokens=8
    )
    assert not none.choices[0].message.tool_calls


def test_a_tool_choice_that_does_not_exist_is_a_bad_request(client: openai.OpenAI) -> None:
    missing: Any = {"type": "function", "function": {"name": "no_such_tool"}}
    with pytest.raises(openai.BadRequestError, match="no_such_tool"):
        client.chat.completions.create(model=MODEL, messages=WEATHER, tools=TOOLS, tool_choice=missing)


# --- responses ---


def test_a_response_has_text_usage_and_a_status(client: openai.OpenAI) -> None:
    answer = client.responses.create(
        model=MODEL,
        input="Say hello.",
        instructions="Be brief.",
        max_output_tokens=6,
        temperature=0,
        store=False,
    )
    assert answer.output_text
    assert answer.status in ("completed", "incomplete")
    if answer.status == "incomplete":
        assert answer.incomplete_details is not None
        assert answer.incomplete_details.reason == "max_output_tokens"
    assert answer.usage is not None
    assert answer.usage.output_tokens <= 6


def test_a_streamed_response_gives_its_events_in_order(client: openai.OpenAI) -> None:
    settings: dict[str, Any] = {"model": MODEL, "input": ASK, "max_output_tokens": 10, "temperature": 0}
    whole = client.responses.create(**settings)
    events = list(client.responses.create(stream=True, **settings))
    assert (
        "".join(one.delta for one in events if one.type == "response.output_text.delta") == whole.output_text
    )
    assert [one.type for one in events[:2]] == ["response.created", "response.in_progress"]
    assert [one.sequence_number for one in events] == list(range(len(events)))
    last = events[-1]
    assert last.type == f"response.{whole.status}"
    assert last.response.output_text == whole.output_text


def test_the_clients_stream_reader_gives_the_users_class(client: openai.OpenAI) -> None:
    with client.responses.stream(
        model=MODEL, input=ASK, max_output_tokens=40, temperature=0, text_format=Person
    ) as stream:
        assert isinstance(stream.get_final_response().output_parsed, Person)


def test_a_parsed_response_is_the_users_class(client: openai.OpenAI) -> None:
    answer = client.responses.parse(
        model=MODEL, input=ASK, max_output_tokens=40, temperature=0, text_format=Person
    )
    assert isinstance(answer.output_parsed, Person)


def test_a_response_calls_the_function_that_it_must(client: openai.OpenAI) -> None:
    flat: list[Any] = [{"type": "function", **one["function"], "strict": True} for one in TOOLS]
    answer = client.responses.create(
        model=MODEL,
        input=WEATHER,
        tools=flat,
        tool_choice={"type": "function", "name": "get_weather"},
        max_output_tokens=80,
        temperature=0,
    )
    (call,) = [item for item in answer.output if item.type == "function_call"]
    assert call.name == "get_weather"
    jsonschema.validate(json.loads(call.arguments), SCHEMAS["get_weather"])


def test_stateful_fields_are_refused_by_name(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.create(model=MODEL, input="and then?", previous_response_id="resp_1")
    assert refused.value.param == "previous_response_id"
