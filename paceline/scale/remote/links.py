"""Links: the replicas that answer an ingress, which of them get requests, and the id of their weights."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

from paceline.core.stats import StepStats
from paceline.scale.remote.channel import Link, Listener, Message
from paceline.scale.remote.wire import Address

logger = logging.getLogger(__name__)

CHECKS = 10  # for silent replicas, per timeout
SEARCH_SECONDS = 1.0  # between two searches for new replicas, while there may be more
REPEAT_SECONDS = 10.0  # between two searches while all are connected


class Replicas(Protocol):
    """Starts replicas: Ray Serve, or a fake."""

    async def introduce(self, address: Address) -> None:
        """Make every replica connect to an ingress."""
        ...

    async def wake(self) -> None:
        """Return when there is a replica; starts one if all were scaled away."""
        ...


@dataclass(frozen=True)
class LinkOptions:
    """What an ingress expects of its replicas."""

    weights_id: str  # that they must have: checkpoint, backend and quantization
    timeout: float  # seconds of silence, after which a replica is given up
    most: int  # replicas that there can be


class Owner(Protocol):
    """Sends requests to the replicas."""

    def received(self, link: Link, messages: list[Message]) -> None:
        """Messages about requests have arrived."""
        ...

    def replica_lost(self, replica: str) -> None:
        """A replica will send nothing more."""
        ...

    def num_sent(self, replica: str) -> int:
        """Requests that a replica has from this ingress."""
        ...


Handler = Callable[..., None]  # of a link, and of the arguments of a message


class Links:
    """Implements LinkOwner. Used in the event loop only."""

    def __init__(self, owner: Owner, replicas: Replicas, options: LinkOptions) -> None:
        self.weights_id = options.weights_id
        self.by_replica: dict[str, Link] = {}
        self._owner = owner
        self._replicas = replicas
        self._options = options
        self._listener = Listener(self)
        self._address: Address | None = None  # of the listener, once it has started
        self._handlers: list[tuple[str, Handler]] = [("state", self._note)]
        self._more = asyncio.Event()  # a replica has become usable
        self._empty_since: float | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._waking: asyncio.Task[None] | None = None

    async def start(self, host: str) -> None:
        """Listen on this address, and let replicas connect."""
        self._address = await self._listener.start(host)
        await self._introduce()
        self._tasks = {asyncio.create_task(work()) for work in (self._watch, self._search)}

    async def _introduce(self) -> None:
        """Let replicas connect that do not know this ingress yet."""
        assert self._address is not None, "start comes first"
        await self._replicas.introduce(self._address)

    def close(self) -> None:
        """Close all connections."""
        for task in self._tasks:
            task.cancel()
        self._listener.close()

    @property
    def usable(self) -> dict[str, Link]:
        """The replicas that may get requests: they answer, are not draining, and have the right weights."""
        return {
            name: link
            for name, link in self.by_replica.items()
            if link.state and not link.draining and link.weights_id == self.weights_id
        }

    async def wait_for_more(self) -> None:
        """Ask for a replica, and return when one may have become usable."""
        if self._waking is None:
            self._waking = asyncio.create_task(self._wake())
            self._tasks.add(self._waking)
        self._more.clear()
        await self._more.wait()

    async def _wake(self) -> None:
        """Have a replica started if there is none, and let it connect."""
        try:
            with suppress(Exception):  # of Ray, while replicas start and stop: keep searching
                await self._replicas.wake()
                await self._introduce()
        finally:
            self._tasks.discard(asyncio.current_task())
            self._waking = None

    @property
    def empty_seconds(self) -> float:
        """How long there has been no replica."""
        return 0.0 if self._empty_since is None else time.monotonic() - self._empty_since

    @property
    def state(self) -> StepStats:
        """The sums over all replicas; of the cache usage, the mean."""
        states = [link.state for link in self.by_replica.values() if link.state]
        names = ("running", "waiting", "prefix_queries", "prefix_hits")
        total = StepStats(**{name: sum(state[name] for state in states) for name in names})
        total.kv_usage = sum(state["kv_usage"] for state in states) / max(1, len(states))
        return total

    def handle(self, handlers: Mapping[str, Handler]) -> None:
        """Call these functions too, for messages of their kinds."""
        self._handlers += handlers.items()

    def spare(self, link: Link) -> None:
        """Send nothing more to a replica that drains."""
        if not link.draining:
            link.draining = True
            self._pin_form()

    # --- LinkOwner ---

    def linked(self, link: Link) -> bool:
        """A replica has connected. It gets requests only if its weights have the id of the others'.

        Once no replica with that id is left, as after an upgrade of the weights, the next id is adopted.
        """
        known = self.by_replica.get(link.replica)
        if known is not None:
            known.close()
        self.by_replica[link.replica] = link
        self._empty_since = None
        self._pin_form()
        if link.weights_id != self.weights_id:
            logger.error(
                "replica %s gets no requests: its weights are %s, those of others %s, which would give other "
                "bytes. Give all the same model and --quantization.",
                *(link.replica, link.weights_id, self.weights_id),
            )
        return True

    def received(self, link: Link, messages: list[Message]) -> None:
        """Handle messages that are not about requests, and pass on the others."""
        handled = {kind for kind, _ in self._handlers}
        for message in [message for message in messages if message[0] in handled]:
            for _, handle in [each for each in self._handlers if each[0] == message[0]]:
                handle(link, *message[1:])
        about_requests = [message for message in messages if message[0] not in handled]
        if about_requests:
            self._owner.received(link, about_requests)

    def _note(self, link: Link, state: dict[str, Any]) -> None:
        """Store the state that a replica reports."""
        link.state = state
        if state["draining"]:
            self.spare(link)
        link.others = max(0, state["running"] + state["waiting"] - self._owner.num_sent(link.replica))
        if state["failure"] is not None:
            self._give_up(link, state["failure"])
        else:
            self._more.set()

    def lost(self, link: Link) -> None:
        """The connection of a replica was closed."""
        if self.by_replica.get(link.replica) is link:
            del self.by_replica[link.replica]
            self._pin_form()
            if not self.by_replica:
                self._empty_since = time.monotonic()
        self._owner.replica_lost(link.replica)

    def _pin_form(self) -> None:
        """Keep the id of the weights while a replica that accepts requests has it; else adopt another's."""
        found = [link.weights_id for link in self.by_replica.values() if not link.draining]
        if found and self.weights_id not in found:
            logger.warning("the weights of the replicas are now %s; they were %s", found[0], self.weights_id)
            self.weights_id = found[0]
            self._more.set()

    def _give_up(self, link: Link, why: str) -> None:
        logger.error("replica %s does not answer (%s): its requests go to others", link.replica, why)
        link.close()
        self.lost(link)

    async def _watch(self) -> None:
        """Give up replicas that hang."""
        timeout, loop = self._options.timeout, asyncio.get_running_loop()
        while True:
            before = loop.time()
            await asyncio.sleep(timeout / CHECKS)
            if loop.time() - before > timeout / 2:
                continue  # this process stood still: the replicas' messages are still unread
            for link in list(self.by_replica.values()):
                if loop.time() - link.heard > timeout:
                    self._give_up(link, f"nothing was heard for {timeout:g} s")

    async def _search(self) -> None:
        """Search for new replicas: often while some are missing, otherwise now and then."""
        while True:
            complete = len(self.by_replica) >= self._options.most
            await asyncio.sleep(REPEAT_SECONDS if complete else SEARCH_SECONDS)
            with suppress(Exception):  # a replica that is gone: the next round leaves it out
                await self._introduce()
