"""Tool calls in /v1/chat/completions, in OpenAI's format, whole and streamed."""

from __future__ import annotations

import json
from typing import Any

import pytest

from paceline.models.tokenizer import Tokenizer
from paceline.serve.tools.formats import FORMATS
from tests.serve.echo import PLAIN_TEMPLATE, ask, byte_tokenizer

PATH = "/v1/chat/completions"
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {
                "type": "object",
                "properties": {"city": {"enum": ["Bern", "Basel"]}},
                "required": ["city"],
            },
        },
    },
    {"type": "function", "function": {"name": "now", "description": "The time"}},
]
BERN = ("weather", '{"city": "Bern"}')
NOW = ("now", "{}")
SPECIAL = byte_tokenizer(PLAIN_TEMPLATE + "{# [TOOL_CALLS] #}", special=["[TOOL_CALLS]"])
ADDED = byte_tokenizer(added=["<tool_call>", "</tool_call>"])
ARGS = byte_tokenizer(PLAIN_TEMPLATE + "{# [TOOL_CALLS] [ARGS] #}", special=FORMATS["mistral_args"].tokens)
DEEPSEEK = byte_tokenizer(
    PLAIN_TEMPLATE + "{# <｜tool▁sep｜> ```json #}", special=FORMATS["deepseek_v3"].tokens
)
FORMAT_TOKENIZERS = {
    "hermes": None,
    "mistral": SPECIAL,
    "llama3_json": byte_tokenizer(PLAIN_TEMPLATE + """{# ipython "parameters": #}"""),
}


def body_of(text: str, **options: Any) -> dict[str, Any]:
    """A request whose answer is this text, if the tools allow it."""
    return {"messages": [{"role": "user", "content": text}], "tools": TOOLS, "temperature": 0, **options}


def choice_of(text: str, tokenizer: Tokenizer | None = None, **options: Any) -> dict[str, Any]:
    answer = ask(PATH, tokenizer, **body_of(text, **options))
    assert answer.status_code == 200, answer.text
    return dict(answer.json()["choices"][0])


def calls_of(choice: dict[str, Any]) -> list[tuple[str, str]]:
    called = [call["function"] for call in choice["message"]["tool_calls"]]
    return [(function["name"], function["arguments"]) for function in called]


def deltas_of(text: str, **options: Any) -> list[dict[str, Any]]:
    """The choices of a stream's chunks."""
    answer = ask(PATH, **body_of(text, stream=True, **options))
    lines = [line.removeprefix("data: ") for line in answer.text.split("\n") if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line)["choices"][0] for line in lines]


def test_calls_are_in_the_message_and_in_the_finish_reason() -> None:
    choice = choice_of("One moment.\n" + FORMATS["hermes"].write([BERN, NOW]))
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == "One moment."
    assert calls_of(choice) == [BERN, NOW]
    assert {call["type"] for call in choice["message"]["tool_calls"]} == {"function"}


def test_text_without_calls_is_content() -> None:
    choice = choice_of("I do not know.")
    assert (choice["finish_reason"], choice["message"]["content"]) == ("stop", "I do not know.")
    assert not choice["message"].get("tool_calls")


def test_a_streamed_call_is_its_name_and_then_its_arguments_in_pieces() -> None:
    deltas = deltas_of("One moment.\n" + FORMATS["hermes"].write([BERN, NOW]))
    assert deltas[0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(one["delta"].get("content", "") for one in deltas) == "One moment."
    calls = [call for one in deltas for call in one["delta"].get("tool_calls", [])]
    started = [call for call in calls if "id" in call]
    assert [(call["index"], call["type"], call["function"]) for call in started] == [
        (0, "function", {"name": "weather", "arguments": ""}),
        (1, "function", {"name": "now", "arguments": ""}),
    ]
    for index, (_, arguments) in enumerate([BERN, NOW]):
        assert "".join(call["function"]["arguments"] for call in calls if call["index"] == index) == arguments
    assert [one["finish_reason"] for one in deltas if one["finish_reason"]] == ["tool_calls"]


@pytest.mark.parametrize("text", ["Hello", "<tool_call>\n", "{}", ""], ids=repr)
def test_a_required_call_is_valid_whatever_the_model_prefers(text: str) -> None:
    choice = choice_of(text, tool_choice="required", parallel_tool_calls=False, max_tokens=200)
    ((name, arguments),) = calls_of(choice)
    assert json.loads(arguments) in ([{}] if name == "now" else [{"city": "Bern"}, {"city": "Basel"}])
    assert (choice["finish_reason"], choice["message"]["content"]) == ("tool_calls", None)


def test_a_named_call_is_of_that_function() -> None:
    named = {"type": "function", "function": {"name": "now"}}
    assert calls_of(choice_of(FORMATS["hermes"].write([BERN]), tool_choice=named)) == [NOW]


def test_a_call_that_begins_can_only_be_a_valid_one() -> None:
    choice = choice_of(FORMATS["hermes"].write([("weather", '{"city": "Bonn"}')]))
    ((name, arguments),) = calls_of(choice)
    assert name == "weather"
    assert json.loads(arguments)["city"] in ("Bern", "Basel")


def test_with_tool_choice_none_there_are_no_calls() -> None:
    text = FORMATS["hermes"].write([("nonsense", "{")])
    choice = choice_of(text, tool_choice="none")
    assert (choice["finish_reason"], choice["message"]["content"]) == ("stop", text)


def test_a_call_that_was_cut_off_ends_with_length() -> None:
    text = FORMATS["hermes"].write([BERN])
    choice = choice_of(text, max_tokens=len(text) - len('rn"}}\n</tool_call>'))
    assert choice["finish_reason"] == "length"
    assert calls_of(choice) == [("weather", '{"city": "Be')]


@pytest.mark.parametrize(
    ("tokenizer", "format"),
    [(SPECIAL, "mistral"), (ARGS, "mistral_args"), (ADDED, "hermes"), (DEEPSEEK, "deepseek_v3")],
    ids=["special", "two-special", "added", "deepseek"],
)
@pytest.mark.parametrize("tool_choice", ["auto", "required"])
def test_markers_may_be_special_tokens(tokenizer: Tokenizer, format: str, tool_choice: str) -> None:
    text = FORMATS[format].write([BERN, NOW])
    choice = choice_of(text, tokenizer, tool_choice=tool_choice)
    assert calls_of(choice) == [BERN, NOW]
    assert choice["message"]["content"] is None


def test_structured_outputs_and_tools_are_refused_together() -> None:
    answer = ask(PATH, **body_of("Hello", structured_outputs={"regex": "a"}))
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "structured_outputs"


FAULTY = {"name": "faulty", "parameters": {"properties": {"x": {"type": "dict"}}}}
# uniqueItems cannot be followed; the rest can
PARTLY = {
    "name": "partly",
    "parameters": {
        "properties": {"x": {"type": "array", "items": {"enum": [1, 2]}, "uniqueItems": True}},
        "required": ["x"],
    },
}


def with_tool(function: dict[str, Any], text: str = "Hello", **options: Any) -> dict[str, Any]:
    return {**body_of(text, **options), "tools": [*TOOLS, {"type": "function", "function": function}]}


@pytest.mark.parametrize(
    ("strict", "tool_choice"), [(True, "auto"), (None, "required"), (True, "required")], ids=repr
)
def test_a_schema_that_must_and_cannot_be_followed_is_refused_by_the_name_of_its_tool(
    strict: bool | None, tool_choice: str
) -> None:
    answer = ask(PATH, **with_tool({**FAULTY, "strict": strict}, tool_choice=tool_choice))
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, "tools")
    assert error["message"].startswith("tools.2: the parameters of 'faulty' cannot be followed")
    assert "dict" in error["message"]
    loose = with_tool({**FAULTY, "strict": False}, tool_choice=tool_choice, max_tokens=200)
    assert ask(PATH, **loose).status_code == 200


def test_with_auto_a_schema_is_followed_as_far_as_it_can_be_and_a_warning_tells() -> None:
    wrong = FORMATS["hermes"].write([("partly", '{"x": [1, 1, 3]}')])
    answer = ask(PATH, **with_tool(PARTLY, wrong, max_tokens=200))
    ((name, arguments),) = calls_of(answer.json()["choices"][0])
    assert name == "partly"
    assert set(json.loads(arguments)["x"]) <= {1, 2}
    (warning,) = answer.json()["warnings"]
    assert warning.startswith("tools.2: the parameters of 'partly' are followed only in part")
    assert "uniqueItems" in warning
    assert answer.headers["x-warnings"] == warning
    streamed = ask(PATH, **with_tool(PARTLY, stream=True))
    assert streamed.headers["x-warnings"] == warning
    faulty = ask(PATH, **with_tool(FAULTY, FORMATS["hermes"].write([("faulty", '{"y": 5}')]), max_tokens=200))
    assert calls_of(faulty.json()["choices"][0]) == [("faulty", '{"y": 5}')]
    assert "'faulty' are not followed, so its arguments may be any object" in faulty.json()["warnings"][0]


def test_a_content_schema_beside_loose_tools_is_followed_in_full() -> None:
    format = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"not": {"type": "string"}}}}
    answer = ask(PATH, **with_tool(PARTLY, response_format=format))
    assert answer.status_code == 400
    assert "not" in answer.json()["error"]["message"]


BASEL = ("weather", '{"city": "Basel"}')


@pytest.mark.parametrize(
    ("written", "kept", "tool_choice", "format"),
    [
        ([BERN] * 9, [BERN], "required", "hermes"),
        ([BERN, NOW, BASEL, BERN, BASEL], [BERN, NOW, BASEL], "auto", "hermes"),
        ([BERN, BASEL, NOW], [BERN, BASEL, NOW], "required", "hermes"),
        ([NOW, NOW, BERN], [NOW], "required", "mistral"),
        ([BERN, BERN], [BERN], "auto", "llama3_json"),
    ],
)
def test_an_identical_call_ends_the_answer_whole_and_streamed(
    written: list[tuple[str, str]], kept: list[tuple[str, str]], tool_choice: str, format: str
) -> None:
    text, tokenizer = FORMATS[format].write(written), FORMAT_TOKENIZERS[format]
    body = body_of(text, tool_choice=tool_choice, stream_options={"include_usage": True})
    streamed = ask(PATH, tokenizer, **body, stream=True)
    *chunks, last = [
        json.loads(line[6:]) for line in streamed.text.split("\n\n") if line.startswith("data: {")
    ]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    calls = [call for choice in choices for call in choice["delta"].get("tool_calls", ())]
    del body["stream_options"]
    whole = ask(PATH, tokenizer, **body).json()
    assert calls_of(whole["choices"][0]) == kept
    assert [call["function"]["name"] for call in calls if "id" in call] == [name for name, _ in kept]
    for index, (_, arguments) in enumerate(kept):
        own = [call["function"]["arguments"] for call in calls if call["index"] == index]
        assert "".join(own) == arguments
    assert {whole["choices"][0]["finish_reason"], choices[-1]["finish_reason"]} == {"tool_calls"}
    assert last["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]
    if written != kept:
        assert whole["usage"]["completion_tokens"] < len(text)
