"""The folder paceline keeps between runs: models it fetched and kernels it compiled."""

from __future__ import annotations

import os
from pathlib import Path


def paceline_home() -> Path:
    """`$PACELINE_HOME`, or `paceline` under the user's cache folder."""
    named = os.environ.get("PACELINE_HOME")
    if named:
        return Path(named).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "paceline"
