"""QueueSlots: how requests are admitted before the model that they ask for is known."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

from paceline.engine.frontend.client import EngineClient
from paceline.errors import OverloadedError

READERS = 2  # large bodies handled at a time
LARGE_BODY = 16 * 1024  # bytes; a smaller body is parsed within a few milliseconds, whatever it contains
MAX_WAITING_BYTES = 64 * 1024 * 1024  # of large bodies that wait for their turn; above this, 429


def is_large(size: int) -> bool:
    """Whether a body of `size` bytes is parsed in a worker thread."""
    return size > LARGE_BODY


class QueueSlot:
    """A request's slot in one engine's queue until it is submitted, and its turn if its body is large."""

    def __init__(self) -> None:
        self._queue = ExitStack()
        self._reader = ExitStack()

    def __enter__(self) -> QueueSlot:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def move_to(self, engine: EngineClient) -> None:
        """Take a slot in the queue of this engine, instead of the current one. OverloadedError: it is full,
        and the request has no slot."""
        self._queue.close()
        self._queue.enter_context(engine.preparing())

    def hold(self, reader: asyncio.Semaphore) -> None:
        """Release this semaphore, which the caller has acquired, with the slot."""
        self._reader.callback(reader.release)

    def close(self) -> None:
        """Give the slot up: the request was submitted, or has ended."""
        self._queue.close()
        self._reader.close()


@dataclass
class QueueSlots:
    """Admits requests to a server. Its engines count each as a waiting request."""

    engines: Sequence[EngineClient]
    readers: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(READERS))
    reading: threading.Lock = field(default_factory=threading.Lock)  # held while a large body is parsed
    waiting_bytes: int = 0  # of large bodies that wait for their turn

    async def reserve(self, size: int) -> QueueSlot:
        """A slot for a request with a body of `size` bytes, held until it is closed.

        Which model it asks for is not known yet, so it takes a slot of the first engine that has one. Only
        READERS large bodies are handled at a time, so that small ones do not wait behind them. Raises
        OverloadedError if there is no room.
        """
        slot = self._first_free()
        try:
            if is_large(size):
                await self._wait_for_reader(size)
                slot.hold(self.readers)
        except BaseException:
            slot.close()
            raise
        return slot

    def _first_free(self) -> QueueSlot:
        *others, last = self.engines
        slot = QueueSlot()
        for engine in others:
            try:
                slot.move_to(engine)
                return slot
            except OverloadedError:
                continue
        slot.move_to(last)
        return slot

    async def _wait_for_reader(self, size: int) -> None:
        if self.waiting_bytes and self.waiting_bytes + size > MAX_WAITING_BYTES:
            raise OverloadedError("too many large bodies wait to be read. Send the request again later.")
        self.waiting_bytes += size
        try:
            await self.readers.acquire()
        finally:
            self.waiting_bytes -= size
