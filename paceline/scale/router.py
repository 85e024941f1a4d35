"""PrefixRouter: the routing policy of routing.py behind Ray Serve's request-router interface."""

from __future__ import annotations

from collections import Counter
from typing import Any

from ray.serve.request_router import (
    LocalityMixin,
    MultiplexMixin,
    PendingRequest,
    ReplicaID,
    RequestRouter,
    RunningReplica,
)

from paceline.scale.routing import PrefixRouting, RoutingOptions
from paceline.scale.wire import RemoteRequest


class PrefixRouter(LocalityMixin, MultiplexMixin, RequestRouter):  # type: ignore[misc]
    """Prefix and session first, load second. Runs in the process of the handle: here, of the ingress.

    Without FIFOMixin: that would give the replica chosen for one request to another that waits longer.
    """

    def initialize_state(self, **options: Any) -> None:
        """Called once by Serve, with the deployment's request_router_kwargs."""
        self._policy = PrefixRouting(RoutingOptions(**options))
        self._ongoing: Counter[str] = Counter()  # requests of this handle, by replica
        self._calls: dict[str, str] = {}  # replica by Serve's request id
        self._known: set[str] = set()

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """The replicas by rank; those that the request avoids come last."""
        by_name = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        for gone in self._known - by_name.keys():
            self._policy.forget(gone)
        self._known = set(by_name)
        loads = {name: self._load(name, replica) for name, replica in by_name.items()}
        request = _request_of(pending_request)
        if request is None:
            ranked = self._policy.rank((), None, loads)
        else:
            ranked = self._policy.rank(request.prefix_hashes, request.session, loads)
            ranked.sort(key=lambda name: name in request.avoid)  # stable
        return [[by_name[name]] for name in ranked]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        """Note where a request went, for the next ones and for the ingress."""
        name = replica_id.unique_id
        self._ongoing[name] += 1
        self._calls[pending_request.metadata.internal_request_id] = name
        request = _request_of(pending_request)
        if request is not None:
            request.routed.append(name)
            self._policy.record(name, request.prefix_hashes, request.session)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """Note that a request has ended."""
        name = self._calls.pop(internal_request_id, None)
        if name is not None:
            self._ongoing[name] -= 1

    def _load(self, name: str, replica: RunningReplica) -> int:
        """Requests that a replica has: of this handle, and as far as Serve knows of others."""
        reported = self.replica_queue_len_cache.get(replica.replica_id)
        return max(self._ongoing[name], reported or 0)


def _request_of(pending: PendingRequest | None) -> RemoteRequest | None:
    """The RemoteRequest that a call carries, if it does."""
    first = pending.args[0] if pending is not None and pending.args else None
    return first if isinstance(first, RemoteRequest) else None
