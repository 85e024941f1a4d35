"""What `paceline readiness` measures: contests of plain decoding against drafting, and the drafters."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

from paceline.bench.run.contest import Contest, SpeculationOptions, contest_config, run_contest
from paceline.bench.run.rows import Row
from paceline.bench.run.speculation import COLD, OFF
from paceline.bench.timing import OnTurn
from paceline.bench.traffic.workloads import Workload, load_workload
from paceline.build import LoadedModel, build_engine, load_model
from paceline.draft.base import Drafter
from paceline.draft.methods import DrafterConfig
from paceline.errors import ConfigError
from paceline.models.heads.checkpoint import WEIGHTS, read_target_name
from paceline.models.heads.shipped import shipped_head
from paceline.models.registry import resolve

SHORT_ANSWER = 16  # tokens
STRUCTURED, STRUCTURED_PROMPTS = "extract", 4  # built-in prompts with a schema, if the traffic has none


@dataclass(frozen=True)
class DrafterStats:
    """What a loaded drafter is and needs."""

    name: str
    kv_share: float  # bytes of its keys and values, relative to the target's
    weight_bytes: int  # of its files
    has_head: bool  # it is a trained head
    known_target: bool  # whose file names the target it was trained for; loading has checked it
    coverage: float | None  # fraction of the answers' tokens that it can draft; None: all


@dataclass(frozen=True)
class Measured:
    """All that the checks look at."""

    concurrency: int
    method: str  # the draft's label
    auto: bool  # the controller decides when to draft
    own_traffic: bool  # the prompts are the user's
    contest: Contest  # at the concurrency and at twice it
    short: Contest  # short answers, at the concurrency
    structured: Contest | None  # prompts with a schema, if the traffic has none; None: it has
    structured_error: str  # why that was not measured
    drafters: tuple[DrafterStats, ...]
    target_bytes: int  # of the target's files

    def rows(self, contest: Contest, times: int = 1) -> dict[str, tuple[Row, Row]]:
        """The rows of plain decoding and of the draft, by segment, at this multiple of the concurrency."""
        found: dict[str, dict[str, Row]] = {}
        for row in contest.rows:
            if row.concurrency == times * self.concurrency:
                found.setdefault(row.segment, {})[row.method] = row
        return {segment: (methods[OFF], methods[self.method]) for segment, methods in found.items()}

    def total(self, contest: Contest, times: int = 1) -> tuple[Row, Row]:
        """The same over all segments, which is the last."""
        return list(self.rows(contest, times).values())[-1]


def measure(
    options: SpeculationOptions, method: str, own_traffic: bool, on_turn: OnTurn = lambda _: None
) -> Measured:
    """Everything that the checks need. ConfigError if the draft cannot be loaded for this model."""
    (workload,), concurrency = options.workloads, options.profiles[0].concurrency
    assert concurrency is not None
    model = load_model(contest_config(options, OFF))
    config = contest_config(options, options.methods[method])
    loaded = build_engine(config, model)
    loaded.engine.close()
    contest = run_contest(options, on_turn, model)
    once = replace(options, profiles=options.profiles[:1])
    short = run_contest(replace(once, workloads=(_shortened(workload),)), on_turn, model)
    structured, error = None, ""
    if not any(prompt.structured_outputs for prompt in workload.prompts):
        try:
            prompts = load_workload(STRUCTURED, STRUCTURED_PROMPTS)
            structured = run_contest(replace(once, workloads=(prompts,), rounds=1), on_turn, model)
        except ConfigError as refused:
            error = str(refused)
    tokens = _answer_tokens(contest)
    speculation = config.speculative.speculation()
    drafters = loaded.drafters.items()
    return Measured(
        concurrency,
        method,
        speculation.auto,
        own_traffic,
        contest,
        short,
        structured,
        error,
        tuple(
            _facts(name, drafter, speculation.drafters.get(name), model, tokens) for name, drafter in drafters
        ),
        _file_bytes(resolve(options.model)),
    )


def _facts(
    name: str, drafter: Drafter, config: DrafterConfig | None, model: LoadedModel, tokens: list[int]
) -> DrafterStats:
    options = None if config is None else config.options
    given = getattr(options, "model", None)
    path = shipped_head(name, model.fingerprint) if given in (None, "shipped") else resolve(given)
    has_head = drafter.draft_ids is not None and path is not None
    known = set() if drafter.draft_ids is None else set(drafter.draft_ids.tolist())
    return DrafterStats(
        name,
        drafter.needs.bytes_per_page / model.backend.bytes_per_page(),
        0 if path is None else _file_bytes(path),
        has_head,
        has_head and path is not None and read_target_name(_weights(path)) is not None,
        sum(token in known for token in tokens) / len(tokens) if known and tokens else None,
    )


def _weights(path: Path) -> Path:
    return path / WEIGHTS[0] if path.is_dir() else path


def _file_bytes(path: Path) -> int:
    files = path.rglob("*") if path.is_dir() else [path]
    return sum(file.stat().st_size for file in files if file.is_file())


def _answer_tokens(contest: Contest) -> list[int]:
    """The tokens of all answers of plain decoding."""
    turns = (turn for runs in contest.runs for group in runs.turns[COLD, OFF] for turn in group)
    return list(chain.from_iterable(answer.token_ids for turn in turns for answer in turn.answers))


def _shortened(workload: Workload) -> Workload:
    prompts = (
        replace(prompt, max_tokens=min(prompt.max_tokens, SHORT_ANSWER)) for prompt in workload.prompts
    )
    return Workload(workload.name, tuple(prompts))
