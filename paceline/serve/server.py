"""`paceline serve`: load a model, warm it up, open the port, and serve until a signal.

The first SIGTERM, SIGINT or SIGHUP drains: new requests are refused, running ones finish. The second
stops at once.
"""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, cast

import uvicorn
import uvicorn.server

from paceline import __version__
from paceline.build import Loaded, LoadedModel, build_engine, load_model
from paceline.config import CacheOptions, EngineConfig
from paceline.core.params import SamplingParams
from paceline.core.request import Request
from paceline.engine.async_engine import AsyncEngine
from paceline.engine.client import EngineClient
from paceline.engine.engine import Engine
from paceline.errors import ConfigError
from paceline.extras import needs_extra
from paceline.models.registry import resolve
from paceline.models.tokenizer import Tokenizer
from paceline.serve.app import Pages, make_app
from paceline.serve.connections import Connection, ConnectionLimits
from paceline.serve.logs import log_event, set_up_logs
from paceline.serve.metrics import Metrics
from paceline.serve.options import ServeOptions
from paceline.serve.service import Service
from paceline.terminal.session import announce_compilation, note

if TYPE_CHECKING:
    from paceline.serve.tracing import Tracing

logger = logging.getLogger(__name__)

LAST_BYTES_SECONDS = 5.0  # for answers to reach their clients after the engine has stopped
SAME_SIGNAL_SECONDS = 0.5  # `timeout` sends a signal to the process and to its group: count it once
OTHER_FILES = 256  # open files besides connections
# How long a thread may hold the GIL while another waits. With Python's 5 ms, a pass that takes the GIL
# ten times beside a thread that renders a template would take 50 ms longer.
SWITCH_SECONDS = 0.001
LIMITS = ("max_model_len", "max_num_seqs", "max_num_batched_tokens")  # that the log of a start shows
WARM_TOKENS = 40  # length of the warm-up prompt: enough to run every kernel of a pass


def serve(model: str, engine: dict[str, Any], server: dict[str, Any]) -> None:
    """Serve a model until a signal. Mistakes in options are reported before anything is loaded."""
    options = ServeOptions.from_flags(server)
    config = EngineConfig.from_options(model=model, **engine)
    if options.otlp_endpoint is not None:
        import_tracing()
    listener = bind(options.host, options.port)
    sys.setswitchinterval(SWITCH_SECONDS)
    set_up_logs(options.log_level, options.log_format)
    begun = time.monotonic()
    loaded = load(config)
    facts = describe(config, loaded)
    allow_files(2 * options.max_connections)
    announce(facts, time.monotonic() - begun)
    names = model_names(model, options)
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        runner.run(run(loaded.engine, loaded.tokenizer, names, options, listener, facts))


def bind(host: str, port: int) -> socket.socket:
    """A socket bound to this address. It listens only once the model is ready."""
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise ConfigError(
            f"host {host!r} is no address of this machine ({error}). Use 127.0.0.1, or 0.0.0.0 for all."
        ) from error
    family, kind, protocol, _, address = min(addresses, key=lambda entry: entry[0] != socket.AF_INET)
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # so that a restart can bind at once
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"cannot listen on {host} port {port}: {error.strerror}. Use another --port (0 takes one that is "
            "free) or --host, or stop what listens there."
        ) from error
    return listener


def allow_files(connections: int) -> None:
    """Raise the limit on open files to what the connections need, as far as the system permits."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = connections + OTHER_FILES
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def load(config: EngineConfig) -> Loaded:
    """The loaded model (downloaded if necessary), with its kernels compiled."""
    resolve(config.model.model)
    if config.backend.name == "cpu":
        announce_compilation()
    if sys.stderr.isatty():
        note(f"loading {config.model.model}")
    model = load_model(config)
    warm_up(config, model)
    loaded = build_engine(config, model)
    loaded.engine.grammars.prepare()
    loaded.engine.prepare()
    return loaded


def warm_up(config: EngineConfig, model: LoadedModel) -> None:
    """Compile and run what passes and drafts need, in a separate engine: the real one stays untouched."""
    small = replace(
        config,
        model=replace(config.model, max_model_len=None),
        cache=CacheOptions(
            kv_cache_memory_bytes=16 * model.backend.bytes_per_page(), enable_prefix_caching=False
        ),
    )
    engine = build_engine(small, model).engine
    length = min(WARM_TOKENS, engine.limits.max_model_len - 3)
    requests: list[Request] = []
    for params in (
        SamplingParams(temperature=0, max_tokens=8, ignore_eos=True),
        SamplingParams(top_p=0.9, top_k=20, seed=0, max_tokens=8, ignore_eos=True, logprobs=1),
    ):
        requests += engine.add_request([0] * length, params)
    while engine.has_unfinished:
        engine.step()
    for request in requests:  # what fails now would fail for every client
        if request.error is not None:
            raise request.error


def describe(config: EngineConfig, loaded: Loaded) -> dict[str, Any]:
    """What is served and how, for the log and the metrics."""
    limits = loaded.engine.limits
    return {
        "version": __version__,
        "model": Path(config.model.model).name,
        "backend": config.backend.name,
        "quantization": loaded.engine.backend.weight_format,
        "drafters": ",".join(loaded.drafters) or "off",
        "draft_control": "auto" if config.speculative.speculation().auto else "fixed",
        "max_model_len": str(limits.max_model_len),
        "max_num_seqs": str(limits.max_num_seqs),
        "max_num_batched_tokens": str(limits.max_num_batched_tokens),
    }


def announce(facts: Mapping[str, str], seconds: float) -> None:
    """Log the model and its drafters. `load_model` has logged the backend; the URL follows."""
    limits: dict[str, Any] = {name: facts[name] for name in LIMITS}
    log_event(logger, "model", name=facts["model"], **limits, seconds=round(seconds, 1))
    log_event(logger, "drafter", name=facts["drafters"], control=facts["draft_control"])


async def run(
    engine: Engine,
    tokenizer: Tokenizer,
    names: tuple[str, ...],
    options: ServeOptions,
    listener: socket.socket,
    facts: Mapping[str, str],
) -> None:
    """Serve a loaded model on a bound socket until a signal."""
    metrics = Metrics(names[0], options.max_segments, facts)
    front = AsyncEngine(
        engine,
        tokenizer,
        max_queue=options.max_queue,
        observers=(metrics,),
        stuck_after=options.stuck_timeout,
    )
    front.start()
    await serve_client(front, tokenizer, names, options, listener, metrics)


async def serve_client(
    front: EngineClient,
    tokenizer: Tokenizer,
    names: tuple[str, ...],
    options: ServeOptions,
    listener: socket.socket,
    metrics: Metrics,
    pages: Pages | None = None,
) -> None:
    """Serve an engine that is started, wherever it runs, on a bound socket until a signal."""
    service = Service(front, tokenizer, names, options.tool_call_parser)
    with ExitStack() as stack:
        on_finished = []
        if options.otlp_endpoint is not None:
            tracing = import_tracing()(options.otlp_endpoint, names[0], front.now)
            stack.callback(tracing.close)
            on_finished.append(tracing.request_ended)
        app = make_app(service, options, metrics, on_finished, pages)
        try:
            await Server(app, front, options, metrics).serve([listener])
        finally:
            await front.stop()
            service.workers.shutdown(wait=False, cancel_futures=True)
    log_event(logger, "stopped")


def import_tracing() -> type[Tracing]:
    """The class that sends traces; ConfigError if its packages are not installed."""
    with needs_extra("otel", "`--otlp-endpoint`"):
        from paceline.serve.tracing import Tracing
    return Tracing


class Server(uvicorn.Server):
    """uvicorn with its own drain: the port stays open until the running requests have finished."""

    def __init__(self, app: Any, engine: EngineClient, options: ServeOptions, metrics: Metrics) -> None:
        limits = ConnectionLimits(
            options.max_connections, options.client_timeout, partial(metrics.answered, "")
        )
        super().__init__(
            uvicorn.Config(
                app,
                http=cast(Any, partial(Connection, limits=limits, idle={})),
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                lifespan="off",
                ws="none",
                root_path=options.root_path,
                timeout_keep_alive=options.timeout_keep_alive,
                timeout_graceful_shutdown=int(LAST_BYTES_SECONDS),
            )
        )
        self._engine = engine
        self._options = options
        self._signal_at: float | None = None  # time of the first signal
        self._loop = asyncio.get_running_loop()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start listening, and log the address."""
        await super().startup(sockets)
        assert sockets is not None
        log_event(logger, "listening", url=_url(self._options.host, sockets[0]))

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handle signals while serving: uvicorn's, and SIGHUP unless it is ignored (nohup)."""
        with super().capture_signals():
            if (
                threading.current_thread() is not threading.main_thread()
                or signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
            ):
                yield
                return
            before = signal.signal(signal.SIGHUP, self.handle_exit)
            try:
                yield
            finally:
                signal.signal(signal.SIGHUP, before)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Handle a signal. (uvicorn's own handler would raise it again at the end: exit code not 0.)"""
        now = time.monotonic()
        if self._signal_at is None:
            self._signal_at = now
            self._loop.call_soon_threadsafe(self._begin_to_stop, sig)
        elif now - self._signal_at > SAME_SIGNAL_SECONDS:
            self._stop_now(sig)

    def _begin_to_stop(self, sig: int) -> None:
        self._stopping = asyncio.create_task(self._drain(sig))

    async def _drain(self, sig: int) -> None:
        """Let running requests finish within drain_timeout, then abort them and stop the server."""
        waiting = self._engine.num_requests
        log_event(logger, "draining", signal=signal.Signals(sig).name, requests=waiting)
        try:  # a stuck engine finishes no request
            async with asyncio.timeout(0 if self._engine.stuck else self._options.drain_timeout):
                await self._engine.drain()
        except TimeoutError:
            log_event(logger, "drain timed out", level=logging.WARNING, requests=self._engine.num_requests)
        try:
            async with asyncio.timeout(LAST_BYTES_SECONDS):
                await self._engine.stop()
        except TimeoutError:  # a pass that does not end
            self._stop_now(sig)
        self.should_exit = True

    def _stop_now(self, sig: int) -> None:
        """End the process at once, without waiting for a pass, a grammar or a slow client."""
        log_event(logger, "stopped now", level=logging.WARNING, signal=signal.Signals(sig).name)
        logging.shutdown()
        os._exit(128 + sig)


def _url(host: str, listener: socket.socket) -> str:
    port = listener.getsockname()[1]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def model_names(model: str, options: ServeOptions) -> tuple[str, ...]:
    """Names that clients may use for the model. A file or folder gives its base name, never its path."""
    if options.served_model_name:
        return options.served_model_name
    path = Path(model).expanduser()
    return (path.resolve().name.removesuffix(".gguf") if path.exists() else model,)


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ModuleNotFoundError:  # uvloop is not available on every platform
        return None
    return uvloop.new_event_loop
