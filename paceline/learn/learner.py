"""Learner: the loop that trains, judges, swaps and watches, while the server keeps serving.

    enough new rows -> train -> score in the shadow -> gate -> trial on live traffic -> promote -> watch
                                                    \\ rejected        \\ rejected         \\ rolled back

One cycle at a time. Everything that takes long runs in another process or waits for live steps. The engine is
changed in one way only: its head is replaced between two steps, which cannot change a byte of the output. A
restart needs nothing from memory: a server that was killed serves History.current() again.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from paceline.core.stats import StepStats
from paceline.errors import UnavailableError
from paceline.learn.activity import Activity
from paceline.learn.evaluation.gate import Verdict, judge, tokens_per_pass
from paceline.learn.evaluation.history import Head, History
from paceline.learn.evaluation.trial import MIN_USE, Meter, Outcome, Turn, log_speedup, outcome
from paceline.learn.jobs import Jobs
from paceline.learn.slowdown import Slowdown
from paceline.learn.status import LearnerConfig, LearnStatus

logger = logging.getLogger(__name__)


LoadedHead = TypeVar(
    "LoadedHead"
)  # an UnboundDrafter in this process; the folder of one, for engines elsewhere
LoadedHead_contra = TypeVar("LoadedHead_contra", contravariant=True)


class HeadEngine(Protocol[LoadedHead_contra]):
    """The part of an AsyncEngine, or of a RemoteEngine, that the Learner uses."""

    @property
    def num_requests(self) -> int: ...

    @property
    def state(self) -> StepStats: ...

    def watch_trainer(self, activity: Activity, /) -> None: ...

    async def replace_head(self, name: str, drafter: LoadedHead_contra, /) -> None: ...


class Learner(Generic[LoadedHead]):
    """Runs `run` as a task of the event loop of an engine."""

    def __init__(
        self,
        engine: HeadEngine[LoadedHead],
        method: str,
        load: Callable[[Path], LoadedHead],
        history: History,
        jobs: Jobs,
        meter: Meter,
        activity: Activity,
        num_rows: Callable[[], int],
        config: LearnerConfig | None = None,
        slowdown: Slowdown | None = None,
        *,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`load` gives what the engine takes as a head, by its folder, and is called in a separate thread.

        `meter`, `activity` and `slowdown` observe the engine; `num_rows` is the number of rows collected so
        far.
        """
        self._engine, self._method, self._load, self._history = engine, method, load, history
        self._jobs, self._meter, self._num_rows = jobs, meter, num_rows
        self._activity = activity
        self._config, self._slowdown = config or LearnerConfig(), slowdown or Slowdown()
        self._sleep, self._clock = sleep, clock
        self.status = LearnStatus(curve=deque(maxlen=self._config.max_points))
        self._in_engine = 0  # number of the head that drafts now; the engine starts with the first
        self._promoted = 0  # number that `current` had at the last check
        self._began = 0.0  # time at which the last training began
        self._trained_rows = 0  # collected when the last training began
        self._expected: Turn | None = None  # the head's first statistics; None: not known yet
        self._level: Turn | None = None  # the last point of the curve
        self._low_points = 0  # of the curve, in a row
        self._overruled = False  # a command changed `current`
        self._job_runs = False
        self._loaded = False  # at the last check more requests ran than a job may run beside

    def note_arrival(self) -> None:
        """A request has arrived. If a job must now stop, stop it at once, not at the next check."""
        self._activity.note_arrival()
        if self._job_runs and not self._loaded and self._engine.num_requests > self._config.max_running:
            self._give_way()

    async def run(self) -> None:
        """Serve the current head, then learn until cancelled or the engine ends. A failure costs one
        cycle."""
        with suppress(UnavailableError):
            await self._learn()

    async def _learn(self) -> None:
        self._engine.watch_trainer(self._activity)
        await self._follow()
        while True:
            await self._poll()
            try:
                if self._num_rows() - self._trained_rows >= self._config.min_rows:
                    await self._cycle()
                elif self._low_points >= self._config.watch_points:
                    await self._recheck()
            except UnavailableError:
                raise
            except Exception as error:  # even a bug: learning must never end serving
                self.status.failures += 1
                logger.warning("learn: this cycle has failed, the current head stays: %s", error)
                await self._serve_current()
            self.status.phase = "collecting"

    # --- a cycle ---

    async def _cycle(self) -> None:
        """Train a candidate, judge it, and let it serve if it gains."""
        self._trained_rows, self._overruled = self._num_rows(), False
        present = self._history.current()
        self.status.phase = "training"
        self.status.trainings += 1
        self._began = self._clock()  # rows that arrive meanwhile are new for the next head
        since = self._history.trained(present.number)
        logger.info("learn: trains head %04d further, after %d rows", present.number, self._trained_rows)
        candidate = await self._during(self._jobs.train(present.path, since))
        if candidate is None:
            await self._tell("no candidate", head=present.number)
            return
        try:
            await self._judge(present, candidate)
        finally:
            self._jobs.discard(candidate)

    async def _judge(self, present: Head, candidate: Path) -> None:
        self.status.phase = "scoring"
        replay = await self._during(self._jobs.score(present.path, candidate))
        if replay is None:
            await self._reject("it could not be scored", {})
            return
        self.status.present_tokens_per_pass = tokens_per_pass(replay.present)
        self.status.candidate_tokens_per_pass = tokens_per_pass(replay.candidate)
        verdict = judge(replay, config=self._config.gate)
        if not verdict.passes or self._overruled:
            await self._reject(
                verdict.reason if not self._overruled else "overruled by hand", verdict.evidence()
            )
            return
        try:
            drafter = await asyncio.to_thread(self._load, candidate)
        except Exception as error:  # whatever is wrong with a candidate, the current head serves
            await self._reject(f"it cannot be loaded: {error}", verdict.evidence())
            return
        await self._try(present, candidate, drafter, verdict)

    async def _try(self, present: Head, candidate: Path, drafter: LoadedHead, verdict: Verdict) -> None:
        """The trial on live traffic; promotes the candidate or rejects it."""
        self.status.phase = "trial"
        old = await asyncio.to_thread(self._load, present.path)
        result = await self._compare(old, drafter)
        evidence = {**verdict.evidence(), "trial": asdict(result), "trained": self._began}
        if self._overruled or not result.better:
            await self._reject(
                "overruled by hand" if self._overruled else _told("it loses", result), evidence
            )
            return
        head = await asyncio.to_thread(self._history.add, candidate, evidence)
        self._promoted = self._history.promote(head.number).number
        # from the history, where it stays: the candidate is deleted, and later replicas need its files
        await self._engine.replace_head(self._method, await asyncio.to_thread(self._load, head.path))
        self._in_engine = self._promoted = self.status.head = head.number
        self._expected, self._low_points = None, 0  # the next point of the curve is what it should keep up
        self.status.swaps += 1
        self.status.gain = result.speedup
        await self._tell("promoted", head=head.number, reason=_told("it gains", result), evidence=evidence)

    async def _compare(self, present: LoadedHead, tried: LoadedHead) -> Outcome:
        """The outcome of a trial, in which the tried head gets a share of the decode steps: see TrialConfig.

        The current one drafts when this returns.
        """
        speedups = list[float]()
        while True:
            turn = await self._turn(tried)
            speedup = log_speedup(await self._turn(present, turn), turn)
            speedups += [] if speedup is None else [speedup]
            result = outcome(speedups, self._config.trial)
            if result.better is not None or self._overruled:
                return result

    async def _turn(self, drafter: LoadedHead, tried: Turn | None = None) -> Turn:
        """A head's statistics in one turn of a trial: the tried head's, or the current one's after
        `tried`."""
        config, meter = self._config.trial, self._meter

        def has_ended() -> bool:
            if tried is None:
                return meter.has(config.turn_steps)
            return meter.decodes >= config.present_steps(tried.decodes)

        if not self._overruled:
            await self._engine.replace_head(self._method, drafter)
        meter.take(skip=config.skipped_steps)
        while not has_ended() and not self._overruled:
            await self._wait(config.look_seconds)
        return meter.take()

    # --- watching ---

    async def _recheck(self) -> None:
        """Compare with the previous head, because live acceptance has fallen; roll back if that is faster.

        A fall alone proves nothing: if the traffic has changed, both heads are worse.
        """
        present, before = self._history.current(), self._history.previous()
        self._low_points, self._overruled, self._expected = 0, False, None
        if before is None:
            return
        self.status.phase = "trial"
        new, old = [await asyncio.to_thread(self._load, head.path) for head in (present, before)]
        result = await self._compare(new, old)
        if self._overruled:
            return
        if result.better:
            head = self._history.rollback()
            await self._engine.replace_head(self._method, old)
            self._in_engine = self._promoted = self.status.head = head.number
            self.status.rollbacks += 1
            await self._tell("rolled back", head=head.number, reason=_told("the head before gains", result))
            return
        self._expected = None  # of this traffic: the next point
        await self._tell("kept", head=present.number, reason=_told("the head before loses", result))

    def _watch(self) -> None:
        """Add a point to the curve of live acceptance, and count points that are too low."""
        if not self._meter.has(self._config.watch_steps):
            return
        turn = self._meter.take()
        by_segment = {segment: turn.tokens_per_draft(segment) or 0.0 for segment in turn.drafted}
        self.status.curve.append((self._clock(), self._in_engine, by_segment))
        self.status.accepted = self._meter.accepted()
        with suppress(OSError):  # a full disk: the live page has it
            self._history.note_live(tokens_per_draft=by_segment, accepted=self.status.accepted)
        self._level = turn
        if self._in_engine == 0:
            return
        if self._expected is None:
            self._expected = turn
        self._low_points = self._low_points + 1 if self._is_low(turn, self._expected) else 0

    def _is_low(self, turn: Turn, expected: Turn) -> bool:
        """Whether a head drafts worse than it should, or the controller hardly lets it draft any more."""
        length, wanted = turn.tokens_per_draft() or 1.0, expected.tokens_per_draft() or 1.0
        return length < (1 - self._config.watch_drop) * wanted or turn.use < MIN_USE * expected.use

    # --- waiting ---

    async def _during(self, job: Any) -> Any:
        """The result of a job. Meanwhile the job yields to requests, and commands are followed."""
        task = asyncio.ensure_future(job)
        self._job_runs = True
        self._activity.begin_work()  # until the job reports more
        try:
            while not task.done():
                await self._poll()
                self._count()
            return task.result()
        finally:
            self._count()
            task.cancel()
            await asyncio.wait([task])  # its process has ended
            self._job_runs = self._loaded = False
            self._jobs.pause(False)
            self._activity.note_stopped(False)
            self._activity.end_work()

    def _count(self) -> None:
        """Record the job's progress."""
        status, jobs = self.status, self._jobs
        status.training_steps, status.planned_steps = jobs.steps, jobs.planned_steps
        status.scored_rows, status.planned_rows = jobs.scored_rows, jobs.planned_rows

    async def _poll(self) -> None:
        """Wait until the next poll, and watch."""
        await self._wait(self._config.poll_seconds)
        self._watch()

    async def _wait(self, seconds: float) -> None:
        """Sleep while a job yields to requests, then follow commands."""
        config = self._config
        while seconds > 0:
            look = config.loaded_look_seconds if self._loaded else config.look_seconds
            slept = min(seconds, look) if self._job_runs else seconds
            await self._sleep(slept)
            seconds -= slept
            self._give_way()
        await self._follow()

    def _give_way(self) -> None:
        """Pause the job under load, and with few requests for a part of the time: see Slowdown."""
        state, status, now = self._engine.state, self.status, self._clock()
        self._activity.note_running(state.running)
        self._loaded = max(state.running, self._engine.num_requests) > self._config.max_running
        status.paused = state.waiting > 0 or self._loaded
        is_its_turn = self._activity.is_pause() or self._slowdown.may_work(now)
        paused = status.paused or not is_its_turn
        self._jobs.pause(paused)
        self._activity.note_stopped(paused)
        status.slowdown, status.computed_seconds = self._slowdown.ratio(), self._activity.computed

    async def _follow(self) -> None:
        """Serve the head that `current` names, at the start and after a command has changed it."""
        head = self._history.current()
        if head.number == self._promoted:
            return
        self._overruled = self.status.phase != "collecting"
        await self._serve_current()
        await self._tell("serves", head=self._in_engine, reason=f"the folder says {head.number}")

    async def _serve_current(self) -> None:
        """Let the current head draft; if it cannot be used, the one before it, and so on to the first.

        The folder's `current` is not changed: a head that could not be read may be readable the next time.
        """
        self._promoted = self._history.current().number
        for head in self._history.succession():
            try:
                await self._engine.replace_head(self._method, await asyncio.to_thread(self._load, head.path))
            except UnavailableError:
                raise
            except Exception as error:  # whatever is wrong with a head, or with the memory for it
                logger.warning("learn: head %d cannot be used: %s", head.number, error)
                continue
            self._in_engine = self.status.head = head.number
            break
        self._expected, self._low_points = self._level, 0  # it should draft as well as the previous one

    # --- status and history ---

    async def _reject(self, reason: str, evidence: Mapping[str, Any]) -> None:
        self.status.rejected += 1
        await self._tell("rejected", head=self._in_engine, reason=reason, evidence=dict(evidence))

    async def _tell(self, decision: str, **facts: Any) -> None:
        """Log a decision with its reason, and store it with all its evidence."""
        logger.info(
            "learn: %s, head %04d: %s", decision, facts["head"], facts.get("reason", "nothing better")
        )
        try:
            await asyncio.to_thread(self._history.note, decision, **facts)
        except OSError as error:  # a full disk: the log above has it
            logger.warning("learn: the decision could not be written: %s", error)


def _told(what: str, result: Outcome) -> str:
    return (
        f"{what} on live traffic: {result.speedup:.3f} times the tokens per second "
        f"({result.low:.3f} to {result.high:.3f}, {result.pairs} pairs of turns)"
    )
