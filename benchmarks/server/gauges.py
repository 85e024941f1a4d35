"""The state of a server, by its /metrics and by the system: memory, files, requests, pages in use."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from paceline.bench.servers.client import ClientError, Server, get

SETTLE_SECONDS = 10.0  # until nothing may be running or held any more
_SAMPLE = re.compile(r"^([A-Za-z_:][\w:]*)(?:\{.*\})? (\S+)$", re.MULTILINE)


@dataclass(frozen=True)
class Gauges:
    """A server's state at one moment."""

    running: float
    waiting: float
    kv_usage: float  # fraction of the pages that requests hold, without those of the prefix cache only
    memory_bytes: float  # resident

    @property
    def idle(self) -> bool:
        """Whether nothing runs, waits or holds pages."""
        return not (self.running or self.waiting or self.kv_usage)


def metric_sums(text: str) -> dict[str, float]:
    """The values of a Prometheus page by name, summed over labels."""
    sums: dict[str, float] = {}
    for name, value in _SAMPLE.findall(text):
        sums[name] = sums.get(name, 0.0) + float(value)
    return sums


async def read_metrics(server: Server) -> dict[str, float]:
    """The server's metrics; empty if it has none."""
    answer = await get(server, "/metrics")
    return metric_sums(answer.body.decode()) if answer.status == 200 else {}


async def idle_gauges(server: Server) -> Gauges | None:
    """The server's state once it is idle, or after SETTLE_SECONDS of waiting for that.

    None if it does not have our metrics: servers of other engines use other names.
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


@dataclass(frozen=True)
class Sample:
    """The server's state at one moment. None: unknown."""

    second: float
    memory_bytes: float | None
    files: float | None  # open
    threads: float | None
    running: float | None
    waiting: float | None
    kv_usage: float | None  # fraction of the pages that requests hold


def memory_slope(samples: Sequence[Sample]) -> float | None:
    """Growth of memory in bytes per hour over the second half of the samples; caches fill in the first."""
    sizes_over_time = [
        (sample.second, sample.memory_bytes) for sample in samples if sample.memory_bytes is not None
    ]
    late = sizes_over_time[len(sizes_over_time) // 2 :]
    if len(late) < 3:
        return None
    seconds, sizes = np.array(late).T
    return float(np.polyfit(seconds, sizes, 1)[0] * 3600)


async def sample_server(server: Server, process_id: int | None, second: float) -> Sample:
    """The server's state now, by its metrics and, if it is on this machine, by the system."""
    try:
        metrics: dict[str, float] = await read_metrics(server)
    except ClientError:
        metrics = {}
    process = _process(process_id)
    return Sample(
        second,
        process.get("memory", metrics.get("process_resident_memory_bytes")),
        process.get("files", metrics.get("process_open_fds")),
        process.get("threads"),
        metrics.get("paceline:num_requests_running"),
        metrics.get("paceline:num_requests_waiting"),
        metrics.get("paceline:kv_cache_usage_perc"),
    )


def _process(process_id: int | None) -> dict[str, Any]:
    """Memory, open files and threads of a process, by Linux; empty if there is none, or no /proc."""
    folder = Path(f"/proc/{process_id}")
    try:
        status = dict(line.split(":", 1) for line in (folder / "status").read_text().splitlines())
        files = len(list((folder / "fd").iterdir()))
    except OSError:
        return {}
    return {
        "memory": 1024.0 * int(status["VmRSS"].split()[0]),
        "files": float(files),
        "threads": float(status["Threads"]),
    }
