"""Which passes look up chains where they run, and which are plain: by what both kinds took and brought.

A pass that looks up waits for nobody, but has more rows. What these cost depends on model, machine and load,
and what they bring on the text. So the kind that gives more tokens in the same time has its turn, and now
and then the other one, for so few passes that trying it costs a hundredth at most.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from paceline.core.stats import StepStats

USUAL = 1.25  # times a plain pass, while nobody knows
EXPECTED, BELIEVED = 1.5, 16.0  # tokens of a pass that looks up, and how many passes that counts for at first
MEMORY = 0.99  # of what passes brought, from one pass of one request to the next
RATE = 0.1  # how far a pass moves the time of its kind
TRIED = 6  # passes of a try: what is in flight, and some whose times are not those of a change
LEAST = 32  # passes between two tries
MOST_LOST = 0.01  # of all passes, by tries

Kind = tuple[bool, int]  # of a pass: whether it looks up, its requests


class Turns:
    """What is known of passes that look up, beside plain ones."""

    def __init__(self) -> None:
        self._seconds: dict[Kind, float] = {}
        self._expected: dict[Kind, float] = {}
        self._last: Kind | None = None
        self._passes, self._tokens = BELIEVED, EXPECTED * BELIEVED  # of requests, lately, that looked up
        self._left, self._tried, self._since = 0, False, 0  # of a try; passes since the last one

    def expect(self, looks_up: bool, seconds: Mapping[int, float]) -> None:
        """Take in what such passes take before anybody has decoded, by the number of their requests."""
        self._expected.update({(looks_up, requests): own for requests, own in seconds.items()})

    def observe(self, stats: StepStats) -> None:
        """Take in a step."""
        kind = (stats.drafted > 0, _bucket(stats.requests))
        last, self._last = self._last, kind
        if stats.failed or stats.prefill_tokens or not stats.ahead:
            self._last = None
            return
        if kind[0]:
            kept = MEMORY**stats.requests
            self._passes = kept * self._passes + stats.requests
            self._tokens = kept * self._tokens + stats.new_tokens
        if last == kind:  # the first behind others has its rows written anew
            usual = self._seconds.get(kind, stats.total_time)
            self._seconds[kind] = usual + RATE * (min(stats.total_time, 2 * usual) - usual)

    def looks_up(self, requests: int) -> bool:
        """Whether the next pass should. Asked once for each."""
        plain, looking = self._times(_bucket(requests))
        gain = self._tokens / self._passes * plain / looking
        if not self._left:
            self._since += 1
            lost = TRIED * (max(gain, 1 / gain) - 1)
            if self._since >= max(LEAST, lost / MOST_LOST):
                self._left, self._tried, self._since = TRIED, gain < 1, 0
        if self._left:
            self._left -= 1
            return self._tried
        return gain >= 1

    def _times(self, bucket: int) -> tuple[float, float]:
        """Seconds of a plain pass and of one that looks up; what is not known follows from the other one."""
        plain, looking = self._expected.get((False, bucket)), self._expected.get((True, bucket))
        ratio = looking / plain if plain and looking else USUAL
        plain, looking = self._seconds.get((False, bucket)), self._seconds.get((True, bucket))
        if plain is None:
            plain = 1.0 if looking is None else looking / ratio
        return plain, plain * ratio if looking is None else looking


def _bucket(requests: int) -> int:
    """The power of two that holds them."""
    return 1 << (requests - 1).bit_length()
