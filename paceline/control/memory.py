"""What the controller has learned, kept in a file from one start to the next."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline import __version__
from paceline.bench.machine import cpu_name
from paceline.home import paceline_home

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Memory:
    """A file of facts. That it cannot be read or written is no reason not to run."""

    path: Path

    @classmethod
    def of(cls, identity: str) -> Memory:
        """That of what runs here: `identity` says which weights run how."""
        facts = f"{__version__} {identity} {cpu_name()} {os.cpu_count()}"
        return cls(paceline_home() / "costs" / f"{hashlib.sha256(facts.encode()).hexdigest()[:24]}.json")

    def read(self) -> Mapping[str, Any]:
        """What is kept; nothing if that is not usable."""
        try:
            kept = json.loads(self.path.read_text())
        except (OSError, ValueError):
            return {}
        return kept if isinstance(kept, dict) else {}

    def write(self, facts: Mapping[str, Any]) -> None:
        """Keep these facts instead, in one move."""
        own = self.path.with_suffix(f".{os.getpid()}")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            own.write_text(json.dumps(facts))
            own.replace(self.path)
        except OSError as error:
            logger.warning("what the controller has learned could not be kept: %s", error)
