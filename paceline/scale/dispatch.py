"""Dispatcher: runs a request on one replica after the other, until it has its whole answer."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

from paceline.core.request import Request
from paceline.engine.output_processor import Delta
from paceline.errors import UnavailableError
from paceline.scale.channel import Link, Message
from paceline.scale.links import Links
from paceline.scale.remote_run import Lost, RemoteRun
from paceline.scale.wire import Address, RemoteRequest, TokenUpdate, decode_error

logger = logging.getLogger(__name__)

MAX_FRUITLESS = 5  # attempts in a row that gave no token, after which a request fails
LAST_WORDS = 5.0  # seconds between the end of a call and the arrival of its last tokens


class Replicas(Protocol):
    """The way to replicas: Ray Serve, or a fake."""

    async def call(self, request: RemoteRequest) -> None:
        """Run a request on a replica; returns when that has done with it. Raises anything if it is lost."""
        ...

    async def introduce(self, address: Address) -> None:
        """Make every replica connect to an ingress."""
        ...


class RemoteObserver(Protocol):
    """Told what clients get, in the event loop."""

    def advanced(self, deltas: Sequence[Delta]) -> None: ...

    def aborted(self, requests: Sequence[Request]) -> None: ...


class Dispatcher:
    """Sends requests to replicas and takes their tokens. Used in the event loop only."""

    def __init__(
        self, replicas: Replicas, form: str, timeout: float, observers: Sequence[RemoteObserver]
    ) -> None:
        """`form`: see Links; `timeout`: seconds in which a replica begins a request, or says anything."""
        self.links = Links(self, form, timeout)
        self.num_resumed = 0  # attempts after the first
        self._replicas = replicas
        self._timeout = timeout
        self._observers = observers
        self._runs: dict[str, RemoteRun] = {}  # by key of the attempt
        self._name = secrets.token_hex(4)  # keys of several ingresses differ
        self._num_attempts = 0

    async def start(self, host: str) -> Address:
        """Listen on this address for the tokens of replicas, and let them connect."""
        address = await self.links.start(host, self._replicas.introduce)
        await self._replicas.introduce(address)
        return address

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
        """Run what is left of a request on one replica. Raises Lost if that replica will not end it."""
        self._num_attempts += 1
        key = f"{self._name}-{self._num_attempts}"
        form = self.links.form
        if run.num_tokens and run.form != form:
            raise UnavailableError(
                f"the answer was begun with weights of another form ({run.form}; now they are {form}). Send "
                "the request again."
            )
        avoid = self.links.unusable
        request = replace(first, key=key, resume=run.resume, form=form, avoid=avoid, routed=[])
        run.replica, run.ended = None, asyncio.get_running_loop().create_future()
        self._runs[key] = run
        call = asyncio.create_task(self._call(request, run.ended))
        starting = asyncio.create_task(self._await_start(request, run))
        try:
            await run.ended
        finally:
            starting.cancel()
            del self._runs[key]
            if run.ended.cancelled() or run.ended.exception() is not None or run.cut_short:
                link = self.links.by_replica.get(run.replica or "")
                if link is not None:
                    link.send(["abort", key])
                call.cancel()

    async def _call(self, request: RemoteRequest, ended: asyncio.Future[None]) -> None:
        """Send the request, and note if its replica is lost."""
        reason = "the call ended without an answer"
        try:
            await self._replicas.call(request)
            await asyncio.wait([ended], timeout=LAST_WORDS)
        except asyncio.CancelledError:
            raise
        except Exception as error:
            reason = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        if not ended.done():
            ended.set_exception(Lost(reason))

    async def _await_start(self, request: RemoteRequest, run: RemoteRun) -> None:
        """Give up a replica that was chosen and does not begin. A request that no replica can take waits."""
        timeout, chosen_at = self._timeout, None
        while run.replica is None:
            await asyncio.sleep(timeout / 4)
            now = time.monotonic()
            chosen_at = chosen_at or (now if request.routed else None)
            if chosen_at is not None and now - chosen_at > timeout and run.replica is None:
                self.links.avoid(request.routed[-1])
                self._lose(run, f"replica {request.routed[-1]} does not begin")
                return

    def _lose(self, run: RemoteRun, reason: str) -> None:
        if run.ended is not None and not run.ended.done():
            run.ended.set_exception(Lost(reason))

    # --- called by Links ---

    def replica_lost(self, replica: str) -> None:
        """Move the requests of a replica that is gone."""
        for run in list(self._runs.values()):
            if run.replica == replica:
                self._lose(run, f"replica {replica} is gone")

    def received(self, link: Link, messages: list[Message]) -> None:
        """Pass a replica's messages to their requests."""
        for kind, *arguments in messages:
            run = self._runs.get(arguments[0])
            if run is not None and run.ended is not None and not run.ended.done():
                try:
                    self._handle(link, run, run.ended, kind, arguments)
                except Lost as reason:
                    self._lose(run, str(reason))

    def _handle(
        self, link: Link, run: RemoteRun, ended: asyncio.Future[None], kind: str, arguments: list[Any]
    ) -> None:
        """Take a message about a request."""
        if kind == "started":
            run.replica, run.form = link.replica, link.form
            run.restart()
        elif kind == "tokens" and (news := run.add(TokenUpdate(*arguments))) is not None:
            delta, update = news
            for observer in self._observers:  # first: metrics count a token before its client sees it
                observer.advanced([delta])
            run.stream.put(update)
            if run.finished and run.cut_short:
                ended.set_result(None)
        elif kind == "ended":
            run.finish(arguments[1])
            ended.set_result(None)
        elif kind == "refused":
            self.links.avoid(link.replica)
            raise Lost(f"replica {link.replica} has weights of another form")
        elif kind == "failed":
            error = decode_error(arguments[1])
            if isinstance(error, UnavailableError):  # of a replica that stops
                self.links.avoid(link.replica)
                raise Lost(f"replica {link.replica} is stopping")
            ended.set_exception(error)
