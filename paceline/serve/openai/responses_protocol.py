"""/v1/responses: the fields of requests and of responses."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BaseModel, Discriminator, Field, Tag

from paceline.serve.http.errors import FieldError
from paceline.serve.openai.fields import Body, Bool, Int, Items, Name, Unsupported
from paceline.serve.openai.protocol import Metrics, SamplingFields
from paceline.serve.tools.declared import Tool, ToolChoice

MAX_METADATA = 16

_SEND_ALL = "is not served: nothing is kept here. Send the whole conversation in input"
_ONLY_TEXT = "must be input_text: only text is served"
_ONLY_FUNCTIONS = "must be function: give a function of your own that does this, or leave it out"
_NO_LOGPROBS = "is not served here: use /v1/chat/completions with logprobs"

Status: TypeAlias = Literal["in_progress", "completed", "incomplete"]


class TextPart(Body):
    type: Annotated[Literal["input_text", "output_text", "text"], Unsupported(_ONLY_TEXT)]
    text: str
    annotations: list[Any] | None = None  # part of our answers, so that clients can send those back unchanged
    logprobs: list[Any] | None = None  # likewise
    cache_control: dict[str, Any] | None = None  # taken; every prefix is cached here


class InputMessage(Body):
    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: str | Items[TextPart]
    id: Name | None = None
    status: Status | None = None
    phase: Name | None = None


class InputCall(Body):
    type: Literal["function_call"]
    call_id: Name
    name: Name
    arguments: str  # JSON
    id: Name | None = None
    status: Status | None = None


class InputCallOutput(Body):
    type: Literal["function_call_output"]
    call_id: Name
    output: str | Items[TextPart]
    id: Name | None = None
    status: Status | None = None


class ReasoningText(Body):
    type: Literal["reasoning_text", "summary_text"]
    text: str


class InputReasoning(Body):
    """What the assistant thought before its next item; the template decides what becomes of it."""

    type: Literal["reasoning"]
    content: Items[ReasoningText] | None = None
    summary: Items[ReasoningText] | None = None
    encrypted_content: str | None = None  # of another server: without meaning here
    id: Name | None = None
    status: Status | None = None


def _kind_of_item(item: Any) -> str:
    kind = item.get("type", "message") if isinstance(item, dict) else getattr(item, "type", "message")
    return str(kind)


InputItem: TypeAlias = Annotated[
    Annotated[InputMessage, Tag("message")]
    | Annotated[InputCall, Tag("function_call")]
    | Annotated[InputCallOutput, Tag("function_call_output")]
    | Annotated[InputReasoning, Tag("reasoning")],
    Discriminator(
        _kind_of_item,
        custom_error_type="unsupported",
        custom_error_message="must be a message, function_call, function_call_output or reasoning",
    ),
]


class FunctionTool(Body):
    type: Annotated[Literal["function"], Unsupported(_ONLY_FUNCTIONS)]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None  # JSON schema of an object; default: no arguments
    strict: Bool | None = None  # false: any JSON object is allowed as arguments

    def tool(self) -> Tool:
        """The tool that this field declares."""
        return Tool(self.name, self.description, self.parameters, self.strict)


class NamedTool(Body):
    type: Annotated[Literal["function"], Unsupported(_ONLY_FUNCTIONS)]
    name: str


class AllowedTools(Body):
    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Items[NamedTool]


def _kind_of_choice(choice: Any) -> str:
    if isinstance(choice, str):
        return "mode"
    kind = choice.get("type") if isinstance(choice, dict) else getattr(choice, "type", None)
    return "allowed" if kind == "allowed_tools" else "named"


ChoiceField: TypeAlias = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("mode")]
    | Annotated[NamedTool, Tag("named")]
    | Annotated[AllowedTools, Tag("allowed")],
    Discriminator(_kind_of_choice),
]


class TextFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    name: Name | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: Bool | None = None  # accepted; the schema is always enforced


class TextOptions(Body):
    format: TextFormat | None = None
    verbosity: Annotated[Literal["medium"] | None, Unsupported("is not served: ask for it in the input")] = (
        None
    )


class Reasoning(Body):
    effort: Annotated[Literal["none"] | None, Unsupported("is not served: ask for it in the input")] = None
    summary: Annotated[None, Unsupported("is not served: this model has none. Leave it out")] = None


class ResponseStreamOptions(Body):
    include_obfuscation: Annotated[Literal[False] | None, Unsupported("is not served: set it to false")] = (
        None
    )


class ResponseRequest(SamplingFields):
    model: Name | None = None
    input: str | Items[InputItem]
    instructions: str | None = None  # a system message before the input
    max_output_tokens: Int | None = Field(None, ge=1, le=2**31)  # default: until the context is full
    text: TextOptions | None = None
    tools: Items[FunctionTool] | None = None
    tool_choice: ChoiceField | None = None  # "auto" if there are tools
    parallel_tool_calls: Bool | None = None
    # accepted and without effect on the answer
    metadata: dict[Name, Annotated[str, Field(max_length=512)]] | None = Field(None, max_length=MAX_METADATA)
    safety_identifier: Name | None = None
    prompt_cache_key: Name | None = None
    service_tier: Annotated[
        Literal["auto", "default"] | None, Unsupported("is not served: there is one tier. Leave it out")
    ] = None
    include: Annotated[
        Items[Literal["reasoning.encrypted_content"]] | None,
        Unsupported("has what this server does not give: leave it out; log-probabilities are in chat"),
    ] = None
    # not supported: only neutral values are accepted
    store: Annotated[Literal[False] | None, Unsupported(f"{_SEND_ALL}, and set it to false")] = None
    previous_response_id: Annotated[None, Unsupported(_SEND_ALL)] = None
    conversation: Annotated[None, Unsupported(_SEND_ALL)] = None
    prompt: Annotated[
        None, Unsupported("is not served: send the prompt's text in instructions and input")
    ] = None
    background: Annotated[
        Literal[False] | None, Unsupported("is not served: wait for the answer, or stream it")
    ] = None
    truncation: Annotated[
        Literal["disabled"] | None, Unsupported("is not served: shorten the input yourself")
    ] = None
    reasoning: Reasoning | None = None
    top_logprobs: Annotated[Literal[0] | None, Unsupported(_NO_LOGPROBS)] = None
    max_tool_calls: Annotated[
        None, Unsupported("is not served: it is for tools of OpenAI's own. See parallel_tool_calls")
    ] = None
    prompt_cache_retention: Annotated[
        None, Unsupported("is not served: the prefix cache keeps what it has room for")
    ] = None
    context_management: Annotated[None, Unsupported("is not served: shorten the input yourself")] = None
    moderation: Annotated[None, Unsupported("is not served: leave it out")] = None
    n: Annotated[Literal[1] | None, Unsupported("is not served: a response has one output")] = None
    stream_options: ResponseStreamOptions | None = None  # type: ignore[assignment]  # other options than chat's

    def content_schema(self) -> dict[str, Any] | None:
        """The JSON schema of the content; None if any text is allowed."""
        form = self.text.format if self.text is not None else None
        if form is None:
            return None
        if (form.type == "json_schema") != (form.schema_ is not None):
            raise FieldError(
                "text.format", 'text.format has a schema if, and only if, its type is "json_schema".'
            )
        if form.type == "text":
            return None
        return form.schema_ or {"type": "object"}

    def choice(self) -> ToolChoice:
        """Which tools the answer may or must call."""
        single = self.parallel_tool_calls is False
        match self.tool_choice:
            case None:
                return ToolChoice("auto", single=single)
            case NamedTool(name=name):
                return ToolChoice.named(name)
            case AllowedTools(mode=mode, tools=tools):
                return ToolChoice(mode, tuple(tool.name for tool in tools), single)
            case mode:
                return ToolChoice(mode, single=single)


class OutputText(BaseModel):
    type: Literal["output_text"]
    text: str
    annotations: list[Any]
    logprobs: list[Any]


class OutputMessage(BaseModel):
    type: Literal["message"]
    id: str
    status: Status
    role: Literal["assistant"]
    content: list[OutputText]


class OutputCall(BaseModel):
    type: Literal["function_call"]
    id: str
    call_id: str
    name: str
    arguments: str
    status: Status


class OutputReasoning(BaseModel):
    type: Literal["reasoning"]
    id: str
    status: Status
    summary: list[Any]
    content: list[dict[str, Any]]


class CachedTokens(BaseModel):
    cached_tokens: int
    cache_write_tokens: int


class ReasoningTokens(BaseModel):
    reasoning_tokens: int


class ResponseUsage(BaseModel):
    input_tokens: int
    input_tokens_details: CachedTokens
    output_tokens: int
    output_tokens_details: ReasoningTokens
    total_tokens: int


class IncompleteDetails(BaseModel):
    reason: Literal["max_output_tokens"]


class ResponseObject(BaseModel):
    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    error: dict[str, Any] | None
    incomplete_details: IncompleteDetails | None
    model: str
    output: list[OutputMessage | OutputCall | OutputReasoning]
    usage: ResponseUsage | None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    temperature: float
    top_p: float
    text: dict[str, Any]
    tools: list[dict[str, Any]]
    tool_choice: Any
    store: Literal[False]
    background: Literal[False]
    previous_response_id: None
    truncation: Literal["disabled"]
    service_tier: Literal["default"]
    reasoning: dict[str, Any]
    safety_identifier: str | None
    prompt_cache_key: str | None
    user: str | None
    top_logprobs: int
    metrics: Metrics | None = None
    warnings: list[str] | None = None  # what the answer does not do, though it was asked for
