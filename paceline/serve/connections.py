"""Connections: uvicorn's HTTP protocol, with limits on what a client may send and how long it may take.

uvicorn bounds neither the size of headers, nor how slowly they come, nor for how long a client may
leave its answer unread; it takes trailers for headers, and clients that have only stopped sending for
gone. What is refused here never reaches the app.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

import httptools
from uvicorn._types import ASGI3Application
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from paceline.serve.errors import RETRY_AFTER, error_body
from paceline.serve.middleware import HEALTH

MOST_HEAD_BYTES = 64 * 1024  # of the request line, headers and trailers together
MOST_HEADERS = 128  # and trailers
MOST_PIPELINED = 16  # requests that a client sends before it has read the first answer
PLACES_FOR_HEALTH = 16  # connections over the limit that are still read, because they may ask for /health
LEAST_IDLE = 1.0  # seconds that a connection may be without a request even if its place is needed
PROBE_AFTER = 0.01  # seconds until a half-closed connection is tried again; then 4 times as many, and so on
STATUS_START = b"HTTP/1.1 "  # of every answer
HOST = re.compile(rb"[\w.~!$&'()*+,;=:%\[\]-]*", re.ASCII)  # what can be a name, an address and a port


@dataclass(frozen=True)
class ConnectionLimits:
    """What one connection, and all of them together, may take."""

    most: int  # connections
    client_timeout: float  # seconds to send a request, or to go on reading an answer; 0: no limit
    tell: Callable[[int], None]  # called with the status of each request that is refused here


class _Refused(Exception):
    """Ends the parsing of a request that was refused."""


class _HalfClosed:
    """The way to a client that sends no more. It may be reading its answer still (`nc -N`), or be gone.

    Only writing tells: one that is gone answers with a reset, and the next write fails. So `probe` writes
    ahead a byte that the answer needs in any case: the next one of its status line, or a zero before
    the length of its next chunk.
    """

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._ahead = 0  # bytes of the status line that were written

    def probe(self, cycle: RequestResponseCycle) -> None:
        """Write a byte of the cycle's answer, if one is certain."""
        if not cycle.response_started:
            self._transport.write(STATUS_START[self._ahead : self._ahead + 1])
            self._ahead = min(self._ahead + 1, len(STATUS_START))
        elif cycle.chunked_encoding:
            self._transport.write(b"0")

    def write(self, data: bytes) -> None:
        self._transport.write(data[self._ahead :])
        self._ahead = 0

    def close(self) -> None:
        self._transport.close()

    def is_closing(self) -> bool:
        return self._transport.is_closing()


class Connection(HttpToolsProtocol):
    """One client's connection."""

    def __init__(
        self, *args: Any, limits: ConnectionLimits, idle: dict[Connection, float], **options: Any
    ) -> None:
        """`idle` is shared by all: those without a request, and since when; the longest first."""
        super().__init__(*args, **options)
        self.access_log = False  # whoever listens to that logger: the log has a line of ours
        self._limits = limits
        self._idle = idle
        self._timer: asyncio.TimerHandle | None = None  # until the request is here
        self._stall: asyncio.TimerHandle | None = None  # until the client reads on
        self._probe: asyncio.TimerHandle | None = None  # until a half-closed connection is tried again
        self._answering: RequestResponseCycle | None = None  # the request whose answer is next
        self._one_too_many = False
        self._in_head = True  # of a request, or waiting for one
        self._bytes_without_body = 0  # since a request ended, or a piece of a body came
        self._field_bytes = self._fields = 0  # of the request: its headers and trailers
        self._refusal = (400, "this is not a valid HTTP/1.1 request.")

    # --- what a client sends ---

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._make_room()
        self._one_too_many = len(self.connections) > self._limits.most
        if len(self.connections) > 2 * self._limits.most + PLACES_FOR_HEALTH:
            transport.abort()  # they have sent nothing: close without an answer
        self._idle[self] = self.loop.time()
        self._start_timer()

    def data_received(self, data: bytes) -> None:
        self._bytes_without_body += len(data)
        super().data_received(data)
        if self._bytes_without_body > MOST_HEAD_BYTES and not self.transport.is_closing():
            self._refuse(431, _too_long())

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head = True
        self._field_bytes = self._fields = 0
        self._start_timer()

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header; or a trailer, which counts as one and is dropped.

        Nothing here needs trailers, and as headers they would come after what a proxy has checked.
        """
        self._fields += 1
        self._field_bytes += len(name) + len(value)
        if len(self.url) + self._field_bytes > MOST_HEAD_BYTES or self._fields > MOST_HEADERS:
            raise self._refused(431, _too_long())
        if self._in_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if len(self.url) > MOST_HEAD_BYTES:
            raise self._refused(431, _too_long())
        hosts = [value for name, value in self.headers if name == b"host"]
        needed = self.parser.get_http_version() != "1.0"
        if len(hosts) > 1 or (needed and not hosts) or not all(map(HOST.fullmatch, hosts)):
            raise self._refused(400, "a request has one Host header, with a name or an address. Send one.")
        if self._one_too_many and not self._is_health_check():
            message = f"there are {self._limits.most} connections already. Try again later."
            raise self._refused(503, message)
        super().on_headers_complete()
        self._in_head = False
        self._idle.pop(self, None)
        if self._one_too_many:
            self.cycle.keep_alive = False
        if self.pipeline:
            self.flow.resume_reading()  # uvicorn pauses it, and would not see the client leave
        if len(self.pipeline) > MOST_PIPELINED:
            self.transport.abort()

    def on_body(self, body: bytes) -> None:
        self._bytes_without_body = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._stop_timer()
        self._bytes_without_body = 0
        self._in_head = True
        super().on_message_complete()

    def eof_received(self) -> bool:  # type: ignore[override]
        """Whether the connection stays open: if the client has sent all of a request that is not answered."""
        if self._answering is None or not self._in_head:
            return False
        self._stop_timer()
        self.cycle.keep_alive = False  # it is the last
        self._try_again(_HalfClosed(self.transport), PROBE_AFTER)
        return True

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        self._idle.pop(self, None)
        if self._probe is not None:
            self._probe.cancel()
        if self._answering is not None:  # uvicorn tells the last request only
            self._answering.disconnected = True
            self._answering.message_event.set()
        self.resume_writing()
        super().connection_lost(exc)

    # --- what it is answered ---

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._answering = cycle
        super()._start_asgi_task(cycle, app)

    def on_response_complete(self) -> None:
        self._answering = None
        super().on_response_complete()
        if self._answering is None and not self.transport.is_closing():
            self._idle[self] = self.loop.time()

    def _try_again(self, client: _HalfClosed, after: float) -> None:
        """See whether a half-closed client still reads, and do so again later."""
        if self._answering is None or self.transport.is_closing():
            return
        self._answering.transport = client  # type: ignore[assignment]
        client.probe(self._answering)
        self._probe = self.loop.call_later(after, self._try_again, client, 4 * after)

    # --- places ---

    def _make_room(self) -> None:
        """Close those that have been without a request for long, while there are too many connections."""
        while len(self.connections) > self._limits.most and self._idle:
            oldest, since = next(iter(self._idle.items()))
            if self.loop.time() - since < LEAST_IDLE:
                return
            del self._idle[oldest]
            self.connections.discard(oldest)
            oldest.transport.close()

    def _is_health_check(self) -> bool:
        """Whether the request is answered even if there are too many: it is short, and has no body."""
        names = {name for name, _ in self.headers}
        return (
            self.parser.get_method() == b"GET"
            and httptools.parse_url(self.url).path == HEALTH.encode()
            and not names & {b"content-length", b"transfer-encoding"}
        )

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

    def _refused(self, status: int, message: str) -> _Refused:
        """What to raise in a callback of the parser: uvicorn then calls send_400_response."""
        self._refusal = (status, message)
        return _Refused()

    def _refuse(self, status: int, message: str) -> None:
        """Answer and close. If an answer is due to an earlier request, or has begun, only the latter."""
        answering = self._answering
        if answering is not None and (
            self._in_head or answering is not self.cycle or answering.response_started
        ):
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
