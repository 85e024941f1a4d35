"""What every client of the matrix asks, and what it must get."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

QUESTION = "Name three primary colors."
TOOL_QUESTION = "What is the weather in Bern?"
CITY_QUESTION = "Which city is the Eiffel Tower in, and in which country?"
MAX_TOKENS = 48  # of a text
CALL_TOKENS = 100  # of a call: a small model may begin a second one, which is left out if it is the same

TOOL = "weather"
TOOL_DESCRIPTION = "The weather of a city"
TOOL_SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}},
    "required": ["city"],
    "additionalProperties": False,
}


@dataclass(frozen=True)
class Target:
    """A server, and one of its models."""

    url: str  # of OpenAI's API, such as http://127.0.0.1:8000/v1
    model: str
    api_key: str

    @property
    def root(self) -> str:
        """The URL without /v1."""
        return self.url.removesuffix("/v1")


def check_text(text: str | None) -> str:
    """The text, which must not be empty."""
    assert text, "the answer is empty"
    return text


def check_same(streamed: str, whole: str) -> str:
    """The streamed text, which must be the whole one: the same request gives the same bytes."""
    assert streamed == whole, f"streamed {streamed!r}, whole {whole!r}"
    return check_text(streamed)


def check_call(name: str, arguments: Mapping[str, Any]) -> str:
    """The call, which must follow the schema of the tool."""
    assert name == TOOL, f"called {name!r}"
    assert set(arguments) == {"city"}, f"called with {arguments!r}"
    assert isinstance(arguments["city"], str), f"called with {arguments!r}"
    return f"{name}({arguments})"
