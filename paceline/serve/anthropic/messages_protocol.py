"""/v1/messages: the fields of Anthropic's requests and answers."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BaseModel, Discriminator, Field, Tag, model_validator

from paceline.models.chat import TemplateOptions
from paceline.serve.http.errors import FieldError
from paceline.serve.openai.fields import Body, Bool, Int, Items, Name, Unsupported
from paceline.serve.openai.protocol import MAX_STOP_STRINGS, Metrics, SamplingFields, StopText
from paceline.serve.tools.declared import Tool, ToolChoice

_ONLY_TEXT = "must be text: this model takes no images, documents or search results"
_OWN_TOOLS = "must be custom: give a tool of your own with an input_schema, or leave it out"
_NOTHING_KEPT = "is not served: nothing is kept here. Send the whole conversation in messages"
_SHORTEN = "is not served: shorten the messages yourself"


class CacheControl(Body):
    """Where a client wants the prompt cached. Taken: the prefix cache keeps every prompt it has room for."""

    type: Literal["ephemeral"]
    ttl: Name | None = None
    scope: Name | None = None


class TextBlock(Body):
    type: Annotated[Literal["text"], Unsupported(_ONLY_TEXT)]
    text: str
    cache_control: CacheControl | None = None
    citations: list[Any] | None = None  # part of Anthropic's answers, so that those can be sent back


class ThinkingBlock(Body):
    type: Literal["thinking"]
    thinking: str
    signature: str | None = None


class RedactedThinkingBlock(Body):
    type: Literal["redacted_thinking"]
    data: str  # encrypted by the server that wrote it


class ToolUseBlock(Body):
    type: Literal["tool_use"]
    id: Name
    name: Name
    input: dict[str, Any]
    cache_control: CacheControl | None = None
    caller: dict[str, Any] | None = None
    toolset_name: Name | None = None


class ToolResultBlock(Body):
    type: Literal["tool_result"]
    tool_use_id: Name
    content: str | Items[TextBlock] | None = None
    is_error: Bool | None = None
    cache_control: CacheControl | None = None
    toolset_name: Name | None = None


def _kind_of_block(block: Any) -> str:
    return str(block.get("type") if isinstance(block, dict) else getattr(block, "type", None))


Block: TypeAlias = Annotated[
    Annotated[TextBlock, Tag("text")]
    | Annotated[ThinkingBlock, Tag("thinking")]
    | Annotated[RedactedThinkingBlock, Tag("redacted_thinking")]
    | Annotated[ToolUseBlock, Tag("tool_use")]
    | Annotated[ToolResultBlock, Tag("tool_result")],
    Discriminator(
        _kind_of_block,
        custom_error_type="unsupported",
        custom_error_message=(
            "must have the type text, tool_use, tool_result, thinking or redacted_thinking: this model takes "
            "no images, documents or search results"
        ),
    ),
]


class InputMessage(Body):
    role: Literal["user", "assistant", "system"]
    content: str | Items[Block]


class CustomTool(Body):
    type: Annotated[Literal["custom"] | None, Unsupported(_OWN_TOOLS)] = None
    name: str
    description: str | None = None
    input_schema: dict[str, Any]  # JSON schema of an object
    strict: Bool | None = None  # false: any JSON object is allowed as input
    cache_control: CacheControl | None = None
    eager_input_streaming: Bool | None = None  # accepted; the input is always streamed as it is written
    defer_loading: Annotated[
        Literal[False] | None, Unsupported("is not served: every tool is shown to the model")
    ] = None
    allowed_callers: Annotated[
        Items[Literal["direct"]] | None, Unsupported('is not served: leave it out, or give ["direct"]')
    ] = None
    input_examples: Annotated[
        None, Unsupported("is not served: write examples into the tool's description")
    ] = None

    def tool(self) -> Tool:
        """The tool that this field declares."""
        return Tool(self.name, self.description, self.input_schema, self.strict)


class ToolChoiceField(Body):
    type: Literal["auto", "any", "tool", "none"]
    name: Name | None = None  # with type "tool"
    disable_parallel_tool_use: Bool | None = None

    def choice(self) -> ToolChoice:
        """Which tools the answer may or must call."""
        if (self.type == "tool") != (self.name is not None):
            raise FieldError("tool_choice", 'tool_choice has a name if, and only if, its type is "tool".')
        if self.name is not None:
            return ToolChoice.named(self.name)
        return ToolChoice(_MODES[self.type], single=bool(self.disable_parallel_tool_use))


_MODES: dict[str, Literal["auto", "required", "none"]] = {"auto": "auto", "any": "required", "none": "none"}


class Thinking(Body):
    """Whether the model may think, where its chat template asks (`enable_thinking`)."""

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: Int | None = None  # accepted: max_tokens bounds the answer
    display: Literal["summarized", "omitted"] | None = None  # accepted: thoughts are part of the text


class OutputFormat(Body):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Body):
    format: OutputFormat | None = None
    effort: Name | None = None  # accepted and without effect on the answer


class ClearThinking(Body):
    type: Annotated[Literal["clear_thinking_20251015"], Unsupported(_SHORTEN)]
    keep: Any = None


class ContextManagement(Body):
    edits: Items[ClearThinking] | None = None  # accepted: chat templates leave out the thinking of past turns


class MessageMetadata(Body):
    user_id: Annotated[str, Field(max_length=512)] | None = None  # hashed in the log


class CountTokensRequest(Body):
    model: Name | None = None
    messages: Annotated[Items[InputMessage], Field(min_length=1)]
    system: str | Items[TextBlock] | None = None
    tools: Items[CustomTool] | None = None
    tool_choice: ToolChoiceField | None = None  # default: "auto" if there are tools
    output_config: OutputConfig | None = None
    thinking: Thinking | None = None
    # accepted and without effect on the answer
    cache_control: CacheControl | None = None
    context_management: ContextManagement | None = None
    # not supported: only neutral values are accepted
    mcp_servers: Annotated[
        Annotated[list[Any], Field(max_length=0)] | None,
        Unsupported("is not served: connect to the server yourself, and give its tools in tools"),
    ] = None
    output_format: Annotated[None, Unsupported("is not a field here: use output_config.format")] = None

    def content_schema(self) -> dict[str, Any] | None:
        """The JSON schema of the content; None if any text is allowed."""
        config = self.output_config
        return config.format.schema_ if config is not None and config.format is not None else None

    def template_options(self) -> TemplateOptions:
        """How the messages become a prompt. A last message of the assistant is continued."""
        options: TemplateOptions = {}
        if self.messages[-1].role == "assistant":
            options["continue_final_message"] = True
        if self.thinking is not None:
            options["chat_template_kwargs"] = {"enable_thinking": self.thinking.type != "disabled"}
        return options

    def choice(self) -> ToolChoice:
        """Which tools the answer may or must call."""
        return ToolChoice() if self.tool_choice is None else self.tool_choice.choice()


class MessagesRequest(CountTokensRequest, SamplingFields):
    max_tokens: Int | None = Field(None, ge=1, le=2**31)  # default: until the context is full
    stop_sequences: Items[StopText] | None = Field(None, max_length=MAX_STOP_STRINGS)
    # accepted and without effect on the answer
    metadata: MessageMetadata | None = None
    service_tier: Annotated[
        Literal["auto", "standard_only"] | None, Unsupported("is not served: there is one tier. Leave it out")
    ] = None
    speed: Annotated[
        Literal["standard"] | None, Unsupported("is not served: there is one speed. Leave it out")
    ] = None
    # not supported: only neutral values are accepted
    container: Annotated[None, Unsupported(_NOTHING_KEPT)] = None
    inference_geo: Annotated[None, Unsupported("is not served: leave it out")] = None
    n: Annotated[Literal[1] | None, Unsupported("is not served: an answer has one output")] = None
    stop: Annotated[None, Unsupported("is not a field here: use stop_sequences")] = None
    stream_options: Annotated[None, Unsupported("is not served: every stream has the usage")] = None

    @model_validator(mode="after")
    def _name_the_user(self) -> MessagesRequest:
        """Let `user` be Anthropic's name for it."""
        if self.user is None and self.metadata is not None:
            self.user = self.metadata.user_id
        return self


class AnswerText(BaseModel):
    type: Literal["text"]
    text: str


class AnswerToolUse(BaseModel):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class MessageUsage(BaseModel):
    input_tokens: int  # of the prompt, without tokens found in the prefix cache
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


StopReason: TypeAlias = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class MessageObject(BaseModel):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[AnswerText | AnswerToolUse]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessageUsage
    metrics: Metrics | None = None
    warnings: list[str] | None = None  # what the answer does not do, though it was asked for


class TokenCount(BaseModel):
    input_tokens: int


class AnthropicErrorDetails(BaseModel):
    type: str
    message: str


class AnthropicError(BaseModel):
    type: Literal["error"]
    error: AnthropicErrorDetails
    request_id: str | None
