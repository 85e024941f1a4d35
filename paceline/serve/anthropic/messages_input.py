"""The conversation of /v1/messages as chat messages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from paceline.serve.anthropic.messages_protocol import (
    Block,
    CountTokensRequest,
    InputMessage,
    RedactedThinkingBlock,
    TextBlock,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
)
from paceline.serve.http.errors import FieldError

# Claude Code begins the system prompt with this block. It is no text for the model, and it differs between
# requests, so that no prefix could be reused behind it.
BILLING = "x-anthropic-billing-header:"


def messages_of(body: CountTokensRequest) -> list[dict[str, Any]]:
    """The conversation of a request: its system prompt first, then its messages."""
    messages: list[dict[str, Any]] = []
    system = _system(body.system)
    if system:
        messages.append({"role": "system", "content": system})
    names: dict[str, str] = {}  # names of the called tools, by the ids of their calls
    for number, message in enumerate(body.messages):
        messages += _of_message(message, f"messages.{number}.content", names)
    return messages


def _system(system: str | Sequence[TextBlock] | None) -> str:
    if system is None or isinstance(system, str):
        return system or ""
    return "\n".join(block.text for block in system if not block.text.startswith(BILLING))


def _of_message(message: InputMessage, place: str, names: dict[str, str]) -> Iterator[dict[str, Any]]:
    """The chat messages of a message: one, and one more for each result of a tool in it."""
    if isinstance(message.content, str):
        yield {"role": message.role, "content": message.content}
        return
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    for number, block in enumerate(message.content):
        _check_role(message.role, block, f"{place}.{number}")
        match block:
            case TextBlock():
                texts.append(block.text)
            case ThinkingBlock():
                thoughts.append(block.thinking)
            case RedactedThinkingBlock():
                pass  # encrypted: it cannot be read here
            case ToolUseBlock():
                names[block.id] = block.name
                function = {"name": block.name, "arguments": block.input}
                calls.append({"id": block.id, "type": "function", "function": function})
            case ToolResultBlock():
                if texts:  # a message of its own, so that the order is kept
                    yield {"role": message.role, "content": "\n".join(texts)}
                    texts = []
                yield _result(block, f"{place}.{number}", names)
    if texts or calls or message.role != "user":
        turn: dict[str, Any] = {"role": message.role, "content": "\n".join(texts) or None}
        if not calls:
            turn["content"] = turn["content"] or ""
        if thoughts:
            turn["reasoning_content"] = "\n".join(thoughts)  # where the template has a place for it
        yield turn | ({"tool_calls": calls} if calls else {})


# the only role in whose messages a block of this type may be
_ROLES = {
    "tool_use": "assistant",
    "thinking": "assistant",
    "redacted_thinking": "assistant",
    "tool_result": "user",
}


def _check_role(role: str, block: Block, place: str) -> None:
    needed = _ROLES.get(block.type, role)
    if role != needed:
        raise FieldError(
            f"{place}.type", f"{place} has the type {block.type}, which is for messages of role {needed}."
        )


def _result(block: ToolResultBlock, place: str, names: dict[str, str]) -> dict[str, Any]:
    """The chat message of a tool's result. A template knows no errors, so the text says that it is one."""
    if block.tool_use_id not in names:
        raise FieldError(
            f"{place}.tool_use_id",
            f"{place}: no tool_use before it has the id {block.tool_use_id[:64]!r}. Send the calls too.",
        )
    parts = [block.content] if isinstance(block.content, str) else [one.text for one in block.content or ()]
    text = "\n".join(parts)
    if block.is_error and not text.lower().startswith("error"):
        text = f"Error: {text}"
    name = names[block.tool_use_id]
    return {"role": "tool", "tool_call_id": block.tool_use_id, "name": name, "content": text}
