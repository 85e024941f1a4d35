"""Never worse while it learns: a server with --learn beside two without, in turns, its trainer at work.

All answer the same prompts. While one is measured the others are stopped, with the trainer, so that each has
the machine for itself. What the two without differ by is noise: their controllers learn apart. The trainer's
CPU seconds and steps in each turn say how much it worked.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.learning.domains import conversations, numbered_chats
from benchmarks.learning.load_report import Compared, Side, Turn
from benchmarks.server.client_requests import CHAT, model_name
from benchmarks.server.process import ServerProcess
from benchmarks.turns import take_turns
from paceline.bench.servers.client import Server, get, post
from paceline.bench.timing import OnTurn
from paceline.errors import PacelineError

WITHOUT, CONTROL, WITH = "without --learn", "another without --learn", "with --learn"
TRAIN_ROWS = 96  # requests before the training begins, by default
ENDLESS = 600  # minutes of the training, which ends after a few passes over its rows: see `check_trains`
READY_SECONDS = 180.0  # most until the trainer has loaded and done its first steps
PAUSE = 0.5  # seconds between turns: an engine's threads spin for a moment
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


def measure_learning_load(
    model: str,
    loads: Sequence[Load],
    tokens: int,
    folder: Path,
    flags: Sequence[str] = (),
    device: str = "cpu",
    on_turn: OnTurn = lambda _: None,
    train_rows: int = TRAIN_ROWS,
) -> Iterator[Compared]:
    """The servers with each load, as it is measured. Every round has its own prompts, the same for all."""
    flags = (*flags, *FLAGS.get(device, ()))
    learn = ("--learn", "--learn-dir", str(folder), "--learn-min-rows", str(train_rows))
    with ExitStack() as stack:
        arguments = (*flags, *learn, "--learn-minutes", str(ENDLESS))
        servers = [
            stack.enter_context(ServerProcess(model, *options, own_group=True))
            for options in (flags, arguments, flags)
        ]
        for server in servers:  # after the last start, which a trainer would disturb
            asyncio.run(_send(server.server, conversations("tools", 0, train_rows), 16, min(tokens, 32)))
        plain, learning, control = servers
        with stopped(plain, control):
            trainer = _trainer(learning)
        sent = 0

        def measured(clients: int, size: int, rounds: int) -> dict[str, list[Turn]]:
            nonlocal sent
            jobs = {
                WITHOUT: _turns(plain, (learning, control), clients, sent, size, tokens),
                CONTROL: _turns(control, (learning, plain), clients, sent, size, tokens),
                WITH: _turns(learning, (plain, control), clients, sent, size, tokens, trainer, device),
            }
            sent += rounds * size
            return take_turns(jobs, rounds, on_turn)

        for load in loads:
            measured(load.clients, 2 * load.clients, 1)  # compiles
            turns = measured(load.clients, max(load.requests, 2 * load.clients), load.rounds)
            first, second, third = (Side(turns[name]) for name in (WITHOUT, CONTROL, WITH))
            yield Compared(load.clients, first, second, third, device, learn_state(learning)["slowdown"])


def check_trains(state: Mapping[str, Any]) -> None:
    """LearningLoadError if the training has ended: a turn without a trainer says nothing of its cost."""
    if not state["planned_steps"]:
        raise LearningLoadError(
            f"the training has ended after {state['training_steps']} steps, before the measurement. Give "
            "more --train-rows, which it passes over three times, or fewer --rounds."
        )


def trainer_seconds(state: Mapping[str, Any], trainer: int | None, device: str) -> float:
    """In which the trainer has computed so far: on a GPU as the server says, else its CPU time."""
    return _cpu_seconds(trainer) if device == "cpu" else float(state["computed_seconds"])


def _turns(
    process: ServerProcess,
    others: Sequence[ServerProcess],
    clients: int,
    first: int,
    size: int,
    tokens: int,
    trainer: int | None = None,
    device: str = "cpu",
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
        """So far: seconds of the trainer, CPU seconds of the server; passes, drafted tokens, steps."""
        state = {} if trainer is None else learn_state(process)
        if trainer is not None:
            check_trains(state)
        steps = state.get("training_steps", 0)
        counts = *_counters(process, "engine_steps", "spec_decode_num_draft_tokens"), steps
        return trainer_seconds(state, trainer, device), _cpu_seconds(process.process.pid), counts

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
        state = learn_state(process)
        if state["planned_steps"]:
            return max(_children(process.process.pid), key=_cpu_seconds)
        time.sleep(0.2)
    raise LearningLoadError(
        f"no training has begun {READY_SECONDS:.0f} s after the requests. The server's last words: "
        f"{process.log[-500:]}"
    )


def learn_state(process: ServerProcess) -> dict[str, Any]:
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
