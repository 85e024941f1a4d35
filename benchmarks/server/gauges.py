"""What a server tells of itself in /metrics: memory, requests at hand, pages in use."""

from __future__ import annotations

import asyncio
import re
import time
from dataclasses import dataclass

from paceline.bench.servers.client import Server, get

SETTLE_SECONDS = 10.0  # within which what was left must be gone
_SAMPLE = re.compile(r"^([A-Za-z_:][\w:]*)(?:\{.*\})? (\S+)$", re.MULTILINE)


@dataclass(frozen=True)
class Gauges:
    """A server's state at one moment."""

    running: float
    waiting: float
    kv_usage: float  # share of the pages that requests hold; those of the prefix cache alone are free
    memory_bytes: float  # resident

    @property
    def idle(self) -> bool:
        """Whether nothing runs, waits or holds pages."""
        return not (self.running or self.waiting or self.kv_usage)


def metric_sums(text: str) -> dict[str, float]:
    """The samples of a page of Prometheus metrics, those of one name added up over their labels."""
    sums: dict[str, float] = {}
    for name, value in _SAMPLE.findall(text):
        sums[name] = sums.get(name, 0.0) + float(value)
    return sums


async def read_metrics(server: Server) -> dict[str, float]:
    """The server's metrics; empty if it has none."""
    answer = await get(server, "/metrics")
    return metric_sums(answer.body.decode()) if answer.status == 200 else {}


async def idle_gauges(server: Server) -> Gauges | None:
    """The server's state once nothing runs any more, or its state after a while of waiting for that.

    None if it does not tell: another engine's server has other names.
    """
    until = time.monotonic() + SETTLE_SECONDS
    while True:
        sums = await read_metrics(server)
        if "paceline:num_requests_running" not in sums:
            return None
        gauges = Gauges(
            running=sums["paceline:num_requests_running"],
            waiting=sums["paceline:num_requests_waiting"],
            kv_usage=sums["paceline:kv_cache_usage_perc"],
            memory_bytes=sums.get("process_resident_memory_bytes", 0.0),
        )
        if gauges.idle or time.monotonic() > until:
            return gauges
        await asyncio.sleep(0.05)
