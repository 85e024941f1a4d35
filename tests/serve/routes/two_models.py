"""An app with two models and routes over them: `small` echoes, and is unsure of questions; `large` shouts."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import httpx
import numpy as np
import numpy.typing as npt

from paceline.control.controller import FixedController
from paceline.core.arrays import Float32Array
from paceline.core.forward import ForwardBatch, ForwardOutput
from paceline.engine.admission import Limits
from paceline.engine.engine import Engine
from paceline.engine.frontend.async_engine import AsyncEngine
from paceline.engine.frontend.step_turns import StepTurns
from paceline.models.tokenizer import Tokenizer
from paceline.serve.http.app import make_models_app
from paceline.serve.observability.metrics import Metrics
from paceline.serve.options import ServeOptions
from paceline.serve.routes.file import RouteTable
from paceline.serve.routes.kinds import Route
from paceline.serve.routes.models import Models
from paceline.serve.service import Service
from tests.engines import new_engine
from tests.serve.api import Api
from tests.serve.echo import EchoBackend, byte_tokenizer

SMALL_CONTEXT, LARGE_CONTEXT = 120, 400
PATIENCE = 60.0  # seconds that a stopped pass waits: longer than tests wait for what must come before


class Unsure(EchoBackend):
    """Echoes, but with a low probability if the text has a question mark. A test can stop it by `open`."""

    def __init__(self, tokenizer: Tokenizer, max_rows: int) -> None:
        super().__init__(tokenizer, max_rows)
        self.open = threading.Event()
        self.open.set()

    def forward(self, batch: ForwardBatch) -> ForwardOutput:
        assert self.open.wait(PATIENCE)
        return super().forward(batch)

    def logits_of(self, tokens: npt.NDArray[np.int64], positions: npt.NDArray[np.int64]) -> Float32Array:
        logits = super().logits_of(tokens, positions)
        return np.where(logits == 50, np.float32(2), logits) if ord("?") in tokens else logits


class Shouting(EchoBackend):
    """Echoes in capitals."""

    def logits_of(self, tokens: npt.NDArray[np.int64], positions: npt.NDArray[np.int64]) -> Float32Array:
        logits = super().logits_of(tokens, positions).copy()
        letters = slice(ord("a"), ord("z") + 1)
        logits[ord("A") : ord("Z") + 1] = np.maximum(logits[ord("A") : ord("Z") + 1], logits[letters])
        logits[letters] = -50
        return logits


def engine_of(backend: EchoBackend, tokenizer: Tokenizer, context: int) -> Engine:
    return new_engine(
        backend,
        tokenizer,
        Limits(tokenizer.vocab_size, context, 16, 256),
        num_pages=1000,
        enable_prefix_caching=True,
        seed=0,
        controller=FixedController(),
        drafters={},
    )


class TwoModels(Api):
    """A client of the app, whose engines run until `close`."""

    def __init__(self, routes: dict[str, Route], default: str = "small", small_queue: int = 100) -> None:
        tokenizer = byte_tokenizer()
        self.small_backend = Unsure(tokenizer, max_rows=256)
        small = engine_of(self.small_backend, tokenizer, SMALL_CONTEXT)
        large = engine_of(Shouting(tokenizer, max_rows=256), tokenizer, LARGE_CONTEXT)
        self._runner = asyncio.Runner()
        turns = StepTurns()
        metrics = [Metrics(name, 8, {"model_name": name}) for name in ("small", "large")]
        self.fronts = [
            AsyncEngine(engine, tokenizer, max_queue=queue, observers=(counters,), turn=turns.join())
            for engine, queue, counters in zip((small, large), (small_queue, 100), metrics, strict=True)
        ]
        self.services = {
            name: Service(front, tokenizer, (name,))
            for name, front in zip(("small", "large"), self.fronts, strict=True)
        }
        self.models = Models(self.services, RouteTable(("small", "large"), routes, default))
        self.app = make_models_app(self.models, ServeOptions(), metrics)

        async def start() -> None:
            for front in self.fronts:
                front.start()

        self._runner.run(start())

    def ask(self, model: str | None, text: str, **fields: Any) -> httpx.Response:
        """The answer to a chat message, greedy."""
        body = {"messages": [{"role": "user", "content": text}], "temperature": 0, "max_tokens": 60, **fields}
        return self.request(
            "POST", "/v1/chat/completions", json=body if model is None else {**body, "model": model}
        )

    def said(self, model: str | None, text: str, **fields: Any) -> str:
        """What the model says to a chat message."""
        response = self.ask(model, text, **fields)
        assert response.status_code == 200, response.text
        return str(response.json()["choices"][0]["message"]["content"])

    def samples(self) -> dict[tuple[str, str], float]:
        """The metrics by route: (name without prefix, labels) to value."""
        text = self.request("GET", "/metrics").text
        lines = [line for line in text.splitlines() if line.startswith("paceline:route_")]
        pairs = [line.removeprefix("paceline:route_").rsplit(" ", 1) for line in lines]
        return {
            (name.partition("{")[0], name.partition("{")[2].rstrip("}")): float(value)
            for name, value in pairs
        }

    def close(self) -> None:
        """Stop the engines. Nothing may be left in them."""
        self.run(self.models.engines.drain)
        self.run(self.models.engines.stop)
        for service in self.services.values():
            service.workers.shutdown()
        self._runner.close()
        assert self.models.engines.num_requests == 0
