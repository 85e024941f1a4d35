"""The async front: the engine steps in a thread of its own, and an event loop sends requests and gets tokens.

    event loop                                 engine thread
    submit, abort  -- commands, in order -->   between two passes: carry them out
    Stream         <-- one batch a step ----   after a pass: what each request gained

Requests belong to the engine thread. The loop only sees Updates, which do not change.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol, TypeAlias

from paceline.constrain.compiler import Grammar
from paceline.core.params import SamplingParams
from paceline.core.request import Request
from paceline.core.stats import StepStats
from paceline.core.structured_outputs import StructuredOutputsParams
from paceline.engine.admission import Limits, TextTokenizer
from paceline.engine.engine import Delta, Engine
from paceline.engine.outputs import RequestOutput, request_output, with_texts
from paceline.engine.stream import Stream, Update
from paceline.errors import OverloadedError, RequestError, UnavailableError

logger = logging.getLogger(__name__)

STUCK_AFTER = 120.0  # seconds in which a step of an engine that works should end
LOOKS = 4  # that the watchdog takes in this time


class Observer(Protocol):
    """Sees every step, in the engine's thread: be quick."""

    def step(self, stats: StepStats, deltas: Sequence[Delta]) -> None: ...

    def aborted(self, requests: Sequence[Request]) -> None:
        """These have ended between two steps: nobody waits for them."""


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
    ) -> None:
        """`max_queue` is how many requests may wait; more are refused with OverloadedError.

        An engine that has work and ends no step within `stuck_after` seconds counts as stuck until it
        does; 0: never.
        """
        self._engine = engine
        self._tokenizer = tokenizer
        self._most_requests = engine.limits.max_num_seqs + max_queue
        self._observers = tuple(observers)
        self._commands: deque[_Command] = deque()
        self._wake = threading.Event()
        self._stopping = False
        self._draining = False
        self._dead: Exception | None = None
        self._stuck_after = stuck_after
        self._busy_since: float | None = None  # when the thread began its turn; None: it waits for work
        self._watching: asyncio.Task[None] | None = None
        self._thread = threading.Thread(target=self._run, name="paceline-engine", daemon=True)
        self._children: dict[str, list[Request]] = {}  # of the engine's thread
        self._streams: dict[str, tuple[Stream, int]] = {}  # of the loop: with how many outputs
        self._num_preparing = 0  # of the loop
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def limits(self) -> Limits:
        """What the engine can take."""
        return self._engine.limits

    @property
    def num_requests(self) -> int:
        """Outputs that are waited for now, and requests that are being prepared."""
        return sum(count for _, count in self._streams.values()) + self._num_preparing

    @property
    def draining(self) -> bool:
        """Whether new requests are refused because the engine is to stop."""
        return self._draining

    @property
    def state(self) -> StepStats:
        """How things are now: who runs and waits, and what the cache holds."""
        return self._engine.state()

    @property
    def failure(self) -> str | None:
        """Why the engine takes no requests any more; None while it is well."""
        if self._dead is not None:
            return f"the engine has died: {type(self._dead).__name__}"
        if self.stuck:
            return f"the engine has ended no step for more than {self._stuck_after:g} seconds"
        return None

    @property
    def stuck(self) -> bool:
        """Whether the engine has work and ends no step. It cannot be interrupted, but may recover."""
        began = self._busy_since
        return bool(self._stuck_after) and began is not None and time.monotonic() - began > self._stuck_after

    def compile(self, structure: StructuredOutputsParams) -> Grammar:
        """The grammar for a request that is to be submitted. Any thread may call this; it can take seconds.

        RequestError if there is none, or if it is beyond the limits.
        """
        return self._engine.grammars.compile(structure, trusted=False)

    def start(self) -> None:
        """Let the engine run. Call it in the event loop that will use it."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()
        if self._stuck_after:
            self._watching = asyncio.create_task(self._watch())

    @contextmanager
    def preparing(self) -> Iterator[None]:
        """A place in the queue for a request that is still read and tokenized. Leave it to submit.

        OverloadedError if there is none.
        """
        self._check_room(1)
        self._num_preparing += 1
        try:
            yield
        finally:
            self._num_preparing -= 1

    async def submit(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        request_id: str,
        *,
        segment: str = "",
        cache_salt: str = "",
        grammar: Grammar | None = None,
        arrived: asyncio.Event | None = None,
    ) -> Stream:
        """The stream of a request that the engine has taken. `arrived`: see Stream.

        `grammar` is what `compile` gave for the params' structured_outputs: it takes too long for the
        engine's thread.
        RequestError if it cannot be served, OverloadedError if too many wait, UnavailableError if
        the engine is stopping or dead.
        """
        assert (grammar is None) == (params.structure is None)
        self._check_open(params.n)
        if request_id in self._streams:
            raise RequestError(f"a request with id {request_id!r} is already running; give each its own id.")
        stream = Stream(request_id, self.abort, arrived)
        self._streams[request_id] = (stream, params.n)
        self._idle.clear()

        def add() -> None:
            try:
                children = self._engine.add_request(
                    prompt_token_ids,
                    params,
                    request_id,
                    segment=segment,
                    cache_salt=cache_salt,
                    grammar=grammar,
                )
                self._children[request_id] = children
                self._in_loop(stream.accept)
            except Exception as error:  # a refusal, or a bug that is this request's alone
                self._in_loop(stream.fail, error)

        self._send(add)
        try:
            await stream.accepted
        except asyncio.CancelledError:
            self.abort(stream)
            raise
        except Exception:
            self._forget(request_id)
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

        self._forget(request_id)
        if self._dead is None:
            self._send(end)

    async def drain(self) -> None:
        """Take no new requests, and return when those at hand have ended."""
        self._draining = True
        await self._idle.wait()

    async def stop(self) -> None:
        """End: requests at hand fail, and what drafters keep is written."""
        self._draining = True
        self._fail_all(UnavailableError("the server is stopping; send the request to another one."))
        self._stopping = True
        self._wake.set()
        if self._thread.ident is not None:
            await asyncio.to_thread(self._thread.join)
        if self._watching is not None:
            self._watching.cancel()

    def _check_open(self, wanted: int) -> None:
        failure = self.failure
        if failure is not None:
            raise UnavailableError(f"{failure}; restart the server.")
        if self._draining:
            raise UnavailableError("the server is stopping; send the request to another one.")
        if wanted > self._most_requests:
            raise RequestError(
                f"n is {wanted}, but at most {self._most_requests} outputs may run and wait. Use a smaller n."
            )
        self._check_room(wanted)

    def _check_room(self, wanted: int) -> None:
        most, now = self._most_requests, self.num_requests
        if now + wanted > most:
            raise OverloadedError(
                f"{now} requests run or wait, and at most {most} may. Send the request again later."
            )

    async def _watch(self) -> None:
        """Log where the engine hangs, each time that it does, and when it goes on."""
        told = False
        while True:
            await asyncio.sleep(self._stuck_after / LOOKS)
            if self.stuck and not told:
                frame = sys._current_frames().get(self._thread.ident or 0)
                stack = "" if frame is None else "".join(traceback.format_stack(frame))
                drafter = self._engine.asked_drafter
                where = "" if drafter is None else f" It waits for the drafter {drafter}."
                logger.error("%s.%s Restart the server. It is here:\n%s", self.failure, where, stack)
            elif told and not self.stuck:
                logger.warning("the engine goes on")
            told = self.stuck

    def _forget(self, request_id: str) -> None:
        """In the loop: this request is no longer waited for."""
        self._streams.pop(request_id, None)
        if not self._streams:
            self._idle.set()

    def _fail_all(self, error: Exception) -> None:
        """In the loop: no stream will get more."""
        for stream, _ in list(self._streams.values()):
            self.abort(stream)
            stream.fail(error)

    def _send(self, command: _Command) -> None:
        self._commands.append(command)
        self._wake.set()

    def _in_loop(self, function: Callable[..., None], *arguments: object) -> None:
        """Call a function in the event loop, if that still runs."""
        try:
            self._loop.call_soon_threadsafe(function, *arguments)
        except RuntimeError:  # the loop is closed: nobody listens
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
        except Exception as error:  # a bug of ours: the requests get an answer and /health tells
            logger.exception("the engine has died")
            self._dead = error
            self._in_loop(self._fail_all, UnavailableError("the engine has died; restart the server."))

    def _step(self) -> None:
        deltas = self._engine.step()
        for observer in self._observers:  # first: who has an answer finds it counted
            observer.step(self._engine.stats, deltas)
        updates = [(delta.request.request_id, self._update(delta)) for delta in deltas if _tells(delta)]
        if updates:
            self._in_loop(self._deliver, updates, self._take_outputs(deltas))

    def _update(self, delta: Delta) -> Update:
        """What a delta tells the loop."""
        request, count = delta.request, len(delta.token_ids)
        logprobs = None
        if request.params.logprobs is not None:
            taken = request.logprobs[len(request.logprobs) - count :]
            logprobs = tuple(with_texts(entry, self._tokenizer) for entry in taken)
        return Update(
            index=request.child,
            text=delta.text,
            token_ids=delta.token_ids,
            logprobs=logprobs,
            finish_reason=request.finish_reason,
            stop_reason=request.stop_reason,
            error=request.error,
        )

    def _take_outputs(self, deltas: Sequence[Delta]) -> list[tuple[str, RequestOutput]]:
        """The whole outputs of requests whose last child has ended in this step."""
        outputs = []
        for request_id in {delta.request.request_id for delta in deltas if delta.request.finished}:
            if all(child.finished for child in self._children[request_id]):
                children = self._children.pop(request_id)
                outputs.append((request_id, request_output(None, children, self._tokenizer)))
        return outputs

    def _deliver(
        self, updates: Sequence[tuple[str, Update]], outputs: Sequence[tuple[str, RequestOutput]]
    ) -> None:
        """In the loop: hand out what a step gave."""
        for request_id, update in updates:
            if request_id in self._streams:  # else it was aborted while the pass ran
                self._streams[request_id][0].put(update)
        for request_id, output in outputs:
            if request_id in self._streams:
                self._streams[request_id][0].end(output)
                self._forget(request_id)


def _tells(delta: Delta) -> bool:
    """Whether a delta has anything for a client; chunks of a prompt have not."""
    return bool(delta.token_ids or delta.text or delta.request.finished)
