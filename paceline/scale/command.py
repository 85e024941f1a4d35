"""`paceline serve --replicas N`: the ingress in this process, the engines on Ray Serve."""

from __future__ import annotations

import asyncio
import logging
import socket
import sys
import time
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.config import EngineConfig
from paceline.errors import ConfigError
from paceline.learn.options import LearnOptions
from paceline.models.heads.checkpoint import load_head
from paceline.models.heads.config import TargetName
from paceline.models.heads.fingerprint import check_target, target_fingerprint
from paceline.models.registry import load_checkpoint, load_tokenizer, resolve
from paceline.models.tokenizer import Tokenizer
from paceline.scale.cluster import cluster, import_ray, replica_resources
from paceline.scale.options import ScaleOptions
from paceline.scale.pages import pages
from paceline.scale.remote_engine import RemoteEngine, RemoteOptions
from paceline.serve.learner import first_head
from paceline.serve.learning import Pupil, learn_options, learning_model, trainable_method
from paceline.serve.loading import announce, model_names
from paceline.serve.logs import log_event, set_up_logs
from paceline.serve.metrics import Metrics
from paceline.serve.options import ServeOptions
from paceline.serve.routes.models import Models
from paceline.serve.server import (
    SWITCH_SECONDS,
    allow_files,
    bind,
    import_tracing,
    loop_factory,
    serve_models,
)
from paceline.serve.service import Service

if TYPE_CHECKING:
    from paceline.scale.deployment import ServeReplicas

logger = logging.getLogger(__name__)

APPLICATION = "paceline"


def serve_replicas(
    model: str,
    engine: dict[str, Any],
    server: dict[str, Any],
    scale_flags: dict[str, Any],
    learn: dict[str, Any] | None = None,
) -> None:
    """Serve a model on replicas until a signal. Mistakes are reported before anything is loaded."""
    options, scale = ServeOptions.from_flags(server), ScaleOptions(**scale_flags)
    check_alone(options)
    config = EngineConfig.from_options(model=model, **engine)
    learning = learn_options(learn or {}, options, config)
    import_ray()
    if options.otlp_endpoint is not None:
        import_tracing()
    listener = bind(options.host, options.port)
    sys.setswitchinterval(SWITCH_SECONDS)
    set_up_logs(options.log_level, options.log_format)
    _check_ranks(config)
    tokenizer = load_tokenizer(resolve(config.model.tokenizer or config.model.model))
    allow_files(2 * options.max_connections)
    begun = time.monotonic()
    with cluster(scale) as ray:
        share = replica_resources(config.backend, scale, ray.cluster_resources())
        if share.threads is not None:
            engine = {**engine, "threads": share.threads}
        replicas = _deploy(model, engine, options, scale, share.for_actor())
        host = "127.0.0.1" if scale.ray_address is None else ray.util.get_node_ip_address()
        log_event(logger, "replicas", count=scale.bounds[1], seconds=round(time.monotonic() - begun, 1))
        try:
            with asyncio.Runner(loop_factory=loop_factory()) as runner:
                runner.run(run(replicas, tokenizer, model, config, options, scale, listener, host, learning))
        finally:
            _remove()


def _deploy(
    model: str,
    engine: dict[str, Any],
    options: ServeOptions,
    scale: ScaleOptions,
    resources: dict[str, float],
) -> ServeReplicas:
    """The replicas, running. ConfigError if they do not come up."""
    from ray import serve

    from paceline.scale.deployment import ServeReplicas, replica_application

    serve.start(http_options={"location": "NoServer"}, logging_config={"log_level": "WARNING"})
    if APPLICATION in serve.status().applications:
        raise ConfigError(
            f"the cluster already runs an application named {APPLICATION!r}. Use another cluster, or remove "
            "it with `serve shutdown`."
        )
    application = replica_application(model, engine, options, scale, resources)
    try:
        handle = serve.run(application, name=APPLICATION, route_prefix=None)
    except RuntimeError as error:
        reason = _last_line(serve.status().applications[APPLICATION].deployments) or str(error)
        serve.delete(APPLICATION)
        raise ConfigError(f"the replicas did not start: {reason}") from error
    return ServeReplicas(handle, scale.replica_timeout)


def _last_line(deployments: Mapping[str, Any]) -> str:
    """The end of what Serve says about deployments: the error that ended their last replica."""
    lines = [line for found in deployments.values() for line in found.message.splitlines() if line.strip()]
    return lines[-1].strip() if lines else ""


def _check_ranks(config: EngineConfig) -> None:
    """ConfigError if the model cannot be shared by --tensor-parallel-size ranks."""
    if config.backend.tensor_parallel_size > 1:
        from paceline.models.tensor_parallel import check_size

        check_size(load_checkpoint(resolve(config.model.model)).config, config.backend.tensor_parallel_size)


def _remove() -> None:
    from ray import serve

    serve.delete(APPLICATION)


def check_alone(options: ServeOptions) -> None:
    """Raise ConfigError for options of one process that replicas do not have."""
    alone = {"--routes": options.routes, "--kv-events-endpoint": options.kv_events}
    for name, given in (alone | {"--lora-modules": options.lora_modules or None}).items():
        if given is not None:
            raise ConfigError(f"{name} is for a server of one process: leave it out, or --replicas.")


async def run(
    replicas: ServeReplicas,
    tokenizer: Tokenizer,
    model: str,
    config: EngineConfig,
    options: ServeOptions,
    scale: ScaleOptions,
    listener: socket.socket,
    host: str,
    learning: LearnOptions,
) -> None:
    """Serve replicas on a bound socket until a signal."""
    names = model_names(model, options)
    front, metrics = await make_ingress(replicas, tokenizer, names[0], config, options, scale, host)
    shown = pages(metrics, front, replicas.snapshots, options.metrics_prefix)
    with ExitStack() as stack:
        learner = None
        if learning.learn:
            pupil = await asyncio.to_thread(remote_pupil, config, tokenizer, names[0], front.drafters)
            learner = stack.enter_context(learning_model(learning, options, pupil, scale.bounds[1]))
            front.push_heads(pupil.first, learner.observers)
        offer = None if learner is None else learner.collector.offer
        service = Service(front, tokenizer, names, options.tool_call_parser, on_finished=offer)
        stack.callback(service.workers.shutdown, wait=False, cancel_futures=True)
        told = None if learner is None else learner.start(front, names[0])
        try:
            await serve_models(Models.of(service), options, listener, [metrics], shown, told)
        finally:
            if learner is not None:
                await learner.stop()


def remote_pupil(
    config: EngineConfig, tokenizer: Tokenizer, name: str, drafters: Iterable[str]
) -> Pupil[Path]:
    """The replicas' model as one that learns. Their engines take the folder of a head that fits it."""
    checkpoint = load_checkpoint(resolve(config.model.model))
    fingerprint, method = target_fingerprint(checkpoint), trainable_method(drafters, checkpoint.config)

    def checked(folder: Path) -> Path:
        check_target(load_head(folder).config, checkpoint.config, fingerprint, str(folder))
        return folder

    first = first_head(config.speculative.speculation(), method, fingerprint)
    target, vocab_size = TargetName(fingerprint, name), checkpoint.config.vocab_size
    return Pupil(target, vocab_size, method, first, checked, tokenizer.decode, config)


async def make_ingress(
    replicas: ServeReplicas,
    tokenizer: Tokenizer,
    name: str,
    config: EngineConfig,
    options: ServeOptions,
    scale: ScaleOptions,
    host: str,
) -> tuple[RemoteEngine, Metrics]:
    """A started engine whose requests run on the replicas, and the counters of its requests."""
    description = await replicas.describe()
    announce(description.facts, 0.0)
    low, high = scale.bounds
    facts = {**description.facts, "replicas": f"{low}:{high}" if low < high else str(high)}
    metrics = Metrics(name, options.max_segments, facts)
    remote = RemoteOptions(options.max_queue, high, low, scale.replica_timeout, config.seed)
    front = RemoteEngine(replicas, description, tokenizer, remote, (metrics,))
    await front.start(host)
    return front, metrics
