"""RequestRecord: the log line of one HTTP request, filled in while it is handled."""

from __future__ import annotations

import hashlib
import re
import time
import uuid
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from starlette.types import Scope

from paceline.core.params import SamplingParams
from paceline.engine.outputs import RequestOutput

if TYPE_CHECKING:
    from paceline.serve.openai.generation import Generation
    from paceline.serve.routes.trail import Trail

_SANE_ID = re.compile(rb"[\w.:/+=@-]{1,128}")
MAX_PATH = 200  # characters of a path in the log
MAX_HEADER = 1000  # characters of a header that quotes the client
TRACE_HEADERS = ("traceparent", "tracestate")
USER_DIGITS = 12  # hex digits of the hash logged for a user


@dataclass
class RequestRecord:
    """Filled in along the way; `facts` returns the fields of the log line."""

    method: str
    path: str
    client: str | None  # its address
    client_request_id: str | None  # the client's X-Request-Id, if it is well-formed
    request_id: str = field(default_factory=lambda: uuid.uuid4().hex)  # ours: always unique
    begun: float = field(default_factory=time.monotonic)
    route: str = ""  # the route that it matched; empty if none
    status: int | None = None  # None: the client disconnected before an answer
    complete: bool = False  # the whole answer was sent
    generation: Generation | None = None
    segment: str = ""
    user: str | None = None
    warnings: list[str] = field(default_factory=list)  # what the answer does not do, though it was asked for
    params: SamplingParams | None = None
    trail: Trail | None = None  # how it came to the model that answers; None: it asks for none
    trace_headers: dict[str, str] = field(default_factory=dict)  # the client's W3C trace context

    @staticmethod
    def of(scope: Scope) -> RequestRecord:
        """The record of a request that has just arrived."""
        headers = dict(scope["headers"])
        given = headers.get(b"x-request-id", b"")
        address = scope.get("client")
        return RequestRecord(
            method=scope["method"],
            path=scope["path"][:MAX_PATH],
            client=address[0] if address else None,
            client_request_id=given.decode() if _SANE_ID.fullmatch(given) else None,
            trace_headers={
                name: headers[name.encode()].decode("latin-1")
                for name in TRACE_HEADERS
                if name.encode() in headers
            },
        )

    def note(self, generation: Generation, params: SamplingParams, segment: str, user: str | None) -> None:
        """Note the generation once the request has been submitted to the engine."""
        self.generation, self.params, self.segment, self.user = generation, params, segment, user

    def headers(self) -> dict[str, str]:
        """The headers that every answer gets, as far as they are known when it begins."""
        headers = {"X-Request-Id": self.request_id}
        if self.client_request_id is not None:
            headers["X-Client-Request-Id"] = self.client_request_id
        if self.warnings:
            headers["X-Warnings"] = _header_value("; ".join(self.warnings))
        if self.trail is not None and self.trail.is_routed:
            headers["X-Routed-Model"] = _header_value(self.trail.model or "")
        if self._unavailable_drafter is not None:
            headers["X-Speculative-Fallback"] = (
                f"{self._unavailable_drafter} is not loaded; drafted as by default"
            )
        return headers

    @property
    def _unavailable_drafter(self) -> str | None:
        return None if self.generation is None else self.generation.unavailable_drafter

    def facts(self) -> dict[str, Any]:
        """The fields of the log line. Times are in milliseconds; no prompt, no answer, no key."""
        user = self.user and hashlib.sha256(self.user.encode()).hexdigest()[:USER_DIGITS]
        facts = {
            "request_id": self.request_id,
            "client_request_id": self.client_request_id,
            "method": self.method,
            "path": self.path,
            "status": self.status,
            "client": self.client,
            "disconnected": True if not self.complete else None,
            "duration_ms": _milliseconds(time.monotonic() - self.begun),
            "segment": self.segment or None,
            "user": user,
            "warnings": self.warnings or None,
            "unavailable_drafter": self._unavailable_drafter,
        }
        if self.trail is not None and self.trail.visits:
            facts |= {
                "routes": self.trail.routes,
                "routed_model": self.trail.model,
                "escalations": self.trail.escalations,
                "fallbacks": self.trail.fallbacks,
            }
        return facts | (_figures(self.generation.outputs) if self.generation else {})


def _figures(outputs: list[RequestOutput]) -> dict[str, Any]:
    """Engine statistics of a request, over all its prompts."""
    if not outputs:
        return {}
    metrics = [output.metrics for output in outputs]
    drafts = [draft.speculative for draft in metrics]
    steps = sum(draft.num_spec_steps for draft in drafts)
    accepted = sum(draft.num_accepted_draft_tokens for draft in drafts)
    arrival = min(metric.arrival_time for metric in metrics)
    firsts = [metric.first_token_time for metric in metrics if metric.first_token_time is not None]
    starts = [metric.scheduled_time for metric in metrics if metric.scheduled_time is not None]
    completions = [completion for output in outputs for completion in output.outputs]
    figures: dict[str, Any] = {
        "prompt_tokens": sum(len(output.prompt_token_ids) for output in outputs),
        "cached_tokens": sum(metric.num_cached_tokens for metric in metrics),
        "completion_tokens": sum(len(completion.token_ids) for completion in completions),
        "finish_reasons": [completion.finish_reason for completion in completions],
        "queue_ms": _milliseconds(min(starts) - arrival) if starts else None,
        "ttft_ms": _milliseconds(min(firsts) - arrival) if firsts else None,
    }
    if steps:
        figures["speculative"] = {
            "num_spec_steps": steps,
            "num_draft_tokens": sum(draft.num_draft_tokens for draft in drafts),
            "num_accepted_draft_tokens": accepted,
            "mean_acceptance_length": round(1 + accepted / steps, 3),
        }
    return figures


def _milliseconds(seconds: float) -> float:
    return round(seconds * 1e3, 2)


def _header_value(text: str) -> str:
    """The text in one line of ASCII."""
    return " ".join(text.split()).encode("ascii", "backslashreplace").decode()[:MAX_HEADER]
