"""LearnFolder: what is where in the folder of --learn-dir."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class LearnFolder:
    """The folder in which a server keeps what it learns."""

    root: Path

    @property
    def traffic(self) -> Path:
        """The TrafficStore."""
        return self.root / "traffic"

    @property
    def heads(self) -> Path:
        """The heads that served, and which one does now."""
        return self.root / "heads"

    @property
    def candidate(self) -> Path:
        """The head that the trainer writes."""
        return self.root / "candidate"
