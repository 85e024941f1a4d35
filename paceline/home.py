"""The folder that paceline keeps between runs: downloaded models and compiled kernels."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from paceline.errors import ConfigError

logger = logging.getLogger(__name__)

_unwritable: set[str] = set()  # what could not be stored and was already reported


def paceline_home() -> Path:
    """`$PACELINE_HOME`, or `paceline` under the user's cache folder."""
    named = os.environ.get("PACELINE_HOME")
    try:
        if named:
            return Path(named).expanduser()
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "paceline"
    except RuntimeError as error:  # a container's user without a home, or an unknown ~name
        raise ConfigError(
            f"there is no folder to keep models and kernels in ({error}). Set PACELINE_HOME to a folder that "
            "you may write to."
        ) from None


def warn_unusable(what: str, folder: Path, error: OSError) -> None:
    """Warn, once per process, that something cannot be stored: every start is then slower, nothing else."""
    if not _unwritable:
        logger.warning(
            "%s cannot be kept in %s (%s), so each start takes longer. Set PACELINE_HOME to a folder that "
            "you may write to, with 100 MB free.",
            what,
            folder,
            error.strerror,
        )
    _unwritable.add(what)
