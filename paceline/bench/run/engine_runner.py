"""Requests to an engine in this process, arriving by a profile."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from paceline.bench.run.slices import ContestantClock, Disturbances, alone
from paceline.bench.run.turns import Answer, Slices, Turn
from paceline.bench.traffic.profiles import Profile
from paceline.bench.traffic.schemas import fits_schema
from paceline.core.params import SamplingParams
from paceline.core.request import Request
from paceline.engine.engine import Delta, Engine
from paceline.errors import ConfigError, RequestError

WARM_UP_TOKENS, WARM_UP_REQUESTS = 16, 4


@dataclass(frozen=True)
class Task:
    """One prompt of a workload, tokenized, with its sampling parameters."""

    id: str
    segment: str
    token_ids: list[int]
    params: SamplingParams
    cache_salt: str = ""  # tasks of different salts see nothing of each other's prompts and responses


class EngineRunner:
    """An engine for one contestant."""

    def __init__(
        self,
        engine: Engine,
        disturbances: Disturbances | None = None,
        clock: Callable[[], float] = time.perf_counter,
        whole: bool = False,
    ) -> None:
        """`disturbances`: lost time to exclude, shared by all contestants; None: all time counts.

        `whole`: turns are not cut into slices, because passes in flight would run during those of others.
        """
        self._engine = engine
        self._disturbances = disturbances
        self._clock = clock
        self._whole = whole

    def slices(self, group: Sequence[Task], profile: Profile) -> Slices:
        """All answers, timed by a clock that counts only this engine's work. That work delays arrivals, as it
        would in a server; in an open profile, times still count from when a request was due."""
        engine = self._engine
        waiting = deque(enumerate(group))
        started: dict[Request, _Started] = {}
        running, lost_seconds = 0, 0.0
        clock = ContestantClock(self._clock)
        while waiting or engine.has_unfinished:
            if clock.slice_is_over and not self._whole:
                clock.pause()
                yield
                clock.resume()
            now = clock.now()
            while waiting and _may_come(profile, waiting[0][0], now, running):
                index, task = waiting.popleft()
                arrival = now if profile.concurrency is not None else profile.due[index]
                started[self._add(task, profile, index)] = _Started(arrival)
                running += 1
            if not engine.has_unfinished:
                clock.skip_to(profile.due[waiting[0][0]])  # only open profiles leave it idle
                continue
            deltas, lost = self._step()
            clock.exclude(lost)
            lost_seconds += lost
            now = clock.now()
            for delta in deltas:
                if delta.token_ids:
                    started[delta.request].note(now, len(delta.token_ids))
                if delta.request.finished:
                    started[delta.request].end(now)
                    running -= 1
        seconds = clock.now()
        answers = [_answer(request, notes) for request, notes in started.items()]
        return Turn(seconds, answers, lost_seconds=lost_seconds)

    def run(self, group: Sequence[Task], profile: Profile) -> Turn:
        """The same, without other contestants."""
        return alone(self.slices(group, profile))

    def warm_up(self, group: Sequence[Task], profile: Profile) -> None:
        """Answer briefly, alone and concurrently, so that all code is compiled."""
        short = [
            replace(task, params=replace(task.params, max_tokens=WARM_UP_TOKENS))
            for task in group[:WARM_UP_REQUESTS]
        ]
        self.run(short[:1], Profile("alone"))
        self.run(short, Profile("at once", min(profile.concurrency or len(short), len(short))))

    def close(self) -> None:
        self._engine.close()

    def _step(self) -> tuple[list[Delta], float]:
        """A step's deltas, and the seconds that it lost to other programs."""
        if self._disturbances is None:
            return self._engine.step(), 0.0
        before = self._disturbances.waited()
        deltas = self._engine.step()
        waited = self._disturbances.waited() - before
        return deltas, self._disturbances.in_step(self._engine.stats, waited)

    def _add(self, task: Task, profile: Profile, index: int) -> Request:
        params = task.params
        if profile.lengths:
            params = replace(params, max_tokens=min(params.max_tokens or 1, profile.lengths[index]))
        try:
            (request,) = self._engine.add_request(
                task.token_ids, params, segment=task.segment, cache_salt=task.cache_salt
            )
        except RequestError as error:
            raise ConfigError(f"prompt {task.id!r} cannot be run: {error}") from None
        return request


class _Started:
    """Arrival and progress of a request."""

    def __init__(self, arrival: float) -> None:
        self.arrival = arrival
        self.times: list[float] = []
        self.gains: list[int] = []
        self.e2e_seconds = 0.0

    def note(self, now: float, num_tokens: int) -> None:
        self.times.append(now - self.arrival)
        self.gains.append(num_tokens)

    def end(self, now: float) -> None:
        self.e2e_seconds = now - self.arrival


def _may_come(profile: Profile, index: int, now: float, running: int) -> bool:
    if profile.concurrency is not None:
        return running < profile.concurrency
    return profile.due[index] <= now


def _answer(request: Request, notes: _Started) -> Answer:
    if request.error is not None:
        raise request.error
    return Answer(
        token_ids=request.output_token_ids,
        num_tokens=request.num_output,
        times=tuple(notes.times),
        e2e_seconds=notes.e2e_seconds,
        text=request.detokenizer.text,
        gains=tuple(notes.gains),
        speculative=request.speculative,
        failed_drafters=tuple(sorted(request.failed_drafters)),
        finished=request.finish_reason == "stop",
        valid=fits_schema(request.detokenizer.text, request.params.structure),
    )


def run_group(engine: Engine, group: Sequence[Task]) -> Turn:
    """The turn of a group of requests that all arrive at once."""
    return EngineRunner(engine).run(group, Profile("at once", len(group)))
