"""RemoteEngine: an EngineClient whose requests run on replicas, and survive them.

A request's output is a pure function of the request. So when a replica dies, hangs or is taken away, the
ingress sends the same request with the tokens it already has to another replica, which continues at the next
token. The client sees a pause, and the same bytes.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Unpack
from weakref import WeakKeyDictionary

from paceline.constrain.compiler import Grammar, GrammarCompiler
from paceline.core.detokenizer import TextTokenizer
from paceline.core.params import SamplingParams
from paceline.core.request import Request
from paceline.core.stats import StepStats
from paceline.core.structured_outputs import StructuredOutputsParams
from paceline.engine.admission import Limits, RequestOptions, make_requests
from paceline.engine.frontend.async_engine import Observer
from paceline.engine.frontend.intake import Intake
from paceline.engine.frontend.stream import Stream
from paceline.errors import PacelineError, UnavailableError
from paceline.kv.hashing import page_hashes
from paceline.learn.activity import Activity
from paceline.scale.heads import HeadPush
from paceline.scale.remote.channel import Link
from paceline.scale.remote.dispatch import Dispatcher, RemoteObserver
from paceline.scale.remote.links import LinkOptions, Replicas
from paceline.scale.remote.remote_run import RemoteRun
from paceline.scale.remote.routing import PrefixRouting, RoutingOptions
from paceline.scale.remote.wire import Description, RemoteRequest

logger = logging.getLogger(__name__)

NO_REPLICA_SECONDS = 60.0  # after which requests are refused


@dataclass(frozen=True)
class RemoteOptions:
    """How an ingress treats its replicas. Times in seconds."""

    max_queue: int = 256  # requests that may wait, besides those running on replicas
    replicas: int = 1  # the most there can be
    min_replicas: int = 1
    replica_timeout: float = 2.0  # seconds without a message from a replica until its requests go to others
    seed: int = 0  # of requests without one


class RemoteEngine:
    """Requests in, tokens out. Make it in the event loop, `start` it, `submit` requests, `stop` it."""

    def __init__(
        self,
        replicas: Replicas,
        description: Description,
        tokenizer: TextTokenizer,
        options: RemoteOptions,
        observers: Iterable[RemoteObserver] = (),
    ) -> None:
        self._description = description
        self._tokenizer = tokenizer
        self._options = options
        self._observers = tuple(observers)
        self._grammars = GrammarCompiler(tokenizer, description.limits.vocab_size)
        self._sources: WeakKeyDictionary[Grammar, tuple[StructuredOutputsParams, bool]] = WeakKeyDictionary()
        room = options.max_queue + options.replicas * description.limits.max_num_seqs
        self._intake = Intake(lambda: room, lambda: self.failure)
        pages = max(1, description.pool_tokens // description.page_size)
        routing = PrefixRouting(RoutingOptions(max_pages=pages))
        expected = LinkOptions(description.weights_id, options.replica_timeout, options.replicas)
        self._dispatcher = Dispatcher(replicas, expected, routing, self._observers)
        self._tasks: dict[str, asyncio.Task[None]] = {}  # by request id
        self._num_arrived = 0
        self._heads: HeadPush | None = None  # None: replicas draft with their own

    async def start(self, host: str) -> None:
        """Listen on this address for the tokens of replicas, and connect to them."""
        await self._dispatcher.links.start(host)

    @property
    def links(self) -> Mapping[str, Link]:
        """The replicas that answer."""
        return self._dispatcher.links.by_replica

    @property
    def num_resumed(self) -> int:
        """How often a request continued after its replica was lost."""
        return self._dispatcher.num_resumed

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
    def drafters(self) -> Iterable[str]:
        """The methods that replicas have loaded, the default first."""
        return self._description.plans

    @property
    def state(self) -> StepStats:
        return self._dispatcher.links.state

    @property
    def unfinished(self) -> list[Request]:
        return self._dispatcher.unfinished

    @property
    def failure(self) -> str | None:
        """Set while no replica answers for a long time. Until then requests wait: replicas are replaced."""
        if self._dispatcher.links.empty_seconds < NO_REPLICA_SECONDS or not self._options.min_replicas:
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
        session: str | None = None,
        arrived: asyncio.Event | None = None,
        **options: Unpack[RequestOptions],
    ) -> Stream:
        """The stream of a request, checked as its replica would check it."""
        grammar = options.get("grammar")
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
            **options,
        )
        self._num_arrived += 1
        structure, lenient = (None, False) if grammar is None else self._sources[grammar]
        stream = Stream(request_id, self.abort, arrived)
        prompt = children[0].prompt_token_ids
        hashes = page_hashes(prompt, description.page_size, children[0].cache_salt)
        seeded = replace(params, seed=children[0].seed)
        run = RemoteRun(children, seeded, stream, self._tokenizer, self.now, hashes, session)
        first = RemoteRequest(
            key="",
            prompt_token_ids=prompt,
            params=seeded,
            structure=structure,
            lenient=lenient,
            segment=options.get("segment", ""),
            cache_salt=options.get("cache_salt", ""),
            adapter=options.get("adapter", ""),
            resume=None,
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

    def push_heads(self, first: Path, observers: Sequence[Observer]) -> None:
        """Enable `replace_head`, and pass the replicas' steps to the observers. `first`: their initial
        head."""
        self._heads = HeadPush(lambda: self._dispatcher.links.usable, first, observers)
        self._dispatcher.links.handle(self._heads.handlers)

    def watch_trainer(self, activity: Activity) -> None:
        """Let replicas on this machine record for each pass whether the trainer computed beside it."""
        assert self._heads is not None, "push_heads comes first"
        self._heads.watch_trainer(activity.path)

    async def replace_head(self, name: str, head: Path) -> None:
        """Let all replicas, also later ones, draft with the head in a folder: see HeadPush."""
        assert self._heads is not None, "push_heads comes first"
        await self._heads.replace(name, head)

    async def drain(self) -> None:
        await self._intake.drain()

    async def stop(self) -> None:
        self._intake.draining = True
        error = UnavailableError("the server is stopping; send the request to another one.")
        for stream in self._intake.streams:
            self.abort(stream)
            stream.fail(error)
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        await asyncio.to_thread(self._grammars.close)
        self._dispatcher.links.close()

    async def _drive(self, run: RemoteRun, first: RemoteRequest) -> None:
        """Run a request and end its stream."""
        stream = run.stream
        try:
            await self._dispatcher.run(run, first)
            stream.end(run.output())
        except asyncio.CancelledError:  # aborted
            self._aborted(run)
        except Exception as error:
            if not isinstance(error, PacelineError):
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
