"""The Learner of a served model: made before its engine starts, ended before it stops."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Generic

from paceline.core.params import SamplingParams
from paceline.draft.speculative_config import Speculation
from paceline.learn.activity import Activity
from paceline.learn.data.collector import Collector, Origin
from paceline.learn.evaluation.history import History
from paceline.learn.evaluation.trial import Meter
from paceline.learn.jobs import Jobs
from paceline.learn.learner import HeadEngine, Learner, LoadedHead
from paceline.learn.slowdown import Slowdown
from paceline.learn.status import LearnerConfig
from paceline.models.heads.registry import resolve_head
from paceline.models.heads.shipped import SHIPPED_HEAD
from paceline.serve.observability.learning_page import Learning


def first_head(speculation: Speculation | None, method: str, fingerprint: str) -> Path:
    """The head that a server of the target with this fingerprint begins with: configured, or shipped."""
    configured = speculation.drafters.get(method) if speculation else None
    named = getattr(configured and configured.options, "model", None) or SHIPPED_HEAD
    return resolve_head(named, method, fingerprint)


class LearningModel(Generic[LoadedHead]):
    """A model that learns from what it answers."""

    def __init__(
        self,
        method: str,
        load: Callable[[Path], LoadedHead],
        collector: Collector,
        history: History,
        jobs: Jobs,
        activity: Activity,
        config: LearnerConfig | None = None,
        slowdown: Slowdown | None = None,
    ) -> None:
        """`method` is the drafter whose head learns; the collector gets finished requests. `load`: what the
        engine takes as a head, by its folder. `activity` is shared with the processes of `jobs`, and
        `slowdown` says how much these may work beside requests.
        """
        self.collector, self.history = collector, history
        self._meter, self._slowdown = Meter(method), slowdown or Slowdown()
        self._activity = activity
        self.observers = (self._meter, activity, self._slowdown)  # of the engine
        self._method, self._load, self._jobs, self._config = method, load, jobs, config
        self._learner: Learner[LoadedHead] | None = None  # since it has started
        self._task: asyncio.Task[None] | None = None

    def restrict(self, params: SamplingParams, origin: Origin) -> SamplingParams:
        """The params with which a request runs: no head of another salt drafts for it.

        From the start of the server on, because a trial may let a candidate draft at any time.
        """
        if self._learner is not None:
            self._learner.note_arrival()
        if self.collector.policy.may_use_head(origin):
            return params
        asked = params.speculative
        method = asked.get("method") if isinstance(asked, Mapping) else asked
        uses_head = method in (None, "auto", self._method)
        return replace(params, speculative="off") if uses_head else params

    @property
    def num_rows(self) -> int:
        """The requests that were kept since the start."""
        return self.collector.counts.kept

    def start(self, engine: HeadEngine[LoadedHead], name: str) -> Learning:
        """Begin to learn, in the event loop of the engine. Returns what is shown of it."""
        learner = self._learner = Learner(
            engine,
            self._method,
            self._load,
            self.history,
            self._jobs,
            self._meter,
            self._activity,
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
