"""What a server that learns shows of it: `/learn` for the live page, and `paceline:learn_*` in /metrics."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from pydantic import BaseModel

from paceline.learn.evaluation.history import History
from paceline.learn.status import LearnStatus
from paceline.serve.http.middleware import LEARN
from paceline.serve.observability.metrics_vllm import PREFIX

SHOWN_DECISIONS = 50


@dataclass(frozen=True)
class Learning:
    """What is shown of one model that learns."""

    model_name: str
    status: LearnStatus
    history: History
    num_rows: Callable[[], int]  # collected since the start


class CurvePoint(BaseModel):
    """The live acceptance of some hundred decode steps."""

    time: float  # seconds since 1970
    head: int
    tokens_per_draft: dict[str, float]  # by segment


class LearnState(BaseModel):
    """What the server has learned."""

    phase: str
    paused: bool
    head: int  # that serves; 0 is the one the server was started with
    rows: int
    trainings: int
    training_steps: int  # of all trainings
    computed_seconds: float  # of all trainings and scorings, on a GPU
    planned_steps: int  # of the training that runs; 0: none does, or it still loads
    scored_rows: int  # of the scoring that runs
    planned_rows: int  # to score, at most; 0: none is scored, or it still loads
    swaps: int
    rollbacks: int
    rejected: int
    gain: float | None  # speedup of the last promotion, measured live
    accepted: dict[str, int]  # drafted tokens since the start, by drafter: what the head gains, and others
    slowdown: float | None  # seconds of a step beside a trainer that computes, over those without
    curve: list[CurvePoint]  # the oldest first
    decisions: list[dict[str, Any]]  # the oldest first


def router(learning: Learning) -> APIRouter:
    """The route of the state."""
    routes = APIRouter(tags=["Server"])

    @routes.get(LEARN)
    def learn() -> LearnState:
        """What a server with --learn has learned: heads, decisions, and acceptance over time."""
        status = learning.status
        shown = {"time", "decision", "head", "reason"}
        decisions = [
            {name: value for name, value in line.items() if name in shown}
            for line in learning.history.decisions()[-SHOWN_DECISIONS:]
        ]
        curve = [
            CurvePoint(time=when, head=head, tokens_per_draft=lengths)
            for when, head, lengths in list(status.curve)
        ]
        return LearnState(
            phase=status.phase,
            paused=status.paused,
            head=status.head,
            rows=learning.num_rows(),
            trainings=status.trainings,
            training_steps=status.training_steps,
            computed_seconds=status.computed_seconds,
            planned_steps=status.planned_steps,
            scored_rows=status.scored_rows,
            planned_rows=status.planned_rows,
            swaps=status.swaps,
            rollbacks=status.rollbacks,
            rejected=status.rejected,
            gain=status.gain,
            accepted=status.accepted,
            slowdown=status.slowdown,
            curve=curve,
            decisions=decisions,
        )

    return routes


class LearnPage(Collector):
    """The metrics of a model that learns."""

    def __init__(self, learning: Learning) -> None:
        self._learning = learning

    def collect(self) -> Iterator[Metric]:
        status = self._learning.status
        counts = {
            "rows": ("Finished requests that were kept.", self._learning.num_rows()),
            "trainings": ("Trainings that were started.", status.trainings),
            "training_steps": ("Steps of all trainings.", status.training_steps),
            "computed_seconds": ("Seconds of a GPU that trainers have taken.", status.computed_seconds),
            "rejected": ("Candidates that do not serve.", status.rejected),
            "swaps": ("Candidates that serve, or served.", status.swaps),
            "rollbacks": ("Heads that were taken back after a live loss.", status.rollbacks),
            "failures": ("Trainings and trials that failed.", status.failures),
        }
        for name, (words, count) in counts.items():
            family = CounterMetricFamily(f"{PREFIX}learn_{name}", words)
            family.add_sample(f"{PREFIX}learn_{name}_total", self._labels(), count)
            yield family
        yield self._gauge("head", "Number of the head that serves.", {"": status.head})
        yield self._gauge("paused", "1 while load lets the trainer wait.", {"": float(status.paused)})
        words = "Seconds of a step beside a trainer that computes, over those without."
        yield self._gauge("slowdown", words, {"": status.slowdown})
        yield self._gauge("gain", "Live speedup of the last head that was promoted.", {"": status.gain})
        replayed = {
            "present": status.present_tokens_per_pass,
            "candidate": status.candidate_tokens_per_pass,
        }
        words = "Tokens per pass on held-back answers, of the last candidate and the head that served then."
        yield self._gauge("replayed_tokens_per_pass", words, replayed, "head")
        live = status.curve[-1][2] if status.curve else {}
        words = "Tokens per draft of the head in the last steps, accepted ones and the one after them."
        yield self._gauge("live_tokens_per_draft", words, live, "segment")

    def _labels(self, **more: str) -> dict[str, str]:
        return {"model_name": self._learning.model_name, **more}

    def _gauge(self, name: str, words: str, values: Any, label: str = "") -> GaugeMetricFamily:
        """The gauge; values that are not known yet have no sample."""
        family = GaugeMetricFamily(f"{PREFIX}learn_{name}", words)
        for key, value in values.items():
            if value is not None:
                labels = self._labels(**({label: key} if label else {}))
                family.add_sample(f"{PREFIX}learn_{name}", labels, value)
        return family
