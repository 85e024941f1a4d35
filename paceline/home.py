"""The folder paceline keeps between runs: models it fetched and kernels it compiled."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from paceline.errors import ConfigError

logger = logging.getLogger(__name__)

_told: set[str] = set()  # what cannot be kept


def paceline_home() -> Path:
    """`$PACELINE_HOME`, or `paceline` under the user's cache folder."""
    named = os.environ.get("PACELINE_HOME")
    try:
        if named:
            return Path(named).expanduser()
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "paceline"
    except RuntimeError as error:  # a container's user without a name, or ~nobody-of-that-name
        raise ConfigError(
            f"there is no folder to keep models and kernels in ({error}). Set PACELINE_HOME to a folder that "
            "you may write to."
        ) from None


def tell_unusable(what: str, folder: Path, error: OSError) -> None:
    """Say, once in a process, that something cannot be kept: that costs time at every start, no more."""
    if not _told:
        logger.warning(
            "%s cannot be kept in %s (%s), so each start takes longer. Set PACELINE_HOME to a folder that "
            "you may write to, with 100 MB free.",
            what,
            folder,
            error.strerror,
        )
    _told.add(what)
