"""litellm: one function for many providers. `hosted_vllm/NAME` is its name for a server like this one."""

from __future__ import annotations

import json
import os
from typing import Any

os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # otherwise it fetches prices when imported

import litellm
from asked import (
    CALL_TOKENS,
    CITY_QUESTION,
    MAX_TOKENS,
    QUESTION,
    TOOL_QUESTION,
    Target,
    check_call,
    check_same,
    check_text,
)
from shapes import City
from with_openai import TOOLS


def ask(target: Target, question: str, **options: Any) -> Any:
    """The answer to a question."""
    return litellm.completion(
        model=f"hosted_vllm/{target.model}",
        api_base=target.url,
        api_key=target.api_key,
        messages=[{"role": "user", "content": question}],
        temperature=0,
        **options,
    )


def plain(target: Target) -> str:
    """Chat, whole."""
    return check_text(ask(target, QUESTION, max_tokens=MAX_TOKENS).choices[0].message.content)


def streamed(target: Target) -> str:
    """Chat, streamed: the same text."""
    chunks = ask(target, QUESTION, max_tokens=MAX_TOKENS, stream=True)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    return check_same(text, plain(target))


def tools(target: Target) -> str:
    """A tool is called when a call is required."""
    answer = ask(target, TOOL_QUESTION, tools=TOOLS, tool_choice="required", max_tokens=CALL_TOKENS)
    call = answer.choices[0].message.tool_calls[0]
    return check_call(call.function.name, json.loads(call.function.arguments))


def structured(target: Target) -> str:
    """An answer follows the schema of a model."""
    answer = ask(target, CITY_QUESTION, response_format=City)
    return repr(City.model_validate_json(answer.choices[0].message.content))
