"""`paceline bench MODEL`: all workloads, profiles and methods, then peers on the same prompts."""

from __future__ import annotations

import gc
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import chain
from typing import Any

from paceline.bench.loading import bench_config, settings
from paceline.bench.peers.lookup import PeerOptions, PeerRow, measure_peer
from paceline.bench.run.engine_runner import EngineRunner, Task, run_group
from paceline.bench.run.figures import Objective
from paceline.bench.run.rows import Row, rows
from paceline.bench.run.slices import Disturbances
from paceline.bench.run.speculation import COLD, OFF, ONE_BY_ONE, WARM, Runs, group_size, measure_workload
from paceline.bench.timing import OnTurn
from paceline.bench.traffic.profiles import Profile
from paceline.bench.traffic.workloads import Prompt, Workload
from paceline.build import LoadedModel, build_engine, load_model
from paceline.config import DEFAULT_MODEL, EngineConfig, SchedulerOptions
from paceline.core.params import SamplingParams
from paceline.draft.methods import AUTO
from paceline.draft.speculative_config import parse_speculative_config
from paceline.errors import ConfigError
from paceline.models.heads.shipped import default_method
from paceline.models.registry import resolve
from paceline.options import check_integer, check_number
from paceline.verify.rules import RULES

LOOKUP_METHODS = ("ngram", "suffix")  # methods that need no weights


@dataclass(frozen=True)
class SpeculationOptions:
    """What to measure."""

    workloads: tuple[Workload, ...]
    methods: Mapping[str, Any]  # speculative_config by label, "off" included; empty: see usual_methods
    model: str = DEFAULT_MODEL
    rounds: int = 3
    profiles: tuple[Profile, ...] = (ONE_BY_ONE,)
    warm: bool = False
    temperature: float | None = None  # None: each prompt's own
    constrain: bool = True  # constrain answers by the workload's response_format
    threads: int | None = None  # None: one per core
    quantization: str = "auto"
    backend: str = "cpu"
    device: str = ""  # empty: the backend's default
    peers: tuple[PeerOptions, ...] = ()
    objective: Objective | None = None
    models: tuple[str, ...] = ()  # of a paceline server, the reference first: contestants instead of methods

    def __post_init__(self) -> None:
        check_integer(ConfigError, "--rounds", self.rounds, 1, None)
        if self.temperature is not None:
            check_number(ConfigError, "--temperature", self.temperature, 0, 100)
        if self.models and (len(self.models) < 2 or len(set(self.models)) < len(self.models)):
            raise ConfigError(
                "--models compares several models of one server, the reference first: give for example "
                f"large,small,careful; got {','.join(self.models)!r}."
            )
        if self.models and self.methods:
            raise ConfigError("--models and --methods are different comparisons: leave one out.")
        for profile in self.profiles:
            for workload in self.workloads:
                profile.check_room(workload.num_requests, workload.name)

    def num_turns(self, contestants: int) -> int:
        """Approximate number of turns, for a progress bar; groups end where segments do."""
        total = 0
        for workload in self.workloads:
            prompts = workload.num_requests
            groups = sum(math.ceil(prompts / group_size(profile, prompts)) for profile in self.profiles)
            total += groups * (1 + self.warm) * contestants + 2 * prompts * len(self.peers)
        return self.rounds * total

    def temperature_of(self, prompt: Prompt) -> float:
        return prompt.temperature if self.temperature is None else self.temperature


@dataclass(frozen=True)
class Contest:
    """The complete result."""

    options: SpeculationOptions
    threads: int | None = None  # None: of a server elsewhere, or of a GPU
    quantization: str | None = None  # the format of the weights; never "auto"
    rows: list[Row] = field(default_factory=list)
    peer_rows: list[PeerRow] = field(default_factory=list)
    peer_errors: dict[str, str] = field(default_factory=dict)  # why a peer has no rows, with the remedy
    inexact: frozenset[str] = frozenset()  # methods that preserve the distribution, not the tokens
    endpoints: Mapping[str, str] = field(default_factory=dict)  # addresses of servers by label
    remarks: tuple[str, ...] = ()  # further remarks for the reader
    reference: str = OFF  # the contestant that others are compared with
    sliced: bool = True  # methods run concurrently in slices, not in whole turns
    runs: list[Runs] = field(default_factory=list)  # all answers, by workload and profile; not in the JSON

    @property
    def identical(self) -> bool:
        """Whether no exact method changed a token of any answer."""
        return all(row.identical is not False for row in self.rows if row.method not in self.inexact)

    @property
    def valid(self) -> bool:
        """Whether every finished answer with a schema is valid."""
        return all(row.valid == row.finished for row in self.rows if row.structured)

    def facts(self) -> dict[str, Any]:
        """Everything, for JSON."""
        options = self.options
        return {
            "model": options.model,
            "backend": options.backend,
            "threads": self.threads,
            "quantization": self.quantization,
            "endpoints": dict(self.endpoints),
            "reference": self.reference,
            "rounds": options.rounds,
            "temperature": options.temperature,
            "constrain": options.constrain,
            "objective": None if options.objective is None else asdict(options.objective),
            "identical": self.identical,
            "valid": self.valid,
            "rows": [asdict(row) for row in self.rows],
            "peer_rows": [asdict(row) for row in self.peer_rows],
            "peer_errors": self.peer_errors,
        }


def run_contest(
    options: SpeculationOptions, on_turn: OnTurn = lambda _: None, model: LoadedModel | None = None
) -> Contest:
    """All rows, by engines in this process, around a loaded model or the one that the options name.

    A peer that fails is reported and does not stop the rest.
    """
    structured = any(
        prompt.structured_outputs for workload in options.workloads for prompt in workload.prompts
    )
    if options.peers and options.constrain and structured:
        raise ConfigError("peers are run without a response_format: add --no-constrain, or leave them out.")
    model = model or load_model(contest_config(options, OFF))
    options = replace(options, methods=options.methods or usual_methods(model))
    configs = {label: contest_config(options, config) for label, config in options.methods.items()}
    chosen = settings(model.backend)
    disturbances = Disturbances()
    overlapped = model.backend.drafts_on_device
    contest = Contest(
        options, chosen.threads, chosen.quantization, inexact=_inexact(options), sliced=not overlapped
    )

    def make(label: str) -> EngineRunner:
        gc.collect()  # frees the KV pools of earlier engines
        engine = build_engine(configs[label], model).engine
        engine.prepare()
        # with overlap scheduling, a step's time is not that of a pass
        return EngineRunner(engine, None if overlapped else disturbances, whole=overlapped)

    makers = {label: partial(make, label) for label in options.methods}
    answer = partial(_plain_answers, options, model)
    tasks = {
        workload.name: tasks_of(with_follow_ups(workload, answer), model, options)
        for workload in options.workloads
    }
    passes = (COLD, WARM) if options.warm else (COLD,)
    for name, workload_tasks in tasks.items():
        for profile in options.profiles:
            # engines on a GPU take seconds to capture CUDA graphs, so they warm up once
            cold = not (overlapped and contest.rows)
            runs = measure_workload(
                makers,
                workload_tasks,
                rounds=options.rounds,
                profile=profile,
                passes=passes,
                warm_up=cold,
                on_turn=on_turn,
            )
            contest.rows.extend(rows(name, runs, options.objective))
            contest.runs.append(runs)
    for peer in options.peers:
        _add_peer(contest, peer, tasks, model, on_turn)
    return contest


def _add_peer(
    contest: Contest,
    peer: PeerOptions,
    tasks: Mapping[str, Sequence[Task]],
    model: LoadedModel,
    on_turn: OnTurn,
) -> None:
    """Measure another engine on the same prompts. If it fails, that is noted."""
    path, threads = resolve(contest.options.model), contest.threads or os.cpu_count() or 1
    peer_rows, error = measure_peer(
        peer, path, threads, tasks, model.tokenizer.eos_ids, contest.options.rounds, on_turn
    )
    contest.peer_rows.extend(peer_rows)
    if error is not None:
        contest.peer_errors[peer.name] = error


def contest_config(options: SpeculationOptions, draft: Any) -> EngineConfig:
    """The configuration of the engines with this speculative_config, which differ in nothing else."""
    max_num_seqs = max(profile.concurrency or SchedulerOptions().max_num_seqs for profile in options.profiles)
    how = (options.quantization, options.threads, max_num_seqs)
    return bench_config(options.model, *how, draft, options.backend, options.device)


def usual_methods(model: LoadedModel) -> Mapping[str, Any]:
    """The default methods: off, auto, look-ups, and the model's shipped head."""
    head = default_method(model.fingerprint)
    return {label: label for label in (OFF, AUTO, *LOOKUP_METHODS, *([] if head is None else [head]))}


def _inexact(options: SpeculationOptions) -> frozenset[str]:
    """The methods whose verification rule guarantees only the distribution for these prompts."""
    sampled = any(
        options.temperature_of(prompt) > 0 for workload in options.workloads for prompt in workload.prompts
    )
    rules = {label: parse_speculative_config(config).rule for label, config in options.methods.items()}
    return frozenset(label for label, rule in rules.items() if sampled and not RULES[rule].same_bytes)


Answerer = Callable[[Workload], Sequence[str]]  # the model's answers to all prompts


def with_follow_ups(workload: Workload, answer: Answerer) -> Workload:
    """The workload with each later turn of its chats as a prompt of its own, behind the turn before it.

    All methods give the same answers, so those to the turns before are computed once, by `answer`.
    """
    chats = [[prompt] for prompt in workload.prompts]
    while going := [chat for chat in chats if chat[-1].follow_ups]:
        answers = answer(Workload(workload.name, tuple(chat[-1] for chat in going)))
        for chat, text in zip(going, answers, strict=True):
            chat.append(chat[-1].followed_up(text))
    turns = (replace(turn, follow_ups=()) for turn in chain.from_iterable(chats))
    return Workload(workload.name, tuple(turns))


def _plain_answers(options: SpeculationOptions, model: LoadedModel, workload: Workload) -> list[str]:
    """The answers of plain decoding."""
    engine = build_engine(contest_config(options, OFF), model).engine
    answers = run_group(engine, tasks_of(workload, model, options)).answers
    engine.close()
    return [answer.text for answer in answers]


def tasks_of(workload: Workload, model: LoadedModel, options: SpeculationOptions) -> list[Task]:
    """The prompts as requests; each has its own seed, the same for all methods."""

    def params(number: int, prompt: Prompt) -> SamplingParams:
        return SamplingParams(
            temperature=options.temperature_of(prompt),
            seed=number,
            max_tokens=prompt.max_tokens,
            structured_outputs=prompt.structured_outputs if options.constrain else None,
        )

    return [
        Task(prompt.id, prompt.segment, prompt.token_ids(model.tokenizer), params(number, prompt))
        for number, prompt in enumerate(workload.prompts)
    ]
