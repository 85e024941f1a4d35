"""Load: many concurrent streaming clients, some of which disconnect or send invalid requests.

Each request is first sent alone; that answer is the expected one. Then all clients send concurrently, for
several rounds. The server passes if every undisrupted request gets the bytes it gets alone, every invalid
one its 4xx, and afterwards nothing runs, waits or holds pages.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.server.client_requests import (
    CHAT,
    COMPLETIONS,
    ClientRequest,
    DisruptionOptions,
    Outcomes,
    model_name,
    post_until_accepted,
)
from benchmarks.server.gauges import Gauges, idle_gauges
from paceline.bench.servers.client import Answer, Server, post
from paceline.bench.timing import OnTurn
from paceline.bench.traffic.workloads import Prompt
from paceline.errors import ConfigError
from paceline.options import check_integer

SAMPLED = {"temperature": 0.8, "top_p": 0.95}  # every second request; the others are greedy
MAX_TRIES = 100  # of a request while the queue is full


@dataclass(frozen=True)
class LoadOptions(DisruptionOptions):
    """The options of a load run."""

    clients: int = 200  # concurrent
    requests: int = 400  # per round, over all clients
    rounds: int = 2

    def __post_init__(self) -> None:
        for name in ("clients", "requests", "rounds"):
            check_integer(ConfigError, f"--{name}", getattr(self, name), 1, 100_000)
        super().__post_init__()


@dataclass
class Round(Outcomes):
    """The outcomes of one round."""

    seconds: float
    answers: list[Answer] = field(default_factory=list)  # to undisrupted requests
    gauges: Gauges | None = None  # of the server, after the round

    @property
    def good(self) -> bool:
        """Whether nothing failed, and nothing is left in the server."""
        idle = self.gauges is None or self.gauges.idle
        return idle and not self.has_failures


@dataclass(frozen=True)
class Load:
    """The result of a load run."""

    model: str
    options: LoadOptions
    before: Gauges | None  # after the requests sent alone
    rounds: tuple[Round, ...]

    @property
    def good(self) -> bool:
        return all(result.good for result in self.rounds)


def plain_requests(prompts: Iterable[Prompt], model: str) -> list[ClientRequest]:
    """The distinct requests of a workload: alternately greedy and sampled, streamed, each with its seed."""
    requests = []
    for index, prompt in enumerate(prompts):
        body: dict[str, Any] = {
            "model": model,
            "max_tokens": prompt.max_tokens,
            "seed": index,
            "stream": True,
            "stream_options": {"include_usage": True},
            **(SAMPLED if index % 2 else {"temperature": 0}),
        }
        if prompt.messages is None:
            requests.append(ClientRequest(COMPLETIONS, {**body, "prompt": prompt.text}, index))
        else:
            requests.append(ClientRequest(CHAT, {**body, "messages": list(prompt.messages)}, index))
    return requests


def mixed_requests(plain: Sequence[ClientRequest], options: LoadOptions, number: int) -> list[ClientRequest]:
    """The requests of round `number`: the distinct ones repeated, some cut, some made invalid."""
    rng = random.Random(f"{options.seed}/{number}")
    repeated = itertools.islice(itertools.cycle(plain), options.requests)
    return [request.disrupted(options, rng, max_reads=request.body["max_tokens"]) for request in repeated]


async def run_load(
    server: Server, prompts: Sequence[Prompt], options: LoadOptions, on_turn: OnTurn = lambda _: None
) -> Load:
    """Send every distinct request alone, then rounds of all clients concurrently."""
    model = await model_name(server)
    plain = plain_requests(prompts, model)
    expected = []
    for request in plain:
        answer = await post(server, request.path, request.body)
        expected.append(answer)
        on_turn("alone")
        if not answer.complete:
            error = answer.error or {"message": f"status {answer.status}, {answer.body[-200:]!r}"}
            raise ConfigError(
                f"a request of the workload fails even alone: {error['message']} Use other prompts, or a "
                "server with more room."
            )
    before = await idle_gauges(server)
    rounds = []
    for number in range(options.rounds):
        mixed = mixed_requests(plain, options, number)
        rounds.append(await _round(server, mixed, expected, options.clients, on_turn))
        rounds[-1].gauges = await idle_gauges(server)
    return Load(model, options, before, tuple(rounds))


async def _round(
    server: Server,
    requests: Sequence[ClientRequest],
    expected: Sequence[Answer],
    clients: int,
    on_turn: OnTurn,
) -> Round:
    """Send all requests, `clients` at a time, and judge the answers."""
    waiting = iter(requests)
    result = Round(0.0)
    answers: list[tuple[ClientRequest, Answer]] = []

    async def client() -> None:
        for request in waiting:
            answers.append((request, await _send(server, request, result)))
            on_turn("at once")

    loop = asyncio.get_running_loop()
    began = loop.time()
    await asyncio.gather(*(client() for _ in range(clients)))
    result.seconds = loop.time() - began
    for request, answer in answers:
        _judge(request, answer, expected[request.number], result)
    return result


async def _send(server: Server, request: ClientRequest, result: Round) -> Answer:
    """The answer to a request, which is sent again while the server's queue is full."""

    def on_turned_away() -> None:
        result.turned_away += 1

    return await post_until_accepted(server, request, on_turned_away, MAX_TRIES)


def _judge(request: ClientRequest, answer: Answer, expected: Answer, result: Round) -> None:
    """Count an answer in the outcomes."""
    result.statuses[answer.status] += 1
    if request.refusal is not None or request.cut is not None:
        result.misjudged += not request.allows(answer)
    elif not answer.complete:
        result.lost += 1
    else:
        result.answers.append(answer)
        same = (answer.text, answer.finish_reason) == (expected.text, expected.finish_reason)
        result.wrong += not (same and answer.completion_tokens == expected.completion_tokens)
