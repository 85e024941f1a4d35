"""OpenTelemetry traces, as a collector receives them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from paceline.errors import ConfigError
from paceline.serve.options import ServeOptions
from tests.serve.observability.test_metrics import LENGTH, drafting_engine, generate
from tests.serve.running import serving

pytest.importorskip("opentelemetry.sdk", reason="needs `pip install 'paceline[otel]'`; make test installs it")
pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="needs `pip install 'paceline[otel]'`")

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from paceline.serve.observability import tracing
from paceline.serve.observability.tracing import traces_url

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
Span = dict[str, Any]


@contextmanager
def collector(status: int = 200) -> Iterator[tuple[str, list[Span]]]:
    """The URL of an OTLP/HTTP collector, and the spans that it has received."""
    spans: list[Span] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.path == "/v1/traces"
            body = self.rfile.read(int(self.headers["Content-Length"]))
            for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                service = _values(resource.resource.attributes)["service.name"]
                for span in (span for scope in resource.scope_spans for span in scope.spans):
                    spans.append(_span(span) | {"service": service})
            self.send_response(status)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", spans
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _span(span: Any) -> Span:
    return {
        "name": span.name,
        "trace": span.trace_id.hex(),
        "id": span.span_id.hex(),
        "parent": span.parent_span_id.hex(),
        "times": (span.start_time_unix_nano, span.end_time_unix_nano),
        "failed": span.status.code == 2,
        **_values(span.attributes),
    }


def _values(attributes: Any) -> dict[str, Any]:
    found = {}
    for item in attributes:
        kind = item.value.WhichOneof("value")
        value = getattr(item.value, kind)
        found[item.key] = [entry.string_value for entry in value.values] if kind == "array_value" else value
    return found


def test_a_request_is_a_span_with_its_phases_and_drafts() -> None:
    with collector() as (url, spans), serving(drafting_engine(), otlp_endpoint=url) as client:
        answer = generate(client, "one", segment="letters", seed=2**64 - 1)
        headers = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
        assert client.post("/v1/completions", {"prompt": "two"}, **headers).status == 200
        client.get("/v1/models")
        # closing the server sends what is queued
    by_name: dict[str, list[Span]] = {}
    for span in spans:
        by_name.setdefault(span["name"], []).append(span)
    assert {name: len(found) for name, found in by_name.items()} == {
        "text_completion toy": 2,
        "queue": 2,
        "prefill": 2,
        "decode": 2,
    }
    request, second = by_name["text_completion toy"]
    assert request["parent"] == ""
    assert (second["trace"], second["parent"]) == (TRACE, PARENT)
    drafts = answer["metrics"]["speculative_decoding"]
    expected = {
        "service": "paceline",
        "gen_ai.operation.name": "text_completion",
        "gen_ai.request.model": "toy",
        "gen_ai.request.max_tokens": LENGTH,
        "gen_ai.usage.input_tokens": answer["usage"]["prompt_tokens"],
        "gen_ai.usage.output_tokens": LENGTH,
        "gen_ai.response.finish_reasons": ["length"],
        "http.response.status_code": 200,
        "paceline.segment": "letters",
        "paceline.speculative.drafters": ["scripted"],
        "paceline.speculative.num_draft_tokens": drafts["num_draft_tokens"],
        "paceline.speculative.num_accepted_draft_tokens": drafts["num_accepted_draft_tokens"],
    }
    assert {name: request.get(name) for name in expected} == expected
    assert "gen_ai.request.seed" not in request  # OTLP has no integer that large
    assert request["gen_ai.server.time_to_first_token"] > 0
    assert not request["failed"]
    queue, prefill, decode = (by_name[name][0] for name in ("queue", "prefill", "decode"))
    for child in (queue, prefill, decode):
        assert (child["trace"], child["parent"]) == (request["trace"], request["id"])
    assert queue["times"][1] == prefill["times"][0]
    assert prefill["times"][1] == decode["times"][0] < decode["times"][1]
    assert decode["paceline.speculative.num_draft_tokens"] == drafts["num_draft_tokens"] > 0


def test_errors_are_marked_and_what_a_client_does_not_sample_is_left_out() -> None:
    with collector() as (url, spans), serving(otlp_endpoint=url + "/v1/traces") as client:
        assert client.complete(temperature=-1).status == 400
        unsampled = {"traceparent": f"00-{TRACE}-{PARENT}-00"}
        assert client.post("/v1/completions", {"prompt": "two"}, **unsampled).status == 200
    (span,) = spans
    assert span["error.type"] == "400"
    assert not span["failed"]  # the fault is the client's


def test_requests_are_answered_whatever_becomes_of_their_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    with collector(status=500) as (url, _), serving(otlp_endpoint=url) as client:
        assert client.complete().status == 200

    def broken(*_: object) -> None:
        raise ValueError("no attributes")

    monkeypatch.setattr(tracing, "request_attributes", broken)
    with collector() as (url, spans), serving(otlp_endpoint=url) as client:
        assert client.complete().status == 200
    assert spans == []
    monkeypatch.setattr(tracing, "CLOSE_SECONDS", 0.1)  # nobody listens: do not wait for it
    with serving(otlp_endpoint="http://127.0.0.1:9") as client:
        assert client.complete().status == 200


def test_an_endpoint_is_a_url_with_or_without_the_path() -> None:
    assert traces_url("http://localhost:4318") == "http://localhost:4318/v1/traces"
    assert traces_url("http://localhost:4318/") == "http://localhost:4318/v1/traces"
    assert traces_url("https://host/otlp/v1/traces") == "https://host/otlp/v1/traces"
    for wrong in ("localhost:4318", "grpc://localhost:4317", "http://", ""):
        with pytest.raises(ConfigError, match="otlp_endpoint"):
            ServeOptions(otlp_endpoint=wrong)
