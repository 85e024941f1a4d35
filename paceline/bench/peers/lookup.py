"""Other engines with prompt lookup, on the same prompts: each compared with itself without it."""

from __future__ import annotations

import json
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.bench.peers import worker
from paceline.bench.peers.contestants import LLAMA_REMEDIES, Contestant, ContestantError, Generation
from paceline.bench.run.engine_runner import Task
from paceline.bench.timing import OnTurn
from paceline.errors import ConfigError

LOOKUP_TOKENS = 8  # drafted per step
PEERS = ("transformers", "llama.cpp", "vllm")
MODULES = {"transformers": "transformers", "llama.cpp": "llama_cpp", "vllm": "vllm"}
SETTLE_SECONDS = 0.3  # until the threads of the previous contestant sleep


@dataclass(frozen=True)
class PeerOptions:
    """A peer and the interpreter that has it."""

    name: str
    python: str = sys.executable


@dataclass(frozen=True)
class PeerRow:
    """A peer's prompt lookup compared with itself, on one workload. Times sum each prompt's best round."""

    workload: str
    peer: str
    version: str
    prompts: int
    output_tokens: int  # without lookup
    decode_tokens_per_second: float  # without lookup, after the first token
    lookup_decode_tokens_per_second: float
    tokens_per_second: float  # prefill included
    lookup_tokens_per_second: float
    decode_speedup: float  # with lookup, relative to the same peer without it
    median_decode_speedup: float
    speedup: float
    changed_prompts: list[str]  # prompts whose tokens changed with lookup


def parse_peers(names: Sequence[str], pythons: Sequence[str]) -> tuple[PeerOptions, ...]:
    """The requested peers, each with its interpreter, given as NAME=INTERPRETER."""
    where: dict[str, str] = {}
    for given in pythons:
        name, equals, python = given.partition("=")
        if name not in PEERS or not equals:
            raise ConfigError(f"--peer-python {given!r}: write NAME=INTERPRETER, NAME of {', '.join(PEERS)}.")
        if shutil.which(python) is None:
            raise ConfigError(f"--peer-python {given!r}: {python} cannot be run. Give a Python interpreter.")
        where[name] = python
    for name in (*names, *where):
        if name not in PEERS or name not in names:
            raise ConfigError(f"--against must name peers of {', '.join(PEERS)}; got {','.join(names)!r}.")
    return tuple(PeerOptions(name, where.get(name, sys.executable)) for name in names)


def measure_peer(
    peer: PeerOptions,
    path: Path,
    threads: int,
    workloads: Mapping[str, Sequence[Task]],
    stop_ids: frozenset[int],
    rounds: int,
    on_turn: OnTurn = lambda _: None,
) -> tuple[list[PeerRow], str | None]:
    """The peer's rows on all workloads, and an error if some are missing. Greedy, one prompt at a time."""
    peer_rows: list[PeerRow] = []
    try:
        with start_peer(peer, path, threads, workloads) as contestant:
            for name, tasks in workloads.items():
                pairs = _turns(contestant, tasks, sorted(stop_ids), rounds, on_turn)
                peer_rows.append(peer_row(name, peer.name, str(contestant.facts["version"]), tasks, pairs))
    except ContestantError as error:
        return peer_rows, str(error)
    return peer_rows, None


def start_peer(
    peer: PeerOptions, path: Path, threads: int, workloads: Mapping[str, Sequence[Task]]
) -> Contestant:
    """The peer in its own process, with context for the longest prompt and answer."""
    longest = max(
        len(task.token_ids) + (task.params.max_tokens or 0) for tasks in workloads.values() for task in tasks
    )
    options = {"model": str(path), "threads": threads, "context": longest + 1 + LOOKUP_TOKENS}
    command = [peer.python, str(Path(worker.__file__).resolve()), peer.name, json.dumps(options)]
    missing = (
        f"It is not installed for {peer.python}: install {MODULES[peer.name]}, or name an interpreter that "
        f"has it by --peer-python {peer.name}=PATH."
    )
    return Contestant(peer.name, command, {**LLAMA_REMEDIES, "ModuleNotFoundError": missing})


Pair = tuple[list[Generation], list[Generation]]  # without lookup and with it, one Generation per round


def _turns(
    contestant: Contestant, tasks: Sequence[Task], stop_ids: list[int], rounds: int, on_turn: OnTurn
) -> list[Pair]:
    """Each prompt without lookup and with it, alternating. First, a warm-up on the first prompt."""
    for lookup in (0, LOOKUP_TOKENS):
        tokens = tasks[0].params.max_tokens or 1
        contestant.generate(tasks[0].token_ids, tokens, stop_ids=stop_ids, lookup=lookup)
    pairs: list[Pair] = [([], []) for _ in tasks]
    for number in range(rounds):
        for task, pair in zip(tasks, pairs, strict=True):
            for runs, lookup in zip(pair, (0, LOOKUP_TOKENS), strict=True):
                time.sleep(SETTLE_SECONDS)
                tokens = task.params.max_tokens or 1
                runs.append(contestant.generate(task.token_ids, tokens, stop_ids=stop_ids, lookup=lookup))
                on_turn(f"{contestant.name}, round {number + 1} of {rounds}")
    return pairs


def peer_row(workload: str, peer: str, version: str, tasks: Sequence[Task], pairs: Sequence[Pair]) -> PeerRow:
    """The row of these turns."""
    plain, lookup = ([pair[side] for pair in pairs] for side in (0, 1))
    tokens, lookup_tokens = (sum(len(runs[0].token_ids) for runs in side) for side in (plain, lookup))

    def rest(run: Generation) -> float:
        return run.rest_seconds

    def whole(run: Generation) -> float:
        return run.first_seconds + run.rest_seconds

    # per token, because lookup may change a peer's answer and so its length
    plain_rest, lookup_rest = (sum(_bests(side, rest)) for side in (plain, lookup))
    plain_whole, lookup_whole = (sum(_bests(side, whole)) for side in (plain, lookup))
    plain_speed = _per_second(tokens - len(pairs), plain_rest)
    lookup_speed = _per_second(lookup_tokens - len(pairs), lookup_rest)
    return PeerRow(
        workload=workload,
        peer=peer,
        version=version,
        prompts=len(pairs),
        output_tokens=tokens,
        decode_tokens_per_second=plain_speed,
        lookup_decode_tokens_per_second=lookup_speed,
        tokens_per_second=tokens / plain_whole,
        lookup_tokens_per_second=lookup_tokens / lookup_whole,
        decode_speedup=lookup_speed / plain_speed,
        median_decode_speedup=statistics.median(_speed(runs[1]) / _speed(runs[0]) for runs in pairs),
        speedup=(lookup_tokens / lookup_whole) / (tokens / plain_whole),
        changed_prompts=[
            task.id
            for task, (first, second) in zip(tasks, pairs, strict=True)
            if first[0].token_ids != second[0].token_ids
        ],
    )


def _bests(side: Sequence[Sequence[Generation]], of: Callable[[Generation], float]) -> list[float]:
    return [min(of(run) for run in runs) for runs in side]


def _speed(runs: Sequence[Generation]) -> float:
    """Decoded tokens per second for one prompt."""
    return _per_second(len(runs[0].token_ids) - 1, min(run.rest_seconds for run in runs))


def _per_second(tokens: int, seconds: float) -> float:
    """Never 0, so that ratios exist even if every answer has only one token."""
    return max(tokens, 1e-9) / max(seconds, 1e-9)
