"""A disconnected client stops costing: its request takes part in no further pass."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from tests.serve.api import Api
from tests.toy import toy_engine
from tests.toy_passes import OneByOne

LONG = {"prompt": "hello", "max_tokens": 200, "ignore_eos": True, "seed": 1}
CHAT = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 90, "ignore_eos": True}


class Client:
    """An ASGI connection that can be closed, and whose first bytes can be awaited."""

    def __init__(self, api: Api, path: str, body: Any) -> None:
        self.left = asyncio.Event()
        self.heard = asyncio.Event()
        self.messages: list[Any] = [
            {"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}
        ]
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": "POST",
            "path": path,
            "raw_path": path.encode(),
            "root_path": "",
            "query_string": b"",
            "scheme": "http",
            "headers": [(b"content-type", b"application/json")],
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 2),
        }
        self.task = asyncio.ensure_future(api.app(scope, self._receive, self._send))

    async def _receive(self) -> Any:
        if self.messages:
            return self.messages.pop()
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        if message.get("body"):
            self.heard.set()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", LONG),
        ("/v1/completions", {**LONG, "prompt": ["a", "b", "c"], "n": 2}),
        ("/v1/chat/completions", CHAT),
    ],
)
@pytest.mark.parametrize("cancelled", [False, True])
def test_an_abandoned_request_ends_with_the_current_pass(
    path: str, body: Any, stream: bool, cancelled: bool
) -> None:
    backend = OneByOne()
    api = Api(toy_engine(backend, max_model_len=400))

    async def leave() -> None:
        client = Client(api, path, {**body, "stream": stream})
        for _ in range(4):
            backend.turn.release()
        if stream:
            await client.heard.wait()
        else:
            while backend.passes < 4:
                await asyncio.sleep(0.001)
        assert api.front.num_requests > 0
        if cancelled:  # like a time limit
            client.task.cancel()
        else:
            client.left.set()
        await asyncio.wait([client.task])
        assert api.front.num_requests == 0

    api.run(leave)
    for _ in range(3):  # the pass it was in, and two for the request with which `close` looks for leftovers
        backend.turn.release()
    api.close()
    assert backend.passes <= 7


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_request_cancelled_at_any_moment_leaves_nothing_behind(path: str) -> None:
    api = Api(toy_engine(max_model_len=400))
    body = {**(LONG if path == "/v1/completions" else CHAT), "stream": True}

    async def cancel_after(turns: int) -> None:
        client = Client(api, path, body)
        for _ in range(turns):
            await asyncio.sleep(0)
        client.task.cancel()
        await asyncio.wait([client.task])
        assert api.front.num_requests == 0

    for turns in range(40):
        api.run(lambda turns=turns: cancel_after(turns))
    api.close()
