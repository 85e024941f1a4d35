"""`paceline bench speculation`: all workloads, concurrencies and methods, then peers on the same prompts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

from paceline.bench.loading import bench_config, settings
from paceline.bench.peers import PeerOptions, PeerRow, measure_peer
from paceline.bench.speculation import Task, measure_workload
from paceline.bench.speculation_rows import Row, rows
from paceline.bench.timing import OnTurn
from paceline.bench.workloads import Prompt, Workload
from paceline.config import DEFAULT_MODEL
from paceline.draft.methods import parse_speculative_config
from paceline.engine.build import LoadedModel, build_engine, load_model
from paceline.engine.engine import Engine
from paceline.errors import ConfigError
from paceline.models.registry import resolve
from paceline.verify.params import SamplingParams
from paceline.verify.rules import RULES


@dataclass(frozen=True)
class SpeculationOptions:
    """What to measure."""

    workloads: tuple[Workload, ...]
    methods: Mapping[str, Any]  # speculative_config by label, "off" among them
    model: str = DEFAULT_MODEL
    rounds: int = 3
    concurrency: tuple[int, ...] = (1,)
    warm: bool = False
    temperature: float = 0.0
    constrain: bool = True  # answers to what a workload's response_format says
    threads: int | None = None  # None: one for each core
    quantization: str = "auto"
    peers: tuple[PeerOptions, ...] = ()

    @property
    def num_turns(self) -> int:
        """About how many turns there will be, for a progress bar."""
        prompts = sum(len(workload.prompts) for workload in self.workloads)
        ours = len(self.concurrency) * (1 + self.warm) * len(self.methods)
        return self.rounds * prompts * (ours + 2 * len(self.peers))


@dataclass(frozen=True)
class Contest:
    """All that was found."""

    options: SpeculationOptions
    threads: int
    quantization: str  # never "auto"
    rows: list[Row] = field(default_factory=list)
    peer_rows: list[PeerRow] = field(default_factory=list)
    peer_errors: dict[str, str] = field(default_factory=dict)  # why a peer has no rows, with the remedy
    inexact: frozenset[str] = (
        frozenset()
    )  # methods that keep the distribution of plain decoding, not its tokens

    @property
    def identical(self) -> bool:
        """Whether no method changed a token of any answer, of those that promise not to."""
        return all(row.identical for row in self.rows if row.method not in self.inexact)

    @property
    def valid(self) -> bool:
        """Whether every answer that a schema was given for, and that came to its end, fits it."""
        return all(row.valid == row.finished for row in self.rows if row.structured)

    def facts(self) -> dict[str, Any]:
        """Everything, for JSON."""
        options = self.options
        return {
            "model": options.model,
            "threads": self.threads,
            "quantization": self.quantization,
            "rounds": options.rounds,
            "temperature": options.temperature,
            "constrain": options.constrain,
            "identical": self.identical,
            "valid": self.valid,
            "rows": [asdict(row) for row in self.rows],
            "peer_rows": [asdict(row) for row in self.peer_rows],
            "peer_errors": self.peer_errors,
        }


def run_contest(options: SpeculationOptions, on_turn: OnTurn = lambda _: None) -> Contest:
    """All rows. A peer that fails is told of, and does not stop the rest."""
    structured = any(prompt.structured_outputs for one in options.workloads for prompt in one.prompts)
    if options.peers and options.constrain and structured:
        raise ConfigError("peers are run without a response_format: add --no-constrain, or leave them out.")
    most = max(options.concurrency)
    configs = {
        label: bench_config(options.model, options.quantization, options.threads, most, config)
        for label, config in options.methods.items()
    }
    model = load_model(next(iter(configs.values())))
    chosen = settings(model.backend)
    contest = Contest(options, chosen.threads, chosen.quantization, inexact=_inexact(options))

    def make(label: str) -> Engine:
        return build_engine(configs[label], model).engine

    makers = {label: partial(make, label) for label in options.methods}
    tasks = {workload.name: _tasks(workload, model, options) for workload in options.workloads}
    for name, own in tasks.items():
        for count in options.concurrency:
            runs = measure_workload(
                makers, own, rounds=options.rounds, concurrency=count, warm=options.warm, on_turn=on_turn
            )
            contest.rows.extend(rows(name, runs))
    path = resolve(options.model) if options.peers else None
    for peer in options.peers:
        assert path is not None
        found, error = measure_peer(
            peer, path, chosen.threads, tasks, model.tokenizer.eos_ids, options.rounds, on_turn
        )
        contest.peer_rows.extend(found)
        if error is not None:
            contest.peer_errors[peer.name] = error
    return contest


def _inexact(options: SpeculationOptions) -> frozenset[str]:
    """The methods whose rule of verification promises, at this temperature, equality in distribution only."""
    rules = {label: parse_speculative_config(config).rule for label, config in options.methods.items()}
    return frozenset(
        label for label, rule in rules.items() if options.temperature > 0 and not RULES[rule].same_bytes
    )


def _tasks(workload: Workload, model: LoadedModel, options: SpeculationOptions) -> list[Task]:
    """The prompts as requests; each has a seed of its own, the same for all methods."""

    def params(number: int, prompt: Prompt) -> SamplingParams:
        return SamplingParams(
            temperature=options.temperature,
            seed=number,
            max_tokens=prompt.max_tokens,
            structured_outputs=prompt.structured_outputs if options.constrain else None,
        )

    return [
        Task(prompt.id, prompt.segment, prompt.token_ids(model.tokenizer), params(number, prompt))
        for number, prompt in enumerate(workload.prompts)
    ]
