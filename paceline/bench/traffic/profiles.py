"""Arrival profiles: a fixed concurrency, a Poisson rate, or a recorded trace."""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

from paceline.bench.traffic.traces import read_trace
from paceline.errors import ConfigError
from paceline.options import check_integer, check_number


@dataclass(frozen=True)
class Profile:
    """When requests arrive. Closed: each of `concurrency` clients sends its next request after its answer.
    Open: requests arrive at their due times, however many are still running."""

    label: str
    concurrency: int | None = 1  # None: open
    due: tuple[float, ...] = ()  # open: seconds from the start, ascending; [request]
    lengths: tuple[int, ...] = ()  # maximum tokens per answer; empty: as in the workload; [request]

    def check_room(self, num_requests: int, workload: str) -> None:
        """Raise ConfigError if the workload has more requests than there are arrivals."""
        if self.concurrency is None and len(self.due) < num_requests:
            raise ConfigError(
                f"{self.label} has {len(self.due)} arrivals, and the workload {workload} {num_requests} "
                f"requests. Add --limit {len(self.due)}, or give a longer trace."
            )


def closed(concurrency: int) -> Profile:
    """A fixed number of concurrent requests."""
    check_integer(ConfigError, "--concurrency", concurrency, 1, None)
    return Profile(f"x{concurrency}", concurrency)


def poisson(rate: float, seed: int, num_requests: int) -> Profile:
    """Independent requests, `rate` per second on average."""
    check_number(ConfigError, "--rate", rate, 0, 1e6, low_open=True)
    rng = random.Random(f"arrivals {seed}")
    return Profile(f"{rate:g}/s", None, tuple(accumulate(rng.expovariate(rate) for _ in range(num_requests))))


def replay(path: Path, time_scale: float = 1.0) -> Profile:
    """The arrivals of a trace, as of `read_trace`, and the maximum length of each answer if it tells them."""
    arrivals = read_trace(path, time_scale)
    lengths = [arrival.answer_tokens for arrival in arrivals if arrival.answer_tokens is not None]
    return Profile(f"trace {path.stem}", None, tuple(arrival.due for arrival in arrivals), tuple(lengths))
