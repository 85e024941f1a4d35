"""Soak: many clients for a long time. Is the last answer as right as the first, and does anything grow?

Each distinct request is first sent alone; that answer is the expected one. Then every client sends one
request after another until the time is over: of every kind, some cut by their client, some invalid.
Meanwhile the server's memory, open files and threads are sampled.
"""

from __future__ import annotations

import asyncio
import random
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from benchmarks.server.client_requests import (
    ClientRequest,
    DisruptionOptions,
    Outcomes,
    model_name,
    post_until_accepted,
)
from benchmarks.server.cut_client import first_text_seconds, gaps
from benchmarks.server.gauges import Gauges, Sample, idle_gauges, sample_server
from benchmarks.server.soak_traffic import comparable, endless_requests, mixed_traffic
from paceline.bench.servers.client import Answer, ClientError, Server, post
from paceline.bench.timing import OnTurn
from paceline.bench.traffic.workloads import Prompt
from paceline.errors import ConfigError
from paceline.options import check_integer

PARTS = 5  # of the time, each reported separately
SAMPLES = 60  # of the server's state, spread over the time
MIN_PAUSE = 0.5  # seconds between two samples
AFTER_A_LOSS = 1.0  # seconds before a client continues
MAX_READS = 20  # after which a client disconnects, if it does
SPARE_FILES = 8  # more open files than at the start are allowed: connections that are being closed
_DURATION = re.compile(r"(\d+(?:\.\d+)?)([smh]?)")
_SECONDS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}


def seconds_of(duration: str) -> float:
    """The seconds of a duration such as 90, 90s, 30m or 1.5h."""
    match = _DURATION.fullmatch(duration.strip())
    if match is None or not 1 <= float(match[1]) * _SECONDS[match[2]] <= 1e6:
        raise ConfigError(f"--duration must be like 90s, 30m or 2h, and at least 1s; got {duration!r}.")
    return float(match[1]) * _SECONDS[match[2]]


@dataclass(frozen=True)
class SoakOptions(DisruptionOptions):
    """The options of a soak."""

    seconds: float
    clients: int = 50

    def __post_init__(self) -> None:
        check_integer(ConfigError, "--clients", self.clients, 1, 10_000)
        super().__post_init__()


@dataclass
class Part:
    """Right answers in one part of the time."""

    answers: int = 0
    tokens: int = 0
    first_texts: list[float] = field(default_factory=list)  # seconds, of streams
    gaps: list[float] = field(default_factory=list)  # seconds, of streams


@dataclass
class Soak(Outcomes):
    """The result of a soak."""

    model: str
    options: SoakOptions
    left_out: dict[str, str]  # kinds of requests that this server refuses: why
    distinct: int  # requests
    parts: list[Part] = field(default_factory=lambda: [Part() for _ in range(PARTS)])
    kinds: Counter[str] = field(default_factory=Counter)  # right answers, by kind of request
    requests: int = 0
    cut: int = 0
    refused: int = 0  # invalid requests that got their 4xx
    examples: list[str] = field(default_factory=list)  # of failures, the first few
    samples: list[Sample] = field(default_factory=list)
    before: Gauges | None = None
    after: Gauges | None = None

    @property
    def good(self) -> bool:
        """Whether every answer was right, and nothing is left in the server."""
        idle = self.after is None or self.after.idle
        return idle and not (self.has_failures or self.leaked_files)

    @property
    def leaked_files(self) -> int:
        """Open files at the end, with no client connected, beyond those at the start."""
        files = [sample.files for sample in self.samples if sample.files is not None]
        more = int(files[-1] - files[0]) if len(files) > 1 else 0
        return more if more > SPARE_FILES else 0

    def note(self, failure: str) -> None:
        if len(self.examples) < 10:
            self.examples.append(failure)


async def run_soak(
    servers: Sequence[Server],
    prompts: Sequence[Prompt],
    options: SoakOptions,
    process_id: int | None = None,
    on_turn: OnTurn = lambda _: None,
) -> Soak:
    """Send every distinct request alone, then let all clients send until the time is over.

    `servers` is one server with several API keys, which clients use in turn. `process_id` is set if the
    server runs on this machine.
    """
    model = await model_name(servers[0])
    requests, expected, left_out = await _alone(servers[0], mixed_traffic(prompts, model))
    soak = Soak(model, options, left_out, len(requests))
    soak.before = await idle_gauges(servers[0])
    loop = asyncio.get_running_loop()
    began = loop.time()
    soak.samples.append(await sample_server(servers[0], process_id, 0.0))

    async def watch() -> None:
        while True:
            await asyncio.sleep(max(MIN_PAUSE, options.seconds / SAMPLES))
            soak.samples.append(await sample_server(servers[0], process_id, loop.time() - began))
            on_turn(f"{soak.requests} requests")

    async def client(number: int) -> None:
        server = servers[number % len(servers)]
        for kind, request in _client_requests(requests, options, number):
            if loop.time() - began >= options.seconds:
                return
            answer = await _send(server, request, soak)
            part = soak.parts[min(PARTS - 1, int((loop.time() - began) / options.seconds * PARTS))]
            _judge(kind, request, answer, expected, soak, part)

    watching = asyncio.create_task(watch())
    try:
        await asyncio.gather(*(client(number) for number in range(options.clients)))
    finally:
        watching.cancel()
    soak.after = await idle_gauges(servers[0])
    soak.samples.append(await sample_server(servers[0], process_id, loop.time() - began))
    return soak


async def _alone(
    server: Server, traffic: Sequence[tuple[str, ClientRequest]]
) -> tuple[list[tuple[str, ClientRequest]], dict[int, str], dict[str, str]]:
    """The requests that this server accepts, the expected answer of each, and why kinds are left out."""
    requests, expected, left_out = [], {}, {}
    for kind, request in traffic:
        if kind in left_out:
            continue
        answer = await post(server, request.path, request.body)
        content = comparable(request, answer)
        if content is None:
            left_out[kind] = str((answer.error or {}).get("message", f"status {answer.status}"))[:200]
        else:
            requests.append((kind, request))
            expected[request.number] = content
    if not requests:
        raise ConfigError(f"the server serves none of these requests: {next(iter(left_out.values()))}")
    return requests, expected, left_out


def _client_requests(
    requests: Sequence[tuple[str, ClientRequest]], options: SoakOptions, client: int
) -> Iterator[tuple[str, ClientRequest]]:
    """The endless requests of one client, with their kinds: some cut, some made invalid."""
    rng = random.Random(f"{options.seed}/{client}")
    kinds = {request.number: kind for kind, request in requests}
    for request in endless_requests([request for _, request in requests], rng.randrange):
        yield kinds[request.number], request.disrupted(options, rng, MAX_READS)


async def _send(server: Server, request: ClientRequest, soak: Soak) -> Answer | None:
    """The answer to a request, sent again while the queue is full; None if the connection failed."""

    def on_turned_away() -> None:
        soak.requests += 1
        soak.statuses[429] += 1
        soak.turned_away += 1

    try:
        answer = await post_until_accepted(server, request, on_turned_away)
    except ClientError as error:
        soak.requests += 1
        soak.note(str(error))
        await asyncio.sleep(AFTER_A_LOSS)
        return None
    soak.requests += 1
    soak.statuses[answer.status] += 1
    return answer


def _judge(
    kind: str,
    request: ClientRequest,
    answer: Answer | None,
    expected: dict[int, str],
    soak: Soak,
    part: Part,
) -> None:
    """Count an answer in the outcomes."""
    if request.cut is not None or request.refusal is not None:
        _judge_disrupted(kind, request, answer, soak)
        return
    content = None if answer is None else comparable(request, answer)
    if answer is None or content is None:
        soak.lost += 1
        soak.note(f"{kind}: status {answer and answer.status}, {(answer.body[-200:] if answer else b'')!r}")
        return
    if content != expected[request.number]:
        soak.wrong += 1
        soak.note(f"{kind}: {_first_difference(content, expected[request.number])}")
        return
    soak.kinds[kind] += 1
    part.answers += 1
    if request.body.get("stream") and answer.chunks and "choices" in answer.chunks[0][1]:
        part.tokens += answer.completion_tokens
        part.gaps += gaps(answer)
        first = first_text_seconds(answer)
        if first is not None:
            part.first_texts.append(first)


def _judge_disrupted(kind: str, request: ClientRequest, answer: Answer | None, soak: Soak) -> None:
    allowed = request.allows(answer)
    soak.misjudged += not allowed
    status = answer and answer.status
    if request.cut is not None:
        soak.cut += 1
        if not allowed:
            soak.note(f"{kind}, cut: status {status}")
    else:
        soak.refused += allowed
        if not allowed:
            soak.note(f"{kind}: nonsense got {status} instead of {request.refusal}")


def _first_difference(content: str, expected: str) -> str:
    pairs = enumerate(zip(content, expected, strict=False))
    first = next((index for index, (left, right) in pairs if left != right), 0)
    around = slice(max(0, first - 40), first + 40)
    return f"{content[around]!r} instead of {expected[around]!r}"
