"""Optional dependencies: `pip install 'paceline[EXTRA]'`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from paceline.errors import ConfigError, PacelineError


@contextmanager
def needs_extra(extra: str, what: str, error: type[PacelineError] = ConfigError) -> Iterator[None]:
    """A context in which `what` imports an extra's packages; the error for a missing one names the extra."""
    try:
        yield
    except ModuleNotFoundError as missing:
        if missing.name is None or missing.name.partition(".")[0] == "paceline":  # an import error of our own
            raise
        raise error(
            f"{what} needs the module {missing.name}: run `pip install 'paceline[{extra}]'`."
        ) from missing
