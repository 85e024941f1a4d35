"""The tools that a request declares, and which of them the model may or must call."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from paceline.errors import RequestError

MAX_TOOLS = 128  # tools per request
MAX_TOOL_BYTES = 1 << 17  # of the JSON of all tools together
NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")

# schema keywords beside which "properties" need not list every property
_COMBINED = ("$ref", "$dynamicRef", "allOf", "anyOf", "oneOf", "if", "patternProperties", "dependentSchemas")


@dataclass(frozen=True)
class Tool:
    """A function that the model may call; validated by check_tools."""

    name: str
    description: str | None = None
    parameters: Mapping[str, Any] | None = None  # JSON schema of an object; None: no arguments
    strict: bool | None = None  # False: the arguments may be any JSON object

    def described(self) -> dict[str, Any]:
        """The tool in the format that chat templates and models expect."""
        function: dict[str, Any] = {"name": self.name}
        if self.description is not None:
            function["description"] = self.description
        function["parameters"] = self.parameters or {"type": "object", "properties": {}}
        return {"type": "function", "function": function}

    def schema(self) -> dict[str, Any]:
        """The JSON schema for the arguments of a call.

        If a tool lists its properties and leaves additionalProperties open, additional ones are forbidden.
        """
        if self.strict is False:
            return {"type": "object"}
        schema = {"type": "object", **(self.parameters or {"properties": {}})}
        if "properties" in schema and not any(keyword in schema for keyword in _COMBINED):
            schema.setdefault("additionalProperties", False)
        return schema


@dataclass(frozen=True)
class ToolChoice:
    """Which tools an answer may or must call."""

    mode: Literal["none", "auto", "required"] = "auto"
    names: tuple[str, ...] | None = None  # only these may be called; None: all
    single: bool = False  # at most one call

    @staticmethod
    def named(name: str) -> ToolChoice:
        """Exactly one call, of this function."""
        return ToolChoice("required", (name,), single=True)


def check_tools(tools: Sequence[Tool], choice: ToolChoice) -> None:
    """Raise RequestError if the tools or the choice are invalid."""
    if not tools and choice.mode == "required":
        raise RequestError(
            "tool_choice asks for a call, but there are no tools. Give tools, or leave it out."
        )
    if len(tools) > MAX_TOOLS:
        raise RequestError(f"tools has {len(tools)} entries, and at most {MAX_TOOLS} may be. Give fewer.")
    names = set()
    for number, tool in enumerate(tools):
        _check_tool(number, tool)
        if tool.name in names:
            raise RequestError(f"tools has two functions named {tool.name!r}. Give each its own name.")
        names.add(tool.name)
    size = len(json.dumps([tool.described() for tool in tools]))
    if size > MAX_TOOL_BYTES:
        raise RequestError(
            f"tools has {size} bytes of JSON, and at most {MAX_TOOL_BYTES} may be. Give fewer."
        )
    for name in choice.names or ():
        if name not in names:
            declared = ", ".join(sorted(names)) or "none"
            raise RequestError(f"tool_choice names {name[:64]!r}, which is not among the tools ({declared}).")


def _check_tool(number: int, tool: Tool) -> None:
    if not NAME.fullmatch(tool.name):
        raise RequestError(
            f"tools.{number} has the name {tool.name[:80]!r}; a name has 1 to 64 letters, digits, "
            "'_', '.' and '-'."
        )
    kind = "object" if tool.parameters is None else tool.parameters.get("type", "object")
    if kind != "object":
        raise RequestError(
            f"tools.{number}: the parameters of {tool.name!r} must be a JSON schema of type 'object', "
            f"got {kind!r:.80}."
        )
