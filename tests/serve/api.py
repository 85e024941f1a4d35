"""The app around the toy model in this process: requests in, answers out, no socket."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

import httpx

from paceline.engine.engine import Engine
from paceline.engine.frontend.async_engine import AsyncEngine
from paceline.serve.http.app import make_models_app
from paceline.serve.options import ServeOptions
from paceline.serve.routes.models import Models
from paceline.serve.service import OnFinished, Restrict, Service
from tests.toy import ToyTokenizer, toy_engine

Result = TypeVar("Result")


class Api:
    """A client of an app whose engine runs until `close`."""

    _keys: Sequence[str] = ()  # of the app, if it asks for one

    def __init__(
        self,
        engine: Engine | None = None,
        max_queue: int = 100,
        on_finished: OnFinished | None = None,
        options: ServeOptions | None = None,
        restrict: Restrict | None = None,
    ) -> None:
        self.engine = engine or toy_engine(max_model_len=400)
        self._keys = [f"Bearer {key}" for key in (options or ServeOptions()).api_key]
        self._runner = asyncio.Runner()
        self.front = AsyncEngine(self.engine, ToyTokenizer(), max_queue=max_queue)
        names = ("toy", "toy-too")
        tokenizer: Any = ToyTokenizer()
        self.service = Service(self.front, tokenizer, names, on_finished=on_finished, restrict=restrict)
        self.models = Models.of(self.service)
        self.app = make_models_app(self.models, options or ServeOptions())

        async def start() -> None:
            self.front.start()

        self._runner.run(start())

    def run(self, work: Callable[[], Awaitable[Result]]) -> Result:
        """The result of `work`, in the app's event loop."""

        async def main() -> Result:
            return await asyncio.wait_for(work(), 60)

        return self._runner.run(main())

    def request(self, method: str, path: str, **options: Any) -> httpx.Response:
        """The answer to a request; streams are read to their end."""
        return self.run(lambda: self.send(method, path, **options))

    async def send(self, method: str, path: str, **options: Any) -> httpx.Response:
        """The same for concurrent requests, inside `run`."""
        transport = httpx.ASGITransport(self.app, raise_app_exceptions=False)
        headers = {"Authorization": self._keys[0]} if self._keys else {}
        async with httpx.AsyncClient(transport=transport, base_url="http://toy", headers=headers) as client:
            return await client.request(method, path, **options)

    def get(self, path: str) -> Any:
        """The JSON at a path."""
        response = self.request("GET", path)
        assert response.status_code == 200, response.text
        return response.json()

    def post(self, path: str, body: Any) -> Any:
        """The JSON of an answer with status 200."""
        response = self.request("POST", path, json=body)
        assert response.status_code == 200, response.text
        return response.json()

    def chunks(self, path: str, body: Any) -> list[Any]:
        """The chunks of a stream that ends properly."""
        response = self.request("POST", path, json={**body, "stream": True})
        assert response.status_code == 200, response.text
        assert response.headers["content-type"].startswith("text/event-stream")
        *events, done = response.text.removesuffix("\n\n").split("\n\n")
        assert done == "data: [DONE]"
        return [json.loads(event.removeprefix("data: ")) for event in events]

    def refusal(self, path: str, body: Any, status: int = 400) -> Any:
        """The error of a refused request."""
        response = self.request("POST", path, json=body)
        assert response.status_code == status, response.text
        assert set(response.json()) == {"error"}
        error = response.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        return error

    def close(self) -> None:
        """Stop the engine. Nothing may be left in it."""
        # the engine handles commands in order: earlier aborts are done before this one
        self.post("/v1/completions", {"prompt": "x", "max_tokens": 1})
        self.run(self.front.drain)
        self.run(self.front.stop)
        self.service.workers.shutdown()
        self._runner.close()
        assert self.front.num_requests == 0
        assert self.engine.kv.usage == 0
