"""Whether passes should wait for what the host drafts: by what such passes took and brought before.

A plain pass that runs ahead hides the host's work; one that is given drafts begins when the host has made
them, and an ordinary step takes longer still. How much longer depends on model, machine and load.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from paceline.engine.stats import StepStats

GIVEN, STEP = 1.5, 3.0  # times a plain pass, while nobody has seen one
RIGHT, BELIEVED = 0.5, 32.0  # share of drafted tokens that are right, and how many tokens that counts for
MEMORY = 0.98  # of counts, from draft to draft
RATE = 0.1  # how far a pass moves the time of its like
BACK = 0.01  # how far a time moves back to the usual with each draft that was not worth it: it may be old

Kind = tuple[bool, bool, int]  # of a pass: whether it ran ahead, whether it was drafted for, its requests


class Worth:
    """What is known of passes with drafts of the host."""

    def __init__(self) -> None:
        self._seconds: dict[Kind, float] = {}
        self._last: Kind | None = None
        self._drafted = self._right = 0.0  # tokens, lately

    def observe(self, stats: StepStats) -> None:
        """Take in a step."""
        kind = (stats.ahead, bool(stats.drafts), _bucket(stats.requests))
        last, self._last = self._last, kind
        if stats.failed or stats.prefill_tokens:
            self._last = None
            return
        if stats.drafts:
            self._fade()
            self._drafted += sum([draft.depth for draft in stats.drafts])
            self._right += sum([draft.accepted for draft in stats.drafts])
        elif last != kind:
            return  # the first plain pass behind others hid nothing
        usual = self._time(kind) or stats.total_time
        self._seconds[kind] = usual + RATE * (min(stats.total_time, 2 * usual) - usual)

    def waits(self, tokens: int, requests: int, ahead: bool) -> bool:
        """Whether a pass, or an ordinary step, with so many drafted tokens promises more than a plain one."""
        bucket = _bucket(requests)
        plain, usual = self._seconds.get((True, False, bucket)), GIVEN if ahead else STEP
        kind = (ahead, True, bucket)
        longer = usual if plain is None else self._seconds.get(kind, usual * plain) / plain
        right = (RIGHT * BELIEVED + self._right) / (BELIEVED + self._drafted)
        if tokens and 1 + right * tokens / requests >= longer:
            return True
        if tokens:
            self._fade()
            if plain is not None and kind in self._seconds:
                self._seconds[kind] += BACK * (usual * plain - self._seconds[kind])
        return False

    def _time(self, kind: Kind) -> float:
        """Seconds of such a pass; 0 if nothing is known."""
        ahead, drafted, bucket = kind
        if kind in self._seconds or not drafted:
            return self._seconds.get(kind, 0.0)
        return (GIVEN if ahead else STEP) * self._seconds.get((True, False, bucket), 0.0)

    def _fade(self) -> None:
        self._drafted *= MEMORY
        self._right *= MEMORY


def _bucket(requests: int) -> int:
    """The power of two that holds them."""
    return 1 << (requests - 1).bit_length()
