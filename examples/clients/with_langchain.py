"""langchain-openai: LangChain's chat model over OpenAI's API."""

from __future__ import annotations

from asked import (
    CITY_QUESTION,
    MAX_TOKENS,
    QUESTION,
    TOOL_QUESTION,
    Target,
    check_call,
    check_same,
    check_text,
)
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import SecretStr
from shapes import City


@tool
def weather(city: str) -> str:
    """The weather of a city"""
    return f"Rain in {city}"


def model(target: Target) -> ChatOpenAI:
    """The chat model."""
    return ChatOpenAI(
        model=target.model,
        base_url=target.url,
        api_key=SecretStr(target.api_key),
        temperature=0,
        max_completion_tokens=MAX_TOKENS,
    )


def plain(target: Target) -> str:
    """Chat, whole."""
    return check_text(str(model(target).invoke(QUESTION).text))


def streamed(target: Target) -> str:
    """Chat, streamed: the same text."""
    return check_same("".join(str(chunk.text) for chunk in model(target).stream(QUESTION)), plain(target))


def tools(target: Target) -> str:
    """A bound tool is called when it is chosen."""
    answer = model(target).bind_tools([weather], tool_choice="weather").invoke(TOOL_QUESTION)
    call = answer.tool_calls[0]
    return check_call(call["name"], call["args"])


def structured(target: Target) -> str:
    """An answer is parsed into a model."""
    return repr(City.model_validate(model(target).with_structured_output(City).invoke(CITY_QUESTION)))
