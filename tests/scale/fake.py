"""Replicas in this process: the ingress, its connections and the workers are real, only Ray is not there."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from paceline.core.detokenizer import TextTokenizer
from paceline.draft.base import Drafter
from paceline.engine.engine import Engine
from paceline.engine.frontend.async_engine import AsyncEngine
from paceline.errors import ConfigError
from paceline.scale.heads import HeadReceiver, StepReports
from paceline.scale.ray.worker import ReplicaWorker
from paceline.scale.remote.channel import Connection, Message
from paceline.scale.remote.remote_engine import RemoteEngine, RemoteOptions
from paceline.scale.remote.wire import Address, Description


def describe(engine: Engine, weights_id: str = "toy") -> Description:
    return Description(
        weights_id=weights_id,
        limits=engine.limits,
        plans=engine.plans,
        pool_tokens=engine.kv.pages.num_pages * engine.kv.page_size,
        page_size=engine.kv.page_size,
        facts={},
    )


LoadHead = Callable[[str, Path | None], Drafter]


def no_heads(method: str, folder: Path | None) -> Drafter:
    raise ConfigError("these replicas have no heads")


class FakeReplica:
    """A worker that can die or hang."""

    def __init__(
        self, name: str, engine: Engine, tokenizer: TextTokenizer, weights_id: str, load: LoadHead
    ) -> None:
        self.name = name
        reports = StepReports()
        self.engine = AsyncEngine(engine, tokenizer, max_queue=1000, observers=(reports,))
        self.engine.start()
        heads = HeadReceiver(self.engine, load, reports)
        self.worker = ReplicaWorker(self.engine, name, describe(engine, weights_id), heads, beat_seconds=0.05)
        self.requests: list[Mapping[str, Any]] = []  # that it got, as JSON
        self.alive, self.hung = True, False
        received = self.worker._received

        def note(connection: Connection, keys: set[str], messages: list[Message]) -> None:
            if self.alive and not self.hung:
                self.requests += [content for kind, content in messages if kind == "request"]
                received(connection, keys, messages)

        self.worker._received = note  # type: ignore[method-assign]

    async def kill(self) -> None:
        """As kill -9: connections are closed, nothing is said."""
        self.alive = False
        self._silence()
        for connecting in list(self.worker._connections.values()):
            connecting.result().close()
        await self.engine.stop()

    def hang(self) -> None:
        """As SIGSTOP: connections stay open, but nothing is read or said any more."""
        self.hung = True
        self._silence()

    def _silence(self) -> None:
        for connecting in self.worker._connections.values():
            connection = connecting.result()
            connection.send = lambda message: None  # type: ignore[method-assign]
            connection._flush = lambda: None  # type: ignore[method-assign]


class FakeReplicas:
    """Implements Replicas."""

    def __init__(
        self,
        make_engine: Callable[[], Engine],
        tokenizer: TextTokenizer,
        count: int,
        load: LoadHead = no_heads,
    ) -> None:
        self._make_engine, self._load = make_engine, load
        self._tokenizer = tokenizer
        self.all: list[FakeReplica] = []
        self.changed = asyncio.Event()
        for _ in range(count):
            self.add()

    def add(self, weights_id: str = "toy") -> FakeReplica:
        name = f"r{len(self.all)}"
        self.all.append(FakeReplica(name, self._make_engine(), self._tokenizer, weights_id, self._load))
        self.changed.set()
        return self.all[-1]

    @property
    def alive(self) -> list[FakeReplica]:
        return [replica for replica in self.all if replica.alive]

    async def introduce(self, address: Address) -> None:
        for replica in self.alive:
            if not replica.hung:
                with suppress(OSError):
                    await replica.worker.link(address)

    async def wake(self) -> None:
        while not self.alive:
            self.changed.clear()
            await self.changed.wait()


class Fleet:
    """An ingress over fake replicas, as an async context."""

    def __init__(
        self,
        make_engine: Callable[[], Engine],
        tokenizer: Any,
        count: int = 2,
        load: LoadHead = no_heads,
        **options: Any,
    ) -> None:
        self._arguments = (make_engine, tokenizer, count, load)
        self._options = {
            "replicas": count,
            "replica_timeout": 60.0,
            **options,
        }  # no false alarm on a busy machine

    async def __aenter__(self) -> Fleet:
        make_engine, tokenizer, count, load = self._arguments
        self.replicas = FakeReplicas(make_engine, tokenizer, count, load)
        description = self.replicas.all[0].worker.description
        self.engine = RemoteEngine(self.replicas, description, tokenizer, RemoteOptions(**self._options))
        await self.engine.start("127.0.0.1")
        while len([link for link in self.engine.links.values() if link.state]) < count:
            await asyncio.sleep(0.005)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.engine.stop()
        for replica in self.replicas.alive:
            await replica.engine.stop()
