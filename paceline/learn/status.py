"""The Learner's configuration and its status."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from paceline.learn.evaluation.gate import GateConfig
from paceline.learn.evaluation.trial import TrialConfig


@dataclass(frozen=True)
class LearnerConfig:
    """When the Learner trains, checks and rolls back."""

    min_rows: int = 200  # new rows before a head is trained on them
    poll_seconds: float = 2.0  # between two checks of processes and commands
    look_seconds: float = 0.025  # between two checks of the load, while a process trains or scores
    # the same under load: a check takes 0.2 ms of the passes that it interrupts, and a job need not continue
    # in the moment in which the load ends
    loaded_look_seconds: float = 1.0
    max_running: int = 2  # requests: with more, or with any that waits, training pauses
    watch_steps: int = 512  # decode steps of a point of the curve of live acceptance
    watch_drop: float = 0.1  # of the tokens per draft since the swap: then the head before it is tried again
    watch_points: int = 3  # in a row that must show the drop
    max_points: int = 2000  # of the curve in memory
    gate: GateConfig = field(default_factory=GateConfig)
    trial: TrialConfig = field(default_factory=TrialConfig)


@dataclass
class LearnStatus:
    """What the Learner has done, for metrics and the live page."""

    phase: str = "collecting"  # or training, scoring, trial
    head: int = 0  # number of the head that serves
    trainings: int = 0
    training_steps: int = 0  # of all trainings
    planned_steps: int = 0  # of the training that runs; 0: none does, or it still loads
    scored_rows: int = 0  # of the scoring that runs
    planned_rows: int = 0  # to score, at most; 0: none is scored, or it still loads
    computed_seconds: float = 0.0  # of all trainings and scorings, on a GPU
    rejected: int = 0  # candidates: by the gate, by the trial, or because they could not be used
    swaps: int = 0  # promotions, automatic or by hand
    rollbacks: int = 0
    failures: int = 0  # trainings and scorings without a result
    present_tokens_per_pass: float | None = None  # replayed, of the last candidate that was judged
    candidate_tokens_per_pass: float | None = None
    gain: float | None = None  # speedup of the last promotion, measured by its trial
    paused: bool = False
    accepted: dict[str, int] = field(default_factory=dict)  # drafted tokens, by drafter
    slowdown: float | None = None  # seconds of a step beside a trainer that computes, over those without
    # (time, number of the head, tokens per draft by segment), the oldest first
    curve: deque[tuple[float, int, dict[str, float]]] = field(default_factory=deque)
