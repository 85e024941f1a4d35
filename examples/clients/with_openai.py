"""openai: OpenAI's own client."""

from __future__ import annotations

import json
from typing import Any

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
from openai import OpenAI
from shapes import City

TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {"name": TOOL, "description": TOOL_DESCRIPTION, "parameters": TOOL_SCHEMA},
    }
]


def client(target: Target) -> OpenAI:
    """A client of the server."""
    return OpenAI(base_url=target.url, api_key=target.api_key)


def plain(target: Target) -> str:
    """Chat, whole."""
    answer = client(target).chat.completions.create(
        model=target.model,
        messages=[{"role": "user", "content": QUESTION}],
        temperature=0,
        max_tokens=MAX_TOKENS,
    )
    return check_text(answer.choices[0].message.content)


def streamed(target: Target) -> str:
    """Chat, streamed: the same text."""
    chunks = client(target).chat.completions.create(
        model=target.model,
        messages=[{"role": "user", "content": QUESTION}],
        temperature=0,
        max_tokens=MAX_TOKENS,
        stream=True,
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    return check_same(text, plain(target))


def tools(target: Target) -> str:
    """A tool is called when a call is required."""
    answer = client(target).chat.completions.create(
        model=target.model,
        messages=[{"role": "user", "content": TOOL_QUESTION}],
        tools=TOOLS,
        tool_choice="required",
        temperature=0,
        max_tokens=CALL_TOKENS,
    )
    assert answer.choices[0].message.tool_calls, "no call"
    call: Any = answer.choices[0].message.tool_calls[0]
    return check_call(call.function.name, json.loads(call.function.arguments))


def structured(target: Target) -> str:
    """An answer is parsed into a model, by the responses API."""
    answer = client(target).responses.parse(
        model=target.model, input=CITY_QUESTION, text_format=City, temperature=0
    )
    return repr(answer.output_parsed or City.model_validate({}))
