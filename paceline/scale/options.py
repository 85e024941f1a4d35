"""The options of replicas: how many, where, and when they are given up."""

from __future__ import annotations

import re
from dataclasses import dataclass

from paceline.errors import ConfigError
from paceline.options import check_integer, check_number, refuse_unknown

MAX_REPLICAS = 10_000


@refuse_unknown(ConfigError)
@dataclass(frozen=True)
class ScaleOptions:
    """How many replicas serve a model. Times are in seconds."""

    replicas: int | None = None  # a fixed number
    autoscale: str | None = None  # MIN:MAX, by load
    ray_address: str | None = None  # of a Ray cluster, HOST:PORT or auto; None: start one on this machine
    replica_timeout: float = 2.0  # seconds without a message from a replica until its requests go to others
    target_ongoing_requests: float | None = None  # per replica; None: half of max_num_seqs
    upscale_delay: float = 5.0  # of too much load, before a replica is added
    downscale_delay: float = 60.0  # of too little load, before one is removed

    def __post_init__(self) -> None:
        if self.replicas is not None:
            check_integer(ConfigError, "replicas", self.replicas, 1, MAX_REPLICAS)
            if self.autoscale is not None:
                raise ConfigError("replicas and autoscale are two ways to say how many. Use one of them.")
        if self.autoscale is not None:
            _ = self.bounds
        check_number(ConfigError, "replica_timeout", self.replica_timeout, 0.1, 3600)
        for name in ("upscale_delay", "downscale_delay"):
            check_number(ConfigError, name, getattr(self, name), 0, 1e6)
        if self.target_ongoing_requests is not None:
            check_number(ConfigError, "target_ongoing_requests", self.target_ongoing_requests, 0.1, 1e6)
        if self.ray_address is not None and not self.wanted:
            raise ConfigError("ray_address needs --replicas or --autoscale: say how many to run there.")

    @property
    def wanted(self) -> bool:
        """Whether there are replicas at all."""
        return self.replicas is not None or self.autoscale is not None

    @property
    def bounds(self) -> tuple[int, int]:
        """The fewest and the most replicas."""
        if self.autoscale is None:
            count = self.replicas or 1
            return count, count
        match = re.fullmatch(r"(\d{1,5}):(\d{1,5})", self.autoscale)
        if match is None:
            raise ConfigError(f"autoscale must be MIN:MAX, such as 1:4, got {self.autoscale!r}.")
        low, high = int(match[1]), int(match[2])
        if high < 1 or high > MAX_REPLICAS or low > high:
            raise ConfigError(
                f"autoscale is MIN:MAX with MIN at most MAX and MAX from 1 to {MAX_REPLICAS}, got "
                f"{self.autoscale!r}. Swap or change them."
            )
        return low, high
