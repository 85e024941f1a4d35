"""DrafterFaults: catches what drafters raise.

Drafting only makes requests faster, so no fault of a drafter may fail one: its requests continue with plain
decoding.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from paceline.core.request import Request

logger = logging.getLogger(__name__)


class DrafterFaults:
    """Isolates calls of drafters. One that raises never drafts for the same requests again."""

    def __init__(self) -> None:
        self.active: str | None = None  # the drafter that is being called now, for the watchdog
        self.count = 0  # calls that raised, since the start

    @contextmanager
    def isolated(self, name: str, requests: Sequence[Request]) -> Iterator[None]:
        """A context for a call of a drafter over these requests. It suppresses what the drafter raises."""
        self.active = name
        try:
            yield
        except Exception as error:  # drafters are plug-ins: they may raise anything
            for request in requests:
                request.failed_drafters.add(name)
            once = not self.count  # one traceback is enough
            self.count += 1
            logger.warning(
                "drafter %s failed, its requests continue without it: %s", name, error, exc_info=once
            )
        finally:
            self.active = None
