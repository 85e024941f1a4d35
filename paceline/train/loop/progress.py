"""The state of a training run beside its weights, and the pace that is chosen at its first step."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

MIN_BATCH_TOKENS, MAX_BATCH_TOKENS = 512, 8192  # of a batch that is chosen by speed; powers of two
STEP_SECONDS = 4.0  # maximum time of a step with the chosen batch
STEPS_WITHIN = 50  # steps that should fit into `minutes`
SLOW_STEP = 0.3  # seconds; slower steps are all recorded, others every RECORD_EVERY
RECORD_EVERY = 10  # steps
LOWEST_RATE = 0.02  # final fraction of the learning rate
WARMUP_SHARE = 0.1  # of the steps, at most


@dataclass(frozen=True)
class Record:
    """Averages over some training steps, or over held-out batches."""

    step: int  # steps done
    loss: float  # weighted over the tokens ahead
    matches: list[float]  # [tokens ahead] fraction of predictions that were the target's best token

    @property
    def expected_length(self) -> float:
        """Estimated tokens per verification, if matches at different steps were independent."""
        return 1 + sum(math.prod(self.matches[: step + 1]) for step in range(len(self.matches)))


@dataclass(frozen=True)
class Check:
    """Acceptance on held-out answers at some step."""

    step: int
    tokens_per_pass: float


@dataclass(frozen=True)
class Pace:
    """How large the steps of a run are, and how often they are recorded. Fixed at its first step."""

    batch_tokens: int  # per step, at most
    record_every: int  # steps


def choose_pace(tokens_per_second: float, batch_tokens: int | None, seconds: float | None) -> Pace:
    """The pace for a device of this speed. `batch_tokens`: as the user asks; `seconds`: time to train."""
    if batch_tokens is None:
        longest = STEP_SECONDS if seconds is None else min(STEP_SECONDS, seconds / STEPS_WITHIN)
        batch_tokens = MAX_BATCH_TOKENS
        while batch_tokens > MIN_BATCH_TOKENS and batch_tokens / tokens_per_second > longest:
            batch_tokens //= 2
    slow = batch_tokens / tokens_per_second > SLOW_STEP
    return Pace(batch_tokens, 1 if slow else RECORD_EVERY)


@dataclass
class Progress:
    """The state of a run; all of it is in the checkpoint."""

    step: int = 0
    total: int = 0  # steps of the whole run; 0 until the first step was measured
    seconds: float = 0.0  # spent so far, earlier runs and answering included
    step_seconds: float = 0.0  # time of a step, lately
    pace: Pace | None = None  # None until the first step was measured
    history: list[Record] = field(default_factory=list)  # on training batches; step 0 is the untrained head
    held_out: list[Record] = field(default_factory=list)  # on held-out batches
    checks: list[Check] = field(default_factory=list)  # of acceptance, the first one before training

    @property
    def seconds_left(self) -> float:
        """Estimated time until the last step."""
        return max(0, self.total - self.step) * self.step_seconds

    @property
    def best(self) -> Check | None:
        """The check with most tokens per pass, the last of equal ones."""
        return max(self.checks[::-1], key=lambda check: check.tokens_per_pass, default=None)

    def facts(self) -> dict[str, Any]:
        """Everything, for JSON."""
        return asdict(self)

    @classmethod
    def of(cls, facts: Mapping[str, Any]) -> Progress:
        """The progress of these facts."""
        records = {name: [Record(**record) for record in facts[name]] for name in ("history", "held_out")}
        pace = None if facts["pace"] is None else Pace(**facts["pace"])
        checks = [Check(**check) for check in facts["checks"]]
        return cls(**{**facts, **records, "pace": pace, "checks": checks})


def learning_rate(highest: float, warmup_steps: int, step: int, total: int) -> float:
    """The rate of this step: warm-up, of WARMUP_SHARE of the steps at most, then half a cosine down."""
    warmup = min(warmup_steps, int(WARMUP_SHARE * total))
    if step < warmup:
        return highest * (step + 1) / warmup
    done = (step - warmup) / max(1, total - warmup)
    return highest * (LOWEST_RATE + (1 - LOWEST_RATE) * (1 + math.cos(math.pi * min(1.0, done))) / 2)


class Stopped(Exception):
    """A run that its user stopped; it can be resumed."""

    def __init__(self, progress: Progress) -> None:
        self.progress = progress
