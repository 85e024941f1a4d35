"""`python -m benchmarks changes`: how fast `auto` reacts when the traffic or the load changes.

One engine with the controller runs through phases: repetitive text, random text, repetitive text; and one
request, many, one. The reaction time is measured until its drafts are near the level where they settle.
"""

from __future__ import annotations

import random
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import pairwise
from typing import Any

from paceline.bench.loading import bench_config, empty_memory
from paceline.bench.run.engine_runner import Task
from paceline.bench.timing import OnTurn
from paceline.bench.traffic.builtin_workloads import CITIES, GOODS, NAMES, QUESTIONS, writing
from paceline.bench.traffic.workloads import Prompt
from paceline.build import LoadedModel, build_engine, load_model
from paceline.config import DEFAULT_MODEL
from paceline.core.params import SamplingParams
from paceline.draft.methods import AUTO
from paceline.engine.engine import Engine

MAX_STEPS, MAX_SECONDS = 50, 2.0  # within which the controller must react; meeting one of them is enough
MIN_CHANGE = 0.5  # drafted tokens per request and step; smaller changes are not judged
WINDOW = 8  # steps of the moving average of drafted tokens
BLOCKS = 4  # repetitions of a repetitive text in its prompt


@dataclass(frozen=True)
class Phase:
    """Requests of one kind at a fixed concurrency."""

    name: str
    tasks: Sequence[Task]
    concurrency: int = 1


@dataclass(frozen=True)
class Moment:
    """One step of the engine."""

    phase: int
    seconds: float  # since the start, of steps only
    requests: int
    new_tokens: int
    drafted: int
    accepted: int
    drafters: tuple[str, ...]

    @property
    def drafted_each(self) -> float:
        return self.drafted / max(self.requests, 1)

    @property
    def tokens_each(self) -> float:
        return self.new_tokens / max(self.requests, 1)


@dataclass(frozen=True)
class Reaction:
    """How fast the controller reacted to a change."""

    change: str
    before: float  # drafted tokens per request and step, where it had settled
    after: float
    steps: int
    seconds: float

    @property
    def holds(self) -> bool | None:
        """Whether it reacted in time; None: there was nothing to react to."""
        if abs(self.after - self.before) < MIN_CHANGE:
            return None
        return self.steps <= MAX_STEPS or self.seconds <= MAX_SECONDS


@dataclass(frozen=True)
class Course:
    """One run through phases."""

    name: str
    phases: tuple[str, ...]
    moments: list[Moment]

    def starts(self) -> list[int]:
        """The first step of each phase."""
        phases = [moment.phase for moment in self.moments]
        return [phases.index(phase) for phase in range(len(self.phases))]

    def reactions(self) -> list[Reaction]:
        """One reaction per change of phase."""
        starts = [*self.starts(), len(self.moments)]
        drafted = [moment.drafted_each for moment in self.moments]
        # settled: the second half of a phase
        levels = [statistics.fmean(drafted[(start + end) // 2 : end]) for start, end in pairwise(starts)]
        return [
            self._reaction(number, starts[number], starts[number + 1], levels[number - 1], levels[number])
            for number in range(1, len(self.phases))
        ]

    def _reaction(self, number: int, start: int, end: int, before: float, after: float) -> Reaction:
        """The steps until the average of the next few steps is nearer to the new level."""
        drafted = [moment.drafted_each for moment in self.moments]
        followed = next(
            step
            for step in range(start, end)
            for now in [statistics.fmean(drafted[step : min(step + WINDOW, end)])]
            if abs(now - after) <= abs(now - before) or step == end - 1
        )
        begun = self.moments[start - 1].seconds
        change = f"{self.phases[number - 1]} to {self.phases[number]}"
        return Reaction(change, before, after, followed + 1 - start, self.moments[followed].seconds - begun)


@dataclass(frozen=True)
class Changes:
    """The complete result."""

    model: str
    courses: list[Course]

    @property
    def reactions(self) -> list[Reaction]:
        return [reaction for course in self.courses for reaction in course.reactions()]

    def facts(self) -> dict[str, Any]:
        """Everything, for JSON."""
        return {
            "model": self.model,
            "most_steps": MAX_STEPS,
            "most_seconds": MAX_SECONDS,
            "reactions": [{**asdict(reaction), "holds": reaction.holds} for reaction in self.reactions],
            "courses": [asdict(course) for course in self.courses],
        }


def run_changes(
    model: str = DEFAULT_MODEL,
    threads: int | None = None,
    quantization: str = "auto",
    crowd: int = 32,
    on_turn: OnTurn = lambda _: None,
) -> Changes:
    """A change of traffic and one of load, each with a new engine and an untrained controller."""
    config = bench_config(model, quantization, threads, crowd, AUTO)
    with empty_memory():
        loaded = load_model(config)
        courses = []
        for name, make in (("traffic", traffic_phases), ("load", partial(load_phases, crowd=crowd))):
            phases = make(loaded)
            engine = build_engine(config, loaded).engine
            courses.append(run_course(name, engine, phases, on_turn))
            engine.close()
    return Changes(model, courses)


def run_course(
    name: str, engine: Engine, phases: Sequence[Phase], on_turn: OnTurn = lambda _: None
) -> Course:
    """All steps of an engine through phases."""
    moments: list[Moment] = []
    seconds = 0.0
    for number, phase in enumerate(phases):
        waiting = deque(phase.tasks)
        running = 0
        while waiting or engine.has_unfinished:
            while waiting and running < phase.concurrency:
                task = waiting.popleft()
                engine.add_request(task.token_ids, task.params, segment=task.segment)
                running += 1
            running -= sum(delta.request.finished for delta in engine.step())
            stats = engine.stats
            seconds += stats.total_time
            drafters = tuple(sorted({draft.drafter for draft in stats.drafts}))
            moments.append(
                Moment(
                    number,
                    seconds,
                    stats.requests,
                    stats.new_tokens,
                    stats.drafted,
                    stats.accepted,
                    drafters,
                )
            )
        on_turn(f"{name}: {phase.name}")
    return Course(name, tuple(phase.name for phase in phases), moments)


def traffic_phases(model: LoadedModel) -> list[Phase]:
    """Repetitive text, random text, repetitive text; all in one segment."""
    return [
        Phase("repetitive", [_repetitive(model, number) for number in range(8)]),
        Phase("random", [_task(model, number, text, 96, 2.0) for number, text in enumerate(_subjects(4))]),
        Phase("repetitive", [_repetitive(model, number) for number in range(8, 16)]),
    ]


def load_phases(model: LoadedModel, crowd: int) -> list[Phase]:
    """One request, many, one."""
    few = [_task(model, number, text, 64, 0.0) for number, text in enumerate(QUESTIONS)]
    many = [_task(model, number, text, 64, 0.0) for number, text in enumerate(_subjects(crowd))]
    half = len(few) // 2  # no prompt is used twice: answers could be copied
    return [
        Phase("1 request", few[:half]),
        Phase(f"{crowd} requests", many, crowd),
        Phase("1 request", few[half:]),
    ]


def _subjects(count: int) -> list[str]:
    """`count` requests for free writing."""
    asked = [line["messages"][0]["content"] for line in writing()]
    return [asked[number % len(asked)] for number in range(count)]


def _repetitive(model: LoadedModel, number: int) -> Task:
    """A list of orders, repeated several times, which the model continues."""
    rng = random.Random(number)
    lines = [
        f"{rng.choice(NAMES)} ordered {rng.randint(2, 90)} {rng.choice(GOODS)} for {rng.choice(CITIES)}.\n"
        for _ in range(4)
    ]
    return _task(model, number, "".join(lines) * BLOCKS, 192, 0.0, chat=False)


def _task(
    model: LoadedModel, number: int, text: str, tokens: int, temperature: float, chat: bool = True
) -> Task:
    """A request with exactly this many output tokens."""
    messages = [{"role": "user", "content": text}] if chat else None
    prompt = Prompt(str(number), "stream", tokens, messages, None if chat else text)
    params = SamplingParams(temperature=temperature, seed=number, max_tokens=tokens, ignore_eos=True)
    return Task(prompt.id, prompt.segment, prompt.token_ids(model.tokenizer), params)
