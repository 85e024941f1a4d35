"""Connections: uvicorn's HTTP protocol, with limits on what a client may send and how long it may take.

uvicorn bounds neither the size of headers, nor how slowly they come, nor for how long a client may
leave its answer unread. What is refused here never reaches the app.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from paceline.serve.errors import RETRY_AFTER, error_body

MOST_HEAD_BYTES = 64 * 1024  # of the request line and all headers together
MOST_HEADERS = 128
MOST_PIPELINED = 16  # requests that a client sends before it has read the first answer


@dataclass(frozen=True)
class ConnectionLimits:
    """What one connection, and all of them together, may take."""

    most: int  # connections
    client_timeout: float  # seconds to send a request, or to go on reading an answer; 0: no limit
    tell: Callable[[int], None]  # called with the status of each request that is refused here


class _Refused(Exception):
    """Ends the parsing of a request that was refused."""


class Connection(HttpToolsProtocol):
    """One client's connection."""

    def __init__(self, *args: Any, limits: ConnectionLimits, **options: Any) -> None:
        super().__init__(*args, **options)
        self.access_log = False  # whoever listens to that logger: the log has a line of ours
        self._limits = limits
        self._timer: asyncio.TimerHandle | None = None  # until the request is here
        self._stall: asyncio.TimerHandle | None = None  # until the client reads on
        self._one_too_many = False
        self._in_head = True  # of a request, or waiting for one
        self._head_bytes = 0
        self._chunk_bytes = 0  # of the data at hand
        self._refusal = (400, "this is not a valid HTTP/1.1 request.")

    # --- what a client sends ---

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._one_too_many = len(self.connections) > self._limits.most
        if len(self.connections) > 2 * self._limits.most:  # no words for those who send nothing
            transport.abort()
        self._start_timer()

    def data_received(self, data: bytes) -> None:
        self._chunk_bytes = len(data)
        self._head_bytes += len(data)
        super().data_received(data)
        if self._in_head and self._head_bytes > MOST_HEAD_BYTES and not self.transport.is_closing():
            self._refuse(431, _too_long())

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head = True
        self._head_bytes = self._chunk_bytes
        self._start_timer()

    def on_headers_complete(self) -> None:
        self._in_head = False
        size = len(self.url) + sum(len(name) + len(value) for name, value in self.headers)
        if self._one_too_many:
            self._refusal = (503, f"there are {self._limits.most} connections already. Try again later.")
            raise _Refused
        if size > MOST_HEAD_BYTES or len(self.headers) > MOST_HEADERS:
            self._refusal = (431, _too_long())
            raise _Refused
        super().on_headers_complete()
        if len(self.pipeline) > MOST_PIPELINED:
            self.transport.abort()

    def on_message_complete(self) -> None:
        self._stop_timer()
        self._head_bytes = 0
        self._in_head = True
        super().on_message_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        self.resume_writing()
        super().connection_lost(exc)

    # --- what it leaves unread ---

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._limits.client_timeout:
            self._stall = self.loop.call_later(self._limits.client_timeout, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._stall is not None:
            self._stall.cancel()
            self._stall = None

    # --- refusing ---

    def send_400_response(self, msg: str) -> None:
        """uvicorn calls this when parsing has failed, which it also does where we refused."""
        self._refuse(*self._refusal)

    def _refuse(self, status: int, message: str) -> None:
        """Answer and close. In the middle of another answer only the latter."""
        if self._answers():
            self.transport.abort()
            return
        self._limits.tell(status)
        kind = "service_unavailable_error" if status == 503 else "invalid_request_error"
        body = json.dumps(error_body(message, kind)).encode()
        head = [
            f"HTTP/1.1 {status} {HTTPStatus(status).phrase}",
            "content-type: application/json",
            f"content-length: {len(body)}",
            "connection: close",
            *([f"retry-after: {RETRY_AFTER}"] if status == 503 else []),
        ]
        self.transport.write("\r\n".join([*head, "\r\n"]).encode() + body)
        self.transport.close()

    def _answers(self) -> bool:
        """Whether an answer has begun and not ended, or others wait for their turn."""
        cycle = self.cycle
        return bool(self.pipeline) or (
            cycle is not None and cycle.response_started and not cycle.response_complete
        )

    def _start_timer(self) -> None:
        self._stop_timer()
        if self._limits.client_timeout:
            self._timer = self.loop.call_later(self._limits.client_timeout, self._took_too_long)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _took_too_long(self) -> None:
        if not self._in_head and self.cycle.response_complete:  # refused before its body was here
            self.transport.close()
        elif not self.transport.is_closing():
            self._refuse(408, f"the request did not come within {self._limits.client_timeout:g} seconds.")


def _too_long() -> str:
    return (
        f"a request may have {MOST_HEADERS} headers and {MOST_HEAD_BYTES} bytes before its body. Send less."
    )
