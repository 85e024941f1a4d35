"""Middleware around every request: plain ASGI, without work per chunk. From the outside in:

Requests    request id, time limit, log line; an error response if the app raises
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

from starlette._utils import get_route_path
from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from paceline.engine.async_engine import AsyncEngine
from paceline.serve.errors import RETRY_AFTER, describe, error_body
from paceline.serve.logs import current_request, log_event
from paceline.serve.record import RequestRecord
from paceline.serve.sse import DONE, event

logger = logging.getLogger(__name__)

HEALTH, METRICS = "/health", "/metrics"
EVENTS = "text/event-stream"


class Requests:
    """Gives each request an id and a time limit, answers exceptions, and reports the finished request."""

    def __init__(self, app: ASGIApp, timeout: float, on_finished: Callable[[RequestRecord], None]) -> None:
        """`timeout` in seconds, 0 for none; `on_finished` gets the record of each finished request."""
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
        answer = _Answer(record, send)
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
            self._on_finished(record)


class _Answer:
    """The send channel: adds our headers, and records how much of the answer was sent."""

    def __init__(self, record: RequestRecord, send: Send) -> None:
        self._record = record
        self._send = send
        self._is_stream = False

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._record.status = message["status"]
            headers = MutableHeaders(scope=message)
            headers["X-Request-Id"] = self._record.request_id
            if self._record.client_request_id is not None:
                headers["X-Client-Request-Id"] = self._record.client_request_id
            self._is_stream = headers.get("content-type", "").startswith(EVENTS)
        await self._send(message)
        if message["type"] == "http.response.body" and not message.get("more_body"):
            self._record.complete = True

    async def error(self, status: int, body: dict[str, object]) -> None:
        """End the answer with an error: as its response, or as the last event of a stream that has begun."""
        if self._record.complete:
            return
        if self._record.status is None:
            headers = {"x-should-retry": "false"} if status == 504 else None  # it would take as long again
            await JSONResponse(body, status, headers)({"type": "http"}, _nothing, self.send)
        elif self._is_stream:
            await self.send({"type": "http.response.body", "body": event(body) + DONE})


async def _nothing() -> Message:
    return {"type": "http.disconnect"}


class Gate:
    """Checks the API key, that the server is not draining, and the size of the body."""

    def __init__(
        self, app: ASGIApp, engine: AsyncEngine, keys: Sequence[str], share_cache: bool, max_body_bytes: int
    ) -> None:
        self._app = app
        self._engine = engine
        self._keys = [_digest(key.encode()) for key in keys]
        # per key, for the engine's caches; random, so that they reveal nothing about the key
        self._salts = ["" if share_cache else secrets.token_hex(16) for _ in keys]
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        salt = self._salt_of_key(headers)
        scope.setdefault("state", {})["key_salt"] = salt
        refusal = self._refuse(get_route_path(scope), has_key=salt is not None)
        if refusal is None:
            first = await self._read(headers, receive)
            if first is not None:
                if first["type"] == "http.request":  # otherwise the client has disconnected
                    await self._app(scope, _replay(first, receive), send)
                return
            message = f"the body has more than {self._max_body_bytes} bytes, the most that is taken here."
            refusal = _refusal(413, message, "invalid_request_error", "body_too_large")
        await refusal(scope, receive, send)

    def _refuse(self, path: str, has_key: bool) -> JSONResponse | None:
        """The response that refuses a request, or None. `path` is the path that the router matches."""
        if path != HEALTH and not has_key:
            message = "the API key is missing or wrong: send `Authorization: Bearer KEY`."
            challenge = {"WWW-Authenticate": "Bearer"}
            return _refusal(401, message, "authentication_error", "invalid_api_key", challenge)
        if self._engine.draining and path not in (HEALTH, METRICS):
            message = "the server is stopping; send the request to another one."
            goodbye = {"Connection": "close", "Retry-After": RETRY_AFTER}
            return _refusal(503, message, "service_unavailable_error", "draining", goodbye)
        return None

    def _salt_of_key(self, headers: Headers) -> str | None:
        """The cache salt of the request's key; None for an unknown key, "" if the server has no keys.

        Constant time, so that comparing reveals nothing about the keys.
        """
        if not self._keys:
            return ""
        scheme, _, given = headers.get("authorization", "").partition(" ")
        digest = _digest(given.strip().encode("latin-1"))
        matches = [hmac.compare_digest(digest, key) for key in self._keys]
        return self._salts[matches.index(True)] if any(matches) and scheme.lower() == "bearer" else None

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


def _digest(key: bytes) -> bytes:
    """A digest: all have one length, so that a comparison does not reveal the length of a key."""
    return hashlib.sha256(key).digest()


def _refusal(
    status: int, message: str, kind: str, code: str, headers: dict[str, str] | None = None
) -> JSONResponse:
    return JSONResponse(error_body(message, kind, code=code), status, headers)


def _replay(first: Message, receive: Receive) -> Receive:
    """A `receive` that returns `first` first."""
    waiting = [first]

    async def replayed() -> Message:
        return waiting.pop() if waiting else await receive()

    return replayed


def log_request(record: RequestRecord) -> None:
    """Log a finished request in one line; health checks and metrics at debug level."""
    watching = record.route in (HEALTH, METRICS) and record.status == 200
    log_event(logger, "request", level=logging.DEBUG if watching else logging.INFO, **record.facts())
