"""What replicas cost and survive: kills under load, throughput beside one process, the ingress's latency."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.server.process import ServerProcess
from paceline.bench.servers.client import Answer, Server, get, post
from paceline.errors import PacelineError

START_SECONDS = 300.0
ALONE = ("--threads", "1")
REPLICAS = ("--replicas", "2", "--threads", "1")


def replicas_of(server: Server) -> dict[str, Any]:
    """The replicas that answer, and how often a request was resumed."""
    found: dict[str, Any] = json.loads(asyncio.run(get(server, "/replicas")).body)
    return found


def wait_for_two(server: Server, gone: int = 0) -> None:
    """Wait until two replicas answer, none of them the process that is gone."""
    deadline = time.monotonic() + START_SECONDS
    while True:
        pids = [replica["pid"] for replica in replicas_of(server)["replicas"]]
        if len(pids) == 2 and gone not in pids and 0 not in pids:
            return
        if time.monotonic() > deadline:
            raise PacelineError("a replica takes too long to come back. Look into the logs of Ray Serve.")
        time.sleep(0.2)


def body(number: int, tokens: int) -> dict[str, Any]:
    """The request of a client; half of them sample."""
    prompt = f"Question {number}: what should everyone know about the number {number}?\nAnswer:"
    sampling: dict[str, Any] = {"temperature": 0.8, "seed": number} if number % 2 else {"temperature": 0}
    return {
        "prompt": prompt,
        "max_tokens": tokens,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        **sampling,
    }


async def ask_all(server: Server, clients: int, tokens: int) -> list[Answer]:
    """The answers to clients that all ask at once."""
    asked = [post(server, "/v1/completions", body(number, tokens)) for number in range(clients)]
    return list(await asyncio.gather(*asked))


@dataclass(frozen=True)
class Round:
    """What killing one replica did."""

    requests: int
    failed: int
    differing: int
    resumed: int
    seconds: float


def measure_kills(model: str, rounds: int, clients: int, tokens: int, delay: float) -> Iterator[Round]:
    """kill -9 of a replica in each round, while all clients stream; their answers beside one process's."""
    with ServerProcess(model, *ALONE) as alone:
        truth = [answer.text for answer in asyncio.run(ask_all(alone.server, clients, tokens))]

    async def ask_and_kill(server: Server, victim: int) -> list[Answer]:
        asking = asyncio.create_task(ask_all(server, clients, tokens))
        await asyncio.sleep(delay)
        os.kill(victim, signal.SIGKILL)
        return await asking

    resumed = 0
    with ServerProcess(model, *REPLICAS) as running:
        wait_for_two(running.server)
        for number in range(rounds):
            victim = replicas_of(running.server)["replicas"][number % 2]["pid"]
            begun = time.monotonic()
            answers = asyncio.run(ask_and_kill(running.server, victim))
            seconds = time.monotonic() - begun
            failed = sum(answer.status != 200 or not answer.complete for answer in answers)
            differing = sum(one.text != text for one, text in zip(answers, truth, strict=True))
            before, resumed = resumed, replicas_of(running.server)["resumed"]
            yield Round(clients, failed, differing, resumed - before, seconds)
            wait_for_two(running.server, victim)


@dataclass(frozen=True)
class Side:
    """One contestant."""

    tokens_per_second: list[float]  # of each turn
    tokens_per_cpu_second: list[float]  # of the server and all processes that it started
    first_text: list[float]  # seconds, of a request alone


def measure_sides(model: str, turns: int, clients: int, tokens: int, probes: int) -> tuple[Side, Side]:
    """One process with two threads, and two replicas with one thread each, both running, in turns.

    First texts are those of one process with one thread, which computes a prompt as long as a replica does.
    """
    alone, replicas = Side([], [], []), Side([], [], [])
    with ServerProcess(model, "--threads", "2") as one, ServerProcess(model, *REPLICAS) as two:
        wait_for_two(two.server)
        for turn in range(turns + 1):  # the first one warms up
            for side, started in ((alone, one), (replicas, two)):
                begun, used = time.monotonic(), cpu_seconds(started.process.pid)
                answers = asyncio.run(ask_all(started.server, clients, tokens))
                count = sum(answer.completion_tokens for answer in answers)
                if turn:
                    side.tokens_per_second.append(count / (time.monotonic() - begun))
                    side.tokens_per_cpu_second.append(count / (cpu_seconds(started.process.pid) - used))
        with ServerProcess(model, *ALONE) as single:
            for number in range(probes):
                for side, server in ((alone, single.server), (replicas, two.server)):
                    answer = asyncio.run(post(server, "/v1/completions", body(1000 + number, 1)))
                    if answer.first_text_seconds is not None:
                        side.first_text.append(answer.first_text_seconds)
    return alone, replicas


def cpu_seconds(root: int) -> float:
    """CPU time of a process and of all that descend from it, those that have ended included."""
    ticks: dict[int, int] = {}
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with suppress(OSError):
                values = (folder / "stat").read_text().rpartition(")")[2].split()
                ticks[int(folder.name)] = sum(map(int, values[11:15]))  # utime, stime, cutime, cstime
                children.setdefault(int(values[1]), []).append(int(folder.name))
    total, waiting = 0, [root]
    while waiting:
        process = waiting.pop()
        total += ticks.get(process, 0)
        waiting += children.get(process, [])
    return total / os.sysconf("SC_CLK_TCK")


def percentile(values: Sequence[float], share: float) -> float:
    """A percentile of values, by the nearest rank."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
