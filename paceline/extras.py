"""What is installed only if it is asked for: `pip install 'paceline[EXTRA]'`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from paceline.errors import ConfigError, PacelineError


@contextmanager
def needs_extra(extra: str, what: str, error: type[PacelineError] = ConfigError) -> Iterator[None]:
    """A block in which `what` imports what the extra installs; an error says so where it is missing."""
    try:
        yield
    except ModuleNotFoundError as missing:
        if missing.name is None or missing.name.partition(".")[0] == "paceline":  # a fault of our own
            raise
        raise error(
            f"{what} needs the module {missing.name}: run `pip install 'paceline[{extra}]'`."
        ) from missing
