"""Intake: how many requests an engine has accepted and can still accept. Used in the event loop only."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from paceline.engine.frontend.stream import Stream
from paceline.errors import OverloadedError, RequestError, UnavailableError


class Intake:
    """The streams of unfinished requests, and the limit on their number."""

    def __init__(self, room: Callable[[], int], failure: Callable[[], str | None]) -> None:
        """`room` returns how many outputs may run and wait at present; `failure`, why none are accepted."""
        self._room = room
        self._failure = failure
        self._streams: dict[str, tuple[Stream, int]] = {}  # stream and n
        self._num_preparing = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self.draining = False  # new requests are refused

    @property
    def num_requests(self) -> int:
        """The number of unfinished outputs, and of requests being prepared."""
        return sum(count for _, count in self._streams.values()) + self._num_preparing

    @property
    def streams(self) -> list[Stream]:
        """The streams of all unfinished requests."""
        return [stream for stream, _ in self._streams.values()]

    def find(self, request_id: str) -> Stream | None:
        """The stream of an unfinished request."""
        entry = self._streams.get(request_id)
        return None if entry is None else entry[0]

    @contextmanager
    def preparing(self) -> Iterator[None]:
        """Reserve a slot while a request is prepared. OverloadedError if the queue is full."""
        self._check_room(1)
        self._num_preparing += 1
        try:
            yield
        finally:
            self._num_preparing -= 1

    def check_open(self, request_id: str, wanted: int) -> None:
        """Raise an error if a new request of `wanted` outputs cannot be accepted."""
        failure = self._failure()
        if failure is not None:
            raise UnavailableError(f"{failure}; restart the server.")
        if self.draining:
            raise UnavailableError("the server is stopping; send the request to another one.")
        if wanted > self._room():
            raise RequestError(
                f"n is {wanted}, but at most {self._room()} outputs may run and wait. Use a smaller n."
            )
        self._check_room(wanted)
        if request_id in self._streams:
            raise RequestError(f"a request with id {request_id!r} is already running; give each its own id.")

    def add(self, stream: Stream, count: int) -> None:
        """Accept a request with `count` outputs."""
        self._streams[stream.request_id] = (stream, count)
        self._idle.clear()

    def forget(self, request_id: str) -> None:
        """Drop a request that has ended."""
        self._streams.pop(request_id, None)
        if not self._streams:
            self._idle.set()

    async def drain(self) -> None:
        """Accept no new requests, and return when all have ended."""
        self.draining = True
        await self._idle.wait()

    def _check_room(self, wanted: int) -> None:
        room, taken = self._room(), self.num_requests
        if taken + wanted > room:
            raise OverloadedError(
                f"{taken} requests run or wait, and at most {room} may. Send the request again later."
            )
