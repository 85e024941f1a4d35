"""`paceline serve`: load models, open the port, and serve until a signal."""

from __future__ import annotations

import asyncio
import logging
import resource
import socket
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from paceline.draft.base import UnboundDrafter
from paceline.engine.frontend.async_engine import AsyncEngine, Observer
from paceline.engine.frontend.step_turns import StepTurns
from paceline.errors import ConfigError
from paceline.extras import needs_extra
from paceline.serve.http.app import Pages, make_models_app
from paceline.serve.http.draining import DrainingServer
from paceline.serve.kv_events import observe, publishing
from paceline.serve.learner import LearningModel
from paceline.serve.learning import learn_options, learning_model, trainable_model
from paceline.serve.loading import ServedModel, declared_models, load_models
from paceline.serve.observability.learning_page import Learning
from paceline.serve.observability.logs import log_event, set_up_logs
from paceline.serve.observability.metrics import Metrics
from paceline.serve.options import ServeOptions
from paceline.serve.routes.file import RoutesFile, RouteTable
from paceline.serve.routes.models import Models
from paceline.serve.service import Service, new_workers

if TYPE_CHECKING:
    from paceline.serve.kv_events.publisher import Publisher
    from paceline.serve.observability.tracing import Tracing

logger = logging.getLogger(__name__)

OTHER_FILES = 256  # open files besides connections
# How long a thread may hold the GIL while another waits. With Python's 5 ms, a pass that takes the GIL
# ten times beside a thread that renders a template would take 50 ms longer.
SWITCH_SECONDS = 0.001


def serve(
    model: str | None, engine: dict[str, Any], server: dict[str, Any], learn: dict[str, Any] | None = None
) -> None:
    """Serve a model, or those of a routes file, until a signal.

    Mistakes in options are reported before anything is loaded.
    """
    options = ServeOptions.from_flags(server)
    declared = declared_models(model, engine, options)
    config = next(iter(declared.models.values())).config
    learning = learn_options(learn or {}, options, config)
    if options.otlp_endpoint is not None:
        import_tracing()
    check_events(options, declared)
    with publishing(options.kv_events) as publisher:
        listener = bind(options.host, options.port)
        sys.setswitchinterval(SWITCH_SECONDS)
        set_up_logs(options.log_level, options.log_format)
        models = load_models(declared)
        allow_files(2 * options.max_connections)
        with ExitStack() as stack:
            learner = None
            if learning.learn:
                learner = stack.enter_context(
                    learning_model(learning, options, trainable_model(models[0], config))
                )
            runner = stack.enter_context(asyncio.Runner(loop_factory=loop_factory()))
            runner.run(run_models(models, declared.table, options, listener, publisher, learner))


def check_events(options: ServeOptions, declared: RoutesFile) -> None:
    """Raise ConfigError if there can be no KV events of these models."""
    if options.kv_events is None:
        return
    if options.routes is not None:
        raise ConfigError(
            "KV events are of one model, and a gateway could not tell several apart: leave them out, or "
            "--routes."
        )
    if not all(entry.config.cache.enable_prefix_caching for entry in declared.models.values()):
        raise ConfigError("KV events tell of the prefix cache: leave out --no-enable-prefix-caching.")


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


async def run_models(
    served: Sequence[ServedModel],
    table: RouteTable,
    options: ServeOptions,
    listener: socket.socket,
    publisher: Publisher | None = None,
    learner: LearningModel[UnboundDrafter] | None = None,
) -> None:
    """Serve loaded models, and routes over them, on a bound socket until a signal.

    The publisher gets KV events, and the learner finished requests, of one model only.
    """
    metrics = [Metrics(model.names[0], options.max_segments, model.facts) for model in served]
    observers: list[list[Observer]] = [[counters] for counters in metrics]
    if publisher is not None:
        (model,), (of_model,) = served, observers
        of_model.append(observe(model.engine.kv, publisher))
        log_event(logger, "kv events", endpoint=publisher.endpoint, replay=publisher.replay_endpoint)
    if learner is not None:
        observers[0].extend(learner.observers)
    turns = StepTurns() if len(served) > 1 else None
    workers = new_workers()
    services: dict[str, Service] = {}
    for model, observing in zip(served, observers, strict=True):
        front = AsyncEngine(
            model.engine,
            model.tokenizer,
            max_queue=options.max_queue if model.max_queue is None else model.max_queue,
            observers=observing,
            stuck_after=options.stuck_timeout,
            turn=None if turns is None else turns.join(),
        )
        front.start()
        parser = model.tool_call_parser or options.tool_call_parser
        on_finished = None if learner is None else learner.collector.offer
        service = Service(
            front,
            model.tokenizer,
            model.names,
            parser,
            on_finished=on_finished,
            restrict=None if learner is None else learner.restrict,
            workers=workers,
        )
        services |= dict.fromkeys(model.names, service)
        learning = None if learner is None else learner.start(front, model.names[0])
    try:
        await serve_models(Models(services, table), options, listener, metrics, learning=learning)
    finally:
        if learner is not None:
            await learner.stop()
        workers.shutdown(wait=False, cancel_futures=True)


async def serve_models(
    models: Models,
    options: ServeOptions,
    listener: socket.socket,
    metrics: Sequence[Metrics],
    pages: Pages | None = None,
    learning: Learning | None = None,
) -> None:
    """Serve models whose engines are started, wherever they run, on a bound socket until a signal.

    `metrics` are those of the engines, in order; `pages` those of engines elsewhere; `learning` is what one
    that learns shows of it.
    """
    engines = models.engines
    with ExitStack() as stack:
        on_finished = []
        if options.otlp_endpoint is not None:
            tracing = import_tracing()(options.otlp_endpoint, models.table.default, engines.now)
            stack.callback(tracing.close)
            on_finished.append(tracing.request_ended)
        app = make_models_app(models, options, metrics, on_finished, pages, learning)
        try:
            await DrainingServer(app, engines, options, metrics[0]).serve([listener])
        finally:
            await engines.stop()
    log_event(logger, "stopped")


def import_tracing() -> type[Tracing]:
    """The class that sends traces; ConfigError if its packages are not installed."""
    with needs_extra("otel", "`--otlp-endpoint`"):
        from paceline.serve.observability.tracing import Tracing
    return Tracing


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """What makes event loops: uvloop's, which is faster; None where it is not installed."""
    try:
        import uvloop
    except ModuleNotFoundError:  # it does not exist for every platform
        return None
    return uvloop.new_event_loop
