"""Stream: a request as the event loop sees it, its updates and finally its output."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

from paceline.engine.outputs import RequestOutput, TokenLogprobs


@dataclass(frozen=True, slots=True)
class Update:
    """The new tokens and text of one of the n outputs, from one step."""

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
        """`abort` aborts the request in the engine.

        `arrived` is set whenever there are updates to take; streams that are read together share one event.
        """
        self.request_id = request_id
        self.output: RequestOutput | None = None  # set when all n outputs have finished
        self.unavailable_drafter: str | None = None  # asked for, but not loaded; known once it is accepted
        self.accepted: asyncio.Future[None] = asyncio.get_running_loop().create_future()  # by the engine
        self._abort = abort
        self._updates: deque[Update] = deque()
        self._arrived = arrived or asyncio.Event()
        self._failure: Exception | None = None
        self._when_finished: Callable[[RequestOutput], None] | None = None

    @property
    def ended(self) -> bool:
        """Whether the request has finished or failed: no more updates come."""
        return self.output is not None or self._failure is not None

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
                continue  # more may have arrived while the caller used these
            if self.output is not None:
                return
            self._arrived.clear()
            await self._arrived.wait()

    def take(self) -> list[Update]:
        """The updates since the last call. Raises the request's error once all updates are taken."""
        if self._failure is not None and not self._updates:
            raise self._failure
        updates = list(self._updates)
        self._updates.clear()
        return updates

    async def finished(self) -> RequestOutput:
        """The whole output; waits until the request has finished."""
        async for _ in self:
            pass
        assert self.output is not None
        return self.output

    def when_finished(self, call: Callable[[RequestOutput], None]) -> None:
        """Call a function with the output once all n outputs have finished; never if it is aborted."""
        if self.output is not None:
            call(self.output)
        else:
            self._when_finished = call

    def abort(self) -> None:
        """Abort the request if it is unfinished. It takes part in no further pass."""
        if not self.ended:
            self._abort(self)

    def accept(self, unavailable_drafter: str | None) -> None:
        """For the engine: the request is accepted."""
        self.unavailable_drafter = unavailable_drafter
        if not self.accepted.done():  # done if its submit was cancelled
            self.accepted.set_result(None)

    def put(self, update: Update) -> None:
        """For the engine: add an update."""
        self._updates.append(update)
        self._arrived.set()

    def end(self, output: RequestOutput) -> None:
        """For the engine: the request has finished."""
        self.output = output
        self._arrived.set()
        if self._when_finished is not None:
            self._when_finished(output)

    def fail(self, error: Exception) -> None:
        """For the engine: the request has failed."""
        self._failure = error
        self._arrived.set()
        if not self.accepted.done():
            self.accepted.set_exception(error)
