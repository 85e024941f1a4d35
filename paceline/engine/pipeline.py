"""Passes on their way: scheduled, in flight, committed. Every pass goes through the same three records.

Schedule --executor.begin--> InFlight --wait--> StepResult --engine.commit--> tokens
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from paceline.control.controller import StepPlan
from paceline.core.features import Features
from paceline.core.request import Request
from paceline.core.schedule import Scheduled
from paceline.core.verdict import Verdict
from paceline.engine.step_stats import Shape

DEPTH = 2  # decode passes in flight when the oldest of them is read
PHASES = ("plan", "draft", "build", "forward", "verify", "commit")


class StepTimer:
    """Seconds that one step spends in each of the PHASES."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._last = clock()
        self.seconds = dict.fromkeys(PHASES, 0.0)

    def end(self, phase: str) -> None:
        """Charge the time since the last call to a phase."""
        now = self._clock()
        self.seconds[phase] += now - self._last
        self._last = now


@dataclass(frozen=True, slots=True)
class Schedule:
    """A pass that can begin: its KV is reserved."""

    parts: list[Scheduled]
    executor: Executor
    step_plan: StepPlan | None = None  # None: a pass over prompts, for which nothing was planned

    @property
    def requests(self) -> list[Request]:
        return [part.request for part in self.parts]


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a pass gave to its requests that have not ended meanwhile."""

    parts: list[Scheduled]
    verdicts: list[Verdict]
    shapes: list[Shape]  # of the drafts; empty if nothing was drafted
    features: Features | None
    num_rows: int
    attended: int  # keys of committed tokens that its rows read, summed over the rows


@dataclass(frozen=True, slots=True)
class InFlight:
    """A pass that has begun."""

    schedule: Schedule
    wait: Callable[[StepTimer], StepResult]  # waits for it, and verifies; raises what the pass was lost by
    skip: Callable[[], None]  # instead of wait: all of its requests have ended


class Executor(Protocol):
    """How a pass runs: its drafts made and its tokens chosen on the host, or on the device."""

    on_device: bool

    def begin(self, schedule: Schedule, timer: StepTimer) -> InFlight:
        """Begin a pass, behind those in flight."""
        ...


class Pipeline:
    """The passes in flight, oldest first."""

    def __init__(self) -> None:
        self._passes: deque[InFlight] = deque()

    def __len__(self) -> int:
        return len(self._passes)

    @property
    def num_decodes(self) -> int:
        """Passes in flight that decode on the device."""
        return sum([one.schedule.executor.on_device for one in self._passes])

    @property
    def prefilling(self) -> list[Request]:
        """Requests whose prompts a pass in flight computes beside those that decode."""
        return next(
            (one.schedule.requests for one in self._passes if not one.schedule.executor.on_device), []
        )

    def decodes(self, requests: Sequence[Request]) -> bool:
        """Whether all passes in flight are decodes, the last of them of exactly these requests."""
        if not self._passes or self.prefilling:
            return False
        return self._passes[-1].schedule.requests == requests

    def append(self, begun: InFlight) -> None:
        self._passes.append(begun)

    def pop(self) -> InFlight | None:
        """The oldest pass that has a request left; those before it are skipped."""
        while self._passes:
            oldest = self._passes.popleft()
            if not all(part.request.finished for part in oldest.schedule.parts):
                return oldest
            oldest.skip()
        return None

    def drop_decodes(self) -> list[Request]:
        """Take out all passes that decode on the device: one of them was lost. Their requests."""
        lost = [one for one in self._passes if one.schedule.executor.on_device]
        self._passes = deque(one for one in self._passes if not one.schedule.executor.on_device)
        return [part.request for one in lost for part in one.schedule.parts]


def failing(schedule: Schedule, error: Exception) -> InFlight:
    """A pass that was lost when it was to begin: whoever waits for it is told."""

    def wait(timer: StepTimer) -> StepResult:
        raise error

    return InFlight(schedule, wait, skip=lambda: None)
