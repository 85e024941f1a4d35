"""Never worse while it learns: a server with --learn beside two without, in turns, its trainer at work.

All answer the same prompts. While one is measured the others are stopped, with the trainer, so that each has
the machine for itself. What the two without differ by is noise: their controllers learn apart. The trainer's
CPU seconds and steps in each turn say how much it worked.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import os
import signal
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.learning.domains import conversations, numbered_chats
from benchmarks.server.client_requests import CHAT, model_name
from benchmarks.server.process import ServerProcess
from benchmarks.turns import take_turns
from paceline.bench.report.result import Result, Table
from paceline.bench.servers.client import Server, get, post
from paceline.bench.timing import OnTurn
from paceline.errors import PacelineError

WITHOUT, CONTROL, WITH = "without --learn", "another without --learn", "with --learn"
TRAIN_ROWS = 96  # requests before the training begins
ENDLESS = 600  # minutes of the training: it is still at work when the measurement ends
READY_SECONDS = 180.0  # most until the trainer has loaded and done its first steps
PAUSE = 0.5  # seconds between turns: an engine's threads spin for a moment
LEAST = {"cpu": 0.95, "cuda": 0.97}  # bar of both ratios with one client, by device
LEAST_UNDER_LOAD = 0.99  # with more clients, for which the trainer waits
# two servers share a GPU, and the trainer needs room for its copy of the model
FLAGS = {"cuda": ("--device", "cuda", "--kv-cache-memory-bytes", "2000000000")}


class LearningLoadError(PacelineError):
    """The servers cannot be compared."""


@dataclass(frozen=True)
class Load:
    """What is sent to each server."""

    clients: int  # at once
    requests: int  # in a turn
    rounds: int  # turns of each server


@dataclass
class Turn:
    """What the clients of a server saw in one turn."""

    seconds: float
    tokens: int
    latencies: list[float]  # seconds of each request
    trained: float = 0.0  # CPU seconds of the trainer
    served: float = 0.0  # CPU seconds of the server
    passes: int = 0  # of the server
    drafted: int = 0  # tokens
    steps: int = 0  # of the trainer; a GPU's trainer reports every tenth

    @property
    def throughput(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds

    @property
    def p95(self) -> float:
        """Seconds in which 95 % of the requests are answered."""
        return _p95(self.latencies)


@dataclass
class Side:
    """All turns of one server with one number of clients."""

    turns: list[Turn] = field(default_factory=list)

    @property
    def throughput(self) -> float:
        """Tokens per second."""
        return sum(turn.tokens for turn in self.turns) / sum(turn.seconds for turn in self.turns)

    @property
    def tokens_per_pass(self) -> float:
        """What drafts gain."""
        return sum(turn.tokens for turn in self.turns) / max(1, sum(turn.passes for turn in self.turns))

    @property
    def drafted_per_pass(self) -> float:
        return sum(turn.drafted for turn in self.turns) / max(1, sum(turn.passes for turn in self.turns))

    @property
    def cpu(self) -> float:
        """CPU seconds of the server per token: unlike times, hardly changed by other work on the machine."""
        return sum(turn.served for turn in self.turns) / sum(turn.tokens for turn in self.turns)

    @property
    def p95(self) -> float:
        """Seconds in which 95 % of the requests are answered."""
        return _p95([each for turn in self.turns for each in turn.latencies])

    @property
    def median(self) -> float:
        """Seconds of the median request: few training steps do not change it."""
        return statistics.median([each for turn in self.turns for each in turn.latencies])

    @property
    def trainer_share(self) -> float:
        """CPU seconds of the trainer per second."""
        return sum(turn.trained for turn in self.turns) / sum(turn.seconds for turn in self.turns)


@dataclass(frozen=True)
class Compared:
    """All servers with one number of clients."""

    clients: int
    first: Side  # without --learn
    control: Side  # another one without
    learning: Side
    device: str = "cpu"
    slowdown: float | None = None  # as the server measured it

    @property
    def without(self) -> Side:
        """Both servers without --learn."""
        return Side([*self.first.turns, *self.control.turns])

    @property
    def noise(self) -> float:
        """Tokens per second of one server without --learn over those of the other: 1 but for noise."""
        return self.control.throughput / self.first.throughput

    @property
    def throughput_ratio(self) -> float:
        return self.learning.throughput / self.without.throughput

    @property
    def latency_ratio(self) -> float:
        """The p95 latency without, over that with: below 1 is a loss, as for throughput."""
        return self.without.p95 / self.learning.p95

    @property
    def median_ratio(self) -> float:
        """The median latency without, over that with: the loss of requests that no training step touches."""
        return self.without.median / self.learning.median

    @property
    def by_round(self) -> list[tuple[float, float]]:
        """Both ratios in each round: of throughput and of p95 latency."""
        plain = zip(self.first.turns, self.control.turns, strict=True)
        rounds = [(Side(list(pair)), turn) for pair, turn in zip(plain, self.learning.turns, strict=True)]
        return [(after.throughput / before.throughput, before.p95 / after.p95) for before, after in rounds]

    @property
    def spread(self) -> tuple[float, float]:
        """Standard errors of the ratios of throughput and of p95 latency, by the rounds."""
        throughput, latency = zip(*self.by_round, strict=True)
        return _standard_error(throughput), _standard_error(latency)

    @property
    def steps(self) -> list[int]:
        """Steps of the trainer in each turn of its server."""
        return [turn.steps for turn in self.learning.turns]

    @property
    def cpu_ratio(self) -> float:
        """The server's CPU time per token without, over that with: below 1 is a loss."""
        return self.without.cpu / self.learning.cpu if self.learning.cpu else 1.0

    @property
    def summary(self) -> str:
        """Both ratios, and what the servers and the trainer did meanwhile."""
        throughput, latency = self.spread
        sides = (self.first, self.control, self.learning)
        passes = " ".join(f"{side.tokens_per_pass:.3f}" for side in sides)
        drafted = " ".join(f"{side.drafted_per_pass:.3f}" for side in sides)
        cpu = [round(turn.trained, 2) for turn in self.learning.turns]
        rounds = " ".join(f"{ratio:.3f}" for ratio, _ in self.by_round)
        medians = [statistics.median(ratios) for ratios in zip(*self.by_round, strict=True)]
        return (
            f"{self.clients} clients: {self.throughput_ratio:.3f} +- {throughput:.3f} of the tokens/s, "
            f"{self.latency_ratio:.3f} +- {latency:.3f} by p95 latency, {self.median_ratio:.3f} by median "
            f"latency; without/without {self.noise:.3f}\n"
            f"  of the tokens/s in each round: {rounds}; median {medians[0]:.3f}, by p95 {medians[1]:.3f}\n"
            f"  without, without, with: tokens per pass {passes}, drafted tokens per pass {drafted}\n"
            f"  the trainer: steps in each turn {self.steps}, CPU seconds {cpu}, slowdown {self.slowdown}"
        )

    @property
    def bar(self) -> float:
        return LEAST[self.device] if self.clients == 1 else LEAST_UNDER_LOAD


def _p95(latencies: Sequence[float]) -> float:
    return sorted(latencies)[min(len(latencies) - 1, int(0.95 * len(latencies)))]


def _standard_error(ratios: Sequence[float]) -> float:
    """Of the mean logarithm of ratios."""
    logs = [math.log(ratio) for ratio in ratios]
    return statistics.stdev(logs) / math.sqrt(len(logs)) if len(logs) > 1 else math.nan


def measure_learning_load(
    model: str,
    loads: Sequence[Load],
    tokens: int,
    folder: Path,
    flags: Sequence[str] = (),
    device: str = "cpu",
    on_turn: OnTurn = lambda _: None,
) -> Iterator[Compared]:
    """The servers with each load, as it is measured. Every round has its own prompts, the same for all."""
    flags = (*flags, *FLAGS.get(device, ()))
    learn = ("--learn", "--learn-dir", str(folder), "--learn-min-rows", str(TRAIN_ROWS))
    with ExitStack() as stack:
        arguments = (*flags, *learn, "--learn-minutes", str(ENDLESS))
        servers = [
            stack.enter_context(ServerProcess(model, *options, own_group=True))
            for options in (flags, arguments, flags)
        ]
        for server in servers:  # after the last start, which a trainer would disturb
            asyncio.run(_send(server.server, conversations("tools", 0, TRAIN_ROWS), 16, min(tokens, 32)))
        plain, learning, control = servers
        with stopped(plain, control):
            trainer = _trainer(learning)
        sent = 0

        def measured(clients: int, size: int, rounds: int) -> dict[str, list[Turn]]:
            nonlocal sent
            jobs = {
                WITHOUT: _turns(plain, (learning, control), clients, sent, size, tokens),
                CONTROL: _turns(control, (learning, plain), clients, sent, size, tokens),
                WITH: _turns(learning, (plain, control), clients, sent, size, tokens, trainer),
            }
            sent += rounds * size
            return take_turns(jobs, rounds, on_turn)

        for load in loads:
            measured(load.clients, 2 * load.clients, 1)  # compiles
            turns = measured(load.clients, max(load.requests, 2 * load.clients), load.rounds)
            first, second, third = (Side(turns[name]) for name in (WITHOUT, CONTROL, WITH))
            yield Compared(load.clients, first, second, third, device, _state(learning)["slowdown"])


def _turns(
    process: ServerProcess,
    others: Sequence[ServerProcess],
    clients: int,
    first: int,
    size: int,
    tokens: int,
    trainer: int | None = None,
) -> Callable[[], Turn]:
    """A job that measures the next turn of a server each time, while the others are stopped."""
    numbers = itertools.count()

    def turn() -> Turn:
        chats = numbered_chats(first + next(numbers) * size, size)
        with stopped(*others):
            time.sleep(PAUSE)
            before = used()
            result = asyncio.run(_send(process.server, chats, clients, tokens))
            after = used()
            result.trained, result.served = after[0] - before[0], after[1] - before[1]
            result.passes, result.drafted, result.steps = (
                late - early for early, late in zip(before[2], after[2], strict=True)
            )
        return result

    def used() -> tuple[float, float, tuple[int, int, int]]:
        """So far: CPU seconds of the trainer and of the server; passes, drafted tokens, training steps."""
        steps = 0 if trainer is None else _state(process)["training_steps"]
        counts = *_counters(process, "engine_steps", "spec_decode_num_draft_tokens"), steps
        return _cpu_seconds(trainer), _cpu_seconds(process.process.pid), counts

    return turn


@contextmanager
def stopped(*processes: ServerProcess) -> Iterator[None]:
    """A context in which servers and their trainers, which have their own process groups, do nothing."""
    own = [process.process.pid for process in processes]
    groups = {os.getpgid(each) for pid in own for each in (pid, *_children(pid))}
    _signal(groups, signal.SIGSTOP)
    try:
        yield
    finally:
        _signal(groups, signal.SIGCONT)


def _signal(groups: Iterable[int], number: int) -> None:
    for group in groups:
        with suppress(ProcessLookupError):  # a trainer that has ended
            os.killpg(group, number)


async def _send(server: Server, chats: Sequence[Any], clients: int, tokens: int) -> Turn:
    model, waiting, latencies, counts = await model_name(server), list(chats), list[float](), list[int]()

    async def client() -> None:
        while waiting:
            body = {"model": model, "messages": waiting.pop(), "max_tokens": tokens, "temperature": 0}
            answer = await post(server, CHAT, {**body, "ignore_eos": True})
            if answer.status != 200:
                raise LearningLoadError(f"a request failed with {answer.status}: {answer.body[-300:]!r}.")
            counts.append(json.loads(answer.body)["usage"]["completion_tokens"])
            latencies.append(answer.ended - answer.sent)

    began = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(clients)))
    return Turn(time.perf_counter() - began, sum(counts), latencies)


def _trainer(process: ServerProcess) -> int:
    """The process id of the trainer, once it has loaded and trains."""
    until = time.monotonic() + READY_SECONDS
    while time.monotonic() < until:
        state = _state(process)
        if state["planned_steps"]:
            return max(_children(process.process.pid), key=_cpu_seconds)
        time.sleep(0.2)
    raise LearningLoadError(
        f"no training has begun {READY_SECONDS:.0f} s after {TRAIN_ROWS} requests. The server's last words: "
        f"{process.log[-500:]}"
    )


def _state(process: ServerProcess) -> dict[str, Any]:
    """What the server says of its learning."""
    state: dict[str, Any] = json.loads(asyncio.run(get(process.server, "/learn")).body)
    return state


def _counters(process: ServerProcess, *names: str) -> tuple[int, int]:
    """Two counters of the server's metrics."""
    text = asyncio.run(get(process.server, "/metrics")).body.decode()
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    first, second = (
        sum(int(float(line.split()[-1])) for line in lines if line.startswith(f"paceline:{name}_total"))
        for name in names
    )
    return first, second


def _children(process_id: int) -> list[int]:
    """The processes that this one has started."""
    threads = Path(f"/proc/{process_id}/task").glob("*/children")
    return [int(child) for thread in threads for child in thread.read_text().split()]


def _cpu_seconds(process_id: int | None) -> float:
    """The CPU time of a process so far; 0 if there is none."""
    try:
        fields = Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def learning_load_result(compared: Sequence[Compared], facts: dict[str, Any]) -> Result:
    """Throughput and p95 latency of both servers, with the ratios that have bars."""
    title = f"{facts['model']}: a server that learns beside one that does not, in turns"
    rows = [
        (
            str(each.clients),
            f"{each.without.throughput:.1f}",
            f"{each.learning.throughput:.1f}",
            f"{each.throughput_ratio:.3f} +- {each.spread[0]:.3f}",
            f"{each.noise:.3f}",
            f"{each.cpu_ratio:.3f}",
            f"{each.without.p95:.3f}",
            f"{each.learning.p95:.3f}",
            f"{each.latency_ratio:.3f} +- {each.spread[1]:.3f}",
            f"{each.bar:.2f}",
            f"{each.learning.trainer_share:.2f}",
            str(sum(each.steps)),
        )
        for each in compared
    ]
    throughput = ("tokens/s without", "with", "ratio", "without/without", "CPU ratio")
    columns = ("clients", *throughput, "p95 s without", "with", "ratio", "bar")
    figures = [
        {
            "clients": each.clients,
            "throughput_ratio": each.throughput_ratio,
            "noise": each.noise,
            "cpu_ratio": each.cpu_ratio,
            "latency_ratio": each.latency_ratio,
            "median_ratio": each.median_ratio,
            "by_round": each.by_round,
            "trainer_share": each.learning.trainer_share,
            "spread": each.spread,
            "training_steps": sum(each.steps),
            "slowdown": each.slowdown,
            "without": [vars(turn) for turn in each.first.turns],
            "control": [vars(turn) for turn in each.control.turns],
            "with": [vars(turn) for turn in each.learning.turns],
        }
        for each in compared
    ]
    table = Table(title, (*columns, "trainer's CPU", "its steps"), rows)
    return Result(title, [table], {**facts, "loads": figures})
