"""ReplicaWorker: a replica's engine, its requests, and the connections to the ingresses that sent them.

Knows nothing of Ray: deployment.py puts it into a Serve replica, tests into this process.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from typing import Any

from paceline.engine.frontend.async_engine import AsyncEngine
from paceline.errors import PacelineError
from paceline.scale.heads import ORDERED, HeadReceiver
from paceline.scale.remote.channel import Connection, Message, connect
from paceline.scale.remote.wire import (
    Address,
    Description,
    RemoteRequest,
    decode_request,
    encode_error,
    encode_output,
    encode_update,
)

logger = logging.getLogger(__name__)

BEAT_SECONDS = 0.2  # between two messages that tell an ingress the state of the replica


class ReplicaWorker:
    """Runs requests of ingresses in an engine, and sends them the tokens."""

    def __init__(
        self,
        engine: AsyncEngine,
        name: str,
        description: Description,
        heads: HeadReceiver,
        beat_seconds: float = BEAT_SECONDS,
    ) -> None:
        self.name = name
        self.description = description
        self._engine = engine
        self._heads = heads
        self._beat_seconds = beat_seconds
        self._draining = False
        self._connections: dict[Address, asyncio.Task[Connection]] = {}
        self._runs: dict[str, asyncio.Task[None]] = {}  # by key

    async def link(self, address: Address) -> Connection:
        """The connection to an ingress."""
        if address not in self._connections:
            self._connections[address] = asyncio.create_task(self._connect(address))
        try:
            return await asyncio.shield(self._connections[address])
        except OSError:
            self._connections.pop(address, None)
            raise

    @property
    def num_requests(self) -> int:
        """Requests that run or wait."""
        return len(self._runs)

    @property
    def healthy(self) -> bool:
        """Whether the engine steps, or has nothing to do."""
        return self._engine.failure is None

    async def drain(self, seconds: float) -> None:
        """Tell ingresses to send nothing more, and return when nothing runs, or after `seconds`."""
        self._draining = True
        for connection in self._connected():
            connection.send(["state", self.state()])
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while self._runs:
                    await asyncio.wait(self._runs.values())

    async def stop(self) -> None:
        """Stop the engine. Ingresses resume what still runs on other replicas."""
        for connection in self._connected():
            connection.close()
        await self._engine.stop()

    def _connected(self) -> list[Connection]:
        tasks = [task for task in self._connections.values() if task.done() and not task.cancelled()]
        return [task.result() for task in tasks if task.exception() is None]

    async def _connect(self, address: Address) -> Connection:
        connection = await connect(address, self.name, self.description.weights_id)
        beating = asyncio.create_task(self._beat(connection))

        async def listen() -> None:
            keys: set[str] = set()  # of this ingress
            await connection.frames(lambda messages: self._received(connection, keys, messages))
            beating.cancel()
            self._connections.pop(address, None)
            for key in keys & self._runs.keys():
                self._runs[key].cancel()  # its ingress is gone, and with it the client

        connection.listening = asyncio.create_task(listen())
        return connection

    async def _beat(self, connection: Connection) -> None:
        while True:
            connection.send(["state", self.state()])
            await asyncio.sleep(self._beat_seconds)

    def state(self) -> Mapping[str, object]:
        """What the ingress shows of this replica."""
        state = self._engine.state
        names = "running waiting kv_usage prefix_queries prefix_hits"
        return {
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "failure": self._engine.failure,
            "draining": self._draining,
            "head": self._heads.serving,
            **{name: getattr(state, name) for name in names.split()},
        }

    def _received(self, connection: Connection, keys: set[str], messages: list[Message]) -> None:
        for kind, content in messages:
            if kind == "request":
                key = content["key"]
                keys.add(key)
                self._runs[key] = run = asyncio.create_task(self._run(key, content, connection))
                run.add_done_callback(partial(self._forget, key, keys))
            elif kind == "abort" and content in self._runs:
                self._runs[content].cancel()
            elif kind in ORDERED:
                self._heads.received(connection, kind, content)

    def _forget(self, key: str, keys: set[str], _: asyncio.Task[None]) -> None:
        keys.discard(key)
        del self._runs[key]

    async def _run(self, key: str, content: Mapping[str, Any], connection: Connection) -> None:
        try:
            await self._generate(decode_request(content), connection)
        except PacelineError as error:
            connection.send(["failed", key, encode_error(error)])
        except Exception as error:  # a bug that concerns only this request
            logger.exception("a request failed")
            connection.send(["failed", key, encode_error(error)])

    async def _generate(self, request: RemoteRequest, connection: Connection) -> None:
        key, engine, grammar = request.key, self._engine, None
        if request.structure is not None:
            grammar = await asyncio.to_thread(engine.compile, request.structure, request.lenient)
        stream = await engine.submit(
            request.prompt_token_ids,
            request.params,
            key,
            segment=request.segment,
            cache_salt=request.cache_salt,
            adapter=request.adapter,
            grammar=grammar,
            resume=request.resume,
        )
        resume = request.resume or {}
        counts = {child: len(resume.get(child, ())) for child in range(request.params.n)}
        async with stream:
            async for update in stream:
                connection.send(encode_update(key, counts[update.index], update))
                counts[update.index] += len(update.token_ids)
        assert stream.output is not None
        connection.send(["ended", key, encode_output(stream.output)])
