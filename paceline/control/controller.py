"""Who decides how much is drafted, and the one who leaves it at what was asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from paceline.core.trees import PLAIN, DraftPlan, DraftTrees

if TYPE_CHECKING:
    from paceline.core.request import Request
    from paceline.core.schedule import Scheduled
    from paceline.core.stats import ControlFacts, StepStats


@dataclass(frozen=True, slots=True)
class Load:
    """How busy the engine is when a step begins."""

    running: int
    waiting: int
    coming: int = 0  # of those who wait: there are slots for so many
    on_device: bool = False  # the device can draft for and choose the tokens of all running requests


@dataclass(slots=True)
class StepPlan:
    """What was decided for one step."""

    plans: list[DraftPlan]  # one for each running request, in order
    record: Any = None  # the controller's own: why, and what it expects
    shadow: DraftPlan | None = None  # by which the host drafts beside a plain pass on the device, to learn


class Controller(Protocol):
    """Plans each step and learns from its facts."""

    def plan(self, running: Sequence[Request], load: Load) -> StepPlan:
        """What each running request may draft in the next step. It may be for nothing: a step can fail."""
        ...

    def device_plans(self) -> Sequence[DraftPlan]:
        """The plans that it may give to all requests of a pass on the device: these are made ready."""
        return ()

    def expect(self, plan: DraftPlan, seconds: Mapping[int, float]) -> None:
        """Take in what passes on the device by a plan take, by the number of their requests."""
        return  # not abstract

    def trim(self, step: StepPlan, parts: Sequence[Scheduled], trees: DraftTrees) -> DraftTrees:
        """What is worth verifying of the trees, by default all. The parts' plans say who drafted each.

        What was drawn at random stays: if its verification depended on what it is, it would not be exact.
        """
        return trees

    def observe(self, step: StepPlan, stats: StepStats) -> None:
        """Take in what a step cost and gave. On the device later ones are planned already."""
        return  # not abstract

    def facts(self) -> ControlFacts | None:
        """What was decided for the last step; None if there was nothing to decide."""
        return None

    def close(self) -> None:
        """The engine ends: the place to write down what is to survive it."""
        return  # not abstract


class FixedController(Controller):
    """Gives every request what it asks for, and the others one plan; by default plain decoding."""

    def __init__(self, plan: DraftPlan = PLAIN) -> None:
        self._plan = plan

    def device_plans(self) -> Sequence[DraftPlan]:
        return (self._plan,)

    def plan(self, running: Sequence[Request], load: Load) -> StepPlan:
        return StepPlan([self._plan if request.plan is None else request.plan for request in running])
