"""instructor: answers as pydantic models, by tools or by JSON schema."""

from __future__ import annotations

from typing import Any

import instructor
from asked import CALL_TOKENS, CITY_QUESTION, Target
from openai import OpenAI
from shapes import City


def client(target: Target, mode: instructor.Mode) -> Any:
    """A client in this mode."""
    return instructor.from_openai(OpenAI(base_url=target.url, api_key=target.api_key), mode=mode)


def request(target: Target) -> dict[str, Any]:
    """What is asked in each row."""
    messages = [{"role": "user", "content": CITY_QUESTION}]
    return {
        "model": target.model,
        "messages": messages,
        "temperature": 0,
        "max_tokens": CALL_TOKENS,
        "max_retries": 0,
    }


def streamed(target: Target) -> str:
    """A model whose fields fill up while it is streamed, and are all there at the end."""
    *_, last = client(target, instructor.Mode.TOOLS).create_partial(response_model=City, **request(target))
    return repr(City.model_validate(last.model_dump()))


def tools(target: Target) -> str:
    """A model by a call of a tool, which is the default."""
    return repr(client(target, instructor.Mode.TOOLS).create(response_model=City, **request(target)))


def structured(target: Target) -> str:
    """A model by its JSON schema."""
    return repr(client(target, instructor.Mode.JSON_SCHEMA).create(response_model=City, **request(target)))
