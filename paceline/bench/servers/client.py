"""A minimal client for OpenAI-compatible servers that records when each piece of an answer arrived.

Plain sockets and no HTTP library: with 200 clients, a library's own work would be in every number. Data is
only recorded as it arrives, and parsed later.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import time
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any
from urllib.parse import urlsplit

from paceline.errors import ConfigError, PacelineError

DONE = b"[DONE]"
CONNECT_SECONDS = 60.0
ANSWER_SECONDS = 600.0  # for a whole answer; a request that takes longer has failed


class ClientError(PacelineError):
    """A server cannot be reached, or does not speak HTTP."""


@dataclass(frozen=True)
class Server:
    """The address of a server."""

    host: str
    port: int
    path: str = ""  # prefix of every path
    tls: bool = False
    api_key: str | None = None

    @staticmethod
    def at(url: str, api_key: str | None = None) -> Server:
        """The server at an address such as http://127.0.0.1:8000, with or without /v1."""
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"--url must be like http://127.0.0.1:8000, got {url!r}.")
        tls = parts.scheme == "https"
        path = parts.path.rstrip("/").removesuffix("/v1")
        return Server(parts.hostname, parts.port or (443 if tls else 80), path, tls, api_key)

    def request(self, method: str, path: str, body: bytes) -> bytes:
        """The bytes of a request."""
        lines = [
            f"{method} {self.path}{path} HTTP/1.1",
            f"Host: {self.host}:{self.port}",
            "Connection: close",
        ]
        if self.api_key is not None:
            lines.append(f"Authorization: Bearer {self.api_key}")
        if body:
            lines += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
        return "\r\n".join([*lines, "", ""]).encode() + body


@dataclass(frozen=True)
class Answer:
    """What arrived, and when: seconds of one monotonic clock."""

    sent: float
    status: int  # 0: the connection ended before a status
    headers: Mapping[str, str]  # names in lower case
    pieces: tuple[tuple[float, bytes], ...]  # of the body, as the server sent them
    ended: float

    @cached_property
    def body(self) -> bytes:
        return b"".join(data for _, data in self.pieces)

    @cached_property
    def events(self) -> list[tuple[float, bytes]]:
        """The data of the stream's events, each with the time of the piece that completed it."""
        events: list[tuple[float, bytes]] = []
        rest = b""
        for when, data in self.pieces:
            *whole, rest = (rest + data).split(b"\n\n")
            lines = [line for event in whole for line in event.split(b"\n")]  # `event:` may come first
            events += [(when, line.removeprefix(b"data: ")) for line in lines if line.startswith(b"data: ")]
        return events

    @cached_property
    def chunks(self) -> list[tuple[float, dict[str, Any]]]:
        """The events that are JSON."""
        return [(when, json.loads(data)) for when, data in self.events if data != DONE]

    @property
    def complete(self) -> bool:
        """Whether a stream was complete, without an error."""
        ended = bool(self.events) and self.events[-1][1] == DONE
        return self.status == 200 and ended and self.error is None and self.finish_reason is not None

    @property
    def error(self) -> dict[str, Any] | None:
        """The error of the answer, or the one that ended the stream."""
        if self.status == 200:
            errors = [chunk["error"] for _, chunk in self.chunks if "error" in chunk]
            return errors[-1] if errors else None
        try:
            error = json.loads(self.body)["error"]
        except (ValueError, KeyError, TypeError):
            return None
        return error if isinstance(error, dict) else None

    @cached_property
    def text(self) -> str:
        """The generated text."""
        return "".join(text for _, text in self.texts)

    @cached_property
    def texts(self) -> list[tuple[float, str]]:
        """The pieces of generated text, and when each arrived."""
        pairs = [(when, _text(choice)) for when, choice in self.choices]
        return [(when, text) for when, text in pairs if text]

    @cached_property
    def choices(self) -> list[tuple[float, dict[str, Any]]]:
        """The choices of all chunks."""
        return [(when, choice) for when, chunk in self.chunks for choice in chunk.get("choices", ())]

    @property
    def finish_reason(self) -> str | None:
        reasons = [choice.get("finish_reason") for _, choice in self.choices]
        return next((reason for reason in reasons if reason is not None), None)

    @property
    def completion_tokens(self) -> int:
        """Number of tokens, by the usage at the end."""
        usages = [chunk["usage"] for _, chunk in self.chunks if chunk.get("usage")]
        return int(usages[-1]["completion_tokens"]) if usages else 0


def _text(choice: Mapping[str, Any]) -> str:
    """The text of a choice, of a completion or of a chat."""
    return choice.get("text") or (choice.get("delta") or {}).get("content") or ""


class Recorder(asyncio.Protocol):
    """Sends a request, and records what arrives and when."""

    def __init__(self, request: bytes) -> None:
        self._request = request
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.reads: list[tuple[float, bytes]] = []
        self.sent = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.write(self._request)
        self.sent = time.perf_counter()

    def data_received(self, data: bytes) -> None:
        self.reads.append((time.perf_counter(), data))

    def connection_lost(self, error: Exception | None) -> None:
        if not self.closed.done():
            self.closed.set_result(None)


async def post(server: Server, path: str, body: Mapping[str, Any] | bytes) -> Answer:
    """The answer to a POST."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return await exchange(server, server.request("POST", path, data))


async def get(server: Server, path: str) -> Answer:
    """The answer to a GET."""
    return await exchange(server, server.request("GET", path, b""))


async def exchange(
    server: Server, request: bytes, recorder: Callable[[bytes], Recorder] = Recorder
) -> Answer:
    """Send a request on its own connection, and record what arrives until it is closed."""
    loop = asyncio.get_running_loop()
    context = ssl.create_default_context() if server.tls else None
    try:
        async with asyncio.timeout(CONNECT_SECONDS):
            transport, connection = await loop.create_connection(
                lambda: recorder(request), server.host, server.port, ssl=context
            )
    except (OSError, TimeoutError) as error:
        raise ClientError(
            f"nothing answers at {server.host}, port {server.port} ({error}); start `paceline serve` there."
        ) from None
    try:
        async with asyncio.timeout(ANSWER_SECONDS):
            await connection.closed
    except TimeoutError:
        pass  # what arrived shows that it is incomplete
    finally:
        transport.abort()
    status, headers, pieces = read_response(connection.reads)
    return Answer(connection.sent, status, headers, tuple(pieces), time.perf_counter())


def read_response(
    reads: Sequence[tuple[float, bytes]],
) -> tuple[int, dict[str, str], list[tuple[float, bytes]]]:
    """Status, headers, and the pieces of the body with the time at which each was complete."""
    raw = b"".join(data for _, data in reads)
    ends = list(accumulate(len(data) for _, data in reads))
    head, blank, _ = raw.partition(b"\r\n\r\n")
    first, *lines = head.decode("latin-1").split("\r\n")
    if not blank or not first.startswith("HTTP/"):
        return 0, {}, []
    pairs = (line.partition(":") for line in lines)
    headers = {name.lower(): value.strip() for name, _, value in pairs}
    start = len(head) + len(blank)
    chunked = "chunked" in headers.get("transfer-encoding", "")
    spans = _chunks(raw, start) if chunked else [(start, len(raw))]
    pieces = [(reads[bisect_left(ends, end)][0], raw[begin:end]) for begin, end in spans if end > begin]
    return int(first.split()[1]), headers, pieces


def _chunks(raw: bytes, start: int) -> list[tuple[int, int]]:
    """Start and end of the body's complete chunks."""
    spans: list[tuple[int, int]] = []
    while (line_end := raw.find(b"\r\n", start)) >= 0:
        size = int(raw[start:line_end].partition(b";")[0], 16)
        begin = line_end + 2
        if size == 0 or begin + size > len(raw):
            break
        spans.append((begin, begin + size))
        start = begin + size + 2
    return spans
