"""The pages of a server of replicas: /metrics added up, /metrics/replicas and /replicas by replica."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from fastapi import APIRouter, Response
from pydantic import BaseModel

from paceline.core.stats import StepStats
from paceline.scale.remote.remote_engine import RemoteEngine
from paceline.serve.http.app import Pages
from paceline.serve.http.middleware import REPLICA_METRICS, REPLICAS
from paceline.serve.observability.metrics import Metrics
from paceline.serve.observability.metrics_page import Page, View, render

STATE = ("running", "waiting", "kv_usage", "prefix_queries", "prefix_hits")


class Counted(Protocol):
    """A replica's counters."""

    @property
    def replica(self) -> str: ...

    @property
    def metrics(self) -> Metrics: ...


Snapshots = Callable[[], Awaitable[Sequence[Counted]]]


class ReplicaState(BaseModel):
    """One replica."""

    replica: str
    model: str  # its name in answers
    host: str
    pid: int
    weights: str  # their id: the same on all replicas that get requests
    head: str  # id of the learned head that drafts; empty: the one it was started with
    running: int
    waiting: int
    kv_cache_usage: float
    draining: bool  # it finishes its requests and gets no new ones
    silent_seconds: float  # since it was last heard


class ReplicaStates(BaseModel):
    replicas: list[ReplicaState]
    resumed: int  # times that a request continued after its replica was lost


@dataclass(frozen=True)
class ModelFleet:
    """A model's replicas, as their ingress sees them."""

    own: Metrics  # what the ingress counts: requests
    engine: RemoteEngine
    snapshots: Snapshots


class FleetMetrics:
    """The metrics of an ingress and of a model's replicas.

    Requests are counted at the ingress, once each and as their clients see them; passes and drafts by the
    replicas. The counts of lost replicas stay in the sums.
    """

    def __init__(self, fleet: ModelFleet, prefix: str) -> None:
        """`prefix`: as in ServeOptions."""
        self._prefix = prefix
        self._fleet = fleet
        self._last: dict[str, Metrics] = {}  # by replica, stopped ones included

    async def total(self) -> Page:
        """Everything added up."""
        await self._update()
        engine, total = self._fleet.engine, self._fleet.own.snapshot()
        for counted in self._last.values():
            total.add_steps(counted)
        return Page(View(total, engine.state, engine.failure is None), self._prefix)

    async def by_replica(self) -> list[Page]:
        """A page for each connected replica."""
        await self._update()
        pages = []
        for name, link in sorted(self._fleet.engine.links.items()):
            if name in self._last:
                state = StepStats(**{key: link.state.get(key, 0) for key in STATE})
                healthy = not link.state.get("failure")
                pages.append(Page(View(self._last[name], state, healthy, {"replica": name}), self._prefix))
        return pages

    async def _update(self) -> None:
        for counted in await self._fleet.snapshots():
            self._last[counted.replica] = counted.metrics


def pages(fleets: Sequence[ModelFleet], prefix: str) -> Pages:
    """The pages of a server of replicas, of one model or several. `prefix`: as in ServeOptions."""
    counters = [FleetMetrics(fleet, prefix) for fleet in fleets]
    routes = APIRouter(tags=["Server"])

    async def total() -> Sequence[Page]:
        return await asyncio.gather(*[one.total() for one in counters])

    @routes.get(REPLICA_METRICS, response_class=Response)
    async def by_replica() -> Response:
        """The metrics of each replica, with its name as a label."""
        found = await asyncio.gather(*[one.by_replica() for one in counters])
        return await asyncio.to_thread(render, [page for some in found for page in some], with_process=False)

    @routes.get(REPLICAS)
    async def replicas() -> ReplicaStates:
        """The replicas that answer."""
        return ReplicaStates(
            replicas=[state for fleet in fleets for state in _states(fleet)],
            resumed=sum(fleet.engine.num_resumed for fleet in fleets),
        )

    return Pages(total, [routes])


def _states(fleet: ModelFleet) -> list[ReplicaState]:
    now = asyncio.get_running_loop().time()
    return [
        ReplicaState(
            replica=name,
            model=fleet.own.model_name,
            host=link.state.get("host", ""),
            pid=link.state.get("pid", 0),
            weights=link.weights_id,
            head=link.state.get("head", ""),
            running=link.state.get("running", 0),
            waiting=link.state.get("waiting", 0),
            kv_cache_usage=link.state.get("kv_usage", 0.0),
            draining=link.draining,
            silent_seconds=round(now - link.heard, 3),
        )
        for name, link in sorted(fleet.engine.links.items())
    ]
