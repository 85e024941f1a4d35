"""/v1/chat/completions: the next message of a conversation."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, Request, Response

from paceline.core.params import SamplingParams
from paceline.engine.frontend.stream import Update
from paceline.engine.outputs import CompletionOutput, RequestOutput
from paceline.serve.http.bodies import json_route
from paceline.serve.http.errors import FieldError
from paceline.serve.http.sse import EventResponse
from paceline.serve.openai.answers import (
    GENERATES,
    ChunkMaker,
    check_fields,
    check_prompt_logprobs,
    json_answer,
    size_of,
)
from paceline.serve.openai.chat_protocol import ChatCompletion, ChatRequest
from paceline.serve.openai.generation import Generation
from paceline.serve.openai.logprobs import chat_logprobs, prompt_logprobs
from paceline.serve.openai.protocol import Metrics, usage_of
from paceline.serve.routes.models import Attempt, Models, user_text
from paceline.serve.service import Prepared, Service
from paceline.serve.tools.chat_fields import chat_choice, chat_tools
from paceline.serve.tools.events import (
    Arguments,
    CallStarted,
    Content,
    Event,
    OutputParser,
    Reasoning,
    read_output,
)
from paceline.serve.tools.toolbox import ToolPlan


def router(models: Models) -> APIRouter:
    """The routes of chat completions."""
    routes = APIRouter(route_class=json_route(models), tags=["OpenAI"])

    @routes.post("/v1/chat/completions", response_model=ChatCompletion, responses=GENERATES)
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        """The next message of a conversation. With `stream`, chunks as server-sent events."""
        attempt = await models.generate(request, body.model, body, _prepare)
        service, generation = attempt.service, attempt.generation
        kind = "chat.completion.chunk" if body.stream else "chat.completion"
        head = service.head(request, "chatcmpl", kind, attempt.asked)
        answer = _Answer(attempt, body, head, request.state.record.warnings)
        if body.stream:
            return EventResponse(answer.chunks(generation), generation.abort)
        (output,) = await service.finished(request, generation)
        size = size_of([output], prompt_ids=bool(body.return_token_ids))
        return await json_answer(service, lambda: answer.whole(output), size)

    return routes


def _prepare(service: Service, body: ChatRequest) -> Prepared:
    """The request as a model gets it."""
    plan, params = _plan(service, body)
    messages = [message.plain() for message in body.messages]
    prompt = service.encode_chat(messages, plan, **body.template_options())
    check_prompt_logprobs([prompt], params)
    plan = service.toolbox.reading(plan, prompt, params)
    return Prepared([prompt], params, plan, user_text(messages), _unread_variables(service, body))


def _unread_variables(service: Service, body: ChatRequest) -> list[str]:
    """A warning for each of chat_template_kwargs that the model's chat template does not read."""
    given = body.chat_template_kwargs or {}
    return [
        f"chat_template_kwargs.{name}: the model's chat template has no such variable, so it changes nothing"
        for name in given
        if name not in service.tokenizer.template_variables
    ]


def _plan(service: Service, body: ChatRequest) -> tuple[ToolPlan, SamplingParams]:
    """The tool plan and the sampling parameters of a request. Contradicting fields are refused."""
    check_fields(body)
    if body.top_logprobs is not None and not body.logprobs:
        raise FieldError("top_logprobs", "top_logprobs needs logprobs: set logprobs to true.")
    if body.stream and body.prompt_logprobs is not None:
        raise FieldError("stream", "log-probabilities of a prompt are not streamed: set stream to false.")
    schema = body.response_format.content_schema() if body.response_format is not None else None
    choice = chat_choice(body.tool_choice, body.parallel_tool_calls)
    plan = service.toolbox.plan(chat_tools(body.tools), choice, schema)
    params = body.sampling_params(
        max_tokens=body.max_completion_tokens or body.max_tokens,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        prompt_logprobs=body.prompt_logprobs,
        **plan.sampling_options(),
    )
    return plan, params


@dataclass
class _Answer:
    """Builds the answer to one request, whole or as chunks."""

    attempt: Attempt[Prepared]
    body: ChatRequest
    head: dict[str, Any]
    warnings: list[str]

    def whole(self, output: RequestOutput) -> dict[str, Any]:
        choices = [self._choice(completion) for completion in output.outputs]
        body = {**self.head, "choices": choices, "usage": usage_of([output])}
        if output.prompt_logprobs is not None:
            body["prompt_logprobs"] = prompt_logprobs(output.prompt_logprobs, self.body.prompt_logprobs or 0)
        if self.body.return_token_ids:
            body["prompt_token_ids"] = output.prompt_token_ids
        if self.body.return_metrics:
            body["metrics"] = Metrics.of(output, self.attempt.routed).model_dump()
        if self.warnings:
            body["warnings"] = self.warnings
        return body

    async def chunks(self, generation: Generation) -> AsyncIterator[bytes]:
        (prompt,) = self.attempt.prepared.prompts
        maker = ChunkMaker(self.head, self.body, len(prompt), self.attempt.routed)
        prompt_ids = {"prompt_token_ids": prompt} if self.body.return_token_ids else {}
        parsers: dict[int, OutputParser] = {}
        async for batch in generation:
            written = []
            for index, update in batch:
                maker.count(update)
                if index not in parsers:
                    parsers[index] = self.attempt.prepared.plan.parser()
                    started = _delta(index, {"role": "assistant", "content": ""})
                    written.append(maker.chunk(started, **prompt_ids))
                written += [maker.chunk(choice) for choice in self._deltas(index, update, parsers[index])]
            yield b"".join(written)
        yield maker.end(generation)

    def _deltas(self, index: int, update: Update, parser: OutputParser) -> list[dict[str, Any]]:
        """The deltas of an update: content, tool calls and, at the end, the finish reason."""
        events = parser.feed(update.text)
        if update.finish_reason is not None:
            events += parser.finish()
        choices = [_delta(index, delta) for delta in map(self._as_delta, events) if delta]
        if update.token_ids and (update.logprobs or self.body.return_token_ids):
            choices = choices or [_delta(index, {})]
        if update.logprobs:
            choices[0]["logprobs"] = self._logprobs(list(update.token_ids), list(update.logprobs))
        if self.body.return_token_ids:
            for number, choice in enumerate(choices):
                choice["token_ids"] = [] if number else list(update.token_ids)
        if update.finish_reason is not None:
            reason = _finish_reason(update.finish_reason, parser)
            choices.append({**_delta(index, {}), "finish_reason": reason, "stop_reason": update.stop_reason})
        return choices

    def _choice(self, completion: CompletionOutput) -> dict[str, Any]:
        parser = self.attempt.prepared.plan.parser()
        content, calls, reasoning = read_output(parser, completion.text)
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if reasoning and self.body.include_reasoning is not False:
            message["reasoning_content"] = reasoning
        if calls:
            message["content"] = content or None
            message["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for call in calls
            ]
        assert completion.finish_reason is not None
        token_ids = {"token_ids": completion.token_ids} if self.body.return_token_ids else {}
        return {
            "index": completion.index,
            "message": message,
            "logprobs": None
            if completion.logprobs is None
            else self._logprobs(completion.token_ids, completion.logprobs),
            "finish_reason": _finish_reason(completion.finish_reason, parser),
            "stop_reason": completion.stop_reason,
            **token_ids,
        }

    def _logprobs(self, token_ids: list[int], entries: list[Any]) -> dict[str, Any]:
        return chat_logprobs(token_ids, entries, self.body.top_logprobs or 0, self.attempt.service.tokenizer)

    def _as_delta(self, event: Event) -> dict[str, Any] | None:
        match event:
            case Content(text=text):
                return {"content": text}
            case Reasoning(text=text):
                return None if self.body.include_reasoning is False else {"reasoning_content": text}
            case CallStarted(index=index, id=call_id, name=name):
                function = {"name": name, "arguments": ""}
                call = {"index": index, "id": call_id, "type": "function", "function": function}
                return {"tool_calls": [call]}
            case Arguments(index=index, text=text):
                return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}
            case _:
                return None  # OpenAI's deltas do not mark the end of a call


def _delta(index: int, delta: dict[str, Any]) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}


def _finish_reason(reason: str, parser: OutputParser) -> str:
    return "tool_calls" if reason == "stop" and parser.num_calls else reason
