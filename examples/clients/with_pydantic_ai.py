"""pydantic-ai: agents with typed outputs."""

from __future__ import annotations

import asyncio

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
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.settings import ModelSettings
from shapes import City

SETTINGS = ModelSettings(temperature=0, max_tokens=MAX_TOKENS)


def model(target: Target) -> OpenAIChatModel:
    """The model of an agent."""
    return OpenAIChatModel(target.model, provider=OpenAIProvider(base_url=target.url, api_key=target.api_key))


def plain(target: Target) -> str:
    """An agent's answer."""
    return check_text(Agent(model(target), model_settings=SETTINGS).run_sync(QUESTION).output)


def streamed(target: Target) -> str:
    """An agent's answer, streamed: the same text."""

    async def run() -> str:
        async with Agent(model(target), model_settings=SETTINGS).run_stream(QUESTION) as result:
            return "".join([piece async for piece in result.stream_text(delta=True)])

    return check_same(asyncio.run(run()), plain(target))


def tools(target: Target) -> str:
    """An agent ends with the call of an output tool, whose arguments are checked."""
    calls: list[str] = []

    def weather(city: str) -> str:
        """The weather of a city"""
        calls.append(check_call("weather", {"city": city}))
        return f"Rain in {city}"

    Agent(model(target), output_type=weather, model_settings=SETTINGS).run_sync(TOOL_QUESTION)
    assert calls, "no call"
    return calls[0]


def structured(target: Target) -> str:
    """An agent's answer follows the JSON schema of a model."""
    agent = Agent(model(target), output_type=NativeOutput(City), model_settings=SETTINGS)
    return repr(agent.run_sync(CITY_QUESTION).output)
