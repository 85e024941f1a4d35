"""The decision log: what the controller decided for a step and why, one line of JSON per change."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.control.controller import Load
from paceline.control.planner.search import Choice


@dataclass(frozen=True, slots=True)
class Decision:
    """A step's plan."""

    step: int
    reason: str  # gain | no gain | pair | stopped | probe: see docs/design/control.md
    load: Load
    drafts: tuple[tuple[str, str, int], ...]  # (request, drafters, most nodes)
    best: Choice  # expected of the best choice
    plain: Choice  # expected of the same step without drafts

    def facts(self) -> dict[str, Any]:
        """The line of the log. Seconds and tokens are those that were expected of the step."""
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
    """A file with a line for each decision that differs from the one before it."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", buffering=1, encoding="utf-8")
        self._last: tuple[object, ...] = ()

    def __call__(self, decision: Decision) -> None:
        key = (decision.reason, decision.load.running, decision.drafts)
        if key != self._last:
            self._last = key
            self._file.write(json.dumps(decision.facts()) + "\n")
