"""Messages with tool calls and results, prepared for a chat template.

A message may have `tool_calls`, in OpenAI's format; its role is then assistant. A result is a message
with the role tool.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from paceline.errors import RequestError
from paceline.serve.http.scanning import MAX_DEPTH, shape_of
from paceline.serve.tools.tool_format import ToolFormat

MAX_ARGUMENT_VALUES = 20_000  # JSON values in the arguments of one call


def with_objects(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The messages with call arguments as objects: templates serialize them themselves."""
    return [
        {**message, "tool_calls": [_with_object(number, call) for call in message["tool_calls"]]}
        if message.get("tool_calls")
        else {name: value for name, value in message.items() if name != "tool_calls"}
        for number, message in enumerate(messages)
    ]


def with_empty_contents(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The messages with empty texts for contents of null, which clients send beside calls.

    For templates that fail on null, as those of gpt-oss, Qwen3 and Ministral 3 do.
    """
    return [
        {**message, "content": ""} if message.get("content") is None else dict(message)
        for message in messages
    ]


def with_spelled_calls(messages: Sequence[Mapping[str, Any]], format: ToolFormat) -> list[dict[str, Any]]:
    """The messages with calls as the text that the model would write, and results as user messages.

    For templates that support neither. Consecutive results become one message.
    """
    spelled: list[dict[str, Any]] = []
    in_results = False
    for message in messages:
        is_result = message["role"] == "tool"
        if is_result:
            text = format.result.replace("{content}", text_of(message.get("content")))
            if in_results:
                spelled[-1]["content"] += "\n" + text
            else:
                spelled.append({"role": "user", "content": text})
        elif "tool_calls" in message:
            functions = [call["function"] for call in message["tool_calls"]]
            calls = [
                (function["name"], json.dumps(function["arguments"], ensure_ascii=False))
                for function in functions
            ]
            parts = [text_of(message.get("content")), format.write(calls)]
            spelled.append({"role": "assistant", "content": "\n".join(part for part in parts if part)})
        else:
            spelled.append(dict(message))
        in_results = is_result
    return spelled


def with_instructions(
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]],
    format: ToolFormat,
    has_system: bool = True,
) -> list[dict[str, Any]]:
    """The messages with a description of the tools appended to the system message.

    `has_system`: whether the template has a system role; else the first message begins with the description.
    """
    described = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    instructions = format.instructions.replace("{tools}", described)
    if messages and not has_system:
        first = f"{instructions}\n\n{text_of(messages[0].get('content'))}"
        return [{**messages[0], "content": first}, *map(dict, messages[1:])]
    if messages and messages[0].get("role") in ("system", "developer"):
        instructions = f"{text_of(messages[0].get('content'))}\n\n{instructions}"
        messages = messages[1:]
    return [{"role": "system", "content": instructions}, *map(dict, messages)]


def text_of(content: Any) -> str:
    """The text of a message's content, which may be a string, text parts or None."""
    if isinstance(content, list):
        return "\n".join(str(part.get("text", "")) for part in content)
    return content or ""


def _with_object(number: int, call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    arguments = function.get("arguments") or "{}"
    if isinstance(arguments, str):
        arguments = _parsed(arguments)
    if not isinstance(arguments, dict):
        raise RequestError(
            f"messages.{number}: the arguments of the call of {str(function.get('name'))[:64]!r} must be "
            f"the JSON text of an object of at most {MAX_ARGUMENT_VALUES} values."
        )
    return {**call, "function": {**function, "arguments": arguments}}


def _parsed(arguments: str) -> Any:
    """The parsed JSON; None if it is invalid, or too large to parse while other requests wait for the GIL."""
    shape = shape_of(arguments.encode())
    if shape.values > MAX_ARGUMENT_VALUES or shape.depth > MAX_DEPTH:
        return None
    try:
        return json.loads(arguments)
    except ValueError:
        return None
