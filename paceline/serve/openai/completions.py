"""/v1/completions: continuations of one or several prompts."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, Field, PlainValidator
from pydantic_core import PydanticCustomError

from paceline.core.params import MAX_LOGPROBS, MAX_N, SamplingParams
from paceline.engine.frontend.stream import Update
from paceline.engine.outputs import CompletionOutput, RequestOutput, TokenLogprobs
from paceline.serve.http.bodies import json_route
from paceline.serve.http.errors import FieldError
from paceline.serve.http.sse import EventResponse
from paceline.serve.openai.answers import (
    GENERATES,
    ChunkMaker,
    FinishReason,
    check_fields,
    check_prompt_logprobs,
    json_answer,
    size_of,
)
from paceline.serve.openai.fields import Bool, Int, Name, Unsupported
from paceline.serve.openai.generation import Generation
from paceline.serve.openai.logprobs import CompletionLogprobs, prompt_logprobs
from paceline.serve.openai.protocol import Metrics, SamplingFields, Usage, usage_of
from paceline.serve.routes.models import Attempt, Models
from paceline.serve.service import Prepared, Service

MAX_OUTPUTS = MAX_N  # outputs per HTTP request, over all its prompts
DEFAULT_MAX_TOKENS = 16  # tokens; OpenAI's default


def _checked_prompt(prompt: Any) -> list[str | list[int]]:
    """The list of prompts, each a text or token ids."""
    prompts = [prompt] if isinstance(prompt, str) or _are_ids(prompt) else prompt
    if not isinstance(prompts, list) or not prompts:
        raise PydanticCustomError(
            "prompt", "must be a text, a list of token ids, or a list of texts or of lists of token ids"
        )
    for number, item in enumerate(prompts):
        if not item or not (isinstance(item, str) or _are_ids(item)):
            where = f"; item {number} of the list is {item!r:.40}" if prompts is prompt else ""
            raise PydanticCustomError(
                "prompt", f"must be a text or a list of token ids, and not empty{where}"
            )
    return prompts


def _are_ids(value: Any) -> bool:
    return isinstance(value, list) and set(map(type, value)) == {int}


Text = Annotated[str, Field(min_length=1)]
Ids = Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]
Prompts = Annotated[
    list[str | list[int]],
    PlainValidator(
        _checked_prompt,
        json_schema_input_type=Text
        | Ids
        | Annotated[list[Text | Ids], Field(min_length=1, max_length=MAX_OUTPUTS)],
    ),
]


class CompletionRequest(SamplingFields):
    model: Name | None = None
    prompt: Prompts
    max_tokens: Int | None = Field(None, ge=0, le=2**31)  # 16 by default; 0 only with echo
    echo: Bool | None = None  # prepend the prompt to the output
    logprobs: Int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    prompt_logprobs: Int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    add_special_tokens: Bool | None = None  # such as BOS before a text; default true
    return_token_ids: Bool | None = None  # each choice has the token ids of its prompt and of its output
    best_of: Annotated[Literal[1] | None, Unsupported("is not served: use n, and choose among them")] = None
    suffix: Annotated[
        None,
        Unsupported("is not served: write the prompt in your model's own form for filling in the middle"),
    ] = None


class LogprobsOfTokens(BaseModel):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(BaseModel):
    index: int
    text: str
    logprobs: LogprobsOfTokens | None
    finish_reason: FinishReason
    stop_reason: int | str | None
    prompt_logprobs: list[dict[str, Any] | None] | None = None
    prompt_token_ids: list[int] | None = None
    token_ids: list[int] | None = None


class Completion(BaseModel):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: Usage
    metrics: Metrics | None = None


def router(models: Models) -> APIRouter:
    """The routes of completions."""
    routes = APIRouter(route_class=json_route(models), tags=["OpenAI"])

    @routes.post("/v1/completions", response_model=Completion, responses=GENERATES)
    async def completions(body: CompletionRequest, request: Request) -> Response:
        """The continuation of a prompt. With `stream`, chunks as server-sent events."""
        attempt = await models.generate(request, body.model, body, _prepare)
        service, generation = attempt.service, attempt.generation
        answer = _Answer(attempt, body, service.head(request, "cmpl", "text_completion", attempt.asked))
        if body.stream:
            return EventResponse(answer.chunks(generation), generation.abort)
        outputs = await service.finished(request, generation)
        size = size_of(outputs, attempt.prepared.echoed, bool(body.return_token_ids))
        return await json_answer(service, lambda: answer.whole(outputs), size)

    return routes


@dataclass(frozen=True)
class _Prepared(Prepared):
    echoed: list[str] = field(default_factory=list)  # texts of the prompts; empty without echo


def _prepare(service: Service, body: CompletionRequest) -> _Prepared:
    """The request as a model gets it."""
    params = _params(body)
    prompts = service.encode(body.prompt, body.add_special_tokens is not False)
    check_prompt_logprobs(prompts, params)
    echoed = []
    if body.echo:
        decode = service.tokenizer.decode
        echoed = [prompt if isinstance(prompt, str) else decode(prompt) for prompt in body.prompt]
    return _Prepared(prompts, params, echoed=echoed)


def _params(body: CompletionRequest) -> SamplingParams:
    """The sampling parameters of a request. Contradicting fields are refused."""
    check_fields(body, len(body.prompt))
    outputs = len(body.prompt) * (body.n or 1)
    if outputs > MAX_OUTPUTS:
        raise FieldError(
            "prompt",
            f"{len(body.prompt)} prompts with n = {body.n or 1} are {outputs} outputs, and at most "
            f"{MAX_OUTPUTS} are made for one request. Send several requests.",
        )
    if body.max_tokens == 0 and not body.echo:
        raise FieldError("max_tokens", "max_tokens is 0, which is only of use with echo: use at least 1.")
    if body.max_tokens == 0 and body.stream:
        raise FieldError("stream", "max_tokens is 0, so there is nothing to stream: set stream to false.")
    if body.stream and (body.prompt_logprobs is not None or (body.echo and body.logprobs is not None)):
        raise FieldError("stream", "log-probabilities of a prompt are not streamed: set stream to false.")
    num_prompt_logprobs = body.prompt_logprobs
    if body.echo and body.logprobs is not None:
        num_prompt_logprobs = max(body.logprobs, num_prompt_logprobs or 0)
    return body.sampling_params(
        max_tokens=max(1, DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens),
        logprobs=body.logprobs,
        prompt_logprobs=num_prompt_logprobs,
    )


@dataclass
class _Answer:
    """Builds the answer to one request, whole or as chunks."""

    attempt: Attempt[_Prepared]
    body: CompletionRequest
    head: dict[str, Any]

    @property
    def prepared(self) -> _Prepared:
        return self.attempt.prepared

    def whole(self, outputs: list[RequestOutput]) -> dict[str, Any]:
        if self.body.max_tokens == 0:
            outputs = [_without_output(output) for output in outputs]
        choices = [
            self._choice(number * self.prepared.params.n + completion.index, output, completion)
            for number, output in enumerate(outputs)
            for completion in output.outputs
        ]
        body = {**self.head, "choices": choices, "usage": usage_of(outputs)}
        if self.body.return_metrics:
            body["metrics"] = Metrics.of(outputs[0], self.attempt.routed).model_dump()
        return body

    async def chunks(self, generation: Generation) -> AsyncIterator[bytes]:
        maker = ChunkMaker(self.head, self.body, sum(map(len, self.prepared.prompts)), self.attempt.routed)
        count = len(self.prepared.prompts) * self.prepared.params.n
        logprobs = [self._logprobs() for _ in range(count)]
        # choices whose prompt_token_ids were not sent yet
        untold = set(range(count)) if self.body.return_token_ids else set()
        if self.body.echo:
            for index in range(count):  # one event each: an echoed prompt may be long
                yield maker.chunk(_choice(index, self.prepared.echoed[index // self.prepared.params.n]))
        async for batch in generation:
            written = []
            for index, update in batch:
                maker.count(update)
                choice = _choice(index, update.text)
                if update.logprobs is not None:
                    choice["logprobs"] = logprobs[index].take(update.token_ids, update.logprobs)
                if update.finish_reason is not None:
                    choice["finish_reason"] = update.finish_reason
                    choice["stop_reason"] = update.stop_reason
                if self.body.return_token_ids:
                    choice["token_ids"] = list(update.token_ids)
                if index in untold:
                    untold.remove(index)
                    choice["prompt_token_ids"] = self.prepared.prompts[index // self.prepared.params.n]
                if _has_content(update) or (self.body.return_token_ids and update.token_ids):
                    written.append(maker.chunk(choice))
            yield b"".join(written)
        yield maker.end(generation)

    def _choice(self, index: int, output: RequestOutput, completion: CompletionOutput) -> dict[str, Any]:
        choice = _choice(index, completion.text)
        if self.body.echo:
            choice["text"] = self.prepared.echoed[index // self.prepared.params.n] + completion.text
        if completion.logprobs is not None:
            tokens: list[int] = completion.token_ids
            entries: list[TokenLogprobs | None] = [*completion.logprobs]
            if self.body.echo and output.prompt_logprobs is not None:
                tokens = output.prompt_token_ids + tokens
                entries = [*output.prompt_logprobs, *entries]
            choice["logprobs"] = self._logprobs().take(tokens, entries)
        if self.body.prompt_logprobs is not None and output.prompt_logprobs is not None:
            choice["prompt_logprobs"] = prompt_logprobs(output.prompt_logprobs, self.body.prompt_logprobs)
        if self.body.return_token_ids:
            choice["prompt_token_ids"] = output.prompt_token_ids
            choice["token_ids"] = completion.token_ids
        return {**choice, "finish_reason": completion.finish_reason, "stop_reason": completion.stop_reason}

    def _logprobs(self) -> CompletionLogprobs:
        return CompletionLogprobs(
            self.attempt.service.tokenizer, self.body.logprobs or 0, self.prepared.params.skip_special_tokens
        )


def _choice(index: int, text: str) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": None, "finish_reason": None}


def _has_content(update: Update) -> bool:
    """Whether an update has anything to send. Part of a UTF-8 character has not."""
    return bool(update.text or update.logprobs or update.finish_reason)


def _without_output(output: RequestOutput) -> RequestOutput:
    """The output without its tokens, for max_tokens 0: the engine generates at least one."""
    empty = [
        replace(
            completion,
            text="",
            token_ids=[],
            logprobs=completion.logprobs and [],
            finish_reason="length",
            stop_reason=None,
        )
        for completion in output.outputs
    ]
    return replace(output, outputs=empty)
