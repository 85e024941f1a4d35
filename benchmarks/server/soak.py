"""Many clients for a long time: is the last answer as right as the first, and does anything grow?

Each distinct request is first sent alone; what comes is the truth for it. Then every client sends one
request after the other until the time is over: of every kind, some cut by their client, some nonsense.
Meanwhile the server's memory, files and threads are looked at again and again.
"""

from __future__ import annotations

import asyncio
import random
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.server.gauges import Gauges, idle_gauges, read_metrics
from benchmarks.server.load import NONSENSE, Asked, model_name
from benchmarks.server.soak_traffic import CHAT, COMPLETIONS, essence, in_turns, mixed_traffic
from paceline.bench.servers.client import Answer, ClientError, Cut, Server, post
from paceline.bench.timing import OnTurn
from paceline.bench.traffic.workloads import Prompt
from paceline.errors import ConfigError
from paceline.options import check_integer, check_number

PARTS = 5  # of the time, each told by itself
SAMPLES = 60  # of the server, spread over the time
MIN_PAUSE = 0.5  # seconds between two of them
AFTER_A_LOSS = 1.0  # seconds before a client tries again
SPARE_FILES = 8  # that may be open at the end beyond those at the begin: a connection that is being closed
_DURATION = re.compile(r"(\d+(?:\.\d+)?)([smh]?)")
_SECONDS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}


def seconds_of(duration: str) -> float:
    """The seconds of a duration such as 90, 90s, 30m or 1.5h."""
    found = _DURATION.fullmatch(duration.strip())
    if found is None or not 1 <= float(found[1]) * _SECONDS[found[2]] <= 1e6:
        raise ConfigError(f"--duration must be like 90s, 30m or 2h, and at least 1s; got {duration!r}.")
    return float(found[1]) * _SECONDS[found[2]]


@dataclass(frozen=True)
class SoakOptions:
    """What a soak does."""

    seconds: float
    clients: int = 50
    cut: float = 0.2  # share of requests whose client leaves at a random point
    bad: float = 0.1  # share of requests that are nonsense
    seed: int = 0

    def __post_init__(self) -> None:
        check_integer(ConfigError, "--clients", self.clients, 1, 10_000)
        for name in ("cut", "bad"):
            check_number(ConfigError, f"--{name}", getattr(self, name), 0, 1)
        if self.cut + self.bad >= 1:
            raise ConfigError(
                f"--cut {self.cut:g} and --bad {self.bad:g} leave no request to judge. Use less."
            )


@dataclass(frozen=True)
class Sample:
    """The server at one moment. None: it does not tell."""

    second: float
    memory_bytes: float | None
    files: float | None  # that are open
    threads: float | None
    running: float | None
    waiting: float | None
    kv_usage: float | None  # share of the pages that requests hold


@dataclass
class Part:
    """What became of the requests that ended in one part of the time."""

    answers: int = 0  # that stayed, and were complete and right
    tokens: int = 0
    first_texts: list[float] = field(default_factory=list)  # seconds, of streams
    gaps: list[float] = field(default_factory=list)  # seconds, of streams


@dataclass
class Soak:
    """A whole run."""

    model: str
    options: SoakOptions
    left_out: dict[str, str]  # kinds that this server refuses: why
    distinct: int  # requests
    parts: list[Part] = field(default_factory=lambda: [Part() for _ in range(PARTS)])
    kinds: Counter[str] = field(default_factory=Counter)  # answers, by kind of request
    statuses: Counter[int] = field(default_factory=Counter)  # 0: left before there was one
    requests: int = 0
    cut: int = 0
    refused: int = 0  # nonsense that got its 4xx
    turned_away: int = 0  # by a full queue, and sent again
    lost: int = 0  # stayed, and got no complete answer
    wrong: int = 0  # stayed, and got other bytes than alone
    misjudged: int = 0  # bad requests that were not refused, or a status that no request should get
    examples: list[str] = field(default_factory=list)  # of what went wrong, the first few
    samples: list[Sample] = field(default_factory=list)
    before: Gauges | None = None
    after: Gauges | None = None

    @property
    def good(self) -> bool:
        """Whether every answer was right, and nothing is left behind."""
        idle = self.after is None or self.after.idle
        return idle and not (self.lost or self.wrong or self.misjudged or self.leaked_files)

    @property
    def leaked_files(self) -> int:
        """Open files at the end, with no client connected, minus those at the beginning."""
        known = [sample.files for sample in self.samples if sample.files is not None]
        more = int(known[-1] - known[0]) if len(known) > 1 else 0
        return more if more > SPARE_FILES else 0

    def note(self, what: str) -> None:
        if len(self.examples) < 10:
            self.examples.append(what)


def memory_slope(samples: Sequence[Sample]) -> float | None:
    """Bytes an hour by which memory grows in the second half of the samples; in the first, caches fill."""
    known = [(one.second, one.memory_bytes) for one in samples if one.memory_bytes is not None]
    late = known[len(known) // 2 :]
    if len(late) < 3:
        return None
    seconds, sizes = np.array(late).T
    return float(np.polyfit(seconds, sizes, 1)[0] * 3600)


async def run_soak(
    servers: Sequence[Server],
    prompts: Sequence[Prompt],
    options: SoakOptions,
    process_id: int | None = None,
    on_turn: OnTurn = lambda _: None,
) -> Soak:
    """Every distinct request alone, then all clients until the time is over.

    `servers` are one server with several keys, which clients have in turns. `process_id` is that of a
    server on this machine.
    """
    model = await model_name(servers[0])
    asked, truths, left_out = await _alone(servers[0], mixed_traffic(prompts, model))
    soak = Soak(model, options, left_out, len(asked))
    soak.before = await idle_gauges(servers[0])
    loop = asyncio.get_running_loop()
    began = loop.time()
    soak.samples.append(await _sample(servers[0], process_id, 0.0))

    async def watch() -> None:
        while True:
            await asyncio.sleep(max(MIN_PAUSE, options.seconds / SAMPLES))
            soak.samples.append(await _sample(servers[0], process_id, loop.time() - began))
            on_turn(f"{soak.requests} requests")

    async def client(number: int) -> None:
        server = servers[number % len(servers)]
        for kind, one in _requests(asked, options, number):
            if loop.time() - began >= options.seconds:
                return
            answer = await _persist(server, one, soak)
            part = soak.parts[min(PARTS - 1, int((loop.time() - began) / options.seconds * PARTS))]
            _judge(kind, one, answer, truths, soak, part)

    watching = asyncio.create_task(watch())
    try:
        await asyncio.gather(*(client(number) for number in range(options.clients)))
    finally:
        watching.cancel()
    soak.after = await idle_gauges(servers[0])
    soak.samples.append(await _sample(servers[0], process_id, loop.time() - began))
    return soak


async def _alone(
    server: Server, traffic: Sequence[tuple[str, Asked]]
) -> tuple[list[tuple[str, Asked]], dict[int, str], dict[str, str]]:
    """The requests that this server serves, the truth for each, and why kinds are left out."""
    asked, truths, left_out = [], {}, {}
    for kind, one in traffic:
        if kind in left_out:
            continue
        answer = await post(server, one.path, one.body)
        truth = essence(one, answer)
        if truth is None:
            left_out[kind] = str((answer.error or {}).get("message", f"status {answer.status}"))[:200]
        else:
            asked.append((kind, one))
            truths[one.truth] = truth
    if not asked:
        raise ConfigError(f"the server serves none of these requests: {next(iter(left_out.values()))}")
    return asked, truths, left_out


def _requests(
    asked: Sequence[tuple[str, Asked]], options: SoakOptions, client: int
) -> Iterator[tuple[str, Asked]]:
    """The requests of one client, without an end: some cut, some made nonsense."""
    rng = random.Random(f"{options.seed}/{client}")
    kinds = {one.truth: kind for kind, one in asked}
    for one in in_turns([one for _, one in asked], rng.randrange):
        kind, lot = kinds[one.truth], rng.random()
        if lot < options.cut:
            yield kind, replace(one, cut=Cut(rng.randint(-1, 20), reset=rng.random() < 0.5))
        elif lot < options.cut + options.bad and one.path in (CHAT, COMPLETIONS):
            fields, status = rng.choice(NONSENSE)
            yield kind, replace(one, body={**one.body, **fields}, refusal=status)
        else:
            yield kind, one


async def _persist(server: Server, one: Asked, soak: Soak) -> Answer | None:
    """The answer to a request, sent again while the queue is full; None if there is none."""
    while True:
        soak.requests += 1
        try:
            answer = await post(server, one.path, one.body, one.cut)
        except ClientError as error:
            soak.note(str(error))
            await asyncio.sleep(AFTER_A_LOSS)
            return None
        soak.statuses[answer.status] += 1
        if answer.status != 429:
            return answer
        soak.turned_away += 1
        await asyncio.sleep(float(answer.headers.get("retry-after", 1)))


def _judge(
    kind: str, one: Asked, answer: Answer | None, truths: dict[int, str], soak: Soak, part: Part
) -> None:
    """Count an answer where it belongs."""
    if one.cut is not None:
        soak.cut += 1
        if answer is not None and answer.status not in (0, 200):
            soak.misjudged += 1
            soak.note(f"{kind}, cut: status {answer.status}")
        return
    if one.refusal is not None:
        right = answer is not None and answer.status == one.refusal and (answer.error or {}).get("message")
        soak.refused += bool(right)
        soak.misjudged += not right
        if not right:
            soak.note(f"{kind}: nonsense got {answer and answer.status} instead of {one.refusal}")
        return
    found = None if answer is None else essence(one, answer)
    if answer is None or found is None:
        soak.lost += 1
        soak.note(f"{kind}: status {answer and answer.status}, {(answer.body[-200:] if answer else b'')!r}")
        return
    if found != truths[one.truth]:
        soak.wrong += 1
        soak.note(f"{kind}: {_first_difference(found, truths[one.truth])}")
        return
    soak.kinds[kind] += 1
    part.answers += 1
    if one.body.get("stream") and answer.chunks and "choices" in answer.chunks[0][1]:
        part.tokens += answer.completion_tokens
        part.gaps += answer.gaps
        if answer.first_text_seconds is not None:
            part.first_texts.append(answer.first_text_seconds)


def _first_difference(found: str, truth: str) -> str:
    place = next((at for at, pair in enumerate(zip(found, truth, strict=False)) if pair[0] != pair[1]), 0)
    around = slice(max(0, place - 40), place + 40)
    return f"{found[around]!r} instead of {truth[around]!r}"


async def _sample(server: Server, process_id: int | None, second: float) -> Sample:
    """The server now, by its metrics and, if it is on this machine, by the system."""
    try:
        told: dict[str, float] = await read_metrics(server)
    except ClientError:
        told = {}
    seen = _process(process_id)
    return Sample(
        second,
        seen.get("memory", told.get("process_resident_memory_bytes")),
        seen.get("files", told.get("process_open_fds")),
        seen.get("threads"),
        told.get("paceline:num_requests_running"),
        told.get("paceline:num_requests_waiting"),
        told.get("paceline:kv_cache_usage_perc"),
    )


def _process(process_id: int | None) -> dict[str, Any]:
    """What Linux tells of a process; nothing if there is none, or no /proc."""
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
