"""Connection: uvicorn's HTTP protocol, with limits on the size and the duration of what a client sends.

uvicorn does not limit the size of headers, how slowly they arrive, or how long a client may leave its
answer unread. It treats trailers as headers, and half-closed connections as closed. What is refused
here never reaches the app.
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

from paceline.serve.http.errors import RETRY_AFTER, error_body
from paceline.serve.http.middleware import HEALTH, PING

MAX_HEAD_BYTES = 64 * 1024  # bytes of request line, headers and trailers together
MAX_HEADERS = 128  # headers and trailers of a request
MAX_PIPELINED = 16  # requests sent on one connection before the first answer has been read
HEALTH_CONNECTIONS = 16  # connections above the limit that are still read, because they may ask for /health
MIN_IDLE_SECONDS = 1.0  # an idle connection is not closed to make room before this
PROBE_AFTER = 0.01  # seconds until a half-closed connection is probed; the interval grows by 4 each time
STATUS_START = b"HTTP/1.1 "  # start of every response
HOST = re.compile(rb"[\w.~!$&'()*+,;=:%\[\]-]*", re.ASCII)  # characters of a Host header


@dataclass(frozen=True)
class ConnectionLimits:
    """Limits of one connection and of all together."""

    max_connections: int
    client_timeout: float  # seconds to send a request, or to continue reading an answer; 0: no limit
    on_refused: Callable[[int], None]  # called with the status of each request refused here


class _Refused(Exception):
    """Stops the parser after a request was refused."""


class _HalfClosed:
    """The write side of a half-closed connection: the client may still read its answer (`nc -N`), or be gone.

    Only a write shows which: a client that is gone answers with a reset, and the next write fails. So
    `probe` sends, ahead of time, a byte that the answer contains in any case: the next one of its status
    line, or a leading zero of the next chunk's length.
    """

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._ahead = 0  # bytes of the status line already sent

    def probe(self, cycle: RequestResponseCycle) -> None:
        """Send one byte of the answer early, if it is known."""
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
        """`idle` is shared by all connections: those without a request and since when, oldest first."""
        super().__init__(*args, **options)
        self.access_log = False  # our own log has one line per request
        self._limits = limits
        self._idle = idle
        self._timer: asyncio.TimerHandle | None = None  # limit until the request has arrived
        self._stall: asyncio.TimerHandle | None = None  # limit until the client reads on
        self._probe: asyncio.TimerHandle | None = None  # until a half-closed connection is probed again
        self._answering: RequestResponseCycle | None = None  # the request that is answered next
        self._one_too_many = False
        self._in_head = True  # reading headers, or waiting for a request
        self._bytes_without_body = 0  # bytes since the last request ended or the last piece of a body arrived
        self._field_bytes = self._fields = 0  # of this request's headers and trailers
        self._refusal = (400, "this is not a valid HTTP/1.1 request.")

    # --- receiving a request ---

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._make_room()
        self._one_too_many = len(self.connections) > self._limits.max_connections
        if len(self.connections) > 2 * self._limits.max_connections + HEALTH_CONNECTIONS:
            transport.abort()  # nothing was sent on it: close without an answer
        self._idle[self] = self.loop.time()
        self._start_timer()

    def data_received(self, data: bytes) -> None:
        self._bytes_without_body += len(data)
        super().data_received(data)
        if self._bytes_without_body > MAX_HEAD_BYTES and not self.transport.is_closing():
            self._refuse(431, _too_long())

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head = True
        self._field_bytes = self._fields = 0
        self._start_timer()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Count a header or trailer; trailers are then dropped.

        Nothing here needs trailers, and as headers they would bypass what a proxy has checked.
        """
        self._fields += 1
        self._field_bytes += len(name) + len(value)
        if len(self.url) + self._field_bytes > MAX_HEAD_BYTES or self._fields > MAX_HEADERS:
            raise self._refused(431, _too_long())
        if self._in_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if len(self.url) > MAX_HEAD_BYTES:
            raise self._refused(431, _too_long())
        hosts = [value for name, value in self.headers if name == b"host"]
        needed = self.parser.get_http_version() != "1.0"
        if len(hosts) > 1 or (needed and not hosts) or not all(map(HOST.fullmatch, hosts)):
            raise self._refused(400, "a request has one Host header, with a name or an address. Send one.")
        if self._one_too_many and not self._is_health_check():
            message = f"there are {self._limits.max_connections} connections already. Try again later."
            raise self._refused(503, message)
        super().on_headers_complete()
        self._in_head = False
        self._idle.pop(self, None)
        if self._one_too_many:
            self.cycle.keep_alive = False
        if self.pipeline:
            self.flow.resume_reading()  # uvicorn pauses reading here, and would not notice a disconnect
        if len(self.pipeline) > MAX_PIPELINED:
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
        """True (keep the connection open) if a complete request is still to be answered."""
        if self._answering is None or not self._in_head:
            return False
        self._stop_timer()
        self.cycle.keep_alive = False  # no further request can come
        self._probe_later(_HalfClosed(self.transport), PROBE_AFTER)
        return True

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        self._idle.pop(self, None)
        if self._probe is not None:
            self._probe.cancel()
        if self._answering is not None:  # uvicorn notifies only the last request
            self._answering.disconnected = True
            self._answering.message_event.set()
        self.resume_writing()
        super().connection_lost(exc)

    # --- answering it ---

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._answering = cycle
        super()._start_asgi_task(cycle, app)

    def on_response_complete(self) -> None:
        self._answering = None
        super().on_response_complete()
        if self._answering is None and not self.transport.is_closing():
            self._idle[self] = self.loop.time()

    def _probe_later(self, client: _HalfClosed, after: float) -> None:
        """Probe whether a half-closed client still reads, and schedule the next probe."""
        if self._answering is None or self.transport.is_closing():
            return
        self._answering.transport = client  # type: ignore[assignment]
        client.probe(self._answering)
        self._probe = self.loop.call_later(after, self._probe_later, client, 4 * after)

    # --- the limit on connections ---

    def _make_room(self) -> None:
        """Close the longest idle connections while there are more than the limit."""
        while len(self.connections) > self._limits.max_connections and self._idle:
            oldest, since = next(iter(self._idle.items()))
            if self.loop.time() - since < MIN_IDLE_SECONDS:
                return
            del self._idle[oldest]
            self.connections.discard(oldest)
            oldest.transport.close()

    def _is_health_check(self) -> bool:
        """Whether this is a health check (GET or HEAD, no body), which is answered above the limit too."""
        names = {name for name, _ in self.headers}
        return (
            self.parser.get_method() in (b"GET", b"HEAD")
            and httptools.parse_url(self.url).path in (HEALTH.encode(), PING.encode())
            and not names & {b"content-length", b"transfer-encoding"}
        )

    # --- unread answers ---

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._limits.client_timeout:
            self._stall = self.loop.call_later(self._limits.client_timeout, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._stall is not None:
            self._stall.cancel()
            self._stall = None

    # --- refusing requests ---

    def send_400_response(self, msg: str) -> None:
        """Called by uvicorn when parsing fails, also after a refusal of ours."""
        self._refuse(*self._refusal)

    def _refused(self, status: int, message: str) -> _Refused:
        """The exception to raise in a parser callback; uvicorn then calls send_400_response."""
        self._refusal = (status, message)
        return _Refused()

    def _refuse(self, status: int, message: str) -> None:
        """Answer with an error and close; only close if an earlier answer is due, or this one has begun."""
        answering = self._answering
        if answering is not None and (
            self._in_head or answering is not self.cycle or answering.response_started
        ):
            self.transport.abort()
            return
        self._limits.on_refused(status)
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
        if not self._in_head and self.cycle.response_complete:  # refused before its body had arrived
            self.transport.close()
        elif not self.transport.is_closing():
            self._refuse(408, f"the request did not come within {self._limits.client_timeout:g} seconds.")


def _too_long() -> str:
    return f"a request may have {MAX_HEADERS} headers and {MAX_HEAD_BYTES} bytes before its body. Send less."
