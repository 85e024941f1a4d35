"""/v1/responses: OpenAI's newer conversation API. Stateless: a request carries the whole conversation."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import AsyncIterator
from typing import Any

from fastapi import APIRouter, Request, Response

from paceline.core.params import SamplingParams
from paceline.engine.outputs import RequestOutput
from paceline.serve.http.bodies import json_route
from paceline.serve.http.errors import describe
from paceline.serve.http.sse import EventResponse, event
from paceline.serve.openai.answers import GENERATES, json_response
from paceline.serve.openai.generation import Generation
from paceline.serve.openai.protocol import Metrics
from paceline.serve.openai.responses_input import messages_of
from paceline.serve.openai.responses_output import OutputItems
from paceline.serve.openai.responses_protocol import ResponseObject, ResponseRequest
from paceline.serve.routes.models import Attempt, Models, user_text
from paceline.serve.service import Prepared, Service
from paceline.serve.tools.toolbox import ToolPlan

logger = logging.getLogger(__name__)


def router(models: Models) -> APIRouter:
    """The route of responses."""
    routes = APIRouter(route_class=json_route(models), tags=["OpenAI"])

    @routes.post("/v1/responses", response_model=ResponseObject, responses=GENERATES)
    async def responses(body: ResponseRequest, request: Request) -> Response:
        """The answer to an input. With `stream`, events as server-sent events."""
        attempt = await models.generate(request, body.model, body, _prepare)
        generation = attempt.generation
        answer = _Answer(body, attempt, f"resp_{request.state.request_id}", request.state.record.warnings)
        if body.stream:
            return EventResponse(answer.events(generation), generation.abort)
        (output,) = await attempt.service.finished(request, generation)
        return json_response(answer.whole(output))

    return routes


def _prepare(service: Service, body: ResponseRequest) -> Prepared:
    """The request as a model gets it."""
    messages = messages_of(body)
    plan, params = _plan(service, body)
    prompt = service.encode_chat(messages, plan)
    plan = service.toolbox.reading(plan, prompt, params)
    return Prepared([prompt], params, plan, user_text(messages))


def _plan(service: Service, body: ResponseRequest) -> tuple[ToolPlan, SamplingParams]:
    """The tool plan and the sampling parameters of a request."""
    tools = [tool.tool() for tool in body.tools or ()]
    plan = service.toolbox.plan(tools, body.choice(), body.content_schema())
    return plan, body.sampling_params(max_tokens=body.max_output_tokens, **plan.sampling_options())


class _Answer:
    """Builds the answer to one request, whole or as events."""

    def __init__(
        self,
        body: ResponseRequest,
        attempt: Attempt[Prepared],
        response_id: str,
        warnings: list[str],
    ) -> None:
        self._attempt = attempt
        self._parser = attempt.prepared.plan.parser()
        self._items = OutputItems(_new_id)
        self._sequence = 0
        self._wants_metrics = bool(body.return_metrics)
        self._head: dict[str, Any] = {
            "id": response_id,
            "object": "response",
            "created_at": int(time.time()),
            "model": attempt.asked,
            **_echoed(body, attempt.prepared.params),
            **({"warnings": warnings} if warnings else {}),
        }

    def whole(self, output: RequestOutput) -> dict[str, Any]:
        """The response object of a finished output."""
        (completion,) = output.outputs
        for parsed in [*self._parser.feed(completion.text), *self._parser.finish()]:
            list(self._items.take(parsed))
        list(self._items.finish(completion.finish_reason == "length"))
        return self._ended(output)

    async def events(self, generation: Generation) -> AsyncIterator[bytes]:
        """The events of a stream. If it fails, the last one is response.failed."""
        begun = self._response("in_progress")
        yield self._lifecycle("created", begun) + self._lifecycle("in_progress", begun)
        try:
            async for batch in generation:
                yield b"".join(self._written(update.text) for _, update in batch)
        except Exception as error:
            status, body = describe(error)
            if status == 500:
                logger.error("a stream failed", exc_info=error)
            details = {"code": "server_error", "message": body["error"]["message"]}
            yield self._lifecycle("failed", {**self._response("failed"), "error": details})
            return
        (output,) = generation.outputs
        cut_off = output.outputs[0].finish_reason == "length"
        last = [wire for parsed in self._parser.finish() for wire in self._items.take(parsed)]
        yield b"".join(self._event(wire) for wire in [*last, *self._items.finish(cut_off)])
        ended = self._ended(output)
        yield self._lifecycle(ended["status"], ended)

    def _written(self, text: str) -> bytes:
        parsed = self._parser.feed(text)
        return b"".join(self._event(wire) for event in parsed for wire in self._items.take(event))

    def _ended(self, output: RequestOutput) -> dict[str, Any]:
        cut_off = output.outputs[0].finish_reason == "length"
        response = self._response("incomplete" if cut_off else "completed")
        response["usage"] = _usage(output)
        if cut_off:
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        else:
            response["completed_at"] = int(time.time())
        if self._wants_metrics:
            response["metrics"] = Metrics.of(output, self._attempt.routed).model_dump()
        return response

    def _response(self, status: str) -> dict[str, Any]:
        nothing = {"completed_at": None, "error": None, "incomplete_details": None, "usage": None}
        return {**self._head, **nothing, "status": status, "output": list(self._items.items)}

    def _lifecycle(self, kind: str, response: dict[str, Any]) -> bytes:
        return self._event({"type": f"response.{kind}", "response": response})

    def _event(self, data: dict[str, Any]) -> bytes:
        numbered = {**data, "sequence_number": self._sequence}
        self._sequence += 1
        return event(numbered, name=data["type"])


def _echoed(body: ResponseRequest, params: SamplingParams) -> dict[str, Any]:
    """The request fields that a response repeats."""
    text_format = (body.text and body.text.format and body.text.format.model_dump(by_alias=True)) or {}
    choice = body.tool_choice
    return {
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "text": {"format": _without_none(text_format) or {"type": "text"}},
        "tools": [tool.model_dump() for tool in body.tools or ()],
        "tool_choice": choice if isinstance(choice, str) else choice.model_dump() if choice else "auto",
        "store": False,
        "background": False,
        "previous_response_id": None,
        "truncation": "disabled",
        "service_tier": "default",
        "reasoning": {"effort": None, "summary": None},
        "safety_identifier": body.safety_identifier,
        "prompt_cache_key": body.prompt_cache_key,
        "user": body.user,
        "top_logprobs": 0,
    }


def _usage(output: RequestOutput) -> dict[str, Any]:
    num_prompt, num_output = len(output.prompt_token_ids), len(output.outputs[0].token_ids)
    cached = {"cached_tokens": output.metrics.num_cached_tokens, "cache_write_tokens": 0}
    return {
        "input_tokens": num_prompt,
        "input_tokens_details": cached,
        "output_tokens": num_output,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": num_prompt + num_output,
    }


def _without_none(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def _new_id(prefix: str) -> str:
    return f"{prefix}_{secrets.token_hex(12)}"
