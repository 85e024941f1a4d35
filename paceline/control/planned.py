"""What requests are asked to draft in a step, and what came of it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from paceline.control.acceptance import Key
from paceline.control.choice import BoolArray, Choice
from paceline.control.cost import Call
from paceline.control.floor import Floor
from paceline.control.probes import Probe
from paceline.draft.trees import DraftPlan

if TYPE_CHECKING:
    from paceline.engine.request import Request

NO_OPINION = 0.7  # what is said of each token for a drafter that says nothing


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
    tried: bool = False  # whether something is verified even if it seems to be worth nothing
    late: int = 0  # tokens that the last of them has to catch up with, if it is asked
    drafter: str = ""  # who drafted
    size: int = 0  # nodes that were drafted
    first: int = 0  # the first of them in the batch
    said: list[float] = field(default_factory=list)  # [nodes] that are verified: what was said of them
    depths: list[int] = field(default_factory=list)  # [nodes] the first level is 1

    def drafted(self, drafter: str, first: int, chances: Sequence[float], parents: Sequence[int]) -> None:
        """Take in the draft; NaN: its drafter has no opinion."""
        self.drafter, self.first, self.size = drafter, first, len(parents)
        for parent in parents:
            self.depths.append(self.depths[parent] + 1 if parent >= 0 else 1)
        for chance, depth in zip(chances, self.depths, strict=True):
            self.said.append(NO_OPINION**depth if math.isnan(chance) else chance)

    def keep_only(self, keep: BoolArray) -> None:
        """Forget what is not verified: [nodes of the batch]."""
        own = keep[self.first : self.first + self.size].tolist()
        self.said = [said for said, stays in zip(self.said, own, strict=True) if stays]
        self.depths = [depth for depth, stays in zip(self.depths, own, strict=True) if stays]


@dataclass(frozen=True, slots=True)
class Planned:
    """What was decided for the step that runs now."""

    asked: dict[Key, Asked]
    choice: Choice  # what would be done without floor and probes
    floor: Floor
    probe: Probe | None

    def calls(self, plans: Mapping[str, DraftPlan]) -> list[Call]:
        """The calls of drafters, which have these plans."""
        sizes: dict[str, list[int]] = {}
        late = dict.fromkeys(plans, 0)
        for asked in self.asked.values():
            for name in asked.names:
                sizes.setdefault(name, []).append(asked.size if name == asked.drafter else 0)
                late[name] += asked.late if name == asked.names[-1] else 0
                if name == asked.drafter:
                    break  # those behind it were not asked
        return [
            Call(name, len(own), min(max(own), plans[name].levels), sum(own), late[name])
            for name, own in sizes.items()
        ]
