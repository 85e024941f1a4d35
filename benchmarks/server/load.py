"""Many streaming clients at once, some of whom leave or talk nonsense: is every other answer right?

Each request is first sent alone; that answer is the truth. Then all clients come at once, for several
rounds. What a server must show: every request that stays gets the bytes it gets alone, nonsense gets a
4xx, and afterwards nothing runs, waits or holds pages.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.server.gauges import Gauges, idle_gauges
from paceline.bench.servers.client import Answer, Cut, Server, get, post
from paceline.bench.timing import OnTurn
from paceline.bench.traffic.workloads import Prompt
from paceline.errors import ConfigError
from paceline.options import check_integer, check_number

SAMPLED = {"temperature": 0.8, "top_p": 0.95}  # every second request; the others are greedy
MAX_TRIES = 100  # of a request that a full queue turns away

# what is sent instead of a request, and the status that must come back
NONSENSE: tuple[tuple[dict[str, Any], int], ...] = (
    ({"temperature": "hot"}, 400),
    ({"temperature": -1}, 400),
    ({"max_tokens": -5}, 400),
    ({"no_such_field": 1}, 400),
    ({"n": 100_000}, 400),
    ({"logit_bias": {"-1": 5}}, 400),
    ({"model": "no-such-model"}, 404),
)


@dataclass(frozen=True)
class LoadOptions:
    """What a load run does."""

    clients: int = 200  # at once
    requests: int = 400  # of a round, all clients together
    rounds: int = 2
    cut: float = 0.2  # share of requests whose client leaves at a random point
    bad: float = 0.1  # share of requests that are nonsense
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("clients", "requests", "rounds"):
            check_integer(ConfigError, f"--{name}", getattr(self, name), 1, 100_000)
        for name in ("cut", "bad"):
            check_number(ConfigError, f"--{name}", getattr(self, name), 0, 1)
        if self.cut + self.bad >= 1:
            raise ConfigError(
                f"--cut {self.cut:g} and --bad {self.bad:g} leave no request to judge. Use less."
            )


@dataclass(frozen=True)
class Asked:
    """One request of a run."""

    path: str
    body: dict[str, Any]
    truth: int  # which of the distinct requests it is
    cut: Cut | None = None
    refusal: int | None = None  # the status it must get, if it is nonsense


@dataclass
class Round:
    """What became of the requests of one round."""

    seconds: float
    kept: list[Answer] = field(default_factory=list)  # answers to those that stayed
    lost: int = 0  # stayed, and got no complete answer
    wrong: int = 0  # stayed, and got other bytes than alone
    misjudged: int = 0  # nonsense that was not refused as it must be, or an error of the server's own
    turned_away: int = 0  # by a full queue, and sent again
    statuses: Counter[int] = field(default_factory=Counter)  # 0: left before there was one
    gauges: Gauges | None = None  # of the server, after the round

    @property
    def good(self) -> bool:
        """Whether nothing is wrong, and nothing is left behind."""
        idle = self.gauges is None or self.gauges.idle
        return idle and not (self.lost or self.wrong or self.misjudged)


@dataclass(frozen=True)
class Load:
    """A whole run."""

    model: str
    options: LoadOptions
    before: Gauges | None  # after the requests alone
    rounds: tuple[Round, ...]

    @property
    def good(self) -> bool:
        return all(one.good for one in self.rounds)


def plain_requests(prompts: Iterable[Prompt], model: str) -> list[Asked]:
    """The distinct requests of a workload: greedy and sampled in turns, streamed, each with its seed."""
    asked = []
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
            asked.append(Asked("/v1/completions", {**body, "prompt": prompt.text}, index))
        else:
            asked.append(Asked("/v1/chat/completions", {**body, "messages": list(prompt.messages)}, index))
    return asked


def mixed_requests(plain: Sequence[Asked], options: LoadOptions, number: int) -> list[Asked]:
    """The requests of round `number`: the distinct ones over and over, some cut, some made nonsense."""
    rng = random.Random(f"{options.seed}/{number}")
    mixed = []
    for index in range(options.requests):
        one = plain[index % len(plain)]
        lot = rng.random()
        if lot < options.cut:
            cut = Cut(rng.randint(-1, one.body["max_tokens"]), reset=rng.random() < 0.5)
            mixed.append(Asked(one.path, one.body, one.truth, cut=cut))
        elif lot < options.cut + options.bad:
            fields, status = rng.choice(NONSENSE)
            mixed.append(Asked(one.path, {**one.body, **fields}, one.truth, refusal=status))
        else:
            mixed.append(one)
    return mixed


async def run_load(
    server: Server, prompts: Sequence[Prompt], options: LoadOptions, on_turn: OnTurn = lambda _: None
) -> Load:
    """Every distinct request alone, then rounds of all clients at once."""
    model = await model_name(server)
    plain = plain_requests(prompts, model)
    truths = []
    for one in plain:
        truths.append(await post(server, one.path, one.body))
        on_turn("alone")
        if not truths[-1].complete:
            error = truths[-1].error or {"message": f"status {truths[-1].status}, {truths[-1].body[-200:]!r}"}
            raise ConfigError(
                f"a request of the workload fails even alone: {error['message']} Use other prompts, or a "
                "server with more room."
            )
    before = await idle_gauges(server)
    rounds = []
    for number in range(options.rounds):
        mixed = mixed_requests(plain, options, number)
        rounds.append(await _round(server, mixed, truths, options.clients, on_turn))
        rounds[-1].gauges = await idle_gauges(server)
    return Load(model, options, before, tuple(rounds))


async def model_name(server: Server) -> str:
    """The first model that the server has."""
    answer = await get(server, "/v1/models")
    if answer.status != 200:
        message = (answer.error or {}).get("message", "it has no /v1/models")
        raise ConfigError(f"the server answers with {answer.status}: {message}")
    return str(json.loads(answer.body)["data"][0]["id"])


async def _round(
    server: Server, asked: Sequence[Asked], truths: Sequence[Answer], clients: int, on_turn: OnTurn
) -> Round:
    """Send all requests, `clients` at a time, and judge what comes."""
    waiting = iter(asked)
    result = Round(0.0)
    answers: list[tuple[Asked, Answer]] = []

    async def client() -> None:
        for one in waiting:
            answers.append((one, await _persist(server, one, result)))
            on_turn("at once")

    loop = asyncio.get_running_loop()
    began = loop.time()
    await asyncio.gather(*(client() for _ in range(clients)))
    result.seconds = loop.time() - began
    for one, answer in answers:
        _judge(one, answer, truths[one.truth], result)
    return result


async def _persist(server: Server, one: Asked, result: Round) -> Answer:
    """The answer to a request, which is sent again when the server's queue is full."""
    for _ in range(MAX_TRIES):
        answer = await post(server, one.path, one.body, one.cut)
        if answer.status != 429:
            break
        result.turned_away += 1
        await asyncio.sleep(float(answer.headers.get("retry-after", 1)))
    return answer


def _judge(one: Asked, answer: Answer, truth: Answer, result: Round) -> None:
    """Count an answer where it belongs."""
    result.statuses[answer.status] += 1
    if one.refusal is not None:
        told = bool((answer.error or {}).get("message"))
        result.misjudged += not (answer.status == one.refusal and told)
    elif one.cut is not None:
        result.misjudged += answer.status not in (0, 200)
    elif not answer.complete:
        result.lost += 1
    else:
        result.kept.append(answer)
        same = (answer.text, answer.finish_reason) == (truth.text, truth.finish_reason)
        result.wrong += not (same and answer.completion_tokens == truth.completion_tokens)
