"""Replicas on Ray Serve: the deployment of engines, the way to them, and an ingress deployment.

Serve places, starts, watches, scales and replaces replicas; a call to `Replica.serve` lasts as long as its
request, so Serve knows the load and drains. Only the tokens take another way (channel.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from ray import serve
from ray.serve.config import AutoscalingConfig, RequestRouterConfig
from ray.serve.handle import DeploymentHandle

from paceline.build import Loaded
from paceline.config import EngineConfig
from paceline.engine.async_engine import AsyncEngine
from paceline.scale.options import ScaleOptions
from paceline.scale.watchdog import Watchdog
from paceline.scale.wire import Address, Description, RemoteRequest
from paceline.scale.worker import ReplicaWorker
from paceline.serve.loading import describe, load
from paceline.serve.logs import set_up_logs
from paceline.serve.metrics import Metrics
from paceline.serve.options import ServeOptions

UNLIMITED = 100_000  # requests of a replica: the ingress limits them
HANG_TIMEOUTS = 4  # replica_timeouts without a turn of its event loop, after which a replica is killed
CHECK_SECONDS = 2.0  # between two health checks
CHECK_TIMEOUT = 5.0  # of a health check; three that fail in a row replace the replica


@dataclass(frozen=True)
class ReplicaSnapshot:
    """What a replica has counted."""

    replica: str
    metrics: Metrics


class Replica:
    """One engine in a Serve replica."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, model: str, engine: Mapping[str, Any], server: Mapping[str, Any], hang_timeout: float
    ) -> None:
        options = ServeOptions(**server)
        set_up_logs(options.log_level, "json")
        config = EngineConfig.from_options(model=model, **engine)
        loaded = await asyncio.to_thread(load, config)
        facts = describe(config, loaded)
        self._metrics = Metrics(facts["model"], options.max_segments, facts)
        front = AsyncEngine(
            loaded.engine,
            loaded.tokenizer,
            max_queue=UNLIMITED,
            observers=(self._metrics,),
            stuck_after=options.stuck_timeout,
        )
        front.start()
        name = serve.get_replica_context().replica_id.unique_id
        self._worker = ReplicaWorker(front, name, description(loaded, facts))
        self._watchdog = Watchdog(hang_timeout)

    async def serve(self, request: RemoteRequest) -> None:
        """Run a request; its tokens go to its ingress directly."""
        await self._worker.serve(request)

    async def introduce(self, address: Address) -> None:
        """Connect to an ingress."""
        with suppress(OSError):  # it is gone
            await self._worker.link(address)

    def describe(self) -> Description:
        """What an ingress must know."""
        return self._worker.description

    def snapshot(self) -> ReplicaSnapshot:
        """What was counted so far."""
        return ReplicaSnapshot(self._worker.name, self._metrics.snapshot())

    def check_health(self) -> None:
        """For Serve: raises if the engine is dead or stuck, so that the replica is replaced."""
        if not self._worker.healthy:
            raise RuntimeError("the engine is dead or stuck")

    def record_routing_stats(self) -> Mapping[str, Any]:
        """For Serve: the state of the engine."""
        return self._worker.state()

    async def __del__(self) -> None:
        """For Serve, after the replica has drained: drafters save what they know."""
        if worker := self.__dict__.get("_worker"):
            self._watchdog.stop()
            await worker.stop()


def description(loaded: Loaded, facts: Mapping[str, str]) -> Description:
    """What an ingress must know of a loaded engine."""
    engine = loaded.engine
    return Description(
        form=f"{loaded.fingerprint[:12]} {facts['backend']} {facts['quantization']}",
        limits=engine.limits,
        plans=dict(engine.plans),
        pool_tokens=engine.kv.pages.num_pages * engine.kv.page_size,
        page_size=engine.kv.page_size,
        facts=dict(facts),
    )


def deployment_options(config: EngineConfig, server: ServeOptions, scale: ScaleOptions) -> dict[str, Any]:
    """The options of the replicas' deployment, without resources."""
    low, high = scale.bounds
    options: dict[str, Any] = {
        "max_ongoing_requests": UNLIMITED,
        "health_check_period_s": CHECK_SECONDS,
        "health_check_timeout_s": CHECK_TIMEOUT,
        "graceful_shutdown_timeout_s": server.drain_timeout,
        "graceful_shutdown_wait_loop_s": 0.5,
        "request_router_config": {"request_router_class": "paceline.scale.router:PrefixRouter"},
    }
    if scale.autoscale is None:
        return {**options, "num_replicas": high}
    target = scale.target_ongoing_requests or max(1, config.scheduler.max_num_seqs // 2)
    autoscaling = {
        "min_replicas": low,
        "max_replicas": high,
        "target_ongoing_requests": target,
        "upscale_delay_s": scale.upscale_delay,
        "downscale_delay_s": scale.downscale_delay,
        "look_back_period_s": min(10.0, max(0.5, scale.upscale_delay)),
    }
    return {**options, "autoscaling_config": autoscaling}


def replica_application(
    model: str,
    engine: Mapping[str, Any],
    server: ServeOptions,
    scale: ScaleOptions,
    resources: Mapping[str, float],
) -> serve.Application:
    """The replicas as a Serve application."""
    options = deployment_options(EngineConfig.from_options(model=model, **engine), server, scale)
    options["request_router_config"] = RequestRouterConfig(**options["request_router_config"])
    if "autoscaling_config" in options:
        options["autoscaling_config"] = AutoscalingConfig(**options["autoscaling_config"])
    kept = ("max_segments", "stuck_timeout", "log_level")
    passed = {name: getattr(server, name) for name in kept}
    made = serve.deployment(Replica).options(
        name="Replica",
        ray_actor_options=dict(resources),
        max_constructor_retry_count=2,
        logging_config={"log_level": "WARNING", "enable_access_log": False},
        **options,
    )
    return made.bind(model, dict(engine), passed, HANG_TIMEOUTS * scale.replica_timeout)


class ServeReplicas:
    """Implements Replicas over the handle of a deployment."""

    def __init__(self, handle: DeploymentHandle, timeout: float) -> None:
        """`timeout` in seconds for what all replicas are asked."""
        self._handle = handle
        self._timeout = timeout

    async def call(self, request: RemoteRequest) -> None:
        response = self._handle.serve.remote(request)
        try:
            await response
        except asyncio.CancelledError:
            response.cancel()
            raise

    async def introduce(self, address: Address) -> None:
        with suppress(Exception):  # one is gone, or slow: this is repeated
            await self._broadcast("introduce", address)

    async def snapshots(self) -> Sequence[ReplicaSnapshot]:
        """What each replica has counted; none if one does not answer in time."""
        with suppress(Exception):
            answers = await self._broadcast("snapshot")
            return [answer for answer in answers if isinstance(answer, ReplicaSnapshot)]
        return []

    async def describe(self) -> Description:
        """The description of any replica."""
        answer: Description = await self._handle.describe.remote()
        return answer

    async def _broadcast(self, method: str, *arguments: Any) -> list[Any]:
        response = self._handle.broadcast(method, *arguments)
        answers: list[Any] = await response.results_async(timeout_s=self._timeout, return_exceptions=True)
        return answers
