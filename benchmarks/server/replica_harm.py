"""Replicas that are killed, stopped or replaced while clients stream: are the answers right, and how late?

The pause of an answer is its longest gap between two pieces of text, or before the first one, that lies after
the harm. A lost replica's requests are computed again from their prompts, at the replica that is left: the
measure of that is how long first texts take when all clients begin at once.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from benchmarks.server.process import ServerProcess
from benchmarks.server.replicas import HARMS, REPLICAS, Fleet, answers_alone, ask_all
from paceline.bench.servers.client import Answer


@dataclass(frozen=True)
class Round:
    """What one harm did."""

    harm: str
    requests: int
    failed: int
    differing: int
    resumed: int
    seconds: float
    pauses: list[float]  # seconds, of each answer that was not complete
    first_texts: list[float]  # seconds, of all answers


def measure_harm(
    model: str, harms: Sequence[str], rounds: int, clients: int, tokens: int, delay: float
) -> Iterator[Round]:
    """`rounds` rounds of each harm (a key of HARMS), `delay` seconds after all clients began to stream."""
    truth = answers_alone(model, clients, tokens)
    with ServerProcess(model, *REPLICAS) as running:
        fleet = Fleet(model, running.server, running.process.pid)
        fleet.wait_for()
        for number, harm in enumerate([harm for harm in harms for _ in range(rounds)]):
            before, resumed = fleet.pids(), fleet.replicas()["resumed"]
            victim = before[number % 2]
            begun = time.perf_counter()
            answers, harmed = asyncio.run(_ask_and_harm(fleet, harm, victim, clients, tokens, delay))
            yield Round(
                harm,
                clients,
                sum(answer.status != 200 or not answer.complete for answer in answers),
                sum(answer.text != text for answer, text in zip(answers, truth, strict=True)),
                fleet.replicas()["resumed"] - resumed,
                time.perf_counter() - begun,
                [pause(answer, harmed) for answer in answers if answer.ended > harmed],
                [answer.first_text_seconds or 0.0 for answer in answers],
            )
            gone = {"none": [], "restart": before}.get(harm, [victim])
            fleet.wait_for(2, frozenset(gone))


async def _ask_and_harm(
    fleet: Fleet, harm: str, victim: int, clients: int, tokens: int, delay: float
) -> tuple[list[Answer], float]:
    """The answers, and when the harm was done."""
    asking = asyncio.create_task(ask_all(fleet.server, clients, tokens))
    await asyncio.sleep(delay)
    harmed = time.perf_counter()
    await asyncio.to_thread(HARMS[harm], fleet, victim)
    return await asking, harmed


def pause(answer: Answer, harmed: float) -> float:
    """The longest time without text that ended after the harm."""
    times = [answer.sent, *(when for when, _ in answer.texts)]
    return max((after - before for before, after in pairwise(times) if after > harmed), default=0.0)
