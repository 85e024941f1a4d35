"""DrafterFaults: catches what drafters raise.

Drafting only makes requests faster, so no fault of a drafter may fail one: its requests continue with plain
decoding.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.core.request import Request

logger = logging.getLogger(__name__)


class DrafterFaults:
    """Isolates calls of drafters. One that raises never drafts for the same requests again."""

    def __init__(self) -> None:
        self.active: str | None = None  # the drafter that is being called now, for the watchdog
        self.count = 0  # calls that raised, since the start

    def isolated(self, name: str, requests: Sequence[Request]) -> Isolation:
        """A context for a call of a drafter over these requests. It suppresses what the drafter raises."""
        return Isolation(self, name, requests)

    def note(self, name: str, requests: Sequence[Request], error: Exception) -> None:
        """Count what a drafter raised: it is not used again for these requests."""
        for request in requests:
            request.failed_drafters.add(name)
        once = not self.count  # one traceback is enough
        self.count += 1
        logger.warning(
            "drafter %s failed, its requests continue without it: %s",
            name,
            error,
            exc_info=error if once else None,
        )


@dataclass(slots=True)
class Isolation:
    """A context for one call of a drafter. Not a generator: every pass opens several."""

    faults: DrafterFaults
    name: str
    requests: Sequence[Request]

    def __enter__(self) -> None:
        self.faults.active = self.name

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        self.faults.active = None
        if not isinstance(error, Exception):  # none, or the process is told to end
            return False
        self.faults.note(self.name, self.requests, error)  # drafters are plug-ins: they may raise anything
        return True
