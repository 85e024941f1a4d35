"""Dispatcher: runs a request on one replica after the other, until it has its whole answer."""

from __future__ import annotations

import logging
import secrets
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

from paceline.core.request import Request
from paceline.engine.output_processor import Delta
from paceline.errors import UnavailableError
from paceline.scale.remote.channel import Link, Message
from paceline.scale.remote.links import LinkOptions, Links, Replicas
from paceline.scale.remote.remote_run import Lost, RemoteRun
from paceline.scale.remote.routing import Routing
from paceline.scale.remote.wire import RemoteRequest, TokenUpdate, decode_error, encode_request

logger = logging.getLogger(__name__)

MAX_FRUITLESS = 5  # attempts in a row without a token, after which a request fails


class RemoteObserver(Protocol):
    """Told what clients get, in the event loop."""

    def advanced(self, deltas: Sequence[Delta]) -> None: ...

    def aborted(self, requests: Sequence[Request]) -> None: ...


class Dispatcher:
    """Sends requests to replicas and takes their tokens. Used in the event loop only."""

    def __init__(
        self, replicas: Replicas, links: LinkOptions, routing: Routing, observers: Sequence[RemoteObserver]
    ) -> None:
        self.links = Links(self, replicas, links)
        self.num_resumed = 0  # attempts after the first
        self._routing = routing
        self._observers = observers
        self._runs: dict[str, RemoteRun] = {}  # by key of the attempt
        self._ongoing: Counter[str] = Counter()  # attempts, by replica
        self._name = secrets.token_hex(4)  # keys of several ingresses differ
        self._num_attempts = 0

    async def run(self, run: RemoteRun, first: RemoteRequest) -> None:
        """Run a request to its end, on as many replicas as it takes. Raises the request's error."""
        fruitless = before = 0
        while not run.finished:
            try:
                await self._attempt(run, first)
            except Lost as reason:
                fruitless = 0 if run.num_tokens > before else fruitless + 1
                before = run.num_tokens
                if fruitless >= MAX_FRUITLESS:
                    raise UnavailableError(
                        f"{fruitless} replicas in a row gave no token ({reason}). Send the request again "
                        "later; if it fails again, look into the logs of the replicas."
                    ) from None
                self.num_resumed += 1
                logger.warning("resuming %s after %d tokens: %s", run.stream.request_id, before, reason)

    @property
    def unfinished(self) -> list[Request]:
        """The outputs that run or wait."""
        runs = list(self._runs.values())
        return [child for run in runs for child in run.children if child.finish_reason is None]

    async def _attempt(self, run: RemoteRun, first: RemoteRequest) -> None:
        """Run the rest of a request on one replica. Raises Lost if that replica will not finish it."""
        link = await self._choose(run)
        self._num_attempts += 1
        key = f"{self._name}-{self._num_attempts}"
        run.begin(link)
        self._runs[key] = run
        self._ongoing[link.replica] += 1
        link.send(encode_request(replace(first, key=key, resume=run.resume)))
        try:
            await run.ended
        finally:
            del self._runs[key]
            self._ongoing[link.replica] -= 1
            if run.ended.cancelled() or run.ended.exception() is not None or run.cut_short:
                link.send(["abort", key])

    async def _choose(self, run: RemoteRun) -> Link:
        """The replica for the next attempt; waits until there is one."""
        while not (usable := self.links.usable):
            await self.links.wait_for_more()
        if run.num_tokens and run.weights_id != self.links.weights_id:
            raise UnavailableError(
                f"the answer was begun with other weights ({run.weights_id}; now they are "
                f"{self.links.weights_id}). Send the request again."
            )
        loads = {name: self._ongoing[name] + link.others for name, link in usable.items()}
        name = self._routing.rank(run.prefix_hashes, run.session, loads)[0]
        self._routing.record(name, run.prefix_hashes, run.session)
        return usable[name]

    def _lose(self, run: RemoteRun, reason: str) -> None:
        if not run.ended.done():
            run.ended.set_exception(Lost(reason))

    # --- called by Links ---

    def replica_lost(self, replica: str) -> None:
        """Move the requests of a lost replica, and forget its cache: a new one of this name has none."""
        self._routing.forget(replica)
        for run in list(self._runs.values()):
            if run.replica == replica:
                self._lose(run, f"replica {replica} is gone")

    def num_sent(self, replica: str) -> int:
        """Requests that a replica has from here."""
        return self._ongoing[replica]

    def received(self, link: Link, messages: list[Message]) -> None:
        """Pass a replica's messages to their requests."""
        for kind, *arguments in messages:
            run = self._runs.get(arguments[0])
            if run is not None and not run.ended.done():
                try:
                    self._handle(link, run, kind, arguments)
                except Lost as reason:
                    self._lose(run, str(reason))

    def _handle(self, link: Link, run: RemoteRun, kind: str, arguments: list[Any]) -> None:
        """Take a message about a request."""
        if kind == "tokens" and (added := run.add(TokenUpdate(*arguments))) is not None:
            delta, update = added
            for observer in self._observers:  # first: metrics count a token before its client sees it
                observer.advanced([delta])
            run.stream.put(update)
            if run.finished and run.cut_short:
                run.ended.set_result(None)
        elif kind == "ended":
            run.finish(arguments[1])
            run.ended.set_result(None)
        elif kind == "failed":
            error = decode_error(arguments[1])
            if isinstance(error, UnavailableError):  # of a replica that stops
                self.links.spare(link)
                raise Lost(f"replica {link.replica} is stopping")
            run.ended.set_exception(error)
