"""Replicas in this process: the ingress, its connections and the workers are real, only Ray is not there."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from paceline.constrain.compiler import GrammarTokenizer
from paceline.engine.async_engine import AsyncEngine
from paceline.engine.engine import Engine
from paceline.scale.remote_engine import RemoteEngine, RemoteOptions
from paceline.scale.routing import PrefixRouting
from paceline.scale.wire import Address, Description, RemoteRequest
from paceline.scale.worker import ReplicaWorker


def describe(engine: Engine, form: str = "toy") -> Description:
    return Description(
        form=form,
        limits=engine.limits,
        plans=engine.plans,
        pool_tokens=engine.kv.pages.num_pages * engine.kv.page_size,
        page_size=engine.kv.page_size,
        facts={},
    )


class FakeReplica:
    """A worker that can die or hang."""

    def __init__(self, name: str, engine: Engine, tokenizer: GrammarTokenizer, form: str) -> None:
        self.name = name
        self.engine = AsyncEngine(engine, tokenizer, max_queue=1000)
        self.engine.start()
        self.worker = ReplicaWorker(self.engine, name, describe(engine, form), beat_seconds=0.05)
        self.calls: set[asyncio.Task[None]] = set()
        self.requests: list[RemoteRequest] = []
        self.alive, self.hung = True, False

    async def kill(self) -> None:
        """As kill -9: connections are closed, calls fail, nothing is said."""
        self.alive = False
        self._silence()
        for connecting in list(self.worker._connections.values()):
            connecting.result().close()
        for call in self.calls:
            call.cancel()
        await self.engine.stop()

    def hang(self) -> None:
        """As SIGSTOP: connections stay open and calls run, but nothing is said any more."""
        self.hung = True
        self._silence()

    def _silence(self) -> None:
        for connecting in self.worker._connections.values():
            connection = connecting.result()
            connection.send = lambda message: None  # type: ignore[method-assign]
            connection._flush = lambda: None  # type: ignore[method-assign]


class FakeReplicas:
    """Implements Replicas."""

    def __init__(self, make_engine: Callable[[], Engine], tokenizer: GrammarTokenizer, count: int) -> None:
        self._make_engine = make_engine
        self._tokenizer = tokenizer
        self._routing = PrefixRouting()
        self.all: list[FakeReplica] = []
        self.changed = asyncio.Event()
        for _ in range(count):
            self.add()

    def add(self, form: str = "toy") -> FakeReplica:
        name = f"r{len(self.all)}"
        self.all.append(FakeReplica(name, self._make_engine(), self._tokenizer, form))
        self.changed.set()
        return self.all[-1]

    @property
    def alive(self) -> list[FakeReplica]:
        return [replica for replica in self.all if replica.alive]

    async def call(self, request: RemoteRequest) -> None:
        while not (usable := [one for one in self.alive if one.name not in request.avoid]):
            self.changed.clear()
            await self.changed.wait()
        loads = {replica.name: len(replica.calls) for replica in usable}
        chosen = self._routing.rank(request.prefix_hashes, request.session, loads)[0]
        self._routing.record(chosen, request.prefix_hashes, request.session)
        request.routed.append(chosen)
        replica = next(one for one in usable if one.name == chosen)
        replica.requests.append(request)
        if replica.hung:
            await asyncio.Event().wait()
        call = asyncio.create_task(replica.worker.serve(request))
        replica.calls.add(call)
        call.add_done_callback(replica.calls.discard)
        try:
            await asyncio.wait([call])
        finally:
            call.cancel()
        if not replica.alive:
            raise RuntimeError("the actor died")

    async def introduce(self, address: Address) -> None:
        for replica in self.alive:
            if not replica.hung:
                with suppress(OSError):
                    await replica.worker.link(address)


class Fleet:
    """An ingress over fake replicas, as an async context."""

    def __init__(
        self, make_engine: Callable[[], Engine], tokenizer: Any, count: int = 2, **options: Any
    ) -> None:
        self._arguments = (make_engine, tokenizer, count)
        self._options = {"replicas": count, "replica_timeout": 0.4, **options}

    async def __aenter__(self) -> Fleet:
        make_engine, tokenizer, count = self._arguments
        self.replicas = FakeReplicas(make_engine, tokenizer, count)
        description = self.replicas.all[0].worker.description
        self.engine = RemoteEngine(self.replicas, description, tokenizer, RemoteOptions(**self._options))
        await self.engine.start("127.0.0.1")
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.engine.stop()
        for replica in self.replicas.alive:
            await replica.engine.stop()
