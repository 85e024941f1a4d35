"""anthropic: Anthropic's own client, of /v1/messages."""

from __future__ import annotations

from typing import Any

from anthropic import Anthropic
from asked import (
    CALL_TOKENS,
    CITY_QUESTION,
    MAX_TOKENS,
    QUESTION,
    TOOL,
    TOOL_DESCRIPTION,
    TOOL_QUESTION,
    TOOL_SCHEMA,
    Target,
    check_call,
    check_same,
    check_text,
)
from shapes import City

TOOLS: list[Any] = [{"name": TOOL, "description": TOOL_DESCRIPTION, "input_schema": TOOL_SCHEMA}]


def client(target: Target) -> Anthropic:
    """A client of the server. It appends /v1 to the URL itself."""
    return Anthropic(base_url=target.root, api_key=target.api_key)


def plain(target: Target) -> str:
    """A message, whole. Its prompt has as many tokens as were counted before."""
    asked: dict[str, Any] = {"model": target.model, "messages": [{"role": "user", "content": QUESTION}]}
    counted = client(target).messages.count_tokens(**asked).input_tokens
    answer = client(target).messages.create(**asked, max_tokens=MAX_TOKENS, extra_body={"temperature": 0})
    assert answer.usage.input_tokens + (answer.usage.cache_read_input_tokens or 0) == counted
    return check_text("".join(block.text for block in answer.content if block.type == "text"))


def streamed(target: Target) -> str:
    """A message, streamed: the same text."""
    with client(target).messages.stream(
        model=target.model,
        messages=[{"role": "user", "content": QUESTION}],
        max_tokens=MAX_TOKENS,
        extra_body={"temperature": 0},
    ) as stream:
        return check_same("".join(stream.text_stream), plain(target))


def tools(target: Target) -> str:
    """A tool is called when a call is required, and its result is taken."""
    asked: list[Any] = [{"role": "user", "content": TOOL_QUESTION}]
    with client(target).messages.stream(
        model=target.model,
        messages=asked,
        tools=TOOLS,
        tool_choice={"type": "any", "disable_parallel_tool_use": True},
        max_tokens=CALL_TOKENS,
        extra_body={"temperature": 0},
    ) as stream:
        answer = stream.get_final_message()
    assert answer.stop_reason == "tool_use", answer.stop_reason
    call: Any = answer.content[-1]
    result: Any = {"type": "tool_result", "tool_use_id": call.id, "content": "Rain, 12 degrees"}
    asked += [{"role": "assistant", "content": answer.content}, {"role": "user", "content": [result]}]
    final = client(target).messages.create(
        model=target.model, messages=asked, tools=TOOLS, tool_choice={"type": "none"}, max_tokens=MAX_TOKENS
    )
    assert final.stop_reason in ("end_turn", "max_tokens"), final.stop_reason
    return check_call(call.name, call.input)


def structured(target: Target) -> str:
    """An answer is parsed into a model."""
    answer = client(target).messages.parse(
        model=target.model,
        messages=[{"role": "user", "content": CITY_QUESTION}],
        output_format=City,
        max_tokens=CALL_TOKENS,
        extra_body={"temperature": 0},
    )
    return repr(answer.parsed_output or City.model_validate({}))
