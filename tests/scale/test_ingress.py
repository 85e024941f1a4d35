"""The HTTP API over replicas: the answers, pages and metrics of one server."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import httpx
import pytest

from paceline.engine.frontend.async_engine import AsyncEngine
from paceline.errors import PacelineError
from paceline.scale.pages import ModelFleet, pages
from paceline.scale.ray import calls
from paceline.scale.remote.remote_engine import RemoteEngine, RemoteOptions
from paceline.serve.http.app import make_app, make_models_app
from paceline.serve.observability.metrics import Metrics
from paceline.serve.options import ServeOptions
from paceline.serve.routes.file import RouteTable
from paceline.serve.routes.kinds import FallbackRoute
from paceline.serve.routes.models import Models
from paceline.serve.service import Service
from tests.scale.fake import FakeReplicas
from tests.toy import toy_engine
from tests.toy_tokenizer import ToyTokenizer

TOKENIZER: Any = ToyTokenizer()
BODIES: list[dict[str, Any]] = [
    {"prompt": "one", "max_tokens": 12, "temperature": 0, "logprobs": 2},
    {"prompt": ["two", "three"], "max_tokens": 9, "n": 2, "seed": 4, "echo": True},
    {"prompt": "four", "max_tokens": 20, "temperature": 0.7, "stop": "A", "user": "someone"},
    {"prompt": "five", "max_tokens": 5, "top_k": -7},
    {"prompt": "six", "max_tokens": 10_000},
    {"prompt": "seven", "speculative": "magic"},
]


class Counted(NamedTuple):
    replica: str
    metrics: Metrics


async def ask(app: Any, method: str, path: str, body: Any = None) -> httpx.Response:
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://toy") as client:
        return await client.request(method, path, json=body)


async def answers(app: Any) -> list[Any]:
    """Status and body of each answer, without what is different for each: ids and times."""
    found = []
    for body in BODIES:
        response = await ask(app, "POST", "/v1/completions", body)
        content = response.json()
        found.append((response.status_code, {**content, "id": "", "created": 0, "metrics": None}))
    return found


def test_the_api_over_replicas_answers_as_over_one_engine() -> None:
    async def main() -> None:
        front = AsyncEngine(toy_engine(max_model_len=400), TOKENIZER, max_queue=100)
        front.start()
        expected = await answers(make_app(Service(front, TOKENIZER, ("toy",))))
        await front.stop()
        statuses = [status for status, _ in expected]
        assert statuses == [200, 200, 200, 400, 200, 400]

        replicas = FakeReplicas(lambda: toy_engine(max_model_len=400), TOKENIZER, 2)
        own = Metrics("toy", 4, {"model": "toy"})
        description = replicas.all[0].worker.description
        engine = RemoteEngine(replicas, description, TOKENIZER, RemoteOptions(replicas=2), (own,))
        await engine.start("127.0.0.1")
        counted = {replica.name: Metrics("toy", 4, {}) for replica in replicas.all}
        for replica in replicas.all:
            replica.engine._observers = (counted[replica.name],)

        async def snapshots() -> Sequence[Counted]:
            return [Counted(name, metrics.snapshot()) for name, metrics in counted.items()]

        shown = pages([ModelFleet(own, engine, snapshots)], "paceline")
        app = make_app(Service(engine, TOKENIZER, ("toy",)), None, own, (), shown)
        assert await answers(app) == expected
        await check_pages(app, counted)
        await check_calls(app)
        await engine.stop()
        for replica in replicas.all:
            await replica.engine.stop()

    asyncio.run(asyncio.wait_for(main(), 60))


async def check_pages(app: Any, counted: dict[str, Metrics]) -> None:
    """What is shown adds up."""
    total = (await ask(app, "GET", "/metrics")).text
    apart = (await ask(app, "GET", "/metrics/replicas")).text
    steps = {name: metrics.steps for name, metrics in counted.items()}
    assert all(steps.values())
    assert values(total, "paceline:engine_steps_total") == [sum(steps.values())]
    assert values(apart, "paceline:engine_steps_total") == list(steps.values())
    for name in steps:
        assert f'replica="{name}"' in apart
    assert sum(values(total, "paceline:request_success_total")) == 1 + 4 + 1 + 1  # each output once
    assert len(re.findall("# TYPE paceline:engine_steps_total", apart)) == 1
    states = (await ask(app, "GET", "/replicas")).json()
    assert [state["replica"] for state in states["replicas"]] == list(steps)
    assert states["resumed"] == 0
    assert (await ask(app, "GET", "/health")).json() == {"status": "ok"}
    assert (await ask(app, "GET", "/load")).json() == {"server_load": 0}
    assert (await ask(app, "GET", "/requests")).json() == {"requests": []}


async def check_calls(app: Any) -> None:
    """Other Serve deployments get the same answers through a handle."""
    body = BODIES[0]
    over_http = (await ask(app, "POST", "/v1/completions", body)).json()
    called = await calls.post(app, "/v1/completions", body)
    assert called["choices"] == over_http["choices"]
    chunks = [chunk async for chunk in calls.stream(app, "/v1/completions", body)]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == called["choices"][0]["text"]
    with pytest.raises(PacelineError, match="top_k"):
        await calls.post(app, "/v1/completions", BODIES[3])
    left = calls.stream(app, "/v1/completions", {**body, "max_tokens": 300, "ignore_eos": True})
    assert await anext(left)
    await left.aclose()
    assert (await ask(app, "GET", "/requests")).json() == {"requests": []}  # it was aborted


def values(page: str, name: str) -> list[float]:
    return [float(line.split()[-1]) for line in page.splitlines() if line.startswith(name + "{")]


def test_routes_lead_to_models_on_replicas() -> None:
    """Two models on replicas of their own; a route falls back to the second while the first has no room."""

    async def none() -> Sequence[Counted]:
        return []

    async def main() -> None:
        engines = {"large": toy_engine(max_model_len=100), "small": toy_engine(max_model_len=400)}
        groups = {name: FakeReplicas(lambda made=made: made, TOKENIZER, 1) for name, made in engines.items()}
        fleets, services = [], {}
        for name, replicas in groups.items():
            options = RemoteOptions(max_queue=0 if name == "large" else 100)
            own = Metrics(name, 4, {"model": name})
            engine = RemoteEngine(replicas, replicas.all[0].worker.description, TOKENIZER, options, (own,))
            await engine.start("127.0.0.1")
            fleets.append(ModelFleet(own, engine, none))
            services[name] = Service(engine, TOKENIZER, (name,))
        table = RouteTable(tuple(services), {"steady": FallbackRoute(["large", "small"])}, "steady")
        app = make_models_app(
            Models(services, table),
            ServeOptions(),
            [fleet.own for fleet in fleets],
            (),
            pages(fleets, "paceline"),
        )
        room = fleets[0].engine.limits.max_num_seqs
        body = {"model": "steady", "prompt": "one", "max_tokens": 4, "n": room}
        assert (await ask(app, "POST", "/v1/completions", body)).headers["x-routed-model"] == "large"
        with fleets[0].engine.preparing(), fleets[0].engine.preparing():  # two others are on their way
            response = await ask(app, "POST", "/v1/completions", body)
        assert response.headers["x-routed-model"] == "small"
        states = (await ask(app, "GET", "/replicas")).json()["replicas"]
        assert [state["model"] for state in states] == ["large", "small"]
        total = (await ask(app, "GET", "/metrics")).text
        assert len(values(total, "paceline:num_requests_running")) == 2
        for fleet in fleets:
            await fleet.engine.stop()
        for replicas in groups.values():
            await replicas.all[0].engine.stop()

    asyncio.run(asyncio.wait_for(main(), 60))
