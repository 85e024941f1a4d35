"""/v1/chat/completions: the fields of requests and of responses."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from paceline.core.params import MAX_LOGPROBS
from paceline.models.chat import TemplateOptions
from paceline.serve.http.errors import FieldError
from paceline.serve.openai.answers import FinishReason
from paceline.serve.openai.fields import Body, Bool, Int, Items, Name, NoFields, NoItems, Unsupported
from paceline.serve.openai.protocol import Metrics, SamplingFields, Usage
from paceline.serve.tools.chat_fields import ChatToolChoice, FunctionTool

MAX_TEMPLATE_KWARGS = 16  # entries of chat_template_kwargs

# Anthropic's mark of what to cache, sent by clients of several providers. Every prefix is cached here.
CacheControl = Annotated[dict[str, Any] | None, Field(exclude=True)]


class TextPart(Body):
    type: Annotated[Literal["text"], Unsupported("must be text: only text parts are served")]
    text: str
    cache_control: CacheControl = None


class CalledFunction(Body):
    name: str
    arguments: str  # JSON


class CalledTool(Body):
    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


_USE_TOOLS = Unsupported("is not served: use tools, tool_calls and messages of role tool")
_ONLY_TEXT = Unsupported("is not served: this model takes and gives text only")

# what chat templates see of a message
_SHOWN = {"role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content", "reasoning"}


class Message(Body):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Items[TextPart] | None = None  # may be left out beside tool_calls
    name: Name | None = None
    tool_calls: Items[CalledTool] | None = None  # what the assistant called
    tool_call_id: Name | None = None  # which call a message of role tool answers
    refusal: str | None = None  # part of our answers, so that clients can send those back unchanged
    annotations: list[Any] | None = None  # likewise
    # what the assistant thought; the template decides what becomes of it
    reasoning_content: str | None = None
    reasoning: str | None = None  # newer name of reasoning_content
    cache_control: CacheControl = None
    audio: Annotated[None, _ONLY_TEXT] = None
    function_call: Annotated[None, _USE_TOOLS] = None

    def plain(self) -> dict[str, Any]:
        """The message as chat templates expect it: some tell a content of null from none at all."""
        plain = self.model_dump(include=_SHOWN, exclude_none=True)
        is_null = self.content is None and "content" in self.model_fields_set
        return {**plain, "content": None} if is_null else plain


class JsonSchema(Body):
    name: Name
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")  # left out: any object
    strict: Bool | None = None  # accepted; the schema is always enforced


class ResponseFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    def content_schema(self) -> dict[str, Any] | None:
        """The JSON schema of the content; None if any text is allowed."""
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise FieldError(
                "response_format",
                'response_format has a json_schema if, and only if, its type is "json_schema".',
            )
        if self.type == "text":
            return None
        return (self.json_schema and self.json_schema.schema_) or {"type": "object"}


class TemplateFields(Body):
    """How messages become a prompt."""

    add_generation_prompt: Bool | None = None  # default true, and false with continue_final_message
    continue_final_message: Bool | None = None  # the answer continues the last message
    chat_template_kwargs: dict[Name, Any] | None = Field(None, max_length=MAX_TEMPLATE_KWARGS)
    # not supported: only neutral values are accepted
    chat_template: Annotated[
        None, Unsupported("is not served: the template is the model's own. Use /v1/completions for another")
    ] = None
    documents: Annotated[NoItems | None, Unsupported("is not served: put the documents into a message")] = (
        None
    )
    mm_processor_kwargs: Annotated[NoFields | None, _ONLY_TEXT] = None

    def template_options(self) -> TemplateOptions:
        """The options that were set. Contradicting ones are refused."""
        options: TemplateOptions = {}
        if self.continue_final_message:
            if self.add_generation_prompt:
                raise FieldError(
                    "continue_final_message",
                    "continue_final_message and add_generation_prompt cannot both be true: the answer either "
                    "continues the last message or begins a new one. Set one to false.",
                )
            options["continue_final_message"] = True
        elif self.add_generation_prompt is not None:
            options["add_generation_prompt"] = self.add_generation_prompt
        if self.chat_template_kwargs:
            options["chat_template_kwargs"] = self.chat_template_kwargs
        return options


class ChatRequest(TemplateFields, SamplingFields):
    model: Name | None = None
    messages: Annotated[Items[Message], Field(min_length=1)]
    max_completion_tokens: Int | None = Field(None, ge=1, le=2**31)  # default: until the context is full
    max_tokens: Int | None = Field(None, ge=1, le=2**31)  # older name; max_completion_tokens takes precedence
    logprobs: Bool | None = None
    top_logprobs: Int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    prompt_logprobs: Int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    return_token_ids: Bool | None = None  # of the prompt, and of each choice's output
    response_format: ResponseFormat | None = None
    tools: Items[FunctionTool] | None = None
    tool_choice: ChatToolChoice | None = None  # default: "auto" if there are tools
    parallel_tool_calls: Bool | None = None
    # accepted and without effect on the answer
    metadata: dict[str, Any] | None = Field(None, max_length=16)
    safety_identifier: Name | None = None
    prompt_cache_key: Name | None = None
    service_tier: Annotated[
        Literal["auto", "default"] | None, Unsupported("is not served: there is one tier. Leave it out")
    ] = None
    # not supported: only neutral values are accepted
    modalities: Annotated[Items[Literal["text"]] | None, _ONLY_TEXT] = None
    audio: Annotated[None, _ONLY_TEXT] = None
    functions: Annotated[None, _USE_TOOLS] = None
    function_call: Annotated[None, _USE_TOOLS] = None
    prediction: Annotated[
        None, Unsupported('is not served: leave it out; "speculative" chooses what is drafted')
    ] = None
    reasoning_effort: Annotated[
        Literal["none"] | None, Unsupported("is not served: ask for it in the messages")
    ] = None
    verbosity: Annotated[
        Literal["medium"] | None, Unsupported("is not served: ask for it in the messages")
    ] = None
    web_search_options: Annotated[None, Unsupported("is not served: give a search function in tools")] = None
    prompt_cache_retention: Annotated[
        None, Unsupported("is not served: the prefix cache keeps what it has room for")
    ] = None
    echo: Annotated[
        Literal[False] | None, Unsupported("is not served here: the answer is what the model adds")
    ] = None
    add_special_tokens: Annotated[
        Literal[False] | None, Unsupported("is not served here: the chat template writes them")
    ] = None
    include_reasoning: Bool | None = None  # false: what the model thought is left out of the answer


class TopLogprob(BaseModel):
    token: str
    logprob: float
    bytes: list[int] | None


class ContentLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChoiceLogprobs(BaseModel):
    content: list[ContentLogprob] | None
    refusal: None = None


class AnswerMessage(BaseModel):
    role: Literal["assistant"]
    content: str | None
    refusal: None = None
    reasoning_content: str | None = None  # what the model thought before
    tool_calls: list[CalledTool] | None = None


class ChatChoice(BaseModel):
    index: int
    message: AnswerMessage
    logprobs: ChoiceLogprobs | None
    finish_reason: FinishReason
    stop_reason: int | str | None
    token_ids: list[int] | None = None


class ChatCompletion(BaseModel):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: list[dict[str, Any] | None] | None = None
    prompt_token_ids: list[int] | None = None
    metrics: Metrics | None = None
    warnings: list[str] | None = None  # what the answer does not do, though it was asked for
