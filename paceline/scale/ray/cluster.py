"""The Ray cluster to deploy to: an existing one, or one started on this machine and stopped again."""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from paceline.backends.options import BackendOptions
from paceline.errors import ConfigError
from paceline.extras import needs_extra
from paceline.machine import find_gpu, usable_cores
from paceline.scale.options import ScaleOptions

CONNECT_SECONDS = 5.0


@dataclass(frozen=True)
class Resources:
    """What each replica gets."""

    threads: int | None  # of each of its ranks; None: it computes on GPUs
    ranks: int = 1  # see --tensor-parallel-size

    @property
    def cpus(self) -> int:
        return (self.threads or 1) * self.ranks

    @property
    def gpus(self) -> int:
        return self.ranks if self.threads is None else 0

    def for_actor(self) -> dict[str, float]:
        return {"num_cpus": self.cpus, "num_gpus": self.gpus}


def import_ray() -> Any:
    """The module ray; ConfigError if it or Ray Serve is not installed."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing is reported to anyone
    os.environ.setdefault("RAY_worker_niceness", "0")  # Ray's 15 would put engines behind all other processes
    with needs_extra("ray", "replicas (`--replicas`, `--autoscale`, `paceline scale`)"):
        import ray
        import ray.serve
    return ray


@contextmanager
def cluster(scale: ScaleOptions) -> Iterator[Any]:
    """The module ray, connected to the cluster. ConfigError if the address cannot be reached."""
    ray = import_ray()
    quiet: dict[str, Any] = {"log_to_driver": False, "configure_logging": False, "namespace": "paceline"}
    if scale.ray_address is None:
        try:
            ray.init(address="local", include_dashboard=False, num_cpus=usable_cores(), **quiet)
        except Exception as error:  # Ray raises no narrower one, for example after 30 s on a busy machine
            raise ConfigError(
                f"Ray did not start on this machine ({error}). Try again when it is less busy, or start a "
                "cluster with `ray start --head` and add --ray-address auto."
            ) from error
    else:
        _check_reachable(scale.ray_address)
        try:
            ray.init(address=scale.ray_address, **quiet)
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise _unreachable(scale.ray_address, error) from error
    logging.getLogger("ray").setLevel(logging.WARNING)
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    with suppress(ValueError):  # not the main thread
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # Ray's aborts
    try:
        yield ray
    finally:
        with suppress(Exception):
            ray.shutdown()


def machine_resources() -> dict[str, float]:
    """This machine's resources, in Ray's words, for when there is no cluster."""
    return {"CPU": usable_cores(), "GPU": 1 if find_gpu().usable else 0}


def _check_reachable(address: str) -> None:
    """ConfigError if nothing listens at HOST:PORT. Ray itself would try for half a minute."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if address == "auto":
        return
    if not host or not port.isdigit():
        raise ConfigError(f"ray_address must be HOST:PORT or auto, got {address!r}.")
    try:
        socket.create_connection((host, int(port)), CONNECT_SECONDS).close()
    except OSError as error:
        raise _unreachable(address, error) from error


def _unreachable(address: str, error: Exception) -> ConfigError:
    reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    return ConfigError(
        f"no Ray cluster answers at {address} ({reason}). Start one with `ray start --head`, set "
        "RAY_AUTH_MODE=token if it wants a token, or leave out --ray-address to start one on this machine."
    )


def needs_gpu(backend: BackendOptions) -> bool:
    """Whether a replica computes on GPUs."""
    return backend.choice.name == "cuda" or backend.choice.device.startswith("cuda")


def replica_resources(
    backends: Sequence[BackendOptions], scale: ScaleOptions, total: Mapping[str, float]
) -> list[Resources]:
    """What each replica of each model gets of a cluster with `total` resources. ConfigError if that is not
    enough for all."""
    _, high = scale.bounds
    cpus, gpus = int(total.get("CPU", 0)), int(total.get("GPU", 0))
    computing = sum(backend.tensor_parallel_size for backend in backends if not needs_gpu(backend))
    shares = []
    for backend in backends:
        threads = backend.threads or max(1, cpus // (high * max(1, computing)))
        shares.append(Resources(None if needs_gpu(backend) else threads, backend.tensor_parallel_size))
    for name, each, available, remedy in (
        ("GPU", [share.gpus for share in shares], gpus, "or more GPUs"),
        ("CPU", [share.cpus for share in shares], cpus, "fewer --threads, or more CPUs"),
    ):
        if high * sum(each) > available:
            counts = " and ".join(f"{count} {name}{'s' * (count > 1)}" for count in each)
            raise ConfigError(
                f"{high} replicas with {counts} each need {high * sum(each)} {name}s, but the "
                f"cluster has {available}. Use fewer replicas, {remedy}."
            )
    return shares
