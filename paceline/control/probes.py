"""Trying what was not chosen, for a share of the time that is fixed beforehand.

Every step earns a little time. When there is enough to pay for a draft that is not the best choice, one is
tried; what it costs more than it brings is paid from there, and what it brings more than it costs is paid in.
A draft that paid for itself is tried again at once: this is how a drafter that has become good is noticed
within a few steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from paceline.core.request import Request

SHARE = 0.004  # of all time
MOST = 12  # steps' time that can be kept for later


@dataclass(frozen=True, slots=True)
class Probe:
    """A draft that is tried."""

    request: tuple[str, int]
    line: int  # of the request in the batch
    drafter: str
    length: int
    needed: float  # tokens that pay for it
    rate: float  # tokens per second of the best choice


class Probes:
    """Time for trying, and who is tried next."""

    def __init__(self, drafters: Sequence[str], credit: float) -> None:
        """So many seconds may be spent before they are earned."""
        self._drafters = list(drafters)
        self._account = credit  # seconds
        self._turn = 0
        self._won: tuple[tuple[str, int], str] | None = None
        self.regret = 0.0  # seconds that were paid, less those that were won

    @property
    def won(self) -> bool:
        """Whether the last probe paid for itself."""
        return self._won is not None

    def earn(self, seconds: float) -> None:
        """Take in that a step has passed."""
        self._account = min(self._account + SHARE * seconds, max(self._account, MOST * seconds))

    def next(self, step: int, requests: Sequence[Request]) -> tuple[int, str]:
        """The line of a request and a drafter that might be tried for it."""
        if self._won is not None:
            (request, child), drafter = self._won
            self._won = None
            for line, candidate in enumerate(requests):
                if candidate.request_id == request and candidate.child == child:
                    return line, drafter
        self._turn += 1
        return step % len(requests), self._drafters[self._turn % len(self._drafters)]

    def can_afford(self, probe: Probe) -> bool:
        """Whether there is time for a probe, even if it brings nothing."""
        return self._account >= max(0.0, probe.needed) / probe.rate

    def observe(self, probe: Probe, accepted: int) -> None:
        """Take in what a probe brought."""
        if accepted > probe.needed:
            self._won = (probe.request, probe.drafter)
        paid = (probe.needed - accepted) / probe.rate
        self._account -= paid
        self.regret += paid
