"""Replicas on Ray Serve: the deployment of engines, and how an ingress finds them.

Serve places, starts, watches, scales and replaces replicas. Requests and tokens do not go through Serve
(channel.py does it), so a replica reports its load to Serve and drains itself.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ray import serve
from ray.serve.config import AutoscalingConfig, AutoscalingContext
from ray.serve.handle import DeploymentHandle

from paceline.build import Loaded
from paceline.config import EngineConfig
from paceline.draft.base import UnboundDrafter
from paceline.engine.frontend.async_engine import AsyncEngine
from paceline.models.lora import adapter_fingerprint
from paceline.scale.heads import HeadReceiver, StepReports
from paceline.scale.options import ScaleOptions
from paceline.scale.ray.watchdog import Watchdog
from paceline.scale.ray.worker import ReplicaWorker
from paceline.scale.remote.wire import Address, Description
from paceline.serve.learner import first_head
from paceline.serve.loading import describe, load
from paceline.serve.observability.logs import set_up_logs
from paceline.serve.observability.metrics import Metrics
from paceline.serve.options import ServeOptions
from paceline.serve.server import SWITCH_SECONDS

UNLIMITED = 100_000  # requests of a replica: the ingress limits them
HANG_TIMEOUTS = 10  # replica_timeouts without a turn of its event loop, after which a replica is killed
LOAD_SECONDS = 1.0  # between two reports of the load
STOP_SECONDS = 2.0  # of the time to drain, for the engine to stop
ONGOING = "ongoing_requests"  # of a replica, running and waiting
CHECK_SECONDS = 2.0  # between two health checks
CHECK_TIMEOUT = 5.0  # of a health check; three that fail in a row replace the replica


@dataclass(frozen=True)
class ReplicaSnapshot:
    """A replica's counters."""

    replica: str
    metrics: Metrics


class Replica:
    """One engine in a Serve replica."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, config: EngineConfig, server: Mapping[str, Any], hang_timeout: float
    ) -> None:
        sys.setswitchinterval(SWITCH_SECONDS)
        options = ServeOptions(**server)
        self._drain_seconds = options.drain_timeout - STOP_SECONDS
        set_up_logs(options.log_level, "json")
        loaded = await asyncio.to_thread(load, config)
        facts = describe(config, loaded)
        self._metrics = Metrics(facts["model"], options.max_segments, facts)
        reports = StepReports()
        front = AsyncEngine(
            loaded.engine,
            loaded.tokenizer,
            max_queue=UNLIMITED,
            observers=(self._metrics, reports),
            stuck_after=options.stuck_timeout,
        )
        front.start()
        name = serve.get_replica_context().replica_id.unique_id
        heads = HeadReceiver(front, partial(load_head, loaded), reports)
        self._worker = ReplicaWorker(front, name, description(config, loaded, facts), heads)
        self._watchdog = Watchdog(hang_timeout)

    async def introduce(self, address: Address) -> None:
        """Connect to an ingress."""
        with suppress(OSError):  # it is gone
            await self._worker.link(address)

    def describe(self) -> Description:
        """The description of this replica for an ingress."""
        return self._worker.description

    def snapshot(self) -> ReplicaSnapshot:
        """The counters so far."""
        return ReplicaSnapshot(self._worker.name, self._metrics.snapshot())

    def check_health(self) -> None:
        """For Serve: raises if the engine is dead or stuck, so that the replica is replaced."""
        if not self._worker.healthy:
            raise RuntimeError("the engine is dead or stuck")

    def record_autoscaling_stats(self) -> dict[str, float]:
        """For Serve: the load."""
        return {ONGOING: float(self._worker.num_requests)}

    async def __del__(self) -> None:
        """For Serve, which ends the replica then: requests finish, and drafters save what they know."""
        if worker := self.__dict__.get("_worker"):
            self._watchdog.stop()
            await worker.drain(self._drain_seconds)
            await worker.stop()


def load_head(loaded: Loaded, method: str, folder: Path | None) -> UnboundDrafter:
    """A drafter with the head in a folder; None: with the one that the model was loaded with."""
    return loaded.load_head(method, folder or first_head(loaded.speculation, method, loaded.fingerprint))


def wanted_replicas(context: AutoscalingContext) -> tuple[float, dict[str, Any]]:
    """An autoscaling policy for Serve: replicas for the load that they report. Serve bounds and delays it."""
    by_replica = (context.aggregated_metrics or {}).get(ONGOING, {})
    return sum(by_replica.values()) / context.config.get_target_ongoing_requests(), {}


def description(config: EngineConfig, loaded: Loaded, facts: Mapping[str, str]) -> Description:
    """The description of a loaded engine for an ingress."""
    engine = loaded.engine
    weights = [loaded.fingerprint[:12], facts["backend"], facts["quantization"]]
    weights += [f"{name}:{adapter_fingerprint(folder)}" for name, folder in config.model.adapters.items()]
    return Description(
        weights_id=" ".join(weights),
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
        "look_back_period_s": min(10.0, max(2 * LOAD_SECONDS, scale.upscale_delay)),
        "metrics_interval_s": LOAD_SECONDS,  # Ray warns: environment variables will replace it
        "policy": {"policy_function": f"{__name__}:{wanted_replicas.__name__}"},
    }
    return {**options, "autoscaling_config": autoscaling}


def replica_application(
    config: EngineConfig, server: ServeOptions, scale: ScaleOptions, resources: Mapping[str, float]
) -> serve.Application:
    """The replicas of a model as a Serve application."""
    options = deployment_options(config, server, scale)
    if "autoscaling_config" in options:
        options["autoscaling_config"] = AutoscalingConfig(**options["autoscaling_config"])
    kept = ("max_segments", "stuck_timeout", "log_level", "drain_timeout")
    passed = {name: getattr(server, name) for name in kept}
    made = serve.deployment(Replica).options(
        name="Replica",
        ray_actor_options=dict(resources),
        max_constructor_retry_count=2,
        logging_config={"log_level": "WARNING", "enable_access_log": False},
        **options,
    )
    return made.bind(config, passed, HANG_TIMEOUTS * scale.replica_timeout)


class ServeReplicas:
    """Implements Replicas over the handle of a deployment."""

    def __init__(self, handle: DeploymentHandle, timeout: float) -> None:
        """`timeout` in seconds for calls to all replicas."""
        self._handle = handle
        self._timeout = timeout

    async def introduce(self, address: Address) -> None:
        with suppress(Exception):  # one is gone, or slow: this is repeated
            await self._broadcast("introduce", address)

    async def wake(self) -> None:
        await self.describe()  # a call that waits for a replica makes Serve start one

    async def snapshots(self) -> Sequence[ReplicaSnapshot]:
        """Each replica's counters; none if one does not answer in time."""
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
