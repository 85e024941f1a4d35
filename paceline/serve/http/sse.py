"""Server-sent events: `data: ...` lines, in OpenAI's format."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from paceline.serve.http.errors import describe, error_form

logger = logging.getLogger(__name__)

DONE = b"data: [DONE]\n\n"

# compact and not ASCII-escaped; raises for lone surrogates, which a tokenizer cannot produce
_encoder = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))
to_json = _encoder.encode
to_json_pieces = _encoder.iterencode  # slower, but releases the GIL between two pieces


def event(data: object, name: str | None = None) -> bytes:
    """One event; `name` for protocols with named events."""
    line = f"data: {to_json(data)}\n\n"
    return (line if name is None else f"event: {name}\n{line}").encode()


def error_event(scope: Scope, status: int, body: dict[str, Any]) -> bytes:
    """The end of a stream that fails, in the form of the API at its path; `body` has it in OpenAI's form."""
    form = error_form(scope)
    written = form.write(status, body, scope.get("state", {}).get("request_id"))
    return event(written, form.event) + (DONE if form.ends_with_done else b"")


class EventResponse(Response):
    """A stream of events, sent as they arrive until the client disconnects; `close` is always called.

    An error after the start is sent as an event, because the status has already been sent.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[bytes], close: Callable[[], None]) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]  # unknown in advance
        self._events = events
        self._close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sending = asyncio.ensure_future(self._send(scope, send))
        gone = asyncio.ensure_future(disconnected(receive))
        try:
            await asyncio.wait((sending, gone), return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                sending.result()
        finally:
            gone.cancel()
            sending.cancel()
            self._close()

    async def _send(self, scope: Scope, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        async for data in _with_errors(self._events, scope):
            if data:
                await send({"type": "http.response.body", "body": data, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def disconnected(receive: Receive) -> None:
    """Wait until the client has closed the connection. The body must already have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def _with_errors(events: AsyncIterator[bytes], scope: Scope) -> AsyncIterator[bytes]:
    try:
        async for data in events:
            yield data
    except Exception as error:
        status, body = describe(error)
        if status == 500:
            logger.error("a stream failed", exc_info=error)
        body["error"]["code"] = body["error"]["code"] or status
        yield error_event(scope, status, body)
