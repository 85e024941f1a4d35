"""ReplicaWorker: a replica's engine, its requests, and the connections to the ingresses that sent them.

Knows nothing of Ray: deployment.py puts it into a Serve replica, tests into this process.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Mapping

from paceline.engine.async_engine import AsyncEngine
from paceline.errors import PacelineError
from paceline.scale.channel import Connection, Message, connect
from paceline.scale.wire import (
    Address,
    Description,
    RemoteRequest,
    encode_error,
    encode_output,
    encode_update,
)

logger = logging.getLogger(__name__)

BEAT_SECONDS = 0.5  # between two messages that tell an ingress the state of the replica


class ReplicaWorker:
    """Runs requests of ingresses in an engine, and sends them the tokens."""

    def __init__(
        self, engine: AsyncEngine, name: str, description: Description, beat_seconds: float = BEAT_SECONDS
    ) -> None:
        self.name = name
        self.description = description
        self._engine = engine
        self._beat_seconds = beat_seconds
        self._connections: dict[Address, asyncio.Task[Connection]] = {}
        self._runs: dict[str, tuple[Address, asyncio.Task[None]]] = {}  # by key

    async def serve(self, request: RemoteRequest) -> None:
        """Run a request to its end; its tokens go to its ingress. Ends early if that aborts it or is gone."""
        connection = await self.link(request.reply_to)
        run = asyncio.create_task(self._run(request, connection))
        self._runs[request.key] = (request.reply_to, run)
        try:
            await asyncio.wait([run])
        finally:
            run.cancel()
            del self._runs[request.key]

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
    def healthy(self) -> bool:
        """Whether the engine steps, or has nothing to do."""
        return self._engine.failure is None

    async def stop(self) -> None:
        """Stop the engine. Ingresses resume what still runs on other replicas."""
        for connecting in self._connections.values():
            if connecting.done() and not connecting.cancelled() and connecting.exception() is None:
                connecting.result().close()
        await self._engine.stop()

    async def _connect(self, address: Address) -> Connection:
        connection = await connect(address, self.name, self.description.form)
        beating = asyncio.create_task(self._beat(connection))

        async def listen() -> None:
            await connection.frames(self._received)
            beating.cancel()
            self._connections.pop(address, None)
            for ingress, run in self._runs.values():
                if ingress == address:
                    run.cancel()  # its ingress is gone, and with it the client

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
            **{name: getattr(state, name) for name in names.split()},
        }

    def _received(self, messages: list[Message]) -> None:
        for kind, key in messages:
            if kind == "abort" and key in self._runs:
                self._runs[key][1].cancel()

    async def _run(self, request: RemoteRequest, connection: Connection) -> None:
        key = request.key
        if request.form not in (None, self.description.form):
            connection.send(["refused", key])
            return
        connection.send(["started", key])
        try:
            await self._generate(request, connection)
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
