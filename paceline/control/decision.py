"""What the controller decided for a step and why: one line of JSON for each decision that differs."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.control.choice import Choice
from paceline.control.controller import Load


@dataclass(frozen=True, slots=True)
class Decision:
    """A step's plan."""

    step: int
    reason: str  # gain | no gain | pair | stopped | probe: see docs/control.md
    load: Load
    drafts: tuple[tuple[str, str, int], ...]  # (request, drafter, most nodes) of those that draft
    best: Choice  # what is expected of the best choice
    plain: Choice  # and of the same step without drafts

    def facts(self) -> dict[str, Any]:
        """What is written down. Seconds and tokens are what was expected of the step."""
        step = self.best if self.reason in ("gain", "probe") else self.plain
        return {
            "step": self.step,
            "reason": self.reason,
            "running": self.load.running,
            "waiting": self.load.waiting,
            "drafts": self.drafts,
            "tokens": step.tokens,
            "seconds": step.seconds,
            "plain_tokens": self.plain.tokens,
            "plain_seconds": self.plain.seconds,
            "gain": round(step.rate / self.plain.rate, 3),
        }


class DecisionLog:
    """A file with a line for each decision that is not the one before it."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", buffering=1, encoding="utf-8")
        self._last: tuple[object, ...] = ()

    def __call__(self, decision: Decision) -> None:
        said = (decision.reason, decision.load.running, decision.drafts)
        if said != self._last:
            self._last = said
            self._file.write(json.dumps(decision.facts()) + "\n")
