"""Replicas beside one process: first texts, throughput and prefix cache hits."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from benchmarks.server.cut_client import first_byte_seconds
from benchmarks.server.process import ServerProcess
from benchmarks.server.replicas import ALONE, REPLICAS, Fleet, ask_all, cpu_seconds
from paceline.bench.servers.client import Server, post
from paceline.errors import PacelineError

PAUSE_SECONDS = 0.1  # between two requests, on average and over all clients
BOTH = ("--threads", "2", *ALONE[2:])


@dataclass
class Side:
    """One contestant."""

    name: str
    tokens_per_second: list[float] = field(default_factory=list)  # of each turn
    tokens_per_cpu_second: list[float] = field(default_factory=list)  # of all processes of the server
    first_texts: list[float] = field(default_factory=list)  # seconds


def measure_ingress(model: str, turns: int, clients: int, requests: int) -> tuple[Side, Side]:
    """Bare requests of one token to one process and to one replica, each with one thread, in turns.

    `requests` per turn and side. Clients wait for random times between requests.
    """
    direct, ingress = Side("one process"), Side("one replica behind the ingress")
    with (
        ServerProcess(model, *ALONE) as one,
        ServerProcess(model, "--replicas", "1", *ALONE) as two,
    ):
        for turn in range(turns + 1):  # the first one warms up
            for side, server in ((direct, one.server), (ingress, two.server)):
                found = asyncio.run(_first_texts(server, clients, requests, turn))
                side.first_texts += found if turn else []
    return direct, ingress


async def _first_texts(server: Server, clients: int, requests: int, seed: int) -> list[float]:
    found: list[float] = []

    async def client(number: int) -> None:
        chance = random.Random(1000 * seed + number)
        for count in range(requests // clients):
            await asyncio.sleep(chance.expovariate(1 / (clients * PAUSE_SECONDS)))
            prompt = f"{seed} {number} {count}"
            request = {"prompt": prompt, "max_tokens": 1, "ignore_eos": True, "stream": True}
            answer = await post(server, "/v1/completions", request)
            seconds = first_byte_seconds(answer)
            if seconds is None or not answer.complete:
                raise PacelineError(f"a request failed with status {answer.status}: {answer.error}")
            found.append(seconds)

    await asyncio.gather(*[client(number) for number in range(clients)])
    return found


def measure_throughput(model: str, turns: int, clients: int, tokens: int) -> tuple[Side, Side]:
    """One process with two threads, and two replicas with one thread each, both running, in turns."""
    alone, replicas = Side("one process, 2 threads"), Side("2 replicas, 1 thread each")
    with ServerProcess(model, *BOTH) as one, ServerProcess(model, *REPLICAS) as two:
        Fleet(model, two.server, two.process.pid).wait_for()
        for turn in range(turns + 1):  # the first one warms up
            for side, started in ((alone, one), (replicas, two)):
                begun, used = time.monotonic(), cpu_seconds(started.process.pid)
                answers = asyncio.run(ask_all(started.server, clients, tokens))
                count = sum(answer.completion_tokens for answer in answers)
                if turn:
                    side.tokens_per_second.append(count / (time.monotonic() - begun))
                    side.tokens_per_cpu_second.append(count / (cpu_seconds(started.process.pid) - used))
    return alone, replicas


@dataclass(frozen=True)
class SharedPrefixes:
    """Requests whose prompts share prefixes, sent by clients that each wait for their answers."""

    prefixes: int = 12
    prefix_tokens: int = 192
    requests: int = 120
    clients: int = 4
    seed: int = 0

    def prompts(self) -> list[list[int]]:
        """Token ids, in the order of sending."""
        chance = np.random.default_rng(self.seed)
        shared = chance.integers(1000, 20_000, (self.prefixes, self.prefix_tokens)).tolist()
        chosen = chance.integers(self.prefixes, size=self.requests)
        own = chance.integers(1000, 20_000, (self.requests, 24)).tolist()
        return [shared[prefix] + tail for prefix, tail in zip(chosen, own, strict=True)]


def measure_hits(model: str, trace: SharedPrefixes) -> dict[str, float]:
    """The share of prompt tokens found in prefix caches, by server."""
    with ServerProcess(model, *ALONE) as one:
        hits = {"one process": _hit_rate([one.server], trace)}
    with ServerProcess(model, *REPLICAS) as two:
        Fleet(model, two.server, two.process.pid).wait_for()
        hits["2 replicas"] = _hit_rate([two.server], trace)
    with ServerProcess(model, *ALONE) as one, ServerProcess(model, *ALONE) as other:
        hits["2 processes, chosen at random"] = _hit_rate([one.server, other.server], trace)
    return hits


def _hit_rate(servers: Sequence[Server], trace: SharedPrefixes) -> float:
    chance = random.Random(trace.seed)
    waiting = iter(trace.prompts())
    cached = total = 0

    async def client() -> None:
        nonlocal cached, total
        for prompt in waiting:
            usage = await _usage(chance.choice(servers), prompt)
            cached += usage["prompt_tokens_details"]["cached_tokens"]
            total += usage["prompt_tokens"]

    async def all_clients() -> None:
        await asyncio.gather(*[client() for _ in range(trace.clients)])

    asyncio.run(all_clients())
    return cached / total


async def _usage(server: Server, prompt: list[int]) -> dict[str, Any]:
    options = {"max_tokens": 2, "ignore_eos": True, "stream": True, "temperature": 0}
    request = {"prompt": prompt, "stream_options": {"include_usage": True}, **options}
    answer = await post(server, "/v1/completions", request)
    if not answer.complete:
        raise PacelineError(f"a request failed with status {answer.status}: {answer.error}")
    usage: dict[str, Any] = [chunk["usage"] for _, chunk in answer.chunks if chunk.get("usage")][-1]
    return {"prompt_tokens_details": {"cached_tokens": 0}, **usage}


def milliseconds(values: Sequence[float], share: float) -> float:
    """A percentile."""
    return 1e3 * float(np.percentile(values, 100 * share))
