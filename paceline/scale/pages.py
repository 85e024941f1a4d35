"""What a server of replicas shows: /metrics added up, /metrics/replicas and /replicas by replica."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from fastapi import APIRouter, Response
from pydantic import BaseModel

from paceline.core.stats import StepStats
from paceline.scale.remote_engine import RemoteEngine
from paceline.serve.app import Pages
from paceline.serve.metrics import Metrics
from paceline.serve.metrics_page import Page, View, render
from paceline.serve.middleware import REPLICA_METRICS, REPLICAS

STATE = ("running", "waiting", "kv_usage", "prefix_queries", "prefix_hits")


class Counted(Protocol):
    """What a replica has counted."""

    @property
    def replica(self) -> str: ...

    @property
    def metrics(self) -> Metrics: ...


Snapshots = Callable[[], Awaitable[Sequence[Counted]]]


class ReplicaState(BaseModel):
    """One replica."""

    replica: str
    host: str
    pid: int
    weights: str  # their form: the same on all replicas that get requests
    head: str  # id of the learned head that drafts; empty: the one it was started with
    running: int
    waiting: int
    kv_cache_usage: float
    draining: bool  # it finishes its requests and gets no others
    silent_seconds: float  # since it was last heard


class ReplicaStates(BaseModel):
    replicas: list[ReplicaState]
    resumed: int  # times that a request went on after its replica was lost


class FleetMetrics:
    """The metrics of an ingress and of its replicas.

    Requests are counted at the ingress, once each and as their clients see them; passes and drafts by the
    replicas. What replicas that are gone have counted stays in the sums.
    """

    def __init__(self, own: Metrics, engine: RemoteEngine, snapshots: Snapshots, prefix: str) -> None:
        """`prefix`: as in ServeOptions."""
        self._prefix = prefix
        self._own = own
        self._engine = engine
        self._read = snapshots
        self._last: dict[str, Metrics] = {}  # by replica, also of those that are gone

    async def total(self) -> Sequence[Page]:
        """One page: everything added up."""
        await self._update()
        own = self._own
        total = own.snapshot()
        for counted in self._last.values():
            total.add_steps(counted)
        return [Page(View(total, self._engine.state, self._engine.failure is None), self._prefix)]

    async def by_replica(self) -> Sequence[Page]:
        """A page for each replica that is there."""
        await self._update()
        pages = []
        for name, link in sorted(self._engine.links.items()):
            if name in self._last:
                state = StepStats(**{key: link.state.get(key, 0) for key in STATE})
                healthy = not link.state.get("failure")
                pages.append(Page(View(self._last[name], state, healthy, {"replica": name}), self._prefix))
        return pages

    async def _update(self) -> None:
        for counted in await self._read():
            self._last[counted.replica] = counted.metrics


def pages(own: Metrics, engine: RemoteEngine, snapshots: Snapshots, prefix: str) -> Pages:
    """The pages of a server of replicas. `prefix`: as in ServeOptions."""
    fleet = FleetMetrics(own, engine, snapshots, prefix)
    routes = APIRouter(tags=["Server"])

    @routes.get(REPLICA_METRICS, response_class=Response)
    async def by_replica() -> Response:
        """The metrics of each replica, with its name as a label."""
        return await asyncio.to_thread(render, await fleet.by_replica(), with_process=False)

    @routes.get(REPLICAS)
    async def replicas() -> ReplicaStates:
        """The replicas that answer."""
        now = asyncio.get_running_loop().time()
        states = [
            ReplicaState(
                replica=name,
                host=link.state.get("host", ""),
                pid=link.state.get("pid", 0),
                weights=link.form,
                head=link.state.get("head", ""),
                running=link.state.get("running", 0),
                waiting=link.state.get("waiting", 0),
                kv_cache_usage=link.state.get("kv_usage", 0.0),
                draining=link.draining,
                silent_seconds=round(now - link.heard, 3),
            )
            for name, link in sorted(engine.links.items())
        ]
        return ReplicaStates(replicas=states, resumed=engine.num_resumed)

    return Pages(fleet.total, [routes])
