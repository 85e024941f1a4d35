"""What every request passes on its way in and out: plain ASGI, nothing that costs per chunk.

Requests    its id, its time limit, its line in the log; an answer even if the app raises
CORS        only where --cors-origin is given
Gate        keys, draining, the size of the body
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
    """Gives each request an id and a time limit, answers what the app did not, and tells of it afterwards."""

    def __init__(self, app: ASGIApp, timeout: float, tell: Callable[[RequestRecord], None]) -> None:
        """`timeout` in seconds, 0 for none; `tell` is called with each request that is over."""
        self._app = app
        self._timeout = timeout or None
        self._tell = tell

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
            self._tell(record)


class _Answer:
    """The way out: adds our headers, and knows how far the answer has come."""

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
        """End the answer with an error: its own, or the last event of a stream that has begun."""
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
    """Lets in who has a key, while the server takes requests, with a body that is not too large."""

    def __init__(
        self, app: ASGIApp, engine: AsyncEngine, keys: Sequence[str], share_cache: bool, max_body_bytes: int
    ) -> None:
        self._app = app
        self._engine = engine
        self._keys = [_digest(key.encode()) for key in keys]
        # of each key, for what the engine caches; drawn by chance: they tell nothing of a key
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
                if first["type"] == "http.request":  # else the client has gone
                    await self._app(scope, _replay(first, receive), send)
                return
            message = f"the body has more than {self._max_body_bytes} bytes, the most that is taken here."
            refusal = _refusal(413, message, "invalid_request_error", "body_too_large")
        await refusal(scope, receive, send)

    def _refuse(self, path: str, has_key: bool) -> JSONResponse | None:
        """Why a request may not come in; None if it may. `path` is what the router goes by."""
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
        """The salt of the key that a request brings; None if it is none of the keys, "" if none is needed.

        Takes the same time whatever it brings.
        """
        if not self._keys:
            return ""
        scheme, _, given = headers.get("authorization", "").partition(" ")
        digest = _digest(given.strip().encode("latin-1"))
        matches = [hmac.compare_digest(digest, key) for key in self._keys]
        return self._salts[matches.index(True)] if any(matches) and scheme.lower() == "bearer" else None

    async def _read(self, headers: Headers, receive: Receive) -> Message | None:
        """The whole body as one message, or the client's disconnect; None if it is too large."""
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
    """Of one length for every key, so that comparing tells nothing, not even how long a key is."""
    return hashlib.sha256(key).digest()


def _refusal(
    status: int, message: str, kind: str, code: str, headers: dict[str, str] | None = None
) -> JSONResponse:
    return JSONResponse(error_body(message, kind, code=code), status, headers)


def _replay(first: Message, receive: Receive) -> Receive:
    """A receive that gives this message first."""
    waiting = [first]

    async def replayed() -> Message:
        return waiting.pop() if waiting else await receive()

    return replayed


def log_request(record: RequestRecord) -> None:
    """One line for each request; those that only look after the server are for debugging."""
    watching = record.route in (HEALTH, METRICS) and record.status == 200
    log_event(logger, "request", level=logging.DEBUG if watching else logging.INFO, **record.facts())
