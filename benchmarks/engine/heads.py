"""A draft head here and in vLLM: same target, head and prompts must give the same acceptance length."""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

from paceline.bench.peers import worker
from paceline.bench.peers.contestants import Contestant
from paceline.bench.run.engine_runner import Task, run_group
from paceline.bench.timing import OnTurn
from paceline.bench.traffic.workloads import Workload
from paceline.build import build_engine
from paceline.config import EngineConfig
from paceline.core.params import SamplingParams
from paceline.engine.engine import Engine
from paceline.errors import ConfigError
from paceline.models.heads.checkpoint import load_head, write_head
from paceline.models.heads.export import vllm_speculative_config
from paceline.models.registry import resolve
from paceline.models.tokenizer import Tokenizer

PEER = "vllm"
FLOAT32: dict[str, dict[str, Any]] = {
    "torch": {"dtype": "float32"},
    "cpu": {"quantization": "none"},
}  # by backend
ROOM = 32  # tokens of vLLM's context beyond the longest answer: it drafts past the end


@dataclass(frozen=True)
class HeadOptions:
    """What to compare: a head on a folder of safetensors, the only format that vLLM reads."""

    model: str
    head: str
    workloads: tuple[Workload, ...]
    num_speculative_tokens: int | None = None  # None: 5, or the whole block of a parallel head
    form: str = "sglang"  # format of the head for vLLM
    backend: str = "torch"  # of ours; cpu: with weights that are not quantized
    threads: int = 1
    python: str = sys.executable  # Python interpreter that has vLLM

    @property
    def num_turns(self) -> int:
        return 2 * sum(len(workload.prompts) for workload in self.workloads)


@dataclass(frozen=True)
class Drafted:
    """The drafts of one engine. Field names are those of the JSON."""

    drafts: int = 0
    accepted: tuple[int, ...] = ()  # [d] drafts whose token at depth d + 1 was accepted

    @property
    def acceptance_length(self) -> float:
        """Tokens per drafted pass, bonus token included."""
        return 1 + sum(self.accepted) / max(self.drafts, 1)

    @property
    def acceptance_per_position(self) -> list[float]:
        """[d] the fraction of all drafts whose token at depth d + 1 was accepted."""
        return [count / max(self.drafts, 1) for count in self.accepted]

    def __add__(self, other: Drafted) -> Drafted:
        accepted = zip_longest(self.accepted, other.accepted, fillvalue=0)
        return Drafted(self.drafts + other.drafts, tuple(map(sum, accepted)))

    def facts(self) -> dict[str, Any]:
        derived = ("acceptance_length", "acceptance_per_position")
        return asdict(self) | {name: getattr(self, name) for name in derived}


@dataclass(frozen=True)
class HeadRow:
    """The result of one workload. Field names are those of the JSON."""

    workload: str
    prompts: int
    same_tokens: int  # prompts with the same answer in both
    ours: Drafted
    peer: Drafted

    @property
    def ratio(self) -> float:
        """Our mean acceptance length relative to the peer's."""
        return self.ours.acceptance_length / self.peer.acceptance_length


@dataclass(frozen=True)
class HeadComparison:
    """The complete result."""

    options: HeadOptions
    version: str  # vLLM's
    rows: list[HeadRow] = field(default_factory=list)  # per workload, then the total

    def facts(self) -> dict[str, Any]:
        """Everything, for JSON."""
        return {
            **{key: value for key, value in vars(self.options).items() if key != "workloads"},
            "version": self.version,
            "rows": [
                {**vars(row), "ours": row.ours.facts(), "peer": row.peer.facts(), "ratio": row.ratio}
                for row in self.rows
            ],
        }


def compare_head(options: HeadOptions, on_turn: OnTurn = lambda _: None) -> HeadComparison:
    """The head's acceptance here and in vLLM: float32, greedy, one prompt at a time."""
    if options.backend not in FLOAT32:
        raise ConfigError(f"--backend must be one of {', '.join(FLOAT32)}, got {options.backend!r}.")
    if shutil.which(options.python) is None:
        raise ConfigError(f"--peer-python {options.python} cannot be run. Give an interpreter that has vllm.")
    path = resolve(options.model)
    if not path.is_dir():
        raise ConfigError(f"vLLM reads folders of safetensors, and {path.name} is none. Give such a folder.")
    with tempfile.TemporaryDirectory() as folder:
        head = load_head(resolve(options.head))
        write_head(head, Path(folder), options.form, str(path))
        drafting: dict[str, Any] = vllm_speculative_config(head.config, Path(folder))
        if options.num_speculative_tokens is not None:
            drafting["num_speculative_tokens"] = options.num_speculative_tokens
        options = replace(options, num_speculative_tokens=drafting["num_speculative_tokens"])
        config = EngineConfig.from_options(
            model=str(path),
            backend=options.backend,
            **FLOAT32[options.backend],
            threads=options.threads,
            enable_prefix_caching=False,
            speculative_config={**drafting, "min_prob": 0.0},  # chains of full length, like vLLM's
        )
        loaded = build_engine(config)
        tasks = {workload.name: _tasks(workload, loaded.tokenizer) for workload in options.workloads}
        stop_ids = sorted(loaded.tokenizer.eos_ids)
        with _start_vllm(path, options, drafting, list(tasks.values())) as peer:
            rows = [
                _row(name, workload_tasks, loaded.engine, peer, stop_ids, on_turn)
                for name, workload_tasks in tasks.items()
            ]
            return HeadComparison(options, str(peer.facts["version"]), [*rows, _total(rows)])


def _tasks(workload: Workload, tokenizer: Tokenizer) -> list[Task]:
    return [
        Task(
            prompt.id,
            prompt.segment,
            prompt.token_ids(tokenizer),
            SamplingParams(temperature=0, max_tokens=prompt.max_tokens),
        )
        for prompt in workload.prompts
    ]


def _start_vllm(
    path: Path, options: HeadOptions, drafting: dict[str, Any], tasks: Sequence[Sequence[Task]]
) -> Contestant:
    """vLLM with the head, in its own process."""
    longest = max(
        len(task.token_ids) + (task.params.max_tokens or 0)
        for workload_tasks in tasks
        for task in workload_tasks
    )
    worker_options = {
        "model": str(path),
        "threads": options.threads,
        "context": longest + ROOM,
        "head": drafting,
    }
    command = [options.python, str(Path(worker.__file__).resolve()), PEER, json.dumps(worker_options)]
    missing = f"It is not installed for {options.python}: name an interpreter that has it by --peer-python."
    return Contestant(PEER, command, {"ModuleNotFoundError": missing})


def _row(
    name: str,
    tasks: Sequence[Task],
    engine: Engine,
    peer: Contestant,
    stop_ids: Sequence[int],
    on_turn: OnTurn,
) -> HeadRow:
    """All prompts of a workload, in both engines."""
    same, ours_drafted, peer_drafted = 0, Drafted(), Drafted()
    for task in tasks:
        (ours,) = run_group(engine, [task]).answers
        on_turn(f"{name}: paceline")
        theirs = peer.generate(task.token_ids, task.params.max_tokens or 1, stop_ids=stop_ids)
        on_turn(f"{name}: {peer.name}")
        same += ours.token_ids == theirs.token_ids
        counted = ours.speculative
        ours_drafted += Drafted(counted.num_spec_steps, tuple(counted.accepted_per_position))
        peer_drafted += Drafted(theirs.drafts, tuple(theirs.accepted))
    return HeadRow(name, len(tasks), same, ours_drafted, peer_drafted)


def _total(rows: Sequence[HeadRow]) -> HeadRow:
    """The sum over all workloads."""
    prompts, same = sum(row.prompts for row in rows), sum(row.same_tokens for row in rows)
    ours, peer = (
        sum(drafted, Drafted()) for drafted in zip(*((row.ours, row.peer) for row in rows), strict=True)
    )
    return HeadRow("all", prompts, same, ours, peer)
