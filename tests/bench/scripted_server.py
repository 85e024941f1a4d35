"""A server without a model and with planted faults: it answers with the prompt's words, one per event."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from paceline.bench.servers.client import Server

Result = TypeVar("Result")
MODELS = json.dumps({"data": [{"id": "scripted"}]}).encode()
FIELDS = {
    "model",
    "prompt",
    "messages",
    "max_tokens",
    "seed",
    "stream",
    "stream_options",
    "temperature",
    "top_p",
}


class ScriptedServer:
    """Correct by default; each subclass changes one thing."""

    def __init__(self) -> None:
        self.seen: list[dict[str, Any]] = []  # complete bodies
        self.left = 0  # connections closed by clients
        self.running = 0
        self.held_after = 0.0  # reported fraction of used pages

    def refusal(self, body: dict[str, Any]) -> int | None:
        """The status for an invalid body."""
        if body["model"] != "scripted":
            return 404
        numbers = (body["temperature"], body["max_tokens"])
        sound = all(type(number) in (int, float) and number >= 0 for number in numbers)
        return None if sound and set(body) <= FIELDS else 400

    def words(self, body: dict[str, Any]) -> list[str]:
        text = body["prompt"] if "prompt" in body else body["messages"][-1]["content"]
        return [f"{word} " for word in str(text).split()][: body["max_tokens"]]

    def ending(self, body: dict[str, Any]) -> list[bytes]:
        return [b"[DONE]"]

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.running += 1
        try:
            await self._answer(reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            self.left += 1
        finally:
            self.running -= 1
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        path = head.split()[1]
        if path == "/v1/models":
            return _whole(writer, 200, MODELS)
        if path == "/metrics":
            return _whole(writer, 200, self._metrics())
        length = int(head.lower().split("content-length: ")[1].split()[0])
        body = json.loads(await reader.readexactly(length))
        self.seen.append(body)
        status = self.refusal(body)
        if status is not None:
            error = {"message": "no", "type": "invalid_request_error", "param": None, "code": None}
            return _whole(writer, status, json.dumps({"error": error}).encode())
        return await self._stream(path, body, writer)

    async def _stream(self, path: str, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        words = self.words(body)
        chat = path.startswith("/v1/chat")
        choices = [[{"delta": {"content": word}} if chat else {"text": word}] for word in words]
        choices += [[{"delta": {}, "finish_reason": "length"}], []]
        for choice in choices:
            usage = None if choice else {"completion_tokens": len(words)}
            await _chunk(writer, json.dumps({"choices": choice, "usage": usage}).encode())
        for data in self.ending(body):
            await _chunk(writer, data)
        writer.write(b"0\r\n\r\n")
        await writer.drain()

    def _metrics(self) -> bytes:
        lines = [
            f'paceline:num_requests_running{{model_name="m"}} {self.running - 1}',  # less the one that asks
            'paceline:num_requests_waiting{model_name="m"} 0',
            f'paceline:kv_cache_usage_perc{{model_name="m"}} {self.held_after}',
            "process_resident_memory_bytes 1.5e+08",
        ]
        return "\n".join(["# HELP nothing", *lines, ""]).encode()


def _whole(writer: asyncio.StreamWriter, status: int, body: bytes) -> None:
    writer.write(
        f"HTTP/1.1 {status} X\r\nRetry-After: 0\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body
    )


async def _chunk(writer: asyncio.StreamWriter, data: bytes) -> None:
    event = b"data: " + data + b"\n\n"
    half = len(event) // 2  # an event may come in two pieces
    for part in (event[:half], event[half:]):
        writer.write(f"{len(part):x}\r\n".encode() + part + b"\r\n")
        await writer.drain()
        await asyncio.sleep(0)  # a client that is in the same loop reads it now


def with_server(scripted: ScriptedServer, work: Callable[[Server], Awaitable[Result]]) -> Result:
    """The result of `work` with the server listening."""

    async def main() -> Result:
        listening = await asyncio.start_server(scripted.handle, "127.0.0.1", 0)
        port = listening.sockets[0].getsockname()[1]
        async with listening:
            return await asyncio.wait_for(work(Server("127.0.0.1", port)), 60)

    return asyncio.run(main())
