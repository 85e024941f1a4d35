"""openai-agents: OpenAI's agents, over /v1/responses."""

from __future__ import annotations

import asyncio
from typing import Any

from agents import Agent, ModelSettings, OpenAIResponsesModel, Runner, function_tool, set_tracing_disabled
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
from openai import AsyncOpenAI
from shapes import City

set_tracing_disabled(True)  # traces would go to OpenAI


def agent(target: Target, max_tokens: int = MAX_TOKENS, **options: Any) -> Agent[Any]:
    """An agent on the server's model. It must call a tool if it has one."""
    openai = AsyncOpenAI(base_url=target.url, api_key=target.api_key)
    tool_choice = "required" if "tools" in options else None
    settings = ModelSettings(temperature=0, max_tokens=max_tokens, tool_choice=tool_choice)
    model = OpenAIResponsesModel(model=target.model, openai_client=openai)
    return Agent(name="Helper", model=model, model_settings=settings, **options)


def plain(target: Target) -> str:
    """An agent's answer."""
    return check_text(Runner.run_sync(agent(target), QUESTION).final_output)


def streamed(target: Target) -> str:
    """An agent's answer, streamed: the same text."""

    async def run() -> str:
        result = Runner.run_streamed(agent(target), QUESTION)
        return "".join(
            [
                event.data.delta
                async for event in result.stream_events()
                if event.type == "raw_response_event" and event.data.type == "response.output_text.delta"
            ]
        )

    return check_same(asyncio.run(run()), plain(target))


def tools(target: Target) -> str:
    """The agent calls a tool, and its result ends the run."""
    calls: list[str] = []

    @function_tool
    def weather(city: str) -> str:
        """The weather of a city"""
        calls.append(check_call("weather", {"city": city}))
        return f"Rain in {city}"

    helper = agent(target, CALL_TOKENS, tools=[weather], tool_use_behavior="stop_on_first_tool")
    Runner.run_sync(helper, TOOL_QUESTION)
    assert calls, "no call"
    return calls[0]


def structured(target: Target) -> str:
    """An agent's answer is parsed into a model."""
    return repr(Runner.run_sync(agent(target, output_type=City), CITY_QUESTION).final_output_as(City))
