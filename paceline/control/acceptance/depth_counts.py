"""Counts of drafts by depth: what the acceptance of chains and trees on the device is estimated from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


class DepthCounts:
    """Tried and accepted tokens by depth, and requests with and without a draft. New drafts fade them.

    Lists: for so few depths they are faster than arrays.
    """

    def __init__(self, tries: list[float], hits: list[float], asked: float, drafted: float) -> None:
        self.tries, self.hits = tries, hits  # [depth]
        self.asked, self.drafted = asked, drafted  # requests, and those of them with a draft

    def fade(self, factor: float, length: int, least: float) -> None:
        """Multiply the counts of the first `length` depths; those up to `least` stay."""
        for depth in range(length):
            if self.tries[depth] > least:
                self.tries[depth] *= factor
                self.hits[depth] *= factor
        if self.asked > least:
            self.asked, self.drafted = factor * self.asked, factor * self.drafted

    def add(
        self, weight: float, tries: Sequence[float], hits: Sequence[float], asked: int, drafted: int
    ) -> None:
        """Add `weight` times the counts of the first depths, and of requests."""
        for depth, (tried, hit) in enumerate(zip(tries, hits, strict=True)):
            self.tries[depth] += weight * tried
            self.hits[depth] += weight * hit
        self.asked += weight * asked
        self.drafted += weight * drafted


@dataclass
class NewDrafts:
    """The drafts of a few passes, each of which could have the same length or tree.

    Counts of chains and, for trees, of first children, which are what a chain would have had there.
    """

    tries: list[int]  # [length] drafts that were accepted down to there, and go on
    hits: list[int]  # [length] those of them whose next token was accepted
    requests: int = 0
    drafted: int = 0  # those of them with a draft
    passes: int = 0
