"""Memory: the file in which the controller's models survive a restart."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.home import paceline_home, warn_unusable
from paceline.machine import cpu_name
from paceline.version import __version__

if TYPE_CHECKING:
    from paceline.control.acceptance.model import AcceptanceModel
    from paceline.control.cost.model import CostModel
    from paceline.control.planner.device import DevicePlanner

logger = logging.getLogger(__name__)

MAX_BYTES = 10_000_000  # of the file: a hundred times what several drafters need


@dataclass(frozen=True)
class Memory:
    """A JSON file of facts. An engine also runs if it cannot be read or written."""

    path: Path

    @classmethod
    def of(cls, identity: str) -> Memory:
        """The file for this machine; `identity` names the weights, the backend and its options."""
        facts = f"{__version__} {identity} {cpu_name()} {os.cpu_count()}"
        return cls(paceline_home() / "costs" / f"{hashlib.sha256(facts.encode()).hexdigest()[:24]}.json")

    def read(self) -> Mapping[str, Mapping[str, Any]]:
        """The facts by section; nothing if the file is unusable, which the next write replaces."""
        try:
            with self.path.open("rb") as file:
                content = file.read(MAX_BYTES + 1)
        except OSError:
            return {}
        try:
            kept = json.loads(content)
        except (ValueError, RecursionError) as error:
            return self._refused(f"not JSON, or more than {MAX_BYTES} bytes of it ({str(error)[:80]})")
        if not isinstance(kept, dict) or not all(isinstance(section, dict) for section in kept.values()):
            return self._refused("not an object of objects")
        return kept

    def _refused(self, reason: str) -> Mapping[str, Mapping[str, Any]]:
        logger.warning("%s is damaged: %s. It is measured again and replaced.", self.path, reason)
        return {}

    def write(self, facts: Mapping[str, Any]) -> None:
        """Replace the facts, atomically."""
        own = self.path.with_suffix(f".{os.getpid()}")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            own.write_text(json.dumps(facts))
            own.replace(self.path)
        except OSError as error:
            with suppress(OSError):
                own.unlink()
            warn_unusable("what the controller has learned", self.path.parent, error)


def restore(
    facts: Mapping[str, Any],
    costs: CostModel,
    acceptance: AcceptanceModel,
    device: DevicePlanner | None = None,
) -> None:
    """Start the models from facts, as far as they make sense."""
    try:
        costs.drafts.begin_with(facts.get("draft_calls", {}))
        for (name, greedy), model in acceptance.drafters.items():
            model_facts = facts.get("models", {}).get(_section(name, greedy))
            if model_facts is not None:
                model.begin_with(model_facts)
        if device is not None and "device" in facts:
            device.begin_with(facts["device"])
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        logger.warning("part of what the controller had learned makes no sense: %r. It learns anew.", error)


def save(
    memory: Memory, costs: CostModel, acceptance: AcceptanceModel, device: DevicePlanner | None = None
) -> None:
    """Write the models to the memory, which also keeps its facts about other drafters."""
    models = {_section(*key): model.facts() for key, model in acceptance.drafters.items() if model.drafts}
    before = memory.read()
    memory.write(
        {
            "steps": costs.passes.facts(),
            "draft_calls": {**before.get("draft_calls", {}), **costs.drafts.facts()},
            "models": {**before.get("models", {}), **models},
            **({} if device is None else {"device": device.facts()}),
        }
    )


def _section(drafter: str, greedy: bool) -> str:
    return f"{drafter} greedy" if greedy else drafter
