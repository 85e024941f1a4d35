"""EngineGroup: the engines of a server's models, for what concerns the whole server."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from paceline.core.request import Request
from paceline.engine.frontend.client import EngineClient


class EngineGroup:
    """Several engines as one: they drain and stop together."""

    def __init__(self, engines: Sequence[EngineClient]) -> None:
        self.engines = tuple(engines)
        self._draining = False
        self._num_routing = 0  # requests on their way to the model that answers them
        self._none_routing = asyncio.Event()
        self._none_routing.set()

    @property
    def num_requests(self) -> int:
        """The number of unfinished outputs and of requests being prepared, of all engines."""
        return sum(engine.num_requests for engine in self.engines)

    @property
    def draining(self) -> bool:
        """Whether new requests are refused, because the server is stopping."""
        return self._draining or all(engine.draining for engine in self.engines)

    @property
    def failure(self) -> str | None:
        """Why one of them takes no more requests; None while all are healthy."""
        return next((engine.failure for engine in self.engines if engine.failure is not None), None)

    @property
    def stuck(self) -> bool:
        """Whether one of them has work and finishes no step."""
        return any(engine.stuck for engine in self.engines)

    @property
    def dead(self) -> bool:
        """Whether one of them has died."""
        return any(engine.failure is not None and not engine.stuck for engine in self.engines)

    @property
    def unfinished(self) -> list[Request]:
        """The requests that run or wait, to be read only; the oldest first."""
        requests = [request for engine in self.engines for request in engine.unfinished]
        return requests if len(self.engines) == 1 else sorted(requests, key=lambda each: each.arrival_time)

    def now(self) -> float:
        """The present time on the clock of the requests' times."""
        return self.engines[0].now()

    @contextmanager
    def routing(self) -> Iterator[None]:
        """The time in which a request may still be submitted to one engine after the other."""
        self._num_routing += 1
        self._none_routing.clear()
        try:
            yield
        finally:
            self._num_routing -= 1
            if not self._num_routing:
                self._none_routing.set()

    async def drain(self) -> None:
        """Accept no new requests, and return when all running and waiting ones have finished.

        A cascade may still ask its next model: engines refuse requests only when nothing is being routed.
        """
        self._draining = True
        await self._none_routing.wait()
        await asyncio.gather(*(engine.drain() for engine in self.engines))

    async def stop(self) -> None:
        """Stop all engines: unfinished requests fail, and drafters save their state."""
        await asyncio.gather(*(engine.stop() for engine in self.engines))
