"""The cost of the server: n streaming clients compared with the offline engine on the same prompts.

Both engines have the same options. The offline one and the clients live in this process, the server in
its own. They run alternately; the idle one sleeps.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.server.client_requests import model_name
from benchmarks.turns import take_turns
from paceline.bench.report.result import Result, Table
from paceline.bench.servers.client import Answer, Server, post
from paceline.bench.timing import OnTurn, Timing
from paceline.core.params import SamplingParams
from paceline.engine.engine import Engine
from paceline.errors import PacelineError

PAUSE = 0.3  # seconds between turns: an engine's threads spin for a moment


class OverheadError(PacelineError):
    """The server's answers differ from the engine's."""


@dataclass(frozen=True)
class Overhead:
    """Times of the same requests, by the server and by the offline engine."""

    tokens: int  # over all answers
    server: Timing
    offline: Timing

    @property
    def best_ratio(self) -> float:
        """The server's throughput relative to the offline engine's, best of each."""
        return self.offline.best / self.server.best

    @property
    def median_ratio(self) -> float:
        return self.offline.median / self.server.median

    def facts(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "tokens": self.tokens,
            "server_tokens_per_second": self.tokens / self.server.best,
            "median_server_tokens_per_second": self.tokens / self.server.median,
            "offline_tokens_per_second": self.tokens / self.offline.best,
            "median_offline_tokens_per_second": self.tokens / self.offline.median,
            "ratio": self.best_ratio,
            "median_ratio": self.median_ratio,
            "server_seconds": self.server.seconds,
            "offline_seconds": self.offline.seconds,
        }


def overhead_result(overhead: Overhead, facts: Mapping[str, Any]) -> Result:
    """Both throughputs, and their ratio. `facts`: model, concurrency, rounds and more."""
    title = (
        f"{facts['model']}: {facts['concurrency']} requests at once, best and median of {facts['rounds']}, "
        "in turns"
    )
    figures = overhead.facts()
    rows = []
    for name, prefix in (("best", ""), ("median", "median_")):
        speeds = (figures[f"{prefix}{side}_tokens_per_second"] for side in ("server", "offline"))
        rows.append((name, *(f"{speed:,.0f}" for speed in speeds), f"{figures[prefix + 'ratio']:.3f}"))
    columns = ("tokens per second", "server", "offline engine", "server / offline")
    return Result(title, [Table(title, columns, rows)], {**facts, **figures})


def measure_overhead(
    server: Server,
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    tokens: int,
    rounds: int,
    on_turn: OnTurn = lambda _: None,
) -> Overhead:
    """Greedy answers of `tokens` tokens to all prompts concurrently, by server and engine alternately.

    Times are from the first request to the end of the last answer, prefill included.
    """
    model = asyncio.run(model_name(server))
    jobs: dict[str, Callable[[], tuple[float, list[str]]]] = {
        "server": lambda: asyncio.run(_ask(server, model, prompts, tokens)),
        "offline": lambda: _generate(engine, prompts, tokens),
    }
    take_turns(jobs, 1)  # compiles, and fills caches
    runs = take_turns(jobs, rounds, on_turn)
    texts = runs["offline"][0][1]
    if any(answers != texts for name in jobs for _, answers in runs[name]):
        raise OverheadError(
            "the server and the engine gave different texts: this is a bug, please report it."
        )
    return Overhead(
        tokens=tokens * len(prompts),
        server=Timing(tuple(seconds for seconds, _ in runs["server"])),
        offline=Timing(tuple(seconds for seconds, _ in runs["offline"])),
    )


async def _ask(
    server: Server, model: str, prompts: Sequence[Sequence[int]], tokens: int
) -> tuple[float, list[str]]:
    """Seconds until all answers are complete, and their texts."""
    await asyncio.sleep(PAUSE)
    bodies = [
        {"model": model, "prompt": list(ids), "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        | {"stream": True, "stream_options": {"include_usage": True}}
        for ids in prompts
    ]
    began = time.perf_counter()
    answers = await asyncio.gather(*(post(server, "/v1/completions", body) for body in bodies))
    seconds = time.perf_counter() - began
    return seconds, [_checked(answer, tokens) for answer in answers]


def _checked(answer: Answer, tokens: int) -> str:
    if not answer.complete or answer.completion_tokens != tokens:
        raise OverheadError(
            f"the server gave no whole answer: status {answer.status}, {answer.body[-300:]!r}."
        )
    return answer.text


def _generate(engine: Engine, prompts: Sequence[Sequence[int]], tokens: int) -> tuple[float, list[str]]:
    time.sleep(PAUSE)
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    began = time.perf_counter()
    requests = [engine.add_request(ids, params)[0] for ids in prompts]
    while engine.has_unfinished:
        engine.step()
    return time.perf_counter() - began, [request.detokenizer.text for request in requests]
