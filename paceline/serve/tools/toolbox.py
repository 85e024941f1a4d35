"""Toolbox: a model's tool-call format, and what its chat template supports."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Protocol

from paceline.constrain.compiler import Grammar
from paceline.core.detokenizer import Watch
from paceline.core.params import SamplingParams
from paceline.core.structured_outputs import StructuredOutputsParams
from paceline.errors import PacelineError, RequestError
from paceline.models.tokenizer import Tokenizer
from paceline.serve.tools.arguments import text_parameters
from paceline.serve.tools.conversation import (
    with_empty_contents,
    with_instructions,
    with_objects,
    with_spelled_calls,
)
from paceline.serve.tools.declared import Tool, ToolChoice, check_tools
from paceline.serve.tools.events import OutputParser
from paceline.serve.tools.formats import choose_format
from paceline.serve.tools.grammar import answer_grammar, special_tokens
from paceline.serve.tools.parser import ToolParser
from paceline.serve.tools.reasoning import ReasoningFormat, choose_reasoning
from paceline.serve.tools.repeats import DistinctCalls
from paceline.serve.tools.tool_format import ToolFormat

Message = Mapping[str, Any]

PROMPT_END = 16  # tokens in which a template may begin the reasoning, white space after it included
BLAME_SECONDS = 1.0  # seconds to find the tool that makes a grammar fail

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


class Compiler(Protocol):
    """Compiles grammars, as AsyncEngine.compile does."""

    def __call__(self, structure: StructuredOutputsParams, lenient: bool = False) -> Grammar: ...


def _no_calls(tools: Sequence[Tool]) -> str:
    raise AssertionError("a plan without calls has no grammar of calls")


@dataclass(frozen=True)
class ToolPlan:
    """Tools, format and constraint of one request."""

    tools: tuple[Tool, ...] = ()  # shown in the prompt
    format: ToolFormat | None = None  # None: the whole answer is content
    structure: Mapping[str, Any] | None = None  # structured_outputs that constrain the answer
    calls_after_text: bool = True
    names: tuple[str, ...] = ()  # tools that may be called
    keep_special_tokens: bool = False  # the parser needs them in the text
    may_loosen: bool = False  # the answer need not call a tool: a schema that cannot be followed is no error
    content_schema: Mapping[str, Any] | None = None  # of an answer that calls nothing
    reasoning: ReasoningFormat | None = None  # None: an answer has no reasoning
    is_reasoning: bool = False  # the prompt has begun the reasoning
    grammar_of: Callable[[Sequence[Tool]], str] = field(default=_no_calls, compare=False)

    def sampling_options(self) -> dict[str, Any]:
        """SamplingParams options that restrict the answer to what the tools and the choice allow."""
        options: dict[str, Any] = {}
        if self.structure is not None:
            options["structured_outputs"] = self.structure
        if self.keep_special_tokens:
            options["skip_special_tokens"] = False
        return options

    def compile(
        self, compiler: Compiler, structure: StructuredOutputsParams
    ) -> tuple[Grammar, Sequence[str]]:
        """The compiled grammar of the request, and a warning for each tool not held to its whole schema.

        A schema that cannot be followed is an error if the answer must be a call, or if its tool is strict.
        An error names the tool that caused it, if that is found within BLAME_SECONDS.
        """
        try:
            return compiler(structure), ()
        except RequestError:
            began = time.monotonic()
            faults = self._faults(compiler)
            if not faults:
                raise
            in_time = time.monotonic() - began <= BLAME_SECONDS
            if self.may_loosen and in_time and not any(self.tools[number].strict for number in faults):
                return self._loosened(compiler, faults)
            number, fault = next(iter(faults.items()))
            raise RequestError(
                f"tools.{number}: the parameters of {self.tools[number].name!r} cannot be followed (strict: "
                f"false would leave its arguments unchecked): {fault}"
            ) from None

    def _faults(self, compiler: Compiler) -> dict[int, RequestError]:
        """The errors of tools whose schemas cannot be followed, by the tools' numbers; strict tools first."""
        began = time.monotonic()
        faults: dict[int, RequestError] = {}
        for number, tool in sorted(enumerate(self.tools), key=lambda item: not item[1].strict):
            if time.monotonic() - began > BLAME_SECONDS:
                break
            fault = _fault(compiler, tool) if tool.name in self.names else None
            if fault is not None:
                faults[number] = fault
        return faults

    def _loosened(
        self, compiler: Compiler, faults: Mapping[int, RequestError]
    ) -> tuple[Grammar, Sequence[str]]:
        """The grammar that holds tools to as much of their schemas as can be followed; a warning each."""
        if self.content_schema is not None:
            compiler(StructuredOutputsParams(json=self.content_schema))  # it must be followed in full
        tools, warnings = list(self.tools), []
        for number, fault in faults.items():
            held, tool = "followed only in part", tools[number]
            if _fault(compiler, tool, lenient=True) is not None:
                held = "not followed, so its arguments may be any object"
                tools[number] = replace(tool, strict=False)
            warnings.append(f"tools.{number}: the parameters of {tool.name!r} are {held}: {fault}")
        source = self.grammar_of([tool for tool in tools if tool.name in self.names])
        return compiler(StructuredOutputsParams(grammar=source), lenient=True), warnings

    def parser(self) -> OutputParser:
        """A parser for one output, which leaves out what follows the first repeat of a call."""
        texts = {tool.name: text_parameters(tool.schema()) for tool in self.tools}
        parser = DistinctCalls(ToolParser(self.format, self.calls_after_text, self.names, texts))
        if self.reasoning is None:
            return parser
        return self.reasoning.reader(parser, self.reasoning, self.is_reasoning)

    @property
    def watch(self) -> Callable[[], Watch] | None:
        """Makes, for each output, what ends it after a repeat of a call; None: there are no calls."""
        return None if self.format is None else self._new_watch

    def _new_watch(self) -> Watch:
        parser = self.parser()

        def repeats(text: str) -> bool:
            parser.feed(text)
            return parser.repeated

        return repeats


def _fault(compiler: Compiler, tool: Tool, lenient: bool = False) -> RequestError | None:
    """Why a tool's schema cannot be followed; None if it can."""
    try:
        compiler(StructuredOutputsParams(json=tool.schema()), lenient=lenient)
    except RequestError as error:
        return error
    return None


NO_TOOLS = ToolPlan()


class Toolbox:
    """Tool calling for one model. Methods may render templates: call them in a worker thread."""

    def __init__(self, tokenizer: Tokenizer, tool_call_parser: str | None = None) -> None:
        """`tool_call_parser` names an entry of FORMATS; None: the format that the chat template uses."""
        self._tokenizer = tokenizer
        self.format = choose_format(tokenizer.tool_template, tool_call_parser)
        self.reasoning = choose_reasoning(tokenizer.chat_template)
        thinking = special_tokens(self.reasoning.tokens if self.reasoning else (), tokenizer)
        self._thinks = bool(thinking)  # in special tokens, which the parser needs in the text
        # what a grammar refers to by id
        self._marks = {**thinking, **special_tokens(self.format.tokens, tokenizer)}
        if tokenizer.id_of(self.format.end) in tokenizer.eos_ids:  # calls end the answer: each one, or all
            self.format = replace(self.format, end="", single=self.format.between.startswith(self.format.end))

    def plan(
        self,
        tools: Sequence[Tool],
        choice: ToolChoice | None = None,
        content_schema: Mapping[str, Any] | None = None,
    ) -> ToolPlan:
        """The plan for a request; RequestError if its tools are invalid.

        `content_schema` is the JSON schema of response_format, if there is one: the answer is then calls or
        JSON of that schema.
        """
        choice = choice or ToolChoice()
        check_tools(tools, choice)
        if not tools or choice.mode == "none":
            structure = None if content_schema is None else {"json": content_schema}
            return ToolPlan(structure=structure, keep_special_tokens=self._thinks)
        if content_schema is not None and choice.mode == "auto" and not self.format.marker:
            raise RequestError(
                "tools cannot be beside a JSON format of the answer with this model: nothing tells its calls "
                "from other JSON. Leave one out, or set tool_choice to 'required' or 'none'."
            )
        callable_tools = [tool for tool in tools if choice.names is None or tool.name in choice.names]

        def grammar_of(tools: Sequence[Tool]) -> str:
            return answer_grammar(self.format, tools, choice, content_schema, self._marks, self.reasoning)

        return ToolPlan(
            tools=tuple(tools),
            format=self.format,
            structure={"grammar": grammar_of(callable_tools)},
            calls_after_text=choice.mode == "auto" and content_schema is None,
            names=tuple(tool.name for tool in callable_tools),
            keep_special_tokens=bool(self._marks),
            may_loosen=choice.mode == "auto",
            content_schema=content_schema,
            grammar_of=grammar_of,
        )

    def reading(self, plan: ToolPlan, prompt: Sequence[int], params: SamplingParams) -> ToolPlan:
        """The plan with how the answer to a prompt is read.

        What is held to a structure from its first token is no reasoning, even if the prompt has begun some.
        """
        if self.reasoning is None:
            return plan
        is_free = params.structured_outputs is None or (plan.format is not None and plan.calls_after_text)
        end = self._tokenizer.decode(prompt[-PROMPT_END:], skip_special_tokens=False)
        is_open = is_free and end.rstrip().endswith(self.reasoning.begin)
        return replace(plan, reasoning=self.reasoning, is_reasoning=is_open)

    def conversation(
        self, messages: Sequence[Message], plan: ToolPlan = NO_TOOLS
    ) -> tuple[list[dict[str, Any]], list[dict[str, Any]] | None]:
        """Messages and tools for the chat template.

        If the template does not support tools or calls, they are written into the messages as text.
        """
        chat = self._as_template_reads(with_objects(messages))
        described = [tool.described() for tool in plan.tools]
        if not described:
            return chat, None
        if self._template_knows_tools:
            return chat, described
        return with_instructions(chat, described, self.format, self._template_has_system), None

    @cached_property
    def _template_knows_tools(self) -> bool:
        prompt = self._rendered(_PROBE_CHAT[:1], [_PROBE_TOOL.described()])
        return _PROBE_TOOL.name in prompt

    @cached_property
    def _template_has_system(self) -> bool:
        """Whether the template takes a system message: Gemma 2's refuses it."""
        return bool(self._rendered([{"role": "system", "content": "probe"}, *_PROBE_CHAT[:1]], None))

    @cached_property
    def _as_template_reads(self) -> Callable[[list[dict[str, Any]]], list[dict[str, Any]]]:
        """What prepares messages for the template: nothing, or what it cannot read is written otherwise."""
        tools = [_PROBE_TOOL.described()] if self._template_knows_tools else None
        for prepared in (list, with_empty_contents):
            prompt = self._rendered(prepared(_PROBE_CHAT), tools)
            if "probe_argument" in prompt and "probe_result" in prompt:
                return prepared
        return lambda chat: with_spelled_calls(chat, self.format)

    def _rendered(self, messages: Sequence[Message], tools: Sequence[Mapping[str, object]] | None) -> str:
        try:
            return self._tokenizer.apply_chat_template(messages, True, tools)
        except PacelineError:  # no template, or it fails on tools
            return ""
