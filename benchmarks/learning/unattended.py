"""The shift on a server, unattended: traffic to `serve --learn` until it has swapped a head in by itself.

Requests come at a steady rate, each prompt once: chats, then a new domain. After the swap, prompts that were
never sent go to this server and to one without --learn, and their tokens per pass are compared.
"""

from __future__ import annotations

import asyncio
import json
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.learning.domains import Conversation, conversations, numbered_chats
from benchmarks.learning.load import FLAGS, LearningLoadError, learn_state
from benchmarks.server.client_requests import CHAT
from benchmarks.server.process import ServerProcess
from paceline.bench.servers.client import post

LOOK_SECONDS = 1.0  # between two looks at what the server does
# what is told when it changes, if it is not 0
SHOWN = (
    *("phase", "training_steps", "planned_steps", "scored_rows", "planned_rows", "computed_seconds"),
    *("swaps", "rejected"),
)


@dataclass(frozen=True)
class UnattendedOptions:
    """The traffic."""

    model: str
    domain: str = "tools"
    rate: float = 3.0  # requests per second
    chats: int = 60  # before the shift
    held_out: int = 60  # prompts of each kind that are compared after the swap
    limit: float = 600.0  # seconds until the swap, after the first request
    tokens: int = 64  # of an answer, at most

    def __post_init__(self) -> None:
        if self.most <= self.chats:
            raise LearningLoadError(
                f"{self.most} requests in {self.limit:g} s at {self.rate:g} per second are no more than the "
                f"{self.chats} chats before the shift: give fewer --chats, a larger --limit or --rate."
            )

    @property
    def most(self) -> int:
        """Requests until the limit."""
        return math.ceil(self.limit * self.rate)


@dataclass
class Answered:
    """One answer: what it took, and what the server did meanwhile."""

    phase: str
    seconds: float
    tokens: int
    accepted: int  # drafted tokens
    text: str


@dataclass
class Unattended:
    """The result."""

    options: UnattendedOptions
    swapped_after: float | None = None  # seconds since the first request; None: not at all
    requests: int = 0  # until then
    state: dict[str, Any] = field(default_factory=dict)  # of the server's learning, at the end
    latencies: dict[str, list[float]] = field(default_factory=dict)  # seconds, by the phase of learning
    tokens_per_pass: dict[str, tuple[float, float]] = field(default_factory=dict)  # static, learning
    same: bool = True  # both servers gave the same answers

    def ratio(self, kind: str) -> float:
        """The learning server's tokens per pass over the static one's."""
        static, learning = self.tokens_per_pass[kind]
        return learning / static

    def latency_line(self, phase: str) -> str:
        """Median and p95 latency while the server collected, trained, scored or tried a head."""
        each = sorted(self.latencies[phase])
        return (
            f"{len(each)} requests while {phase}: median {1e3 * statistics.median(each):.1f} ms, "
            f"p95 {1e3 * each[int(0.95 * len(each))]:.1f} ms"
        )

    def facts(self) -> dict[str, Any]:
        """Everything, for JSON."""
        return asdict(self)


def run_unattended(
    options: UnattendedOptions,
    folder: Path,
    flags: Sequence[str],
    learn_flags: Sequence[str],
    device: str,
    say: Callable[[str], None] = lambda line: None,
) -> Unattended:
    """Send the traffic, wait for a swap, and compare both servers."""
    flags = (*flags, *FLAGS.get(device, ()))
    learn = (*flags, "--learn", "--learn-dir", str(folder), *learn_flags)
    with ExitStack() as stack, ThreadPoolExecutor() as threads:
        starts = [
            threads.submit(ServerProcess, options.model, *each, own_group=True) for each in (flags, learn)
        ]
        static, learning = (stack.enter_context(start.result()) for start in starts)
        say("both servers are up")
        traffic = Traffic(options, learning, say)
        traffic.run()
        result = traffic.result
        if result.swapped_after is not None:
            say(f"swapped in after {result.swapped_after:.0f} s and {result.requests} requests")
            compare(result, static, learning, traffic.unsent())
        result.state = learn_state(learning)
    return result


def compare(
    result: Unattended,
    static: ServerProcess,
    learning: ServerProcess,
    prompts: Mapping[str, Sequence[Conversation]],
) -> None:
    """Let both servers answer the same prompts of each kind."""
    for kind, chats in prompts.items():
        first, second = (
            [_answer(server, chat, result.options.tokens) for chat in chats] for server in (static, learning)
        )
        result.tokens_per_pass[kind] = tokens_per_pass(first), tokens_per_pass(second)
        result.same &= [each.text for each in first] == [each.text for each in second]


class Traffic:
    """Requests at a steady rate to a server that learns, until it has swapped a head in or the time is up."""

    def __init__(self, options: UnattendedOptions, server: ServerProcess, say: Callable[[str], None]) -> None:
        self._options, self._server, self._say = options, server, say
        self.result = Unattended(options)
        self._most = options.most
        prompts = conversations(options.domain, 0, self._most - options.chats + options.held_out)
        self._prompts = [*numbered_chats(0, options.chats), *prompts]
        self._looked, self._phase, self._swaps, self._told = -math.inf, "collecting", 0, ""

    def run(self) -> None:
        options, result = self._options, self.result
        began = time.monotonic()
        for number in range(self._most):
            time.sleep(max(0.0, number / options.rate - (time.monotonic() - began)))
            if time.monotonic() - began > options.limit:
                return
            answer = _answer(self._server, self._prompts[number], options.tokens, self._phase)
            result.latencies.setdefault(answer.phase, []).append(answer.seconds)
            result.requests = number + 1
            self._look()
            if self._swaps:
                result.swapped_after = time.monotonic() - began
                return

    def unsent(self) -> dict[str, Sequence[Conversation]]:
        """Prompts of both kinds that were not sent."""
        options = self._options
        chats = numbered_chats(options.chats, options.held_out)
        return {options.domain: self._prompts[self._most :], "chat": chats}

    def _look(self) -> None:
        if (now := time.monotonic()) - self._looked < LOOK_SECONDS:
            return
        state = learn_state(self._server)
        if state["phase"] != self._phase and self._phase in self.result.latencies:
            self._say(self.result.latency_line(self._phase))
        self._looked, self._phase, self._swaps = now, state["phase"], state["swaps"]
        told = " ".join(f"{name} {state[name]}" for name in SHOWN if state[name])
        if told != self._told:
            self._told = told
            self._say(f"{self.result.requests} requests: {told}")


def _answer(server: ServerProcess, chat: Conversation, tokens: int, phase: str = "") -> Answered:
    body = {"messages": chat, "max_tokens": tokens, "temperature": 0, "return_metrics": True}
    answer = asyncio.run(post(server.server, CHAT, body))
    if answer.status != 200:
        raise LearningLoadError(f"a request failed with {answer.status}: {answer.body[-300:]!r}.")
    content = json.loads(answer.body)
    accepted = content["metrics"]["speculative_decoding"]["num_accepted_draft_tokens"]
    text = content["choices"][0]["message"]["content"] or ""
    return Answered(phase, answer.ended - answer.sent, content["usage"]["completion_tokens"], accepted, text)


def tokens_per_pass(answers: Sequence[Answered]) -> float:
    """Tokens per pass of the target after the first token, which needs a pass without a draft."""
    tokens = sum(each.tokens - 1 for each in answers)
    return tokens / max(1, tokens - sum(each.accepted for each in answers))
