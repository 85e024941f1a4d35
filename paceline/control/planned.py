"""What requests are asked to draft in a step, and what came of it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from paceline.control.acceptance import Key
from paceline.control.choice import BoolArray, Choice
from paceline.control.floor import Floor
from paceline.control.probes import Probe
from paceline.core.trees import PLAIN, DraftPlan

if TYPE_CHECKING:
    from paceline.core.request import Request

SHORT = 3  # tokens that a request may still have: below, a draft has nothing to save
NO_OPINION = 0.7  # what is said of each token for a drafter that says nothing
SURPRISE = 10.0  # tokens that drafts brought less than was expected: what was chosen does not hold
FORGIVEN = 0.97  # what is left of them after another step


@dataclass(frozen=True, slots=True)
class Wish:
    """What was chosen for one request."""

    names: tuple[str, ...]  # drafters, in the order in which they are asked; none: plain decoding
    enough: float  # tokens that the first must promise for the second not to be asked


@dataclass(slots=True)
class Asked:
    """What one request is asked to draft in this step, and what came of it."""

    request: Request
    names: tuple[str, ...]  # drafters, in the order in which they are asked
    length: int  # most nodes
    enough: float = 0.0  # tokens that the first must promise for the second not to be asked
    tried: str = ""  # a drafter whose drafts are to teach: some is verified even if it seems worth nothing
    plan: DraftPlan = PLAIN
    late: int = 0  # tokens that the last of them has to catch up with, if it is asked
    drafter: str = ""  # who drafted
    size: int = 0  # nodes that were drafted
    first: int = 0  # the first of them in the batch
    said: list[float] = field(default_factory=list)  # [nodes] that are verified: what was said of them
    believed: list[float] = field(default_factory=list)  # [nodes] and what is to be believed
    depths: list[int] = field(default_factory=list)  # [nodes] the first level is 1

    def drafted(self, drafter: str, first: int, chances: Sequence[float], parents: Sequence[int]) -> None:
        """Take in the draft; NaN: its drafter has no opinion."""
        self.drafter, self.first, self.size = drafter, first, len(parents)
        for parent in parents:
            self.depths.append(self.depths[parent] + 1 if parent >= 0 else 1)
        for chance, depth in zip(chances, self.depths, strict=True):
            self.said.append(NO_OPINION**depth if math.isnan(chance) else chance)

    def told(self) -> tuple[str, str, int]:
        """For the log: the request, who is asked, and for how many nodes."""
        return f"{self.request.request_id}#{self.request.child}", "+".join(self.names), self.length

    def least_chance(self, drafter: str) -> float:
        """What a drafter must have said of a node for it to be drafted."""
        plan: DraftPlan | None = self.plan
        while plan is not None and plan.drafter != drafter:
            plan = plan.otherwise
        return 0.0 if plan is None else plan.least_chance

    def keep_only(self, keep: BoolArray) -> None:
        """Forget what is not verified: [nodes of the batch]."""
        own = keep[self.first : self.first + self.size].tolist()
        self.said = [said for said, stays in zip(self.said, own, strict=True) if stays]
        self.believed = [chance for chance, stays in zip(self.believed, own, strict=True) if stays]
        self.depths = [depth for depth, stays in zip(self.depths, own, strict=True) if stays]


@dataclass(slots=True)
class Shortfall:
    """Tokens that were expected since a choice was made, and did not come; older ones count less."""

    tokens: float = 0.0

    def add(self, expected: float, accepted: int, requests: int) -> bool:
        """Take in a step. Whether another choice is to be made."""
        self.tokens = FORGIVEN * (self.tokens + expected - accepted)
        return self.tokens > SURPRISE * math.sqrt(requests)


@dataclass(frozen=True, slots=True)
class Planned:
    """What was decided for the step that runs now."""

    asked: dict[Key, Asked]
    choice: Choice  # what would be done without floor and probes
    floor: Floor
    probe: Probe | None

    def late(self, drafter: str) -> int:
        """Tokens that a drafter has to catch up with, if it is asked."""
        return sum(asked.late for asked in self.asked.values() if asked.names[-1] == drafter)


def is_open(request: Request) -> bool:
    """Whether it is for the controller to say what a request drafts in this step."""
    if request.plan is not None or request.num_pending != 1:
        return False
    return request.max_output - request.num_output >= SHORT
