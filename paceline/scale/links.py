"""Links: the replicas that answer an ingress, those that it avoids, and the form of their weights."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Protocol

from paceline.core.stats import StepStats
from paceline.scale.channel import Link, Listener, Message
from paceline.scale.wire import Address

logger = logging.getLogger(__name__)

AVOID_SECONDS = 30.0  # for which a replica that did not answer gets no request


class Owner(Protocol):
    """Who sends requests to the replicas."""

    def received(self, link: Link, messages: list[Message]) -> None:
        """Messages about requests have arrived."""
        ...

    def replica_lost(self, replica: str) -> None:
        """A replica will say nothing more."""
        ...


class Links:
    """Implements LinkOwner. Used in the event loop only."""

    def __init__(self, owner: Owner, form: str, timeout: float) -> None:
        """`form` is that of the weights that replicas must have; `timeout` is in seconds of silence."""
        self.form = form
        self.by_replica: dict[str, Link] = {}
        self._owner = owner
        self._timeout = timeout
        self._listener = Listener(self)
        self._avoided: dict[str, float] = {}  # replicas that did not answer, and until when they are avoided
        self._empty_since: float | None = None
        self._watching: asyncio.Task[None] | None = None

    async def start(self, host: str, introduce: Callable[[Address], Awaitable[None]]) -> Address:
        """Listen on this address; `introduce` is awaited often, and makes new replicas connect."""
        address = await self._listener.start(host)
        self._watching = asyncio.create_task(self._watch(address, introduce))
        return address

    def close(self) -> None:
        """Close all connections."""
        if self._watching is not None:
            self._watching.cancel()
        self._listener.close()

    @property
    def unusable(self) -> frozenset[str]:
        """Replicas that must not get requests: they do not answer, or have weights of another form."""
        others = [name for name, link in self.by_replica.items() if link.form != self.form]
        return frozenset([*self._avoided, *others])

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

    def avoid(self, replica: str) -> None:
        """Send a replica nothing for a while."""
        self._avoided[replica] = time.monotonic() + AVOID_SECONDS

    # --- LinkOwner ---

    def linked(self, link: Link) -> bool:
        """A replica has connected. It gets requests only if its weights have the form of the others'.

        Once no replica of that form is left, as after an upgrade of the weights, the next form is adopted.
        """
        known = self.by_replica.get(link.replica)
        if known is not None:
            known.close()
        self.by_replica[link.replica] = link
        self._avoided.pop(link.replica, None)
        self._empty_since = None
        self._pin_form()
        if link.form != self.form:
            logger.error(
                "replica %s gets no requests: its weights are %s, those of others %s, which would give other "
                "bytes. Give all the same model and --quantization.",
                *(link.replica, link.form, self.form),
            )
        return True

    def received(self, link: Link, messages: list[Message]) -> None:
        """Note states, and pass on the rest."""
        for _, state in [message for message in messages if message[0] == "state"]:
            link.state = state
            if state["failure"] is not None:
                self._give_up(link, state["failure"])
        about_requests = [message for message in messages if message[0] != "state"]
        if about_requests:
            self._owner.received(link, about_requests)

    def lost(self, link: Link) -> None:
        """The connection of a replica was closed."""
        if self.by_replica.get(link.replica) is link:
            del self.by_replica[link.replica]
            self._pin_form()
            if not self.by_replica:
                self._empty_since = time.monotonic()
        self._owner.replica_lost(link.replica)

    def _pin_form(self) -> None:
        """Keep the form of the weights while any replica has it, else take that of the first replica."""
        forms = [link.form for link in self.by_replica.values()]
        if forms and self.form not in forms:
            logger.warning("the weights of the replicas are now %s; they were %s", forms[0], self.form)
            self.form = forms[0]

    def _give_up(self, link: Link, why: str) -> None:
        logger.error("replica %s does not answer (%s): its requests go to others", link.replica, why)
        self.avoid(link.replica)
        link.close()

    async def _watch(self, address: Address, introduce: Callable[[Address], Awaitable[None]]) -> None:
        """Find replicas that hang, and get to know new ones."""
        introduced = time.monotonic()
        while True:
            await asyncio.sleep(self._timeout / 10)
            now = asyncio.get_running_loop().time()
            for link in list(self.by_replica.values()):
                if now - link.heard > self._timeout:
                    self._give_up(link, f"nothing was heard for {self._timeout:g} s")
            for replica in [name for name, until in self._avoided.items() if until < time.monotonic()]:
                del self._avoided[replica]
            if time.monotonic() - introduced > self._timeout:
                introduced = time.monotonic()
                with suppress(Exception):  # a replica that is gone: the next round leaves it out
                    await introduce(address)
