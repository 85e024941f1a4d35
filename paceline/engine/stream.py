"""What the event loop sees of a request: its updates, and in the end the whole."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

from paceline.engine.outputs import RequestOutput, TokenLogprobs


@dataclass(frozen=True, slots=True)
class Update:
    """What one step added to one of the n outputs of a request."""

    index: int  # which of the n outputs
    text: str  # may be empty while characters or stop strings are incomplete
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] | None  # one per token, if asked
    finish_reason: str | None  # stop | length | abort | error, in the last update of the output
    stop_reason: int | str | None
    error: Exception | None  # why, when finish_reason is error


class Stream:
    """The updates of one request as an async iterator. Leaving its `async with` early aborts the request."""

    def __init__(
        self, request_id: str, abort: Callable[[Stream], None], arrived: asyncio.Event | None = None
    ) -> None:
        """`abort` ends the request in the engine.

        `arrived` is set whenever there is something to take; streams that are read together share one.
        """
        self.request_id = request_id
        self.output: RequestOutput | None = None  # the whole, once all n outputs have ended
        self.accepted: asyncio.Future[None] = asyncio.get_running_loop().create_future()  # by the engine
        self._abort = abort
        self._updates: deque[Update] = deque()
        self._arrived = arrived or asyncio.Event()
        self._failure: Exception | None = None

    async def __aenter__(self) -> Stream:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.abort()

    async def __aiter__(self) -> AsyncIterator[Update]:
        while True:
            taken = self.take()
            for update in taken:
                yield update
            if taken:
                continue  # more may have come while these were used
            if self.output is not None:
                return
            self._arrived.clear()
            await self._arrived.wait()

    def take(self) -> list[Update]:
        """The updates that have come and were not taken yet. Raises what the request has failed with."""
        if self._failure is not None and not self._updates:
            raise self._failure
        taken = list(self._updates)
        self._updates.clear()
        return taken

    async def finished(self) -> RequestOutput:
        """The whole output, when it is there."""
        async for _ in self:
            pass
        assert self.output is not None
        return self.output

    def abort(self) -> None:
        """End the request now, if it has not ended. It takes part in no further pass."""
        if self.output is None and self._failure is None:
            self._abort(self)

    def accept(self) -> None:
        """For the engine: the request runs or waits."""
        if not self.accepted.done():  # else its waiter has gone
            self.accepted.set_result(None)

    def put(self, update: Update) -> None:
        """For the engine: one more update."""
        self._updates.append(update)
        self._arrived.set()

    def end(self, output: RequestOutput) -> None:
        """For the engine: that was all."""
        self.output = output
        self._arrived.set()

    def fail(self, error: Exception) -> None:
        """For the engine: the request has ended without an output."""
        self._failure = error
        self._arrived.set()
        if not self.accepted.done():
            self.accepted.set_exception(error)
