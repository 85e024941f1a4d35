"""One request to an OpenAI-compatible server, with the time at which each piece of the answer came.

Plain sockets and no HTTP library: with 200 clients a library's own work would be in every number,
and a connection must be cut where we say. What comes is only noted while it comes, and read later.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any
from urllib.parse import urlsplit

from paceline.errors import ConfigError, PacelineError

DONE = b"[DONE]"
CONNECT_SECONDS = 60.0
ANSWER_SECONDS = 600.0  # for a whole answer; whoever waits longer has lost a request


class ClientError(PacelineError):
    """A server cannot be reached, or does not speak HTTP."""


@dataclass(frozen=True)
class Server:
    """Where requests go."""

    host: str
    port: int
    path: str = ""  # in front of every path
    tls: bool = False
    api_key: str | None = None

    @staticmethod
    def at(url: str, api_key: str | None = None) -> Server:
        """The server of an address such as http://127.0.0.1:8000, with or without /v1."""
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
class Cut:
    """Where a client leaves: in the middle of its own request, or after some pieces of the answer."""

    pieces: int  # -1: half of the request is sent
    reset: bool  # as a crash does (RST) instead of a close (FIN)


@dataclass(frozen=True)
class Answer:
    """What came back, and when: seconds of one monotonic clock."""

    sent: float
    status: int  # 0: the connection ended before there was one
    headers: Mapping[str, str]  # names in lower case
    pieces: tuple[tuple[float, bytes], ...]  # as the connection gave them
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
            events += [(when, line.removeprefix(b"data: ")) for line in whole if line.startswith(b"data: ")]
        return events

    @cached_property
    def chunks(self) -> list[tuple[float, dict[str, Any]]]:
        """The events that are JSON."""
        return [(when, json.loads(data)) for when, data in self.events if data != DONE]

    @property
    def complete(self) -> bool:
        """Whether a stream came to its end and ended well."""
        ended = bool(self.events) and self.events[-1][1] == DONE
        return self.status == 200 and ended and self.error is None and self.finish_reason is not None

    @property
    def error(self) -> dict[str, Any] | None:
        """The error that the answer is, or that ended a stream."""
        if self.status == 200:
            found = [chunk["error"] for _, chunk in self.chunks if "error" in chunk]
            return found[-1] if found else None
        try:
            error = json.loads(self.body)["error"]
        except (ValueError, KeyError, TypeError):
            return None
        return error if isinstance(error, dict) else None

    @cached_property
    def text(self) -> str:
        """What was generated."""
        return "".join(text for _, text in self.texts)

    @cached_property
    def texts(self) -> list[tuple[float, str]]:
        """The pieces of text that were generated, and when each came."""
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
        """By the usage that the server tells at the end."""
        usages = [chunk["usage"] for _, chunk in self.chunks if chunk.get("usage")]
        return int(usages[-1]["completion_tokens"]) if usages else 0

    @property
    def first_byte_seconds(self) -> float | None:
        """From sending to the first piece of the body; a chat's first says the role and no text."""
        return self.pieces[0][0] - self.sent if self.pieces else None

    @property
    def first_text_seconds(self) -> float | None:
        """From sending to the first text."""
        return self.texts[0][0] - self.sent if self.texts else None

    @property
    def gaps(self) -> list[float]:
        """Seconds between one piece of text and the next."""
        times = [when for when, _ in self.texts]
        return [after - before for before, after in pairwise(times)]


def _text(choice: Mapping[str, Any]) -> str:
    """The text of a choice, of a completion or of a chat."""
    return choice.get("text") or (choice.get("delta") or {}).get("content") or ""


@dataclass
class _Noted:
    """What has come so far."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    pieces: list[tuple[float, bytes]] = field(default_factory=list)


async def post(server: Server, path: str, body: Mapping[str, Any] | bytes, cut: Cut | None = None) -> Answer:
    """The answer to a body, or what of it came before the connection was cut."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return await exchange(server, server.request("POST", path, data), cut)


async def get(server: Server, path: str) -> Answer:
    """The answer to a GET."""
    return await exchange(server, server.request("GET", path, b""), None)


async def exchange(server: Server, request: bytes, cut: Cut | None) -> Answer:
    """Send the bytes of a request over a connection of its own, and note what comes back."""
    reader, writer = await _connect(server)
    noted = _Noted()
    sent = time.perf_counter()
    try:
        writer.write(request if cut is None or cut.pieces >= 0 else request[: len(request) // 2])
        await writer.drain()
        if cut is None or cut.pieces > 0:
            most = None if cut is None else cut.pieces
            await asyncio.wait_for(_read(reader, noted, most), ANSWER_SECONDS)
    except (ConnectionError, asyncio.IncompleteReadError, TimeoutError):
        pass  # what has come tells that it is not all
    finally:
        if cut is not None and cut.reset:
            writer.transport.abort()
        else:
            writer.close()
    return Answer(sent, noted.status, noted.headers, tuple(noted.pieces), time.perf_counter())


async def _connect(server: Server) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    context = ssl.create_default_context() if server.tls else None
    try:
        connecting = asyncio.open_connection(server.host, server.port, ssl=context)
        return await asyncio.wait_for(connecting, CONNECT_SECONDS)
    except (OSError, TimeoutError) as error:
        raise ClientError(
            f"nothing answers at {server.host}, port {server.port} ({error}); start `paceline serve` there."
        ) from None


async def _read(reader: asyncio.StreamReader, noted: _Noted, most: int | None) -> None:
    """Note the status, the headers and the pieces of the body; at most so many of these."""
    words = (await reader.readline()).split(None, 2)
    if len(words) < 2 or not words[0].startswith(b"HTTP/"):
        return
    noted.status = int(words[1])
    while (line := await reader.readline()).strip():
        name, _, value = line.decode("latin-1").partition(":")
        noted.headers[name.lower()] = value.strip()
    async for data in _body(reader, noted.headers):
        noted.pieces.append((time.perf_counter(), data))
        if len(noted.pieces) == most:
            return


async def _body(reader: asyncio.StreamReader, headers: Mapping[str, str]) -> AsyncIterator[bytes]:
    if "chunked" in headers.get("transfer-encoding", ""):
        while size := int((await reader.readline()).partition(b";")[0] or b"0", 16):
            data = await reader.readexactly(size + 2)  # and the end of the line
            yield data[:-2]
    else:
        yield await reader.readexactly(int(headers.get("content-length", 0)))
