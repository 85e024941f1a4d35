"""RemoteEngine: an EngineClient whose requests run on replicas, and survive them.

A request's output is a pure function of the request. So when a replica dies, hangs or is taken away, the
ingress sends the same request with the tokens it already has to another replica, which goes on at the next
token. The client sees a pause, and the same bytes.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, replace
from typing import Any, Protocol
from weakref import WeakKeyDictionary

from paceline.constrain.compiler import Grammar, GrammarCompiler, GrammarTokenizer
from paceline.core.params import SamplingParams
from paceline.core.request import Request
from paceline.core.stats import StepStats
from paceline.core.structured_outputs import StructuredOutputsParams
from paceline.engine.admission import Limits, make_requests
from paceline.engine.intake import Intake
from paceline.engine.output_processor import Delta
from paceline.engine.stream import Stream
from paceline.errors import PacelineError, UnavailableError
from paceline.kv.hashing import page_hashes
from paceline.models.detokenizer import Watch
from paceline.scale.channel import Link, Listener, Message
from paceline.scale.remote_run import Lost, RemoteRun
from paceline.scale.wire import Address, Description, RemoteRequest, TokenUpdate, decode_error

logger = logging.getLogger(__name__)

MAX_FRUITLESS = 5  # attempts in a row that gave no token, after which a request fails
LAST_WORDS = 5.0  # seconds between the end of a call and the arrival of its last tokens
NO_REPLICA_SECONDS = 60.0  # after which requests are refused
AVOID_SECONDS = 30.0  # for which a replica that did not answer gets no request


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


@dataclass(frozen=True)
class RemoteOptions:
    """How an ingress treats its replicas. Times in seconds."""

    max_queue: int = 256  # requests that wait, besides those that `replicas` can run at once
    replicas: int = 1  # the most there can be
    min_replicas: int = 1
    replica_timeout: float = 5.0  # without a word from a replica, after which its requests go to others
    seed: int = 0  # of requests without one


class RemoteEngine:
    """Requests in, tokens out. Make it in the event loop, `start` it, `submit` requests, `stop` it."""

    def __init__(
        self,
        replicas: Replicas,
        description: Description,
        tokenizer: GrammarTokenizer,
        options: RemoteOptions,
        observers: Iterable[RemoteObserver] = (),
    ) -> None:
        self.links: dict[str, Link] = {}  # by replica
        self.num_resumed = 0  # attempts after the first
        self._replicas = replicas
        self._description = description
        self._tokenizer = tokenizer
        self._options = options
        self._observers = tuple(observers)
        self._grammars = GrammarCompiler(tokenizer, description.limits.vocab_size)
        self._sources: WeakKeyDictionary[Grammar, tuple[StructuredOutputsParams, bool]] = WeakKeyDictionary()
        room = options.max_queue + options.replicas * description.limits.max_num_seqs
        self._intake = Intake(lambda: room, lambda: self.failure)
        self._listener = Listener(self)
        self._runs: dict[str, RemoteRun] = {}  # by key of the attempt
        self._tasks: dict[str, asyncio.Task[None]] = {}  # by request id
        self._avoided: dict[str, float] = {}  # replicas that did not answer, and until when they are avoided
        self._form = description.form  # that replicas must have
        self._unlinked_since: float | None = None
        self._name = secrets.token_hex(4)
        self._num_arrived = self._num_attempts = 0
        self._watching: asyncio.Task[None] | None = None

    async def start(self, host: str) -> None:
        """Listen on this address for the tokens of replicas, and connect to them."""
        self._address = await self._listener.start(host)
        await self._replicas.introduce(self._address)
        self._watching = asyncio.create_task(self._watch())

    # --- EngineClient ---

    @property
    def limits(self) -> Limits:
        return self._description.limits

    @property
    def num_requests(self) -> int:
        return self._intake.num_requests

    @property
    def draining(self) -> bool:
        return self._intake.draining

    @property
    def state(self) -> StepStats:
        """The sums over all replicas; of the cache usage, the mean."""
        states = [link.state for link in self.links.values() if link.state]
        total = StepStats(
            **{
                name: sum(state[name] for state in states)
                for name in ("running", "waiting", "prefix_queries", "prefix_hits")
            }
        )
        total.kv_usage = sum(state["kv_usage"] for state in states) / max(1, len(states))
        return total

    @property
    def unfinished(self) -> list[Request]:
        runs = list(self._runs.values())
        return [child for run in runs for child in run.children if child.finish_reason is None]

    @property
    def failure(self) -> str | None:
        """Set while no replica answers for a long time. Until then requests wait: replicas are replaced."""
        since = self._unlinked_since
        if since is None or time.monotonic() - since < NO_REPLICA_SECONDS or not self._options.min_replicas:
            return None
        return f"no replica has answered for {NO_REPLICA_SECONDS:g} seconds"

    @property
    def stuck(self) -> bool:
        return False

    def now(self) -> float:
        return time.perf_counter()

    def compile(self, structure: StructuredOutputsParams, lenient: bool = False) -> Grammar:
        """The compiled grammar. It checks the request here; its replica compiles the same source."""
        grammar = self._grammars.compile(structure, trusted=False, lenient=lenient)
        self._sources[grammar] = (structure, lenient)
        return grammar

    def preparing(self) -> AbstractContextManager[None]:
        return self._intake.preparing()

    async def submit(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        request_id: str,
        *,
        segment: str = "",
        cache_salt: str = "",
        session: str | None = None,
        grammar: Grammar | None = None,
        watch: Callable[[], Watch] | None = None,
        arrived: asyncio.Event | None = None,
    ) -> Stream:
        """The stream of a request, checked as its replica would check it."""
        assert (grammar is None) == (params.structure is None)
        self._intake.check_open(request_id, params.n)
        description = self._description
        children = make_requests(
            request_id,
            self._num_arrived,
            prompt_token_ids,
            params,
            limits=description.limits,
            tokenizer=self._tokenizer,
            engine_seed=self._options.seed,
            pool_tokens=description.pool_tokens,
            now=self.now(),
            plans=description.plans,
            grammar=grammar,
            watch=watch,
            segment=segment,
            cache_salt=cache_salt,
        )
        self._num_arrived += 1
        structure, lenient = (None, False) if grammar is None else self._sources[grammar]
        stream = Stream(request_id, self.abort, arrived)
        run = RemoteRun(children, replace(params, seed=children[0].seed), stream, self._tokenizer, self.now)
        first = RemoteRequest(
            key="",
            reply_to=self._address,
            prompt_token_ids=children[0].prompt_token_ids,
            params=run.params,
            structure=structure,
            lenient=lenient,
            segment=segment,
            cache_salt=cache_salt,
            resume=None,
            form=None,
            prefix_hashes=page_hashes(children[0].prompt_token_ids, description.page_size, cache_salt),
            session=session,
        )
        self._intake.add(stream, params.n)
        self._tasks[request_id] = asyncio.create_task(self._drive(run, first))
        stream.accept(children[0].unavailable_drafter)
        return stream

    def abort(self, stream: Stream) -> None:
        """End a stream's request."""
        task = self._tasks.get(stream.request_id)
        if task is not None:
            task.cancel()
        self._intake.forget(stream.request_id)

    async def drain(self) -> None:
        await self._intake.drain()

    async def stop(self) -> None:
        self._intake.draining = True
        error = UnavailableError("the server is stopping; send the request to another one.")
        for stream in self._intake.streams:
            self.abort(stream)
            stream.fail(error)
        if self._watching is not None:
            self._watching.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        await asyncio.to_thread(self._grammars.close)
        self._listener.close()

    # --- one request ---

    async def _drive(self, run: RemoteRun, first: RemoteRequest) -> None:
        """Run a request, on as many replicas as it takes, and end its stream."""
        stream, fruitless, before = run.stream, 0, 0
        try:
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
                    logger.warning(
                        "resuming a request: id=%s tokens=%d reason=%s", stream.request_id, before, reason
                    )
            stream.end(run.output())
        except asyncio.CancelledError:  # aborted
            self._aborted(run)
        except PacelineError as error:
            self._aborted(run)
            stream.fail(error)
        except Exception as error:
            logger.exception("a request failed")
            self._aborted(run)
            stream.fail(error)
        finally:
            self._tasks.pop(stream.request_id, None)
            self._intake.forget(stream.request_id)

    def _aborted(self, run: RemoteRun) -> None:
        aborted = run.abort()
        for observer in self._observers:
            observer.aborted(aborted)

    async def _attempt(self, run: RemoteRun, first: RemoteRequest) -> None:
        """Run what is left of a request on one replica. Raises Lost if that replica will not end it."""
        self._num_attempts += 1
        key = f"{self._name}-{self._num_attempts}"
        if run.num_tokens and run.form != self._form:
            raise UnavailableError(
                f"the answer was begun with weights of another form ({run.form}; now they are {self._form}). "
                "Send the request again."
            )
        request = replace(
            first,
            key=key,
            resume=run.resume,
            form=self._form,
            avoid=self._unusable(),
            routed=[],
        )
        run.replica, run.ended = None, asyncio.get_running_loop().create_future()
        self._runs[key] = run
        call = asyncio.create_task(self._call(request, run.ended))
        starting = asyncio.create_task(self._await_start(request, run))
        try:
            await run.ended
        finally:
            starting.cancel()
            del self._runs[key]
            link = self.links.get(run.replica or "")
            if not run.ended.done() or run.ended.cancelled() or run.ended.exception() is not None:
                call.cancel()
            if link is not None and not call.done():
                link.send(["abort", key])  # also ends what only the ingress knows to have ended

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
        timeout, chosen_at = self._options.replica_timeout, None
        while run.replica is None:
            await asyncio.sleep(timeout / 4)
            now = time.monotonic()
            chosen_at = chosen_at or (now if request.routed else None)
            if chosen_at is not None and now - chosen_at > timeout and run.replica is None:
                self._avoid(request.routed[-1])
                self._lose(run, f"replica {request.routed[-1]} does not begin")
                return

    def _unusable(self) -> frozenset[str]:
        """Replicas that must not get requests: they do not answer, or have weights of another form."""
        others = [name for name, link in self.links.items() if link.form != self._form]
        return frozenset([*self._avoided, *others])

    def _avoid(self, replica: str) -> None:
        self._avoided[replica] = time.monotonic() + AVOID_SECONDS

    def _lose(self, run: RemoteRun, reason: str) -> None:
        if run.ended is not None and not run.ended.done():
            run.ended.set_exception(Lost(reason))

    # --- links ---

    def linked(self, link: Link) -> bool:
        """A replica has connected. It gets requests only if its weights have the form of the others'.

        Once no replica of that form is left, as after an upgrade of the weights, the next form is adopted.
        """
        known = self.links.get(link.replica)
        if known is not None:
            known.close()
        self.links[link.replica] = link
        self._avoided.pop(link.replica, None)
        self._unlinked_since = None
        self._pin_form()
        if link.form != self._form:
            logger.error(
                "replica %s gets no requests: its weights are %s, those of others %s, which would give other "
                "bytes. Give all the same model and --quantization.",
                *(link.replica, link.form, self._form),
            )
        return True

    def _pin_form(self) -> None:
        """Keep the form of the weights while any replica has it, else take that of the first replica."""
        forms = [link.form for link in self.links.values()]
        if forms and self._form not in forms:
            logger.warning("the weights of the replicas are now %s; they were %s", forms[0], self._form)
            self._form = forms[0]

    def lost(self, link: Link) -> None:
        """Move the requests of a replica that is gone."""
        if self.links.get(link.replica) is link:
            del self.links[link.replica]
            if not self.links:
                self._unlinked_since = time.monotonic()
            self._pin_form()
        for run in list(self._runs.values()):
            if run.replica == link.replica:
                self._lose(run, f"replica {link.replica} is gone")

    def received(self, link: Link, messages: list[Message]) -> None:
        """Pass a replica's messages to their requests."""
        deltas: list[Delta] = []
        for kind, *arguments in messages:
            if kind == "state":
                link.state = arguments[0]
                if link.state["failure"] is not None:
                    self._give_up(link, link.state["failure"])
            elif (run := self._runs.get(arguments[0])) is not None and run.ended is not None:
                try:
                    deltas += self._handle(link, run, run.ended, kind, arguments)
                except Lost as reason:
                    self._lose(run, str(reason))
        if deltas:
            for observer in self._observers:
                observer.advanced(deltas)

    def _handle(
        self, link: Link, run: RemoteRun, ended: asyncio.Future[None], kind: str, arguments: list[Any]
    ) -> Iterable[Delta]:
        """The deltas of a message about a request."""
        if ended.done():
            return ()
        if kind == "started":
            run.replica, run.form = link.replica, link.form
            run.restart()
        elif kind == "tokens" and (news := run.add(TokenUpdate(*arguments))) is not None:
            run.stream.put(news[1])
            if run.finished and run.cut_short:
                ended.set_result(None)
            return (news[0],)
        elif kind == "ended":
            run.finish(arguments[1])
            ended.set_result(None)
        elif kind == "refused":
            self._avoid(link.replica)
            raise Lost(f"replica {link.replica} has weights of another form")
        elif kind == "failed":
            error = decode_error(arguments[1])
            if isinstance(error, UnavailableError):  # of a replica that stops
                self._avoid(link.replica)
                raise Lost(f"replica {link.replica} is stopping")
            ended.set_exception(error)
        return ()

    def _give_up(self, link: Link, why: str) -> None:
        logger.error("replica %s does not answer (%s): its requests go to others", link.replica, why)
        self._avoid(link.replica)
        link.close()

    async def _watch(self) -> None:
        """Find replicas that hang, and get to know new ones."""
        timeout, introduced = self._options.replica_timeout, time.monotonic()
        while True:
            await asyncio.sleep(timeout / 10)
            now = asyncio.get_running_loop().time()
            for link in list(self.links.values()):
                if now - link.heard > timeout:
                    self._give_up(link, f"nothing was heard for {timeout:g} s")
            for replica in [name for name, until in self._avoided.items() if until < time.monotonic()]:
                del self._avoided[replica]
            if time.monotonic() - introduced > timeout:
                introduced = time.monotonic()
                with suppress(Exception):  # a replica that is gone: the next round leaves it out
                    await self._replicas.introduce(self._address)
