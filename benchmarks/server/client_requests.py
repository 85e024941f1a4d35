"""What load.py and soak.py share: requests of which some are cut or made invalid, and what must come back."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from benchmarks.server.cut_client import Cut, post_cut
from paceline.bench.servers.client import Answer, Server, get
from paceline.errors import ConfigError
from paceline.options import check_number

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"

# fields that make a request invalid, and the status that must come back
INVALID_FIELDS: tuple[tuple[dict[str, Any], int], ...] = (
    ({"temperature": "hot"}, 400),
    ({"temperature": -1}, 400),
    ({"max_tokens": -5}, 400),
    ({"no_such_field": 1}, 400),
    ({"n": 100_000}, 400),
    ({"logit_bias": {"-1": 5}}, 400),
    ({"model": "no-such-model"}, 404),
)


@dataclass(frozen=True, kw_only=True)
class DisruptionOptions:
    """How many requests are disrupted."""

    cut: float = 0.2  # fraction of requests whose client disconnects at a random point
    bad: float = 0.1  # fraction of requests that are invalid
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("cut", "bad"):
            check_number(ConfigError, f"--{name}", getattr(self, name), 0, 1)
        if self.cut + self.bad >= 1:
            raise ConfigError(
                f"--cut {self.cut:g} and --bad {self.bad:g} leave no request to judge. Use less."
            )


@dataclass(frozen=True)
class ClientRequest:
    """One request of a run."""

    path: str
    body: dict[str, Any]
    number: int  # which of the distinct requests it is
    cut: Cut | None = None
    refusal: int | None = None  # the status it must get, if it is invalid

    def disrupted(self, options: DisruptionOptions, rng: random.Random, max_reads: int) -> ClientRequest:
        """The request as it is, cut after at most `max_reads` reads, or made invalid."""
        lot = rng.random()
        if lot < options.cut:
            return replace(self, cut=Cut(rng.randint(-1, max_reads), reset=rng.random() < 0.5))
        if lot < options.cut + options.bad and self.path in (CHAT, COMPLETIONS):
            fields, status = rng.choice(INVALID_FIELDS)
            return replace(self, body={**self.body, **fields}, refusal=status)
        return self

    def allows(self, answer: Answer | None) -> bool:
        """Whether a disrupted request may get this answer: if it is invalid, only its refusal."""
        if self.cut is not None:
            return answer is None or answer.status in (0, 200)
        return (
            answer is not None and answer.status == self.refusal and bool((answer.error or {}).get("message"))
        )


@dataclass(kw_only=True)
class Outcomes:
    """Counts of what can go wrong."""

    lost: int = 0  # undisrupted requests without a complete answer
    wrong: int = 0  # undisrupted requests with other bytes than alone
    misjudged: int = 0  # disrupted requests with a status that they must not get
    turned_away: int = 0  # by a full queue, and sent again
    statuses: Counter[int] = field(default_factory=Counter)  # 0: disconnected before there was one

    @property
    def has_failures(self) -> bool:
        return bool(self.lost or self.wrong or self.misjudged)


async def post_until_accepted(
    server: Server, request: ClientRequest, on_turned_away: Callable[[], None], max_tries: int | None = None
) -> Answer:
    """The answer to a request, which is sent again while the server's queue is full (status 429)."""
    for attempt in itertools.count(1):
        answer = await post_cut(server, request.path, request.body, request.cut)
        if answer.status != 429:
            break
        on_turned_away()
        await asyncio.sleep(float(answer.headers.get("retry-after", 1)))
        if attempt == max_tries:
            break
    return answer


async def model_name(server: Server) -> str:
    """The server's first model."""
    answer = await get(server, "/v1/models")
    if answer.status != 200:
        message = (answer.error or {}).get("message", "it has no /v1/models")
        raise ConfigError(f"the server answers with {answer.status}: {message}")
    return str(json.loads(answer.body)["data"][0]["id"])
