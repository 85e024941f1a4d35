"""AsyncEngine: the engine in its own thread, behind an asyncio interface.

    event loop                                  engine thread
    submit, abort  -- commands, in order --->   executed between two passes
    Stream         <-- one batch per step ---   the new tokens of each request

Requests belong to the engine thread. The event loop only sees Updates, which are immutable.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol, TypeAlias, Unpack

from paceline.constrain.compiler import Grammar
from paceline.core.detokenizer import TextTokenizer
from paceline.core.params import SamplingParams
from paceline.core.request import Request
from paceline.core.stats import StepStats, TrainerActivity
from paceline.core.structured_outputs import StructuredOutputsParams
from paceline.draft.base import UnboundDrafter
from paceline.engine.admission import Limits, RequestOptions
from paceline.engine.engine import Delta, Engine
from paceline.engine.frontend.intake import Intake
from paceline.engine.frontend.stream import Stream, Update
from paceline.engine.outputs import RequestOutput, request_output, with_texts
from paceline.errors import PacelineError, UnavailableError
from paceline.kv.cache import KVCache

logger = logging.getLogger(__name__)

STUCK_AFTER = 120.0  # seconds without a finished step after which the engine counts as stuck
CHECKS_PER_TIMEOUT = 4  # watchdog checks within that time


class Observer(Protocol):
    """Called after every step, in the engine's thread: must be fast."""

    def step(self, stats: StepStats, deltas: Sequence[Delta]) -> None: ...

    def aborted(self, requests: Sequence[Request]) -> None:
        """These requests were aborted between two steps."""


_Command: TypeAlias = Callable[[], None]


class AsyncEngine:
    """An engine for an event loop. Make it, `start` it in the loop, `submit` requests, `stop` it."""

    def __init__(
        self,
        engine: Engine,
        tokenizer: TextTokenizer,
        *,
        max_queue: int,
        observers: Sequence[Observer] = (),
        stuck_after: float = STUCK_AFTER,
        turn: AbstractContextManager[object] | None = None,
    ) -> None:
        """`max_queue` requests may wait; more are refused with OverloadedError.

        An engine that has work and finishes no step within `stuck_after` seconds counts as stuck until it
        does; 0: never. Each step is within `turn`: see StepTurns.
        """
        self._engine = engine
        self._tokenizer = tokenizer
        room = engine.limits.max_num_seqs + max_queue
        self._intake = Intake(lambda: room, lambda: self.failure)
        self._observers = tuple(observers)
        self._commands: deque[_Command] = deque()
        self._wake = threading.Event()
        self._stopping = False
        self._dead: Exception | None = None
        self._stuck_after = stuck_after
        self._turn = turn or nullcontext()
        self._busy_since: float | None = None  # start of the current step; None: idle
        self._loop: asyncio.AbstractEventLoop | None = None  # in which it was started
        self._watching: asyncio.Task[None] | None = None
        self._thread = threading.Thread(target=self._run, name="paceline-engine", daemon=True)
        self._children: dict[str, list[Request]] = {}  # used by the engine's thread only

    @property
    def limits(self) -> Limits:
        """The engine's limits."""
        return self._engine.limits

    @property
    def num_requests(self) -> int:
        """The number of unfinished outputs, and of requests being prepared."""
        return self._intake.num_requests

    @property
    def draining(self) -> bool:
        """Whether new requests are refused because the engine is stopping."""
        return self._intake.draining

    @property
    def state(self) -> StepStats:
        """The current numbers of running and waiting requests, and the cache usage."""
        return self._engine.state()

    @property
    def kv(self) -> KVCache:
        """The KV cache, to be read only: the engine's thread changes it."""
        return self._engine.kv

    @property
    def unfinished(self) -> list[Request]:
        """The requests that run or wait, to be read only: the engine's thread changes them."""
        groups = list(self._children.values())  # one C call: the engine's thread cannot come between
        return [request for children in groups for request in children if not request.finished]

    def now(self) -> float:
        """The present time on the clock of the requests' times."""
        return self._engine.now()

    @property
    def failure(self) -> str | None:
        """Why the engine accepts no more requests; None while it is healthy."""
        if self._dead is not None:
            known = f": {self._dead}" if isinstance(self._dead, PacelineError) else ""
            return f"the engine has died: {type(self._dead).__name__}{known}"
        if self.stuck:
            return f"the engine has ended no step for more than {self._stuck_after:g} seconds"
        return None

    @property
    def stuck(self) -> bool:
        """Whether the engine has work and finishes no step. It cannot be interrupted, but may recover."""
        began = self._busy_since
        return bool(self._stuck_after) and began is not None and time.monotonic() - began > self._stuck_after

    def compile(self, structure: StructuredOutputsParams, lenient: bool = False) -> Grammar:
        """The compiled grammar of a request, for `submit`. Any thread may call this; it can take seconds.

        RequestError if it is not valid or exceeds the limits. `lenient`: see GrammarCompiler.compile.
        """
        return self._engine.grammars.compile(structure, trusted=False, lenient=lenient)

    def start(self) -> None:
        """Start the engine's thread. Call it in the event loop that will use the engine."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()
        if self._stuck_after:
            self._watching = asyncio.create_task(self._watch())

    def preparing(self) -> AbstractContextManager[None]:
        """Reserve a slot in the queue while a request is read and tokenized. Exit before `submit`.

        OverloadedError if the queue is full.
        """
        return self._intake.preparing()

    async def submit(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        request_id: str,
        *,
        session: str | None = None,
        arrived: asyncio.Event | None = None,
        **options: Unpack[RequestOptions],
    ) -> Stream:
        """The stream of a request that the engine has accepted. For `arrived`, see Stream.

        The `grammar` is the result of `compile` for the params' structured_outputs, which would take too long
        in the engine's thread. `session` is for routers and ignored here. RequestError if the request
        cannot be served, OverloadedError if too many wait, UnavailableError if the engine stops or is dead.
        """
        assert (options.get("grammar") is None) == (params.structure is None)
        self._intake.check_open(request_id, params.n)
        stream = Stream(request_id, self.abort, arrived)
        self._intake.add(stream, params.n)

        def add() -> None:
            try:
                children = self._engine.add_request(prompt_token_ids, params, request_id, **options)
                self._children[request_id] = children
                self._in_loop(stream.accept, children[0].unavailable_drafter)
            except Exception as error:  # a refusal, or a bug that concerns only this request
                self._in_loop(stream.fail, error)

        self._send(add)
        try:
            await stream.accepted
        except asyncio.CancelledError:
            self.abort(stream)
            raise
        except Exception:
            self._intake.forget(request_id)
            raise
        return stream

    def abort(self, stream: Stream) -> None:
        """End a stream's request before the next pass."""
        request_id = stream.request_id

        def end() -> None:
            aborted = self._engine.abort(request_id)
            self._children.pop(request_id, None)
            for observer in self._observers:
                observer.aborted(aborted)

        self._intake.forget(request_id)
        if self._dead is None:
            self._send(end)

    def watch_trainer(self, trainer: TrainerActivity) -> None:
        """Record for each pass whether a trainer computed beside it. See Engine.watch_trainer."""
        self._engine.watch_trainer(trainer)

    async def replace_head(self, name: str, drafter: UnboundDrafter) -> None:
        """Replace a head between two passes; returns when it is done. See Engine.replace_head."""
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def settle(error: Exception | None) -> None:
            if done.cancelled():
                return
            if error is None:
                done.set_result(None)
            else:
                done.set_exception(error)

        def swap() -> None:
            try:
                self._engine.replace_head(name, drafter)
            except Exception as error:  # a head that does not fit: the current one stays
                self._in_loop(settle, error)
            else:
                self._in_loop(settle, None)

        if self._dead is not None or self._stopping:
            raise UnavailableError("the engine has ended: a head cannot be replaced. Restart the server.")
        self._send(swap)
        await done

    async def drain(self) -> None:
        """Accept no new requests, and return when all running and waiting ones have finished."""
        await self._intake.drain()

    async def stop(self) -> None:
        """Stop: unfinished requests fail, and drafters save their state."""
        self._intake.draining = True
        self._fail_all(UnavailableError("the server is stopping; send the request to another one."))
        self._stopping = True
        self._wake.set()
        if self._thread.ident is not None:
            await asyncio.to_thread(self._thread.join)
        if self._watching is not None:
            self._watching.cancel()

    async def _watch(self) -> None:
        """The watchdog: log the stack each time the engine gets stuck, and when it recovers."""
        was_stuck = False
        while True:
            await asyncio.sleep(self._stuck_after / CHECKS_PER_TIMEOUT)
            if self.stuck and not was_stuck:
                frame = sys._current_frames().get(self._thread.ident or 0)
                stack = "" if frame is None else "".join(traceback.format_stack(frame))
                drafter = self._engine.active_drafter
                where = "" if drafter is None else f" It waits for the drafter {drafter}."
                logger.error("%s.%s Restart the server. It is here:\n%s", self.failure, where, stack)
            elif was_stuck and not self.stuck:
                logger.warning("the engine has finished a step and is no longer stuck")
            was_stuck = self.stuck

    def _fail_all(self, error: Exception) -> None:
        """In the event loop: abort all requests with this error."""
        for stream in self._intake.streams:
            self.abort(stream)
            stream.fail(error)

    def _send(self, command: _Command) -> None:
        self._commands.append(command)
        self._wake.set()

    def _in_loop(self, function: Callable[..., None], *arguments: object) -> None:
        """Call a function in the event loop, if it is still open."""
        assert self._loop is not None, "start comes first"
        try:
            self._loop.call_soon_threadsafe(function, *arguments)
        except RuntimeError:  # the event loop is closed
            self._stopping = True

    # --- the engine's thread ---

    def _run(self) -> None:
        try:
            while not self._stopping:
                if not self._engine.has_unfinished and not self._commands:
                    self._busy_since = None
                    self._wake.wait()
                self._wake.clear()
                self._busy_since = time.monotonic()
                while self._commands:
                    self._commands.popleft()()
                if self._engine.has_unfinished:
                    self._step()
            self._engine.close()
            self._busy_since = None
        except Exception as error:  # a bug of ours: requests get an error, and /health reports it
            logger.exception("the engine has died")
            self._dead = error
            self._in_loop(self._fail_all, UnavailableError("the engine has died; restart the server."))

    def _step(self) -> None:
        with self._turn:
            deltas = self._engine.step()
        for observer in self._observers:  # first: metrics count a token before its client sees it
            observer.step(self._engine.stats, deltas)
        updates = [(delta.request.request_id, self._update(delta)) for delta in deltas if _has_news(delta)]
        if updates:
            self._in_loop(self._deliver, updates, self._take_outputs(deltas))

    def _update(self, delta: Delta) -> Update:
        """A delta as the event loop sees it."""
        request, count = delta.request, len(delta.token_ids)
        logprobs = None
        if request.params.logprobs is not None:
            entries = request.logprobs[len(request.logprobs) - count :]
            logprobs = tuple(with_texts(entry, self._tokenizer) for entry in entries)
        return Update(
            index=request.child,
            text=request.detokenizer.take(),
            token_ids=delta.token_ids,
            logprobs=logprobs,
            finish_reason=request.finish_reason,
            stop_reason=request.stop_reason,
            error=request.error,
        )

    def _take_outputs(self, deltas: Sequence[Delta]) -> list[tuple[str, RequestOutput]]:
        """The outputs of requests whose last child has finished in this step."""
        outputs = []
        for request_id in {delta.request.request_id for delta in deltas if delta.request.finished}:
            if all(child.finished for child in self._children[request_id]):
                children = self._children.pop(request_id)
                outputs.append((request_id, request_output(None, children, self._tokenizer)))
        return outputs

    def _deliver(
        self, updates: Sequence[tuple[str, Update]], outputs: Sequence[tuple[str, RequestOutput]]
    ) -> None:
        """In the event loop: pass a step's updates and outputs to their streams."""
        for request_id, update in updates:
            if (stream := self._intake.find(request_id)) is not None:  # else aborted while the pass ran
                stream.put(update)
        for request_id, output in outputs:
            if (stream := self._intake.find(request_id)) is not None:
                stream.end(output)
                self._intake.forget(request_id)


def _has_news(delta: Delta) -> bool:
    """Whether a delta has anything for the client; prefill chunks have nothing."""
    return bool(delta.token_ids or delta.request.finished)
