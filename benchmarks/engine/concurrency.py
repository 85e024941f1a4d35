"""Throughput of concurrent requests, and proof that each gets the tokens it gets alone."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from benchmarks.turns import take_turns
from paceline.bench.timing import OnTurn, Timing
from paceline.core.params import SamplingParams
from paceline.core.request import Request
from paceline.engine.engine import Engine
from paceline.errors import ConfigError
from paceline.options import check_integer

DEFAULT_COUNTS = (1, 4, 16)
PROMPT_TOKENS = 16


@dataclass(frozen=True)
class Concurrency:
    """Times of n concurrent requests, by n, and the requests whose output depended on the others."""

    tokens: int  # per output
    timings: dict[int, Timing]
    differing: dict[int, list[int]]  # by n: requests whose tokens differ from those they get alone

    @property
    def identical(self) -> bool:
        """Whether every request got, in every run, exactly what it gets alone."""
        return not any(self.differing.values())

    def facts(self) -> list[dict[str, object]]:
        """One entry per number of requests, for JSON; ratios are relative to one request."""
        single = self.timings[1]
        return [
            {
                "concurrency": count,
                "tokens_per_second": count * self.tokens / timing.best,
                "median_tokens_per_second": count * self.tokens / timing.median,
                "ratio": count * single.best / timing.best,
                "median_ratio": count * single.median / timing.median,
                "identical_to_alone": not self.differing[count],
                "differing_requests": self.differing[count],
            }
            for count, timing in self.timings.items()
        ]


def measure_concurrency(
    engine: Engine,
    token_ids: Sequence[int],
    counts: Sequence[int] = DEFAULT_COUNTS,
    tokens: int = 64,
    rounds: int = 3,
    on_turn: OnTurn = lambda _: None,
) -> Concurrency:
    """Times from the first prompt's arrival to the last token, for each n and always for 1, in turns.

    Prompts are different pieces of `token_ids`; decoding is greedy. Each request first runs alone: that is
    the warm-up, and gives the expected outputs.
    """
    for count in counts:
        check_integer(ConfigError, "a concurrency", count, 1, engine.limits.max_num_seqs)
    check_integer(ConfigError, "tokens", tokens, 1, None)
    check_integer(ConfigError, "rounds", rounds, 1, None)
    distinct = sorted({1, *counts})
    prompts = short_prompts(token_ids, distinct[-1])
    alone = []
    for number, prompt in enumerate(prompts):
        alone += _run(engine, [prompt], tokens)[1]
        on_turn(f"request {number + 1} alone")
    jobs = {count: partial(_run, engine, prompts[:count], tokens) for count in distinct}
    take_turns(jobs, 1)
    runs = take_turns(jobs, rounds, lambda done: on_turn(f"requests at once: {done}"))
    return Concurrency(
        tokens=tokens,
        timings={
            count: Timing(tuple(seconds for seconds, _ in repetitions)) for count, repetitions in runs.items()
        },
        differing={
            count: [
                index
                for index in range(count)
                if any(outputs[index] != alone[index] for _, outputs in repetitions)
            ]
            for count, repetitions in runs.items()
        },
    )


def short_prompts(token_ids: Sequence[int], count: int) -> list[list[int]]:
    """`count` different pieces of the text, evenly spaced."""
    stride = (len(token_ids) - PROMPT_TOKENS) // count
    if stride < 1:
        raise ConfigError(
            f"a text of {len(token_ids)} tokens has no {count} different prompts; ask for fewer."
        )
    return [list(token_ids[start : start + PROMPT_TOKENS]) for start in range(0, stride * count, stride)]


def run_requests(
    engine: Engine, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]
) -> tuple[float, list[Request]]:
    """Seconds from the arrival of all prompts at once to the last token, and the finished requests."""
    start = time.perf_counter()
    pairs = zip(prompts, params, strict=True)
    requests = [engine.add_request(prompt, options)[0] for prompt, options in pairs]
    while engine.has_unfinished:
        engine.step()
    seconds = time.perf_counter() - start
    for request in requests:
        if request.error is not None:
            raise request.error
    return seconds, requests


def _run(engine: Engine, prompts: Sequence[Sequence[int]], tokens: int) -> tuple[float, list[list[int]]]:
    """Total seconds of the prompts, and each one's output."""
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    seconds, requests = run_requests(engine, prompts, [params] * len(prompts))
    return seconds, [request.output_token_ids for request in requests]
