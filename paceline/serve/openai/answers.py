"""What the generating endpoints share: documented status codes, JSON responses, stream chunks, usage."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

from pydantic import BaseModel
from starlette.responses import Response

from paceline.core.params import MAX_LOGPROBS, SamplingParams
from paceline.engine.frontend.stream import Update
from paceline.engine.outputs import RequestOutput
from paceline.errors import RequestError
from paceline.serve.http.errors import FieldError
from paceline.serve.http.sse import DONE, event, to_json, to_json_pieces
from paceline.serve.openai.generation import Generation
from paceline.serve.openai.protocol import Metrics, Routed, SamplingFields, usage, usage_of
from paceline.serve.service import Service

LARGE_ANSWER = 4096  # JSON values; a smaller answer is serialized within a few milliseconds
MAX_PROMPT_LOGPROBS = 2**19  # per answer: 128 prompts of 2,000 tokens, each with its likeliest token


class ErrorDetails(BaseModel):
    message: str
    type: str
    param: str | None  # the field that is wrong
    code: str | int | None


class ErrorBody(BaseModel):
    error: ErrorDetails


FinishReason = Literal["stop", "length", "tool_calls"]

_ERRORS: dict[int, dict[str, Any]] = {
    400: {"description": "The request is wrong; `param` names the field"},
    401: {"description": "An API key is needed"},
    404: {"description": "This model is not served here"},
    408: {"description": "The request did not come in time"},
    413: {"description": "The body is too large"},
    415: {"description": "The body is not JSON"},
    429: {"description": "Too many requests wait; come again after Retry-After"},
    500: {"description": "The server failed on this request"},
    503: {"description": "The server is stopping, or its engine is dead"},
    504: {"description": "The answer took longer than the server allows"},
}
ALL_ERRORS = tuple(_ERRORS)


def documented(
    *statuses: int, stream: bool = False, form: type[BaseModel] = ErrorBody
) -> dict[int | str, dict[str, Any]]:
    """The OpenAPI entries for these error statuses, whose bodies are `form`.

    With `stream`, also one for a 200 with an event stream.
    """
    event = {"type": "object", "properties": {"data": {"type": "string"}}, "required": ["data"]}
    events: dict[int | str, dict[str, Any]] = {
        200: {"content": {"text/event-stream": {"schema": event}}}  # the schema of one event
    }
    # FastAPI builds a validator for each model that it is given: one makes the schema that the others name
    named = {"content": {"application/json": {"schema": {"$ref": f"#/components/schemas/{form.__name__}"}}}}
    errors = {
        status: _ERRORS[status] | ({"model": form} if status == statuses[0] else named) for status in statuses
    }
    return (events if stream else {}) | errors


GENERATES = documented(*ALL_ERRORS, stream=True)
READS = documented(*ALL_ERRORS)
ASKS = documented(401, 500, 503)


def json_response(body: dict[str, Any]) -> Response:
    """A JSON response, serialized in one call that holds the GIL."""
    return Response(to_json(body), media_type="application/json")


async def json_answer(service: Service, write: Callable[[], dict[str, Any]], size: int) -> Response:
    """The response whose body `write` builds. Large ones (`size` values) are built in a worker thread."""
    if size <= LARGE_ANSWER:
        return json_response(write())

    def in_pieces() -> Response:
        return Response("".join(to_json_pieces(write())), media_type="application/json")

    return await service.in_thread(in_pieces)


def size_of(outputs: Sequence[RequestOutput], echoed: Sequence[str] = (), prompt_ids: bool = False) -> int:
    """Estimated number of JSON values in an answer. Sixteen characters of echoed text count as one.

    `prompt_ids`: the answer has the prompts' token ids.
    """
    size = 0
    for number, output in enumerate(outputs):
        per_token = 1 + (output.outputs[0].logprobs is not None) * MAX_LOGPROBS
        prompt_size = len(output.prompt_logprobs or ()) * MAX_LOGPROBS
        prompt_size += len(echoed[number]) // 16 if echoed else 0
        prompt_size += len(output.prompt_token_ids) if prompt_ids else 0
        size += sum(len(completion.token_ids) * per_token + prompt_size for completion in output.outputs)
    return size


def check_prompt_logprobs(prompts: Sequence[Sequence[int]], params: SamplingParams) -> None:
    """Raise RequestError if prompt_logprobs would make the answer larger than MAX_PROMPT_LOGPROBS values."""
    if params.prompt_logprobs is None:
        return
    size = params.n * sum(map(len, prompts)) * (params.prompt_logprobs + 1)
    if size > MAX_PROMPT_LOGPROBS:
        raise RequestError(
            f"prompt_logprobs asks for {size} log-probabilities of prompts, and at most "
            f"{MAX_PROMPT_LOGPROBS} are given in one answer. Ask for fewer, or send several requests."
        )


class ChunkMaker:
    """Serializes the chunks of a stream: shared fields, one choice, and usage where it was requested."""

    def __init__(
        self,
        head: dict[str, Any],
        fields: SamplingFields,
        num_prompt_tokens: int,
        routed: Routed | None = None,
    ) -> None:
        """`routed`: see Metrics."""
        self._head = head
        self._routed = routed
        self._before = f'data: {to_json(head)[:-1]},"choices":['  # the same in every chunk: serialized once
        self._fields = fields
        self._num_prompt_tokens = num_prompt_tokens
        self._num_tokens = 0

    def count(self, update: Update) -> None:
        """Add the tokens of an update to the usage."""
        self._num_tokens += len(update.token_ids)

    def chunk(self, choice: dict[str, Any], **more: Any) -> bytes:
        """One server-sent event with one choice; `more` are fields beside it."""
        if self._fields.wants_running_usage:
            more["usage"] = usage(self._num_prompt_tokens, self._num_tokens)
        elif self._fields.wants_usage:
            more["usage"] = None
        after = f"],{to_json(more)[1:]}" if more else "]}"
        return f"{self._before}{to_json(choice)}{after}\n\n".encode()

    def end(self, generation: Generation) -> bytes:
        """The final events: usage and metrics (a chunk without choices, if requested), then [DONE]."""
        data: dict[str, Any] = {}
        if self._fields.wants_usage:
            data["usage"] = usage_of(generation.outputs)
        if self._fields.return_metrics:
            data["metrics"] = Metrics.of(generation.outputs[0], self._routed).model_dump()
        return (event({**self._head, "choices": [], **data}) if data else b"") + DONE


def check_fields(fields: SamplingFields, num_prompts: int = 1) -> None:
    """Raise FieldError if two fields contradict each other."""
    if fields.stream_options is not None and not fields.stream:
        raise FieldError("stream_options", "stream_options is only for streams: set stream to true.")
    if fields.return_metrics and num_prompts > 1:
        raise FieldError("return_metrics", "return_metrics is for one prompt: send several requests.")
