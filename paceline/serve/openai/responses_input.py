"""The input of /v1/responses as chat messages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from paceline.serve.http.errors import FieldError
from paceline.serve.openai.responses_protocol import (
    InputCall,
    InputCallOutput,
    InputItem,
    InputMessage,
    InputReasoning,
    ResponseRequest,
    TextPart,
)


def messages_of(body: ResponseRequest) -> list[dict[str, Any]]:
    """The conversation of a request: its instructions first, then its input."""
    if isinstance(body.input, str):
        messages: list[dict[str, Any]] = [{"role": "user", "content": body.input}]
    else:
        messages = _of_items(body.input)
    if not messages:
        raise FieldError("input", "input is empty: send a text, or at least one item.")
    if body.instructions is None:
        return messages
    instructions = body.instructions
    if messages[0]["role"] in ("system", "developer"):  # chat templates take one system message
        instructions = f"{instructions}\n\n{messages.pop(0)['content']}"
    return [{"role": "system", "content": instructions}, *messages]


def _of_items(items: Sequence[InputItem]) -> list[dict[str, Any]]:
    """One message per item, except that the calls of one turn share a message."""
    messages: list[dict[str, Any]] = []
    names: dict[str, str] = {}  # names of the called functions, by call id
    thoughts: list[str] = []  # before the assistant's next message or call
    for number, item in enumerate(items):
        match item:
            case InputMessage():
                messages.append({"role": item.role, "content": _text(item.content)})
            case InputReasoning():
                thoughts += [part.text for part in item.content or item.summary or ()]
                continue
            case InputCall():
                names[item.call_id] = item.name
                if not messages or messages[-1]["role"] != "assistant":
                    messages.append({"role": "assistant", "content": None})
                function = {"name": item.name, "arguments": item.arguments}
                call = {"id": item.call_id, "type": "function", "function": function}
                messages[-1].setdefault("tool_calls", []).append(call)
            case InputCallOutput():
                if item.call_id not in names:
                    raise FieldError(
                        f"input.{number}.call_id",
                        f"no function_call before it has call_id {item.call_id[:64]!r}. Send the calls too.",
                    )
                result = {
                    "tool_call_id": item.call_id,
                    "name": names[item.call_id],
                    "content": _text(item.output),
                }
                messages.append({"role": "tool", **result})
        if thoughts and messages[-1]["role"] == "assistant":
            messages[-1]["reasoning_content"] = "\n".join(thoughts)
            thoughts.clear()
    return messages


def _text(content: str | list[TextPart]) -> str:
    return content if isinstance(content, str) else "\n".join(part.text for part in content)
