"""One TCP connection for each pair of replica and ingress, opened by the replica.

    replica                                       ingress
    hello: secret, name, id of the weights ->     drops the connection if the secret is wrong
                            <--  requests, aborts
    tokens of one step, state              -->    batched: one frame per step, not one per request

A call through Ray Serve would add 5 ms to a first token, a stream of Ray objects 1.5 ms of CPU for each
request and step; a frame costs less than 0.1 ms for all requests of a step. A frame is its length (4 bytes)
and a JSON list of messages.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import secrets
from collections.abc import Callable
from typing import Any, Protocol

from paceline.scale.remote.wire import Address

logger = logging.getLogger(__name__)

Message = list[Any]  # its kind, and its arguments
MAX_FRAME = 1 << 28  # bytes
HELLO_SECONDS = 10.0


async def read_frame(reader: asyncio.StreamReader) -> list[Message]:
    """The messages of the next frame. IncompleteReadError at the end of the connection."""
    size = int.from_bytes(await reader.readexactly(4), "little")
    if size > MAX_FRAME:
        raise ConnectionError(f"a frame of {size} bytes")
    messages = json.loads(await reader.readexactly(size))
    if not isinstance(messages, list):
        raise ConnectionError("a frame that is no list")
    return messages


class Connection:
    """Sends messages, batched: all that are sent in one turn of the event loop go into one frame."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._waiting: list[Message] = []
        self.listening: asyncio.Task[None] | None = None  # kept from the garbage collector

    def send(self, message: Message) -> None:
        """Send a message soon. Messages to a closed connection are dropped."""
        if not self._waiting:
            asyncio.get_running_loop().call_soon(self._flush)
        self._waiting.append(message)

    def _flush(self) -> None:
        messages, self._waiting = self._waiting, []
        if not self._writer.is_closing():
            data = json.dumps(messages, separators=(",", ":")).encode()
            self._writer.write(len(data).to_bytes(4, "little") + data)

    async def drain(self) -> None:
        """Return when all sent messages are on their way. OSError if the connection is closed."""
        await asyncio.sleep(0)  # the flush
        await self._writer.drain()

    async def frames(self, on_messages: Callable[[list[Message]], None]) -> None:
        """Pass on what arrives, until the connection is closed."""
        try:
            while True:
                on_messages(await read_frame(self._reader))
        except (OSError, EOFError, ValueError) as error:
            logger.debug("connection closed: %r", error)
        finally:
            self.close()

    def close(self) -> None:
        """Close at once; the other side notices."""
        self._writer.transport.abort()


class Link(Connection):
    """A replica as its ingress sees it."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, replica: str, weights_id: str
    ) -> None:
        super().__init__(reader, writer)
        self.replica = replica
        self.weights_id = weights_id
        self.heard = asyncio.get_running_loop().time()  # when it last sent something
        self.state: dict[str, Any] = {}  # the last state that it reported
        self.others = 0  # requests that it had from other ingresses at that time
        self.draining = False  # it takes no more requests


class LinkOwner(Protocol):
    """The receiver of replicas' messages."""

    def linked(self, link: Link) -> bool:
        """A replica has connected. False: refuse it."""
        ...

    def received(self, link: Link, messages: list[Message]) -> None: ...

    def lost(self, link: Link) -> None:
        """The connection of a replica was closed."""
        ...


class Listener:
    """The ingress's side: accepts connections of replicas."""

    def __init__(self, owner: LinkOwner) -> None:
        self._owner = owner
        self._secret = secrets.token_hex(16)
        self._server: asyncio.Server | None = None
        self._links: set[Link] = set()

    async def start(self, host: str) -> Address:
        """Listen on a free port of this address."""
        self._server = await asyncio.start_server(self._accept, host, 0)
        port: int = self._server.sockets[0].getsockname()[1]
        return Address(host, port, self._secret)

    def close(self) -> None:
        """Stop listening and close all connections."""
        if self._server is not None:
            self._server.close()
        for link in list(self._links):
            link.close()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(HELLO_SECONDS):
                ((secret, replica, weights_id),) = await read_frame(reader)
            if not hmac.compare_digest(str(secret), self._secret):
                raise ConnectionError("wrong secret")
        except (OSError, EOFError, ValueError) as error:  # TimeoutError is an OSError
            logger.warning("refused a connection that is no replica's: %r", error)
            writer.transport.abort()
            return
        link = Link(reader, writer, str(replica), str(weights_id))
        if not self._owner.linked(link):
            link.close()
            return
        self._links.add(link)

        def on_messages(messages: list[Message]) -> None:
            link.heard = asyncio.get_running_loop().time()
            self._owner.received(link, messages)

        try:
            await link.frames(on_messages)
        finally:
            self._links.discard(link)
            self._owner.lost(link)


async def connect(address: Address, replica: str, weights_id: str) -> Connection:
    """The replica's side: a connection to an ingress. OSError if it cannot be reached."""
    reader, writer = await asyncio.open_connection(address.host, address.port)
    connection = Connection(reader, writer)
    connection.send([address.secret, replica, weights_id])
    return connection
