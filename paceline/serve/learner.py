"""The Learner of a served model: made before its engine starts, ended before it stops."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from pathlib import Path

from paceline.build import Loaded
from paceline.engine.async_engine import AsyncEngine
from paceline.learn.collector import Collector
from paceline.learn.history import History
from paceline.learn.jobs import Jobs
from paceline.learn.learner import Learner
from paceline.learn.slowdown import Slowdown
from paceline.learn.status import LearnerConfig
from paceline.learn.trial import Meter
from paceline.models.heads.registry import resolve_head
from paceline.models.heads.shipped import SHIPPED_HEAD
from paceline.serve.learning_page import Learning


def history_of(loaded: Loaded, method: str, folder: Path) -> History:
    """The history of a method's heads in a folder, beginning with the one that the model was loaded with."""
    configured = loaded.speculation.drafters[method].options if loaded.speculation else None
    named = getattr(configured, "model", None) or SHIPPED_HEAD
    return History(folder, resolve_head(named, method, loaded.fingerprint))


class LearningModel:
    """A model that learns from what it answers."""

    def __init__(
        self,
        loaded: Loaded,
        method: str,
        collector: Collector,
        history: History,
        jobs: Jobs,
        config: LearnerConfig | None = None,
    ) -> None:
        """`method` is the drafter whose head learns; the collector gets finished requests."""
        self.collector, self.history = collector, history
        self._meter, self._slowdown = Meter(method), Slowdown()
        self.observers = (self._meter, self._slowdown)  # of the engine
        self._loaded, self._method, self._jobs, self._config = loaded, method, jobs, config
        self._task: asyncio.Task[None] | None = None

    @property
    def num_rows(self) -> int:
        """The requests that were kept since the start."""
        return self.collector.counts.kept

    def start(self, engine: AsyncEngine, name: str) -> Learning:
        """Begin to learn, in the event loop of the engine. Returns what is shown of it."""
        learner = Learner(
            engine,
            self._method,
            lambda path: self._loaded.load_head(self._method, path),
            self.history,
            self._jobs,
            self._meter,
            lambda: self.num_rows,
            self._config,
            self._slowdown,
        )
        self._task = asyncio.create_task(learner.run())
        return Learning(name, learner.status, self.history, lambda: self.num_rows)

    async def stop(self) -> None:
        """End learning; what has been promoted stays."""
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task
