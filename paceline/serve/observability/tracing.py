"""OpenTelemetry traces: a span for each request to the model, sent by the SDK's own thread over OTLP/HTTP.

    chat smollm2-135m          the HTTP request, a child of the client's span if it sent a `traceparent`
      queue                    from arrival to its first pass
      prefill                  to its first token
      decode                   to its last token

Spans are made when a request has ended, from the times that the engine keeps anyway. Names of attributes are
those of the GenAI semantic conventions and of vLLM (`gen_ai.latency.*`); ours begin with `paceline.`.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import Span, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from paceline import __version__
from paceline.core.params import SamplingParams
from paceline.engine.outputs import RequestOutput
from paceline.serve.observability.record import RequestRecord

logger = logging.getLogger(__name__)

EXPORT_SECONDS = 5.0  # for the collector to take a batch of spans
CLOSE_SECONDS = 3.0  # to send the last spans when the server stops
TRACES_PATH = "/v1/traces"
MAX_INTEGER = 2**63 - 1
# by route; requests to other routes have no span
OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "text_completion",
    "/v1/messages": "chat",
    "/v1/responses": "chat",
}
Attributes = dict[str, Any]


class Tracing:
    """Sends spans to a collector. Where it is slow or gone, spans are dropped: requests never wait."""

    def __init__(self, endpoint: str, model: str, now: Callable[[], float]) -> None:
        """`endpoint`: an OTLP/HTTP collector, with or without the path. `now`: the engine's clock."""
        self._model = model
        self._now = now
        # OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES win over these
        resource = Resource({"service.name": "paceline", "service.version": __version__})
        self._provider = TracerProvider(
            resource=resource.merge(OTELResourceDetector().detect()), shutdown_on_exit=False
        )
        exporter = OTLPSpanExporter(endpoint=traces_url(endpoint), timeout=EXPORT_SECONDS)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("paceline", __version__)
        self._client_context = TraceContextTextMapPropagator()

    def request_ended(self, record: RequestRecord) -> None:
        """Queue the spans of a request that has ended. Never raises."""
        try:
            if record.route in OPERATIONS:
                self._add_request(record)
        except Exception:  # a trace is never worth a request
            logger.exception("the spans of a request could not be made")

    def close(self) -> None:
        """Send what is queued, for at most CLOSE_SECONDS."""
        closing = threading.Thread(target=self._provider.shutdown, name="paceline-traces", daemon=True)
        closing.start()
        closing.join(CLOSE_SECONDS)

    def _add_request(self, record: RequestRecord) -> None:
        end, operation = time.time_ns(), OPERATIONS[record.route]
        span = self._tracer.start_span(
            f"{operation} {self._model}",
            context=self._client_context.extract(record.trace_headers),
            kind=SpanKind.SERVER,
            start_time=end - _nanoseconds(time.monotonic() - record.begun),
        )
        if span.is_recording():  # else the client's `traceparent` or a sampler left it out
            outputs = record.generation.outputs if record.generation else []
            span.set_attributes(request_attributes(record, operation, self._model, outputs))
            if _has_failed(record, outputs):
                span.set_status(Status(StatusCode.ERROR))
            for output in outputs:
                self._add_phases(span, output, end - _nanoseconds(self._now()))
        span.end(end)

    def _add_phases(self, parent: Span, output: RequestOutput, epoch: int) -> None:
        """The child spans of one prompt; `epoch`: the time in nanoseconds when the engine's clock was 0."""
        metrics, context = output.metrics, set_span_in_context(parent)
        first = metrics.first_token_time
        for name, start, end, attributes in (
            ("queue", metrics.arrival_time, metrics.scheduled_time, {}),
            ("prefill", metrics.scheduled_time, first, prefill_attributes(output)),
            ("decode", first, metrics.finished_time, decode_attributes([output])),
        ):
            if start is not None and end is not None:
                begun = epoch + _nanoseconds(start)
                span = self._tracer.start_span(name, context, attributes=attributes, start_time=begun)
                span.end(epoch + _nanoseconds(end))


def traces_url(endpoint: str) -> str:
    """The URL that spans are sent to: the endpoint, with the usual path if it has none."""
    return endpoint.rstrip("/") + TRACES_PATH if urlsplit(endpoint).path in ("", "/") else endpoint


def request_attributes(
    record: RequestRecord, operation: str, model: str, outputs: list[RequestOutput]
) -> Attributes:
    """The attributes of a request's span; no prompt, no answer, no key."""
    attributes: Attributes = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": "paceline",
        "gen_ai.request.id": record.request_id,
        "gen_ai.request.model": model,
        "gen_ai.response.model": model,
        "http.request.method": record.method,
        "http.route": record.route,
        "paceline.segment": record.segment or None,
    }
    if record.status is not None:
        attributes["http.response.status_code"] = record.status
    if not record.complete:
        attributes["error.type"] = "disconnected"
    elif record.status is not None and record.status >= 400:
        attributes["error.type"] = str(record.status)
    if record.params is not None:
        attributes |= sampling_attributes(record.params)
    if outputs:
        attributes |= usage_attributes(outputs) | latency_attributes(outputs) | decode_attributes(outputs)
    return {name: value for name, value in attributes.items() if _can_be_sent(value)}


def sampling_attributes(params: SamplingParams) -> Attributes:
    """The sampling options of a request."""
    return {
        "gen_ai.request.max_tokens": params.max_tokens,
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p,
        "gen_ai.request.top_k": params.top_k,
        "gen_ai.request.frequency_penalty": params.frequency_penalty,
        "gen_ai.request.presence_penalty": params.presence_penalty,
        "gen_ai.request.seed": params.seed,
        "gen_ai.request.choice.count": params.n,
    }


def usage_attributes(outputs: list[RequestOutput]) -> Attributes:
    """Tokens in and out, and why the outputs ended."""
    completions = [completion for output in outputs for completion in output.outputs]
    return {
        "gen_ai.usage.input_tokens": sum(len(output.prompt_token_ids) for output in outputs),
        "gen_ai.usage.output_tokens": sum(len(completion.token_ids) for completion in completions),
        "gen_ai.usage.cache_read.input_tokens": sum(output.metrics.num_cached_tokens for output in outputs),
        "gen_ai.response.finish_reasons": [completion.finish_reason or "" for completion in completions],
    }


def latency_attributes(outputs: list[RequestOutput]) -> Attributes:
    """Times of a request in seconds, of the slowest of its prompts."""
    metrics = [output.metrics for output in outputs]

    def longest(begin: str, end: str) -> float | None:
        pairs = [(getattr(each, begin), getattr(each, end)) for each in metrics]
        return max((last - first for first, last in pairs if None not in (first, last)), default=None)

    first_token = longest("arrival_time", "first_token_time")
    return {
        "gen_ai.server.time_to_first_token": first_token,
        "gen_ai.latency.time_to_first_token": first_token,
        "gen_ai.latency.time_in_queue": longest("arrival_time", "scheduled_time"),
        "gen_ai.latency.time_in_model_prefill": longest("scheduled_time", "first_token_time"),
        "gen_ai.latency.time_in_model_decode": longest("first_token_time", "finished_time"),
        "gen_ai.latency.e2e": longest("arrival_time", "finished_time"),
    }


def prefill_attributes(output: RequestOutput) -> Attributes:
    """What was prefilled."""
    return {
        "gen_ai.usage.input_tokens": len(output.prompt_token_ids),
        "gen_ai.usage.cache_read.input_tokens": output.metrics.num_cached_tokens,
    }


def decode_attributes(outputs: list[RequestOutput]) -> Attributes:
    """What was generated, and what drafts gave."""
    drafts = [output.metrics.speculative for output in outputs]
    steps = sum(draft.num_spec_steps for draft in drafts)
    accepted = sum(draft.num_accepted_draft_tokens for draft in drafts)
    return {
        "gen_ai.usage.output_tokens": sum(
            len(completion.token_ids) for output in outputs for completion in output.outputs
        ),
        "paceline.speculative.drafters": sorted({name for draft in drafts for name in draft.drafters}),
        "paceline.speculative.num_spec_steps": steps,
        "paceline.speculative.num_draft_tokens": sum(draft.num_draft_tokens for draft in drafts),
        "paceline.speculative.num_accepted_draft_tokens": accepted,
        "paceline.speculative.mean_acceptance_length": 1.0 + accepted / max(1, steps),
    }


def _has_failed(record: RequestRecord, outputs: list[RequestOutput]) -> bool:
    """Whether the fault is the server's, or the client left: a wrong request is no error of the span."""
    reasons = {completion.finish_reason for output in outputs for completion in output.outputs}
    return not record.complete or "error" in reasons or (record.status or 0) >= 500


def _can_be_sent(value: object) -> bool:
    """OTLP has no null and no larger integers; one such value would cost its whole batch of spans."""
    return value is not None and not (isinstance(value, int) and value > MAX_INTEGER)


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)
