"""Replicas that are killed, stopped or replaced while clients stream: are the answers right, and how late?

The pause of an answer is its longest time without text after the fault. A lost replica's answers are computed
again, prompt and tokens, at the replica that is left, and nothing else may delay them. The measure of that is
a new request, as long as a prompt with its answer, sent when the ingress has noticed the fault: after that,
no answer may pause longer than the new request waits for its first text. New requests are sent one after the
other until all answers have ended; the slowest counts. Each round has its own cache salt, so that nothing is
found in a prefix cache.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from itertools import count, cycle, pairwise

from benchmarks.server.cut_client import first_text_seconds
from benchmarks.server.process import ServerProcess
from benchmarks.server.replicas import FAULTS, REPLICAS, Fleet, answers_alone, ask_all, body
from paceline.bench.servers.client import Answer, get, post

TOLERANCE = 0.05  # of a pause: texts of the same pass are sent one after the other
POLL_SECONDS = 0.02
PROBE_TOKENS = 4  # of the answer to a new request: the first may have no text


@dataclass(frozen=True)
class Round:
    """What one fault did."""

    fault: str
    requests: int
    failed: int
    differing: int
    resumed: int
    seconds: float
    pauses: list[float]  # seconds, of each answer that was not complete
    noticed: float  # seconds from the fault until the first answer was resumed; 0: none was
    new: list[float]  # seconds to the first text of new requests after that

    @property
    def late(self) -> bool:
        """Whether an answer paused longer than a new request would have waited."""
        return max(self.pauses, default=0.0) > (1 + TOLERANCE) * (self.noticed + max(self.new))


def measure_faults(
    model: str, faults: Sequence[str], rounds: int, clients: int, tokens: int, progress: float
) -> Iterator[Round]:
    """`rounds` rounds of each fault (a key of FAULTS), when an answer has this share of its tokens."""
    truth = answers_alone(model, clients, tokens)
    with ServerProcess(model, *REPLICAS) as running:
        fleet = Fleet(model, running.server, running.process.pid)
        fleet.wait_for()
        for number, fault in enumerate([fault for fault in faults for _ in range(rounds)]):
            before = fleet.pids()
            victim = before[number % 2]
            faulty = _FaultyFleet(fleet, clients, tokens, truth, f"round {number}")
            yield asyncio.run(faulty.round(fault, victim, progress))
            gone = {"none": [], "restart": before}.get(fault, [victim])
            fleet.wait_for(2, frozenset(gone))


@dataclass
class _FaultyFleet:
    """A fleet into which faults are injected while its clients stream."""

    fleet: Fleet
    clients: int
    tokens: int
    truth: list[str]  # the right answers
    cache_salt: str

    async def round(self, name: str, victim: int, progress: float) -> Round:
        """One fault. Clients that have their answers ask again until it is done."""
        fault, begun = FAULTS[name], time.perf_counter()
        before = (await self.fleet.state())["resumed"]
        asking = asyncio.create_task(self._ask())
        while await self._furthest() < progress * self.tokens:
            await asyncio.sleep(POLL_SECONDS)
        injected, noticed = time.perf_counter(), 0.0
        injecting = asyncio.create_task(asyncio.to_thread(fault.do, self.fleet, victim))
        again = asyncio.create_task(self._ask_until_done(asking, injecting))
        while fault.loses and not noticed and not again.done():
            if (await self.fleet.state())["resumed"] > before:
                noticed = time.perf_counter() - injected
            await asyncio.sleep(POLL_SECONDS)
        new = [answer async for answer in self._new_requests(again)]
        answers = await again
        return Round(
            name,
            len(answers),
            sum(answer.status != 200 or not answer.complete for answer in answers),
            sum(answer.text != text for answer, text in zip(answers, cycle(self.truth), strict=False)),
            (await self.fleet.state())["resumed"] - before,
            time.perf_counter() - begun,
            [pause(answer, injected) for answer in answers if answer.ended > injected],
            noticed,
            [first_text_seconds(answer) or 0.0 for answer in new],
        )

    async def _ask_until_done(
        self, asking: asyncio.Task[list[Answer]], injecting: asyncio.Task[None]
    ) -> list[Answer]:
        answers = await asking
        while not injecting.done():
            answers += await self._ask()
        await injecting
        return answers

    async def _furthest(self) -> int:
        """The most tokens that an answer has."""
        running = json.loads((await get(self.fleet.server, "/requests")).body)["requests"]
        return max((request["output_tokens"] for request in running), default=0)

    async def _ask(self) -> list[Answer]:
        return await ask_all(self.fleet.server, self.clients, self.tokens, self.cache_salt)

    async def _new_requests(self, until: asyncio.Task[list[Answer]]) -> AsyncIterator[Answer]:
        """The answers to new requests, one after the other, each as long as a prompt with its answer."""
        for number in count(self.clients):
            asked = body(number, PROBE_TOKENS, self.cache_salt)
            asked["prompt"] += self.truth[number % self.clients]
            yield await post(self.fleet.server, "/v1/completions", asked)
            if until.done():
                break


def pause(answer: Answer, injected: float) -> float:
    """The longest time without text after the fault. For an answer that was requested after it, the wait for
    its first text does not count."""
    times = [when for when, _ in answer.texts]
    if answer.sent < injected:
        times.insert(0, answer.sent)
    gaps = [after - max(before, injected) for before, after in pairwise(times) if after > injected]
    return max(gaps, default=0.0)
