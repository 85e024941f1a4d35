"""Requests to the HTTP app from within its process: what other Serve deployments call through a handle."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any

from paceline.errors import PacelineError

DATA = b"data: "
DONE = b"[DONE]"


async def post(app: Any, path: str, body: Mapping[str, Any], api_key: str | None = None) -> dict[str, Any]:
    """The answer to a POST. PacelineError, with the API's message, for one that is refused."""
    whole = b"".join([piece async for piece in _pieces(app, path, body, api_key)])
    answer: dict[str, Any] = json.loads(whole)
    return answer


async def stream(
    app: Any, path: str, body: Mapping[str, Any], api_key: str | None = None
) -> AsyncGenerator[dict[str, Any], None]:
    """The chunks of a streamed answer. Closing the iterator aborts the request."""
    rest = b""
    async with aclosing(_pieces(app, path, {**body, "stream": True}, api_key)) as pieces:
        async for piece in pieces:
            *events, rest = (rest + piece).split(b"\n\n")
            lines = [line for event in events for line in event.split(b"\n") if line.startswith(DATA)]
            for data in (line.removeprefix(DATA) for line in lines):
                if data != DONE:
                    yield _checked(json.loads(data))


async def _pieces(
    app: Any, path: str, body: Mapping[str, Any], api_key: str | None
) -> AsyncGenerator[bytes, None]:
    """The body of an answer as the app sends it."""
    sent: asyncio.Queue[Any] = asyncio.Queue()
    given, gone = [json.dumps(body).encode()], asyncio.Event()

    async def receive() -> dict[str, Any]:
        if given:
            return {"type": "http.request", "body": given.pop(), "more_body": False}
        await gone.wait()
        return {"type": "http.disconnect"}

    async def run() -> None:
        try:
            await app(_scope(path, api_key), receive, sent.put)
        finally:
            sent.put_nowait(None)  # nothing follows, even if the answer has not ended

    async def next_message() -> Any:
        message = await sent.get()
        if message is None:
            await running  # raises what has ended it
            raise PacelineError(f"the answer to {path} was broken off")
        return message

    running = asyncio.create_task(run())
    try:
        start = await next_message()
        more = True
        while more:
            message = await next_message()
            more = message.get("more_body", False)
            data: bytes = message.get("body", b"")
            if start["status"] != 200:
                _checked(json.loads(data))
            yield data
    finally:
        gone.set()  # the app aborts what still runs
        await running


def _scope(path: str, api_key: str | None) -> dict[str, Any]:
    """The ASGI scope of a request."""
    headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
    if api_key is not None:
        headers.append((b"authorization", f"Bearer {api_key}".encode()))
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": headers,
        "client": None,
        "server": None,
    }


def _checked(answer: dict[str, Any]) -> dict[str, Any]:
    """The same; PacelineError if it is one of the API's errors."""
    if "error" in answer:
        raise PacelineError(answer["error"]["message"])
    return answer
