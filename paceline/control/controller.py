"""The Controller protocol, and FixedController, which gives every request the same plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from paceline.core.trees import PLAIN, DraftPlan, DraftTrees

if TYPE_CHECKING:
    from paceline.core.request import Request
    from paceline.core.schedule import Scheduled
    from paceline.core.stats import ControlStats, StepStats


@dataclass(frozen=True, slots=True)
class Load:
    """How busy the engine is when a step is planned."""

    running: int
    waiting: int
    coming: int = 0  # waiting requests that have a free slot: they start now
    on_device: bool = False  # the device can draft for all running requests, and sample their tokens


@dataclass(slots=True)
class StepPlan:
    """What was decided for one step."""

    plans: list[DraftPlan]  # [running]
    record: Any = None  # the controller's notes, which it gets back with the step's statistics
    shadow: DraftPlan | None = None  # of shadow drafts: made by the host beside a plain pass, to learn


class Controller(Protocol):
    """Plans each step and learns from its statistics."""

    def plan(self, running: Sequence[Request], load: Load) -> StepPlan:
        """What each running request may draft in the next step. The step may not happen, or fail."""
        ...

    def device_plans(self) -> Sequence[DraftPlan]:
        """The plans that it may give to passes on the device: buffers and graphs are prepared for these."""
        return ()

    def expect(self, plan: DraftPlan, seconds: Mapping[int, float], catch_up: float | None = None) -> None:
        """Seconds of a plan's passes on the device by their number of requests, and per token of its head's
        catching up with a prompt, measured at start-up."""
        return  # not abstract

    def coming_plan(self, running: Sequence[Request], load: Load) -> DraftPlan:
        """The plan of the device passes that will follow a prefill of some of these requests. A head that
        drafts there catches up meanwhile."""
        return PLAIN

    def trim(self, step: StepPlan, parts: Sequence[Scheduled], trees: DraftTrees) -> DraftTrees:
        """The nodes of the trees that are worth verifying, by default all. The parts' plans name drafters.

        Nodes that were drawn at random must stay: if verification depended on their value, it would not be
        exact.
        """
        return trees

    def observe(self, step: StepPlan, stats: StepStats) -> None:
        """Learn from the statistics of a step. On the device, later steps may have been planned already."""
        return  # not abstract

    def stats(self) -> ControlStats | None:
        """What was decided for the last step; None before there was anything to decide."""
        return None

    def close(self) -> None:
        """The engine ends: write down what the next one can use."""
        return  # not abstract


class FixedController(Controller):
    """Gives requests the plan they ask for, and all others the same one; by default plain decoding."""

    def __init__(self, plan: DraftPlan = PLAIN) -> None:
        self._plan = plan

    def device_plans(self) -> Sequence[DraftPlan]:
        # chains: what more requests get than the trees have buffers for, see DeviceExecutor.fitting
        return (self._plan, self._plan.as_chain()) if self._plan.branching > 1 else (self._plan,)

    def coming_plan(self, running: Sequence[Request], load: Load) -> DraftPlan:
        return self._plan

    def plan(self, running: Sequence[Request], load: Load) -> StepPlan:
        return StepPlan([self._plan if request.plan is None else request.plan for request in running])
