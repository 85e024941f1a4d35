"""Tool calls in /v1/chat/completions, in OpenAI's format, whole and streamed."""

from __future__ import annotations

import json
from typing import Any

import pytest

from paceline.models.tokenizer import Tokenizer
from paceline.serve.tools import FORMATS
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
    ("tokenizer", "format"), [(SPECIAL, "mistral"), (ADDED, "hermes")], ids=["special", "added"]
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


def test_a_schema_that_cannot_be_followed_is_refused_by_the_name_of_its_tool() -> None:
    faulty = {"name": "faulty", "parameters": {"properties": {"x": {"type": "dict"}}}}
    answer = ask(PATH, **{**body_of("Hello"), "tools": [*TOOLS, {"type": "function", "function": faulty}]})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, "tools")
    assert error["message"].startswith("tools.2: the parameters of 'faulty' cannot be followed")
    assert "dict" in error["message"]
    loose = {"type": "function", "function": {**faulty, "strict": False}}
    assert ask(PATH, **{**body_of("Hello"), "tools": [*TOOLS, loose]}).status_code == 200
