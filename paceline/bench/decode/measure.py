"""Plain decoding and prefill of one request, compared with llama.cpp on the same file."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from paceline.bench.peers.contestants import (
    Contestant,
    ContestantError,
    Generation,
    start_llama_cpp,
    start_paceline,
)
from paceline.bench.text import text_ids
from paceline.bench.timing import OnTurn, Timing
from paceline.config import DEFAULT_MODEL
from paceline.errors import ConfigError
from paceline.machine import has_amx, usable_cores
from paceline.models.registry import load_tokenizer, resolve
from paceline.options import check_integer

PEERS = ("llama.cpp", "none")
SETTLE_SECONDS = 0.3  # until the threads of the previous contestant sleep


@dataclass(frozen=True)
class DecodeOptions:
    """What to measure."""

    model: str = DEFAULT_MODEL
    tokens: int = 128  # timed, after the first one
    prompt_tokens: int = 16  # of the prompt for decoding
    prefill: int = 512  # of the prompt for prefill
    rounds: int = 5
    threads: int | None = None  # None: one per core
    quantization: str = "auto"
    peer: str = "llama.cpp"
    peer_python: str = sys.executable
    settle_seconds: float = SETTLE_SECONDS

    def __post_init__(self) -> None:
        for name in ("tokens", "prompt_tokens", "prefill", "rounds"):
            check_integer(ConfigError, name, getattr(self, name), 1, None)
        if self.threads is not None:
            check_integer(ConfigError, "threads", self.threads, 1, 1024)
        if self.peer not in PEERS:
            raise ConfigError(f"peer must be one of {', '.join(PEERS)}, got {self.peer!r}.")

    @property
    def context(self) -> int:
        """Context length that the longest job needs."""
        return max(self.prompt_tokens + self.tokens + 1, self.prefill + 1)


@dataclass(frozen=True)
class Measured:
    """One contestant's times over all rounds."""

    facts: dict[str, object]  # version and other facts about itself
    decode: Timing  # of `tokens` tokens
    prefill: Timing  # until the first token after a prompt of `prefill` tokens
    overhead: Timing  # of a step outside its pass, over all steps; empty if not reported
    token_ids: list[int]


@dataclass(frozen=True)
class FreshStart:
    """Times of a new process: from its start to its first token, then one long prompt."""

    seconds: float
    peak_memory_bytes: int


@dataclass(frozen=True)
class Contest:
    """The result of `paceline bench decode`."""

    options: DecodeOptions
    threads: int
    paceline: Measured
    fresh_start: FreshStart
    peer: Measured | None
    peer_error: str | None  # why there is no peer, with the remedy
    peer_handicap: str | None = None  # what the peer could not use of this machine

    def ratio(self, of: Callable[[Measured], float]) -> float | None:
        """How many times faster paceline is, by one of the times; None without a peer."""
        return None if self.peer is None else of(self.peer) / of(self.paceline)

    @property
    def agreeing_tokens(self) -> int:
        """Number of equal tokens before the first difference, which rounding may cause."""
        pairs = zip(self.paceline.token_ids, self.peer.token_ids if self.peer else [], strict=False)
        differing = [place for place, (ours, theirs) in enumerate(pairs) if ours != theirs]
        return differing[0] if differing else len(self.paceline.token_ids)


def measure_decode(options: DecodeOptions, on_turn: OnTurn = lambda _: None) -> Contest:
    """Both contestants' times, measured alternately. A peer that fails is reported and does not stop ours."""
    path = resolve(options.model)
    ids = text_ids(load_tokenizer(path), max(options.prompt_tokens, options.prefill))
    threads = options.threads or usable_cores()
    peer, peer_error = None, None
    with ExitStack() as stack:
        ours = Entrant(stack.enter_context(start_paceline(path, threads, options.quantization)), options, ids)
        ours.warm_up()
        if options.peer != "none":
            try:
                llama = start_llama_cpp(path, threads, options.context, options.peer_python)
                peer = Entrant(stack.enter_context(llama), options, ids)
                peer.warm_up()
                time.sleep(options.settle_seconds)
            except ContestantError as error:
                peer, peer_error = None, str(error)
        for number in range(options.rounds):
            for job in (Entrant.run_decode, Entrant.run_prefill):
                job(ours)
                try:
                    if peer is not None:
                        time.sleep(options.settle_seconds)
                        job(peer)
                        time.sleep(options.settle_seconds)
                except ContestantError as error:
                    peer, peer_error = None, str(error)
            on_turn(f"round {number + 1} of {options.rounds}")
    result = None if peer is None else peer.result()
    return Contest(
        options=options,
        threads=threads,
        paceline=ours.result(),
        fresh_start=measure_fresh_start(path, threads, options, ids),
        peer=result,
        peer_error=peer_error,
        peer_handicap=None if result is None else handicap(result.facts, has_amx()),
    )


class Entrant:
    """A contestant and its times so far."""

    def __init__(self, contestant: Contestant, options: DecodeOptions, ids: list[int]) -> None:
        self._contestant = contestant
        self._options = options
        self._ids = ids
        self._decodes: list[Generation] = []
        self._prefills: list[Generation] = []

    def warm_up(self) -> None:
        """Run both jobs once, untimed: code is compiled, files are read, buffers are allocated."""
        self.run_prefill()
        self.run_decode()
        self._prefills.clear()
        self._decodes.clear()

    def run_decode(self) -> None:
        """Decode once. The first token is not counted: it belongs to the prefill."""
        prompt = self._ids[: self._options.prompt_tokens]
        self._decodes.append(self._contestant.generate(prompt, self._options.tokens + 1))

    def run_prefill(self) -> None:
        """Prefill the long prompt once."""
        self._prefills.append(self._contestant.generate(self._ids[: self._options.prefill], 1))

    def result(self) -> Measured:
        return Measured(
            facts=self._contestant.facts,
            decode=Timing(tuple(run.rest_seconds for run in self._decodes)),
            prefill=Timing(tuple(run.first_seconds for run in self._prefills)),
            overhead=Timing(tuple(step for run in self._decodes for step in run.overhead_seconds)),
            token_ids=self._decodes[0].token_ids,
        )


def handicap(peer_facts: dict[str, object], amx: bool) -> str | None:
    """What a llama.cpp build leaves unused on this machine, so that its time is not taken for its best."""
    if amx and "AMX_INT8 = 1" not in str(peer_facts.get("system_info")):
        return "built without AMX, which this CPU has: its prefill may be much faster with it"
    return None


def measure_fresh_start(path: Path, threads: int, options: DecodeOptions, ids: list[int]) -> FreshStart:
    """Seconds from the start of a new process to its first token, with a warm kernel cache."""
    start = time.perf_counter()
    with start_paceline(path, threads, options.quantization) as contestant:
        contestant.generate(ids[: options.prompt_tokens], 1)
        seconds = time.perf_counter() - start
        return FreshStart(seconds, contestant.generate(ids[: options.prefill], 1).peak_memory_bytes)
