"""The tools of a model: which format it writes calls in, and what its chat template knows of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from paceline.constrain.compiler import Grammar
from paceline.core.structured_outputs import StructuredOutputsParams
from paceline.errors import PacelineError, RequestError
from paceline.models.tokenizer import Tokenizer
from paceline.serve.tools.conversation import with_instructions, with_objects, with_spelled_calls
from paceline.serve.tools.declared import Tool, ToolChoice, check_tools
from paceline.serve.tools.formats import ToolFormat, choose_format
from paceline.serve.tools.grammar import answer_grammar, special_tokens
from paceline.serve.tools.parser import ToolParser

Message = Mapping[str, Any]

BLAME_SECONDS = 1.0  # for finding out which tool a grammar failed by

_PROBE_TOOL = Tool("probe_tool", "a description", {"type": "object", "properties": {}})
_PROBE_CALL: dict[str, Any] = {
    "id": "probe0001",
    "type": "function",
    "function": {"name": "probe_tool", "arguments": {"probe_argument": 1}},
}
_PROBE_CHAT: list[Message] = [
    {"role": "user", "content": "hello"},
    {"role": "assistant", "content": None, "tool_calls": [_PROBE_CALL]},
    {"role": "tool", "tool_call_id": "probe0001", "name": "probe_tool", "content": "probe_result"},
]


@dataclass(frozen=True)
class ToolPlan:
    """What the tools of one request ask for."""

    tools: tuple[Tool, ...] = ()  # those that the prompt shows
    format: ToolFormat | None = None  # None: the answer is content, whatever it looks like
    structure: Mapping[str, Any] | None = None  # structured_outputs that the answer needs
    calls_after_text: bool = True
    names: tuple[str, ...] = ()  # of the tools that may be called
    keep_special_tokens: bool = False  # the parser must see them

    def sampling_options(self) -> dict[str, Any]:
        """What SamplingParams must have, so that the answer is what the tools and the choice allow."""
        options: dict[str, Any] = {}
        if self.structure is not None:
            options["structured_outputs"] = self.structure
        if self.keep_special_tokens:
            options["skip_special_tokens"] = False
        return options

    def compile(
        self, compiler: Callable[[StructuredOutputsParams], Grammar], structure: StructuredOutputsParams
    ) -> Grammar:
        """The grammar of the request's structure. An error names the tool whose schema is at fault, if that
        is found soon.
        """
        try:
            return compiler(structure)
        except RequestError:
            began = time.monotonic()
            for number, tool in enumerate(self.tools):
                if time.monotonic() - began > BLAME_SECONDS:
                    break
                try:
                    compiler(StructuredOutputsParams(json=tool.schema()))
                except RequestError as error:
                    raise RequestError(
                        f"tools.{number}: the parameters of {tool.name!r} cannot be followed (strict: false "
                        f"would leave its arguments unchecked): {error}"
                    ) from None
            raise

    def parser(self) -> ToolParser:
        """A reader for one output."""
        return ToolParser(self.format, self.calls_after_text, self.names)


NO_TOOLS = ToolPlan()


class Toolbox:
    """Tool calling with one model. Its methods may render templates: call them beside the event loop."""

    def __init__(self, tokenizer: Tokenizer, tool_call_parser: str | None = None) -> None:
        """`tool_call_parser` names a format of FORMATS; None takes the one that the chat template teaches."""
        self._tokenizer = tokenizer
        self.format = choose_format(tokenizer.chat_template, tool_call_parser)
        self._special = special_tokens(self.format, tokenizer)

    def plan(
        self,
        tools: Sequence[Tool],
        choice: ToolChoice | None = None,
        content_schema: Mapping[str, Any] | None = None,
    ) -> ToolPlan:
        """The plan for a request; RequestError if its tools cannot be served.

        `content_schema` is the JSON schema of the content, if the request has a response_format: the
        answer is then calls or such JSON.
        """
        choice = choice or ToolChoice()
        check_tools(tools, choice)
        if not tools or choice.mode == "none":
            return NO_TOOLS if content_schema is None else ToolPlan(structure={"json": content_schema})
        if content_schema is not None and choice.mode == "auto" and not self.format.marker:
            raise RequestError(
                "tools cannot be beside a JSON format of the answer with this model: nothing tells its calls "
                "from other JSON. Leave one out, or set tool_choice to 'required' or 'none'."
            )
        callable_tools = [tool for tool in tools if choice.names is None or tool.name in choice.names]
        grammar = answer_grammar(self.format, callable_tools, choice, content_schema, self._special)
        return ToolPlan(
            tools=tuple(tools),
            format=self.format,
            structure={"grammar": grammar},
            calls_after_text=choice.mode == "auto" and content_schema is None,
            names=tuple(tool.name for tool in callable_tools),
            keep_special_tokens=bool(self._special),
        )

    def conversation(
        self, messages: Sequence[Message], plan: ToolPlan = NO_TOOLS
    ) -> tuple[list[dict[str, Any]], list[dict[str, Any]] | None]:
        """The messages and tools for the chat template.

        Earlier calls and results, and the plan's tools, are in the messages' text where the template
        does not know them.
        """
        chat = with_objects(messages)
        if not self._template_knows_calls:
            chat = with_spelled_calls(chat, self.format)
        described = [tool.described() for tool in plan.tools]
        if not described:
            return chat, None
        if self._template_knows_tools:
            return chat, described
        return with_instructions(chat, described, self.format), None

    @cached_property
    def _template_knows_tools(self) -> bool:
        prompt = self._rendered(_PROBE_CHAT[:1], [_PROBE_TOOL.described()])
        return _PROBE_TOOL.name in prompt

    @cached_property
    def _template_knows_calls(self) -> bool:
        tools = [_PROBE_TOOL.described()] if self._template_knows_tools else None
        prompt = self._rendered(_PROBE_CHAT, tools)
        return "probe_argument" in prompt and "probe_result" in prompt

    def _rendered(self, messages: Sequence[Message], tools: Sequence[Mapping[str, object]] | None) -> str:
        try:
            return self._tokenizer.apply_chat_template(messages, True, tools)
        except PacelineError:  # there is no template, or it trips over what it does not know
            return ""
