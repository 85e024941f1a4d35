"""Middleware around every request: plain ASGI, without work per chunk. From the outside in:

Requests    request id, time limit, log line; an error response if the app raises
HeadAsGet   HEAD on every GET path
CORS        only with --cors-origin
Gate        API keys, draining, body size
the app
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import secrets
from collections.abc import Callable, Sequence
from typing import Any

from starlette._utils import get_route_path
from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from paceline.serve.engines import EngineGroup
from paceline.serve.http.errors import RETRY_AFTER, describe, error_body, error_response
from paceline.serve.http.sse import error_event
from paceline.serve.observability.logs import current_request, log_event
from paceline.serve.observability.record import RequestRecord

logger = logging.getLogger(__name__)

HEALTH, PING, METRICS, LOAD, DOCS = "/health", "/ping", "/metrics", "/load", "/docs"
REQUESTS, PAGE, STATIC = "/requests", "/", "/static/"
LEARN = "/learn"  # of a server that learns
REPLICAS, REPLICA_METRICS = "/replicas", "/metrics/replicas"  # of a server of replicas
# served while the server drains, too
WATCHING = (HEALTH, PING, METRICS, LOAD, REQUESTS, LEARN, REPLICAS, REPLICA_METRICS)
OPEN = (HEALTH, PING, DOCS, PAGE)  # anyone may read these: they hold nothing of the server
EVENTS = "text/event-stream"


class Requests:
    """Gives each request an id and a time limit, answers exceptions, and reports the finished request."""

    def __init__(
        self, app: ASGIApp, timeout: float, on_finished: Sequence[Callable[[RequestRecord], None]]
    ) -> None:
        """`timeout` in seconds, 0 for none; `on_finished` get the record of each finished request."""
        self._app = app
        self._timeout = timeout or None
        self._on_finished = on_finished

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        record = RequestRecord.of(scope)
        scope.setdefault("state", {}).update(request_id=record.request_id, record=record)
        current_request.set(record.request_id)
        answer = _Answer(record, scope, send)
        try:
            async with asyncio.timeout(self._timeout) as limit:
                await self._app(scope, receive, answer.send)
        except Exception as error:
            if limit.expired():
                message = f"the request took more than {self._timeout:g} seconds and was ended."
                await answer.error(504, error_body(message, "timeout_error"))
            else:
                logger.error("a request failed", exc_info=error)
                await answer.error(*describe(error))
        finally:
            record.route = getattr(scope.get("route"), "path", "")
            for observe in self._on_finished:
                observe(record)


class _Answer:
    """The send channel: adds our headers, and records how much of the answer was sent."""

    def __init__(self, record: RequestRecord, scope: Scope, send: Send) -> None:
        self._record = record
        self._scope = scope
        self._send = send
        self._is_stream = False

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._record.status = message["status"]
            headers = MutableHeaders(scope=message)
            headers.update(self._record.headers())
            self._is_stream = headers.get("content-type", "").startswith(EVENTS)
        await self._send(message)
        if message["type"] == "http.response.body" and not message.get("more_body"):
            self._record.complete = True

    async def error(self, status: int, body: dict[str, Any]) -> None:
        """End the answer with an error: as its response, or as the last event of a stream that has begun."""
        if self._record.complete:
            return
        if self._record.status is None:
            headers = {"x-should-retry": "false"} if status == 504 else None  # it would take as long again
            response = error_response(self._scope, status, body, headers)
            await response({"type": "http"}, _nothing, self.send)
        elif self._is_stream:
            await self.send({"type": "http.response.body", "body": error_event(self._scope, status, body)})


async def _nothing() -> Message:
    return {"type": "http.disconnect"}


class HeadAsGet:
    """Answers HEAD as GET and leaves the body out. FastAPI's routes, unlike Starlette's, have no HEAD."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "HEAD":
            await self._app(scope, receive, send)
            return

        async def send_head(message: Message) -> None:
            is_body = message["type"] == "http.response.body"
            await send({**message, "body": b""} if is_body else message)

        # a copy: the server must know that it is HEAD, or it would expect the body that the headers announce
        get = {**scope, "method": "GET"}
        try:
            await self._app(get, receive, send_head)
        finally:
            scope["route"] = get.get("route")  # for the log and the metrics


class Gate:
    """Checks the API key, that the server is not draining, and the size of the body."""

    def __init__(
        self, app: ASGIApp, engine: EngineGroup, keys: Sequence[str], separate_keys: bool, max_body_bytes: int
    ) -> None:
        self._app = app
        self._engine = engine
        self._keys = [key_digest(key.encode()) for key in keys]
        # per key, for the engine's caches; random, so that they reveal nothing about the key
        self._salts = [secrets.token_hex(16) if separate_keys else "" for _ in keys]
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        salt, key_id = self._known_key(headers)
        state = scope.setdefault("state", {})
        state["key_salt"], state["key_id"] = salt, key_id
        refusal = self._refuse(scope, has_key=salt is not None)
        if refusal is None:
            first = await self._read(headers, receive)
            if first is not None:
                if first["type"] == "http.request":  # otherwise the client has disconnected
                    await self._app(scope, _replay(first, receive), send)
                return
            message = f"the body has more than {self._max_body_bytes} bytes, the most that is taken here."
            refusal = _refusal(scope, 413, message, "invalid_request_error", "body_too_large")
        await refusal(scope, receive, send)

    def _refuse(self, scope: Scope, has_key: bool) -> JSONResponse | None:
        """The response that refuses a request, or None."""
        path = get_route_path(scope)  # the one that the router matches
        if not has_key and not _needs_no_key(path):
            message = "the API key is missing or wrong: send `Authorization: Bearer KEY` or `x-api-key: KEY`."
            challenge = {"WWW-Authenticate": "Bearer"}
            return _refusal(scope, 401, message, "authentication_error", "invalid_api_key", challenge)
        if self._engine.draining and path not in WATCHING:
            message = "the server is stopping; send the request to another one."
            goodbye = {"Connection": "close", "Retry-After": RETRY_AFTER}
            return _refusal(scope, 503, message, "service_unavailable_error", "draining", goodbye)
        return None

    def _known_key(self, headers: Headers) -> tuple[str | None, str]:
        """The cache salt of the request's key, and its digest, which is the same after a restart.

        A salt of None: an unknown key. Both are empty if the server has no keys.

        Constant time, so that comparing reveals nothing about the keys.
        """
        if not self._keys:
            return "", ""
        digest = key_digest(_given_key(headers).encode("latin-1"))
        matches = [hmac.compare_digest(digest, key) for key in self._keys]
        return (self._salts[matches.index(True)], digest.hex()) if any(matches) else (None, "")

    async def _read(self, headers: Headers, receive: Receive) -> Message | None:
        """The whole body as one message, or the disconnect message; None if the body is too large."""
        if int(headers.get("content-length", "0")) > self._max_body_bytes:
            return None
        body = bytearray()
        while True:
            message = await receive()
            if message["type"] != "http.request":
                return message
            body += message.get("body", b"")
            if len(body) > self._max_body_bytes:
                return None
            if not message.get("more_body"):
                return {"type": "http.request", "body": bytes(body), "more_body": False}


def _needs_no_key(path: str) -> bool:
    """Whether anyone may read this path: health checks and pages with their files, not what they show."""
    return path in OPEN or path.startswith(STATIC)


def _given_key(headers: Headers) -> str:
    """The key of a request: OpenAI's clients send it as a bearer token, Anthropic's as x-api-key."""
    scheme, _, token = headers.get("authorization", "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "").strip()


def key_digest(key: bytes) -> bytes:
    """A digest: all have one length, so that a comparison does not reveal the length of a key."""
    return hashlib.sha256(key).digest()


def _refusal(
    scope: Scope, status: int, message: str, kind: str, code: str, headers: dict[str, str] | None = None
) -> JSONResponse:
    return error_response(scope, status, error_body(message, kind, code=code), headers)


def _replay(first: Message, receive: Receive) -> Receive:
    """A `receive` that returns `first` first."""
    waiting = [first]

    async def replayed() -> Message:
        return waiting.pop() if waiting else await receive()

    return replayed


def log_request(record: RequestRecord) -> None:
    """Log a finished request in one line; health checks, metrics and the live page at debug level."""
    watching = record.status == 200 and (record.route in (*WATCHING, PAGE) or record.route.startswith(STATIC))
    log_event(logger, "request", level=logging.DEBUG if watching else logging.INFO, **record.facts())
