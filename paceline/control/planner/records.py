"""Records of a step's drafts: what each request was asked to draft, and what it drafted."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from paceline.control.acceptance.drafter import Key
from paceline.control.config import CONFIG
from paceline.control.explorer import Probe
from paceline.control.guard import ABGuard
from paceline.control.planner.row_costs import BoolArray
from paceline.control.planner.search import Choice
from paceline.core.trees import PLAIN, DraftPlan

if TYPE_CHECKING:
    from paceline.core.request import Request


@dataclass(frozen=True, slots=True)
class DraftAssignment:
    """The drafters that a choice assigns to one request."""

    names: tuple[str, ...]  # in the order in which they are asked; none: plain decoding
    enough: float  # tokens that the first must promise for the second not to be asked


@dataclass(slots=True)
class DraftRecord:
    """What one request is asked to draft in this step, and its draft."""

    request: Request
    names: tuple[str, ...]  # drafters, in the order in which they are asked
    length: int  # most nodes
    enough: float = 0.0  # tokens that the first must promise for the second not to be asked
    explored: str = ""  # a drafter to learn about: one node is verified even if it seems worth nothing
    plan: DraftPlan = PLAIN
    catch_up: int = 0  # tokens that the last drafter has to catch up with, if it is asked
    drafter: str = ""  # the drafter that drafted
    size: int = 0  # drafted nodes
    first: int = 0  # index of the first of them in the batch
    confidences: list[float] = field(default_factory=list)  # [verified nodes]
    chances: list[float] = field(default_factory=list)  # [verified nodes] of being accepted
    depths: list[int] = field(default_factory=list)  # [verified nodes] the first level is 1

    def add_draft(
        self, drafter: str, first: int, confidences: Sequence[float], parents: Sequence[int]
    ) -> None:
        """Add the draft. A confidence of NaN means that its drafter reports none."""
        self.drafter, self.first, self.size = drafter, first, len(parents)
        for parent in parents:
            self.depths.append(self.depths[parent] + 1 if parent >= 0 else 1)
        for confidence, depth in zip(confidences, self.depths, strict=True):
            is_silent = math.isnan(confidence)
            self.confidences.append(CONFIG.acceptance.silent_chance**depth if is_silent else confidence)

    def logged(self) -> tuple[str, str, int]:
        """For the decision log: the request, its drafters, and the most nodes."""
        return f"{self.request.request_id}#{self.request.child}", "+".join(self.names), self.length

    def threshold(self, drafter: str) -> float:
        """The least confidence that a drafter was asked for."""
        plan: DraftPlan | None = self.plan
        while plan is not None and plan.drafter != drafter:
            plan = plan.otherwise
        return 0.0 if plan is None else plan.least_chance

    def keep_only(self, keep: BoolArray) -> None:
        """Drop the nodes that are not verified: [nodes of the batch]."""
        kept = keep[self.first : self.first + self.size].tolist()
        self.confidences = [value for value, stays in zip(self.confidences, kept, strict=True) if stays]
        self.chances = [chance for chance, stays in zip(self.chances, kept, strict=True) if stays]
        self.depths = [depth for depth, stays in zip(self.depths, kept, strict=True) if stays]


@dataclass(slots=True)
class Shortfall:
    """Expected minus accepted tokens of a choice, faded: older steps count less."""

    tokens: float = 0.0

    def add(self, expected: float, accepted: int, requests: int) -> bool:
        """Add a step. Returns whether the choice should be made again."""
        self.tokens = CONFIG.planner.shortfall_fade * (self.tokens + expected - accepted)
        return self.tokens > CONFIG.planner.max_shortfall * math.sqrt(requests)


@dataclass(frozen=True, slots=True)
class StepRecord:
    """What was decided for a step through the host."""

    drafts: dict[Key, DraftRecord]
    choice: Choice  # the best one, which the guard or a probe may have replaced
    guard: ABGuard
    probe: Probe | None

    def catch_up(self, drafter: str) -> int:
        """Tokens that a drafter has to catch up with, if it is asked."""
        return sum(record.catch_up for record in self.drafts.values() if record.names[-1] == drafter)


def is_open(request: Request) -> bool:
    """Whether the controller decides what a request drafts in this step."""
    if request.plan is not None or request.num_pending != 1:
        return False
    return request.max_output - request.num_output >= CONFIG.planner.min_tokens_left
