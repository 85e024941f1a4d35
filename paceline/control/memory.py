"""What the controller has learned, kept in a file from one start to the next."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.home import paceline_home, tell_unusable
from paceline.machine import cpu_name
from paceline.version import __version__

logger = logging.getLogger(__name__)

MAX_BYTES = 10_000_000  # a hundred times what several drafters leave


@dataclass(frozen=True)
class Memory:
    """A file of facts. That it cannot be read or written is no reason not to run."""

    path: Path

    @classmethod
    def of(cls, identity: str) -> Memory:
        """That of what runs here: `identity` says which weights run how."""
        facts = f"{__version__} {identity} {cpu_name()} {os.cpu_count()}"
        return cls(paceline_home() / "costs" / f"{hashlib.sha256(facts.encode()).hexdigest()[:24]}.json")

    def read(self) -> Mapping[str, Mapping[str, Any]]:
        """What is kept, by section; nothing if that is not usable, which the next write replaces."""
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
        """Keep these facts instead, in one move."""
        own = self.path.with_suffix(f".{os.getpid()}")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            own.write_text(json.dumps(facts))
            own.replace(self.path)
        except OSError as error:
            with suppress(OSError):
                own.unlink()
            tell_unusable("what the controller has learned", self.path.parent, error)
