"""`paceline serve --replicas N`: the ingress in this process, the engines on Ray Serve."""

from __future__ import annotations

import asyncio
import logging
import socket
import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from paceline.errors import ConfigError
from paceline.learn.options import LearnOptions
from paceline.models.heads.checkpoint import load_head
from paceline.models.heads.config import TargetName
from paceline.models.heads.fingerprint import check_target, target_fingerprint
from paceline.models.registry import load_checkpoint, resolve
from paceline.scale.options import ScaleOptions
from paceline.scale.pages import ModelFleet, pages
from paceline.scale.ray.cluster import cluster, import_ray
from paceline.scale.ray.launch import RemoteModel, launch, load_tokenizers, remove
from paceline.scale.remote.remote_engine import RemoteEngine, RemoteOptions
from paceline.serve.learner import first_head
from paceline.serve.learning import TrainableModel, learn_options, learning_model, trainable_method
from paceline.serve.loading import announce, declared_models
from paceline.serve.observability.logs import log_event, set_up_logs
from paceline.serve.observability.metrics import Metrics
from paceline.serve.options import ServeOptions
from paceline.serve.routes.file import RouteTable
from paceline.serve.routes.models import Models
from paceline.serve.server import (
    SWITCH_SECONDS,
    allow_files,
    bind,
    import_tracing,
    loop_factory,
    serve_models,
)
from paceline.serve.service import Service, new_workers

logger = logging.getLogger(__name__)


def serve_replicas(
    model: str | None,
    engine: dict[str, Any],
    server: dict[str, Any],
    scale_flags: dict[str, Any],
    learn: dict[str, Any] | None = None,
) -> None:
    """Serve a model, or those of a routes file, each on separate replicas, until a signal. Mistakes are
    reported before anything is loaded."""
    options, scale = ServeOptions.from_flags(server), ScaleOptions(**scale_flags)
    check_alone(options)
    declared = declared_models(model, engine, options, together=False)
    learning = learn_options(learn or {}, options, next(iter(declared.models.values())).config)
    import_ray()
    if options.otlp_endpoint is not None:
        import_tracing()
    listener = bind(options.host, options.port)
    sys.setswitchinterval(SWITCH_SECONDS)
    set_up_logs(options.log_level, options.log_format)
    tokenizers = load_tokenizers(declared)
    allow_files(2 * options.max_connections)
    begun = time.monotonic()
    with cluster(scale) as ray:
        models = launch(declared, tokenizers, options, scale, ray.cluster_resources())
        host = "127.0.0.1" if scale.ray_address is None else ray.util.get_node_ip_address()
        log_event(logger, "replicas", count=scale.bounds[1], seconds=round(time.monotonic() - begun, 1))
        try:
            with asyncio.Runner(loop_factory=loop_factory()) as runner:
                runner.run(run(models, declared.table, options, scale, listener, host, learning))
        finally:
            remove(models)


def check_alone(options: ServeOptions) -> None:
    """Raise ConfigError for options of one process that replicas do not have."""
    if options.kv_events is not None:
        raise ConfigError("--kv-events-endpoint is for a server of one process: leave it out, or --replicas.")


async def run(
    models: Sequence[RemoteModel],
    table: RouteTable,
    options: ServeOptions,
    scale: ScaleOptions,
    listener: socket.socket,
    host: str,
    learning: LearnOptions,
) -> None:
    """Serve models on replicas, and routes over them, on a bound socket until a signal."""
    fleets = [await make_ingress(model, options, scale, host) for model in models]
    shown = pages(fleets, options.metrics_prefix)
    workers = new_workers()
    with ExitStack() as stack:
        stack.callback(workers.shutdown, wait=False, cancel_futures=True)
        learner = None
        if learning.learn:
            (model,), (fleet,) = models, fleets
            trainable = await asyncio.to_thread(remote_trainable_model, model, fleet.engine.drafters)
            learner = stack.enter_context(learning_model(learning, options, trainable, scale.bounds[1]))
            fleet.engine.push_heads(trainable.first, learner.observers)
        offer, restrict = (None, None) if learner is None else (learner.collector.offer, learner.restrict)
        services: dict[str, Service] = {}
        for model, fleet in zip(models, fleets, strict=True):
            parser = model.entry.tool_call_parser or options.tool_call_parser
            service = Service(
                fleet.engine,
                model.tokenizer,
                model.names,
                parser,
                on_finished=offer,
                restrict=restrict,
                workers=workers,
            )
            services |= dict.fromkeys(model.names, service)
        told = None if learner is None else learner.start(fleets[0].engine, models[0].names[0])
        try:
            own = [fleet.own for fleet in fleets]
            await serve_models(Models(services, table), options, listener, own, shown, told)
        finally:
            if learner is not None:
                await learner.stop()


def remote_trainable_model(model: RemoteModel, drafters: Iterable[str]) -> TrainableModel[Path]:
    """The replicas' model, whose engines load a head by its folder. ConfigError if it has no such head."""
    config = model.entry.config
    checkpoint = load_checkpoint(resolve(config.model.model))
    fingerprint, method = target_fingerprint(checkpoint), trainable_method(drafters, checkpoint.config)

    def checked(folder: Path) -> Path:
        check_target(load_head(folder).config, checkpoint.config, fingerprint, str(folder))
        return folder

    first = first_head(config.speculative.speculation(), method, fingerprint)
    target, vocab_size = TargetName(fingerprint, model.names[0]), checkpoint.config.vocab_size
    return TrainableModel(target, vocab_size, method, first, checked, model.tokenizer.decode, config)


async def make_ingress(
    model: RemoteModel, options: ServeOptions, scale: ScaleOptions, host: str
) -> ModelFleet:
    """A started engine whose requests run on the replicas, and the counters of its requests."""
    description = await model.replicas.describe()
    announce(description.facts, 0.0)
    low, high = scale.bounds
    count = f"{low}:{high}" if low < high else str(high)
    facts = {**description.facts, **model.facts, "replicas": count}
    metrics = Metrics(model.names[0], options.max_segments, facts)
    max_queue = options.max_queue if model.entry.max_queue is None else model.entry.max_queue
    remote = RemoteOptions(max_queue, high, low, scale.replica_timeout, model.entry.config.seed)
    front = RemoteEngine(model.replicas, description, model.tokenizer, remote, (metrics,))
    await front.start(host)
    return ModelFleet(metrics, front, model.replicas.snapshots)
