"""LearnFolder: the files in the folder of --learn-dir."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

SALTS = "salts"
NOTHING_BETTER = 3  # exit status of a trainer that found no better head, or of a scorer that refuses one


@dataclass(frozen=True)
class LearnFolder:
    """The folder in which a server stores traffic and heads."""

    root: Path
    salt: str = ""  # hash of the salt that the heads learn from; empty: heads for all requests

    @property
    def traffic(self) -> Path:
        """The TrafficStore, of all salts: its rows name theirs."""
        return self.root / "traffic"

    @property
    def heads(self) -> Path:
        """The heads that have served, and which one serves now."""
        return self._own / "heads"

    @property
    def candidate(self) -> Path:
        """The head that the trainer writes."""
        return self._own / "candidate"

    @property
    def scores(self) -> Path:
        """The file of the scores of the candidate and of the head that serves."""
        return self._own / "scores.json"

    def salts(self) -> list[str]:
        """The hashes of the salts that have their own heads."""
        return sorted(path.name for path in (self.root / SALTS).glob("*"))

    @property
    def _own(self) -> Path:
        return self.root / SALTS / self.salt if self.salt else self.root
