"""The pipeline: every pass is a Schedule, then InFlight, then a StepResult.

Schedule --executor.begin--> InFlight --wait--> StepResult --engine._commit--> tokens
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from paceline.control.controller import StepPlan
from paceline.core.features import Features
from paceline.core.request import Request
from paceline.core.schedule import Scheduled
from paceline.core.trees import PLAIN, DraftPlan
from paceline.core.verdict import Verdict
from paceline.engine.step_stats import Shape

DEPTH = 2  # decode passes in flight when the oldest is read
PHASES = ("plan", "draft", "build", "forward", "verify", "commit")


class StepTimer:
    """Seconds that one step spends in each of the PHASES."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.last = clock()  # when the last phase ended
        self.seconds = dict.fromkeys(PHASES, 0.0)

    def end(self, phase: str) -> None:
        """Add the time since the last call to a phase."""
        now = self._clock()
        self.seconds[phase] += now - self.last
        self.last = now


@dataclass(slots=True)
class Schedule:
    """A pass that can start: its pages are reserved. Immutable by convention."""

    parts: list[Scheduled]
    executor: Executor
    step_plan: StepPlan | None = None  # None: a host pass beside device passes, which the controller ignores
    plan: DraftPlan = PLAIN  # of a pass on the device: the longest of its requests' plans
    requests: list[Request] = field(init=False)  # [parts]

    def __post_init__(self) -> None:
        self.requests = [part.request for part in self.parts]


@dataclass(frozen=True, slots=True)
class StepResult:
    """The result of a pass, for the requests that were not aborted while it ran."""

    parts: list[Scheduled]
    verdicts: list[Verdict]
    shapes: list[Shape]  # [parts] of the drafts; empty if nothing was drafted
    features: Features | None
    num_rows: int
    attended: int  # keys of committed tokens that its rows read, summed over the rows
    # [parts] accepted nodes of trees that the device has verified; empty otherwise
    paths: Sequence[tuple[int, ...]] = ()


@dataclass(frozen=True, slots=True)
class InFlight:
    """A pass that was started."""

    schedule: Schedule
    wait: Callable[[StepTimer], StepResult]  # waits for the pass and verifies; raises if the pass failed
    skip: Callable[[], None]  # call instead of wait if all of its requests have ended


class Executor(Protocol):
    """Runs passes. Drafts are made and tokens are sampled on the host or on the device."""

    on_device: bool

    def begin(self, schedule: Schedule, timer: StepTimer) -> InFlight:
        """Start a pass, after those in flight."""
        ...


class Pipeline:
    """The passes in flight, oldest first."""

    def __init__(self) -> None:
        self._passes: deque[InFlight] = deque()

    def __len__(self) -> int:
        return len(self._passes)

    @property
    def num_decodes(self) -> int:
        """The number of decode passes in flight on the device."""
        return sum([in_flight.schedule.executor.on_device for in_flight in self._passes])

    @property
    def on_host(self) -> dict[Request, int]:
        """The requests of the host passes in flight (one pass, or several prefills), and the tokens that each
        will have computed after them, without its draft."""
        return {
            part.request: part.start + part.num_tokens
            for in_flight in self._passes
            if not in_flight.schedule.executor.on_device
            for part in in_flight.schedule.parts
        }

    def decodes(self, requests: Sequence[Request]) -> bool:
        """Whether all passes in flight are decode passes, and the last one has exactly these requests."""
        if not self._passes or self.on_host:
            return False
        return self._passes[-1].schedule.requests == requests

    def append(self, begun: InFlight) -> None:
        self._passes.append(begun)

    def pop(self) -> InFlight | None:
        """The oldest pass with an unfinished request; passes before it are skipped. None if there is none."""
        while self._passes:
            oldest = self._passes.popleft()
            if not all(request.finished for request in oldest.schedule.requests):
                return oldest
            oldest.skip()
        return None

    def drop_decodes(self) -> list[Request]:
        """Remove all decode passes on the device, because one of them failed. Returns their requests."""
        lost = [in_flight for in_flight in self._passes if in_flight.schedule.executor.on_device]
        self._passes = deque(
            in_flight for in_flight in self._passes if not in_flight.schedule.executor.on_device
        )
        return [request for in_flight in lost for request in in_flight.schedule.requests]


def failing(schedule: Schedule, error: Exception) -> InFlight:
    """A pass that failed to start: waiting for it raises the error."""

    def wait(timer: StepTimer) -> StepResult:
        raise error

    return InFlight(schedule, wait, skip=lambda: None)
