"""The tool fields of /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

from paceline.serve.openai.fields import Body, Bool, Items
from paceline.serve.tools.declared import Tool, ToolChoice


class Function(Body):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None  # JSON schema of an object; default: no arguments
    strict: Bool | None = None  # false: any JSON object is allowed as arguments


class FunctionTool(Body):
    type: Literal["function"]
    function: Function
    cache_control: dict[str, Any] | None = None  # taken; every prefix is cached here


class FunctionName(Body):
    name: str


class NamedTool(Body):
    type: Literal["function"]
    function: FunctionName


class AllowedTools(Body):
    mode: Literal["auto", "required"]
    tools: Items[NamedTool]


class AllowedToolsChoice(Body):
    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


ChatToolChoice: TypeAlias = Literal["none", "auto", "required"] | NamedTool | AllowedToolsChoice


def chat_tools(tools: Sequence[FunctionTool] | None) -> list[Tool]:
    """The tools that a body declares."""
    return [
        Tool(tool.function.name, tool.function.description, tool.function.parameters, tool.function.strict)
        for tool in tools or ()
    ]


def chat_choice(choice: ChatToolChoice | None, parallel_tool_calls: bool | None) -> ToolChoice:
    """The tool choice of a body."""
    single = parallel_tool_calls is False
    match choice:
        case None:
            return ToolChoice("auto", single=single)
        case NamedTool():
            return ToolChoice.named(choice.function.name)
        case AllowedToolsChoice(allowed_tools=allowed):
            return ToolChoice(allowed.mode, tuple(tool.function.name for tool in allowed.tools), single)
        case _:
            return ToolChoice(choice, single=single)
