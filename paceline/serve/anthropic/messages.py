"""/v1/messages: Anthropic's conversation API, over the same prompts, tools and sampling as chat."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any

from fastapi import APIRouter, Request, Response

from paceline.engine.outputs import CompletionOutput, RequestOutput
from paceline.serve.anthropic.messages_input import messages_of
from paceline.serve.anthropic.messages_output import ContentBlocks
from paceline.serve.anthropic.messages_protocol import (
    AnthropicError,
    CountTokensRequest,
    MessageObject,
    MessagesRequest,
    TokenCount,
)
from paceline.serve.http.bodies import json_route
from paceline.serve.http.sse import EventResponse, event, to_json
from paceline.serve.openai.answers import ALL_ERRORS, documented, json_response
from paceline.serve.openai.generation import Generation
from paceline.serve.openai.protocol import Metrics
from paceline.serve.openai.tokens import most_tokens
from paceline.serve.routes.models import Attempt, Models, user_text
from paceline.serve.service import Prepared, Service
from paceline.serve.tools.toolbox import ToolPlan

_PING = event({"type": "ping"}, name="ping")


def router(models: Models) -> APIRouter:
    """The routes of messages."""
    routes = APIRouter(route_class=json_route(models), tags=["Anthropic"])

    @routes.post(
        "/v1/messages",
        response_model=MessageObject,
        responses=documented(*ALL_ERRORS, stream=True, form=AnthropicError),
    )
    async def messages(body: MessagesRequest, request: Request) -> Response:
        """The next message of a conversation. With `stream`, events as server-sent events."""
        attempt = await models.generate(request, body.model, body, _prepare)
        generation = attempt.generation
        answer = _Answer(body, attempt, f"msg_{request.state.request_id}", request.state.record.warnings)
        if body.stream:
            return EventResponse(answer.events(generation), generation.abort)
        (output,) = await attempt.service.finished(request, generation)
        return Response(answer.whole(output), media_type="application/json")

    @routes.post(
        "/v1/messages/count_tokens",
        response_model=TokenCount,
        responses=documented(*ALL_ERRORS, form=AnthropicError),
    )
    async def count_tokens(body: CountTokensRequest) -> Response:
        """The number of tokens of a conversation as the model gets it."""
        service = models.reference(body.model)
        return json_response({"input_tokens": await service.in_thread(_count, service, body)})

    return routes


def _prepare(service: Service, body: MessagesRequest) -> Prepared:
    """The request as a model gets it."""
    plan = _plan(service, body)
    params = body.sampling_params(
        max_tokens=body.max_tokens, stop=body.stop_sequences, **plan.sampling_options()
    )
    messages = messages_of(body)
    prompt = service.encode_chat(messages, plan, **body.template_options())
    plan = service.toolbox.reading(plan, prompt, params)
    return Prepared([prompt], params, plan, user_text(messages), _unread_thinking(service, body))


def _unread_thinking(service: Service, body: MessagesRequest) -> list[str]:
    """A warning if thinking is asked of a model whose chat template has no switch for it."""
    asked = body.thinking is not None and body.thinking.type != "disabled"
    if not asked or "enable_thinking" in service.tokenizer.template_variables:
        return []
    return ["thinking: the model's chat template has no enable_thinking, so it changes nothing"]


def _count(service: Service, body: CountTokensRequest) -> int:
    """The tokens of a conversation, which may be longer than the context: a client counts to shorten it."""
    text = service.chat_text(messages_of(body), _plan(service, body), **body.template_options())
    return len(service.encode_text(text, False, most_tokens(service)))


def _plan(service: Service, body: CountTokensRequest) -> ToolPlan:
    tools = [tool.tool() for tool in body.tools or ()]
    return service.toolbox.plan(tools, body.choice(), body.content_schema())


class _Answer:
    """Builds the answer to one request, whole or as events."""

    def __init__(
        self,
        body: MessagesRequest,
        attempt: Attempt[Prepared],
        message_id: str,
        warnings: Sequence[str],
    ) -> None:
        self._attempt = attempt
        self._parser = attempt.prepared.plan.parser()
        self._blocks = ContentBlocks()
        self._wants_metrics = bool(body.return_metrics)
        self._head: dict[str, Any] = {
            "id": message_id,
            "type": "message",
            "role": "assistant",
            "model": attempt.asked,
            **({"warnings": warnings} if warnings else {}),
        }

    def whole(self, output: RequestOutput) -> str:
        """The JSON of the message of a finished output."""
        (completion,) = output.outputs
        for parsed in [*self._parser.feed(completion.text), *self._parser.finish()]:
            list(self._blocks.take(parsed))
        list(self._blocks.finish())
        end = {**self._stopped(completion), "usage": _usage(output), **self._metrics(output)}
        return f'{to_json(self._head | end)[:-1]},"content":{self._blocks.json()}}}'

    async def events(self, generation: Generation) -> AsyncIterator[bytes]:
        """The events of a stream."""
        begun: dict[str, Any] = {"content": [], "stop_reason": None, "stop_sequence": None}
        # how much was cached is known at the end
        usage = _counts(len(self._attempt.prepared.prompts[0]), num_cached=0, num_output=0)
        yield _event({"type": "message_start", "message": {**self._head, **begun, "usage": usage}}) + _PING
        async for batch in generation:
            parsed = [event for _, update in batch for event in self._parser.feed(update.text)]
            yield b"".join(_event(wire) for event in parsed for wire in self._blocks.take(event))
        (output,) = generation.outputs
        last = [wire for parsed in self._parser.finish() for wire in self._blocks.take(parsed)]
        end = {"delta": self._stopped(output.outputs[0]), "usage": _usage(output), **self._metrics(output)}
        last += [*self._blocks.finish(), {"type": "message_delta", **end}, {"type": "message_stop"}]
        yield b"".join(map(_event, last))

    def _stopped(self, completion: CompletionOutput) -> dict[str, Any]:
        """Why the answer ended."""
        reason, sequence = completion.finish_reason, completion.stop_reason
        if reason == "length":
            return {"stop_reason": "max_tokens", "stop_sequence": None}
        if isinstance(sequence, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": sequence}
        return {"stop_reason": "tool_use" if self._parser.num_calls else "end_turn", "stop_sequence": None}

    def _metrics(self, output: RequestOutput) -> dict[str, Any]:
        if not self._wants_metrics:
            return {}
        return {"metrics": Metrics.of(output, self._attempt.routed).model_dump()}


def _event(data: dict[str, Any]) -> bytes:
    return event(data, name=data["type"])


def _usage(output: RequestOutput) -> dict[str, int]:
    num_prompt, num_output = len(output.prompt_token_ids), len(output.outputs[0].token_ids)
    return _counts(num_prompt, output.metrics.num_cached_tokens, num_output)


def _counts(num_prompt: int, num_cached: int, num_output: int) -> dict[str, int]:
    """Anthropic's usage: the input is counted without what was read from the cache."""
    return {
        "input_tokens": num_prompt - num_cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": num_cached,
        "output_tokens": num_output,
    }
