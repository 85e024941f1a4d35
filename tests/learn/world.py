"""An engine, its heads and the trainer as one stand-in: its speed depends on the head in it."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.core.stats import DraftStats, StepStats
from paceline.errors import CheckpointError
from paceline.learn.activity import Activity, new_activity
from paceline.learn.evaluation.gate import Replay, RowScore, group_sizes
from paceline.learn.evaluation.history import History
from paceline.learn.evaluation.trial import Meter, TrialConfig
from paceline.learn.learner import Learner
from paceline.learn.slowdown import Slowdown
from paceline.learn.status import LearnerConfig

CONFIG = LearnerConfig(
    min_rows=10,
    look_seconds=2.0,
    loaded_look_seconds=2.0,
    max_running=2,
    watch_steps=20,
    watch_points=2,
    trial=TrialConfig(turn_steps=10, share=0.5, skipped_steps=2, min_pairs=3, max_pairs=5),
)
LOOK = 0.025  # seconds between two polls
FIRST = 2.0  # tokens per draft of the head that the server starts with


def replay_of(present: list[RowScore], candidate: list[RowScore], scored: int | None = None) -> Replay:
    """The replay of these rows; only of the first ones, if `scored` of them were."""
    groups = group_sizes((row.segment, row.client) for row in present)
    return Replay(present[:scored], candidate[:scored], len(present), groups)


@dataclass
class World:
    """An engine, its heads and the processes, all in one. A head's file says how long its drafts are."""

    folder: Path
    trained: list[Any] = field(default_factory=list)  # what each training gives: a length, None or an error
    replayed: float | None = None  # tokens per pass of the candidate in the shadow; None: as it is live
    factor: float = 1.0  # of all lengths: the traffic
    live: dict[str, float] = field(default_factory=dict)  # lengths of heads that are not what they were
    collected: int = 10
    running: int = 1
    swaps: list[str] = field(default_factory=list)  # contents of the heads, in the order they came in
    paused: list[bool] = field(default_factory=list)
    disturbed: list[bool] = field(default_factory=list)  # at each poll: the trainer has just worked
    on_poll: Callable[[World], None] = lambda world: None
    polls: int = 0
    since: list[float] = field(default_factory=list)  # of each training
    steps: int = 0
    planned_steps: int = 0
    scored_rows: int = 0
    planned_rows: int = 0
    slowdown: Slowdown = field(default_factory=Slowdown)
    config: LearnerConfig = CONFIG
    slept: list[float] = field(default_factory=list)  # seconds, at each poll
    drafted: list[str] = field(default_factory=list)  # the head in use at each step

    def __post_init__(self) -> None:
        first = self.folder / "first"
        first.mkdir()
        (first / "model.safetensors").write_text(str(FIRST))
        self.history = History(self.folder / "heads", first)
        self.meter = Meter("eagle3")
        self.in_use = str(FIRST)

    # the engine

    @property
    def num_requests(self) -> int:
        return self.running

    @property
    def state(self) -> StepStats:
        return StepStats(running=self.running)

    def watch_trainer(self, activity: Activity) -> None:
        self.activity = activity

    async def replace_head(self, name: str, drafter: Any) -> None:
        assert name == "eagle3"
        self.in_use = drafter
        self.swaps.append(drafter)

    def step(self) -> None:
        self.drafted.append(self.in_use)
        tokens = round(1000 * self.factor * self.live.get(self.in_use, float(self.in_use)))
        draft = DraftStats("r", "chat", "eagle3", nodes=tokens, depth=tokens, accepted=tokens - 1)
        self.meter.step(StepStats(requests=1, new_tokens=tokens, forward_time=1.0, drafts=(draft,)), ())

    # the processes

    async def train(self, present: Path, since: float) -> Path | None:
        self.since.append(since)
        result = self.trained.pop(0)
        if isinstance(result, Exception):
            raise result
        if result is None:
            return None
        candidate = self.folder / "candidate"
        candidate.mkdir()
        (candidate / "model.safetensors").write_text(str(result))
        return candidate

    async def score(self, present: Path, candidate: Path) -> Any:
        old, new = ((head / "model.safetensors").read_text() for head in (present, candidate))
        if new == "crashes":
            return None
        replayed = float(new) if self.replayed is None else self.replayed
        rows = [
            [RowScore(str(row), "chat", 60, round(60 / length) + row % 3) for row in range(40)]
            for length in (float(old), replayed)
        ]
        return replay_of(rows[0], rows[1])

    def pause(self, wanted: bool) -> None:
        self.paused.append(wanted)

    def discard(self, candidate: Path) -> None:
        shutil.rmtree(candidate)

    # the loop

    def load(self, path: Path) -> Any:
        content = (path / "model.safetensors").read_text()
        if content == "damaged":
            raise CheckpointError("it is damaged")
        return content

    async def sleep(self, seconds: float) -> None:
        self.polls += 1
        self.slept.append(seconds)
        self.disturbed.append(self.activity.is_working(0.01))
        self.on_poll(self)
        for _ in range(6):
            self.step()
        await asyncio.sleep(0)

    def run(self, polls: int = 100) -> Learner:
        """The Learner after this number of polls."""

        def end(world: World) -> None:
            on_poll(world)
            if world.polls >= polls:
                task.cancel()

        async def main() -> None:
            nonlocal task
            task = asyncio.ensure_future(learner.run())
            await asyncio.wait([task])

        on_poll, self.on_poll, self.polls = self.on_poll, end, 0
        task: asyncio.Future[None]
        with new_activity(lambda: self.polls * LOOK) as activity:
            learner = self.learner = Learner(
                self,
                "eagle3",
                self.load,
                self.history,
                self,
                self.meter,
                activity,
                lambda: self.collected,
                self.config,
                self.slowdown,
                sleep=self.sleep,
                clock=lambda: self.polls * LOOK,
            )
            asyncio.run(main())
        self.on_poll = on_poll
        return learner

    @property
    def decisions(self) -> list[str]:
        return [line["decision"] for line in self.history.decisions()]
