"""What the controller decided for a step and why: one line of JSON for each decision that differs."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Decision:
    """A step's plan. Seconds and tokens are what was expected of it."""

    step: int
    reason: str  # gain | no gain | pair | stopped | probe: see docs/control.md
    running: int
    waiting: int
    drafts: tuple[tuple[str, str, int], ...]  # (request, drafter, most nodes) of those that draft
    tokens: float  # of the step
    seconds: float
    plain_tokens: float  # of the same step without drafts
    plain_seconds: float

    @property
    def gain(self) -> float:
        """Expected tokens per second, as many times those of plain decoding."""
        return self.tokens / self.seconds / (self.plain_tokens / self.plain_seconds)


class DecisionLog:
    """A file with a line for each decision that is not the one before it."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", buffering=1, encoding="utf-8")
        self._last: tuple[object, ...] = ()

    def __call__(self, decision: Decision) -> None:
        said = (decision.reason, decision.running, decision.drafts)
        if said != self._last:
            self._last = said
            self._file.write(json.dumps(asdict(decision) | {"gain": round(decision.gain, 3)}) + "\n")
