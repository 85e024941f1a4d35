"""How deep drafts go and how deep they are right, for each request and drafter, learned from past drafts.

Three levels know something: all drafts of a drafter, those of a segment, those of a request. Each estimate
begins at that of the level above, as if it had been seen a few times, and follows its own counts as they
come. Counts fade with every draft, those of a request fastest: a text changes its topic.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

MOST_SEGMENTS = 256  # that have counts of their own: a client may name as many as it likes
FIRST_GUESS = 0.6  # chance of a first token of a drafter that nobody knows
Rates = tuple[list[float], list[float]]  # by depth: chance to be right, chance that the draft goes so deep


@dataclass(frozen=True, slots=True)
class Level:
    """How one level of counts learns."""

    fade: float  # what is left of its counts after another draft
    doubt: float  # drafts that the level above counts for


EVERYWHERE = Level(fade=0.995, doubt=4.0)
SEGMENT = Level(fade=0.99, doubt=6.0)
REQUEST = Level(fade=0.95, doubt=10.0)


class Counts:
    """Faded counts of drafts by depth. A depth is tried if all above it was right and more was asked for."""

    __slots__ = ("asked", "given", "level", "right", "tried")

    def __init__(self, depth: int, level: Level) -> None:
        self.level = level
        self.tried = [0.0] * depth  # [depth] drafts asked for this depth and right in all above
        self.right = [0.0] * depth  # [depth] those that were right here too
        self.asked = [0.0] * depth  # [depth] drafts asked for this depth that had all above
        self.given = [0.0] * depth  # [depth] those that had this depth too

    def add(self, asked: int, given: int, accepted: int) -> None:
        """Count a draft: levels it might have had, levels it had, levels that were right."""
        fade = self.level.fade
        for counts in (self.tried, self.right, self.asked, self.given):
            counts[:] = [fade * count for count in counts]
        for depth in range(min(asked, accepted + 1)):
            self.tried[depth] += 1.0
            self.right[depth] += depth < accepted
        for depth in range(min(asked, given + 1)):
            self.asked[depth] += 1.0
            self.given[depth] += depth < given

    def rates(self, above: Rates | None) -> Rates:
        """Chances by depth, each given all above it. Without a level above, a depth is thought to be as the
        one before it, until it is seen."""
        doubt = self.level.doubt
        rights: list[float] = []
        goings: list[float] = []
        right, going = FIRST_GUESS, 1.0
        for depth in range(len(self.tried)):
            if above is not None:
                right, going = above[0][depth], above[1][depth]
            right = (self.right[depth] + doubt * right) / (self.tried[depth] + doubt)
            going = (self.given[depth] + doubt * going) / (self.asked[depth] + doubt)
            rights.append(right)
            goings.append(going)
        return rights, goings


class AcceptanceModel:
    """Expected tokens and rows of the drafts of one drafter."""

    def __init__(self, depth: int) -> None:
        """Drafts have at most so many levels."""
        self._depth = depth
        self.drafts = 0  # that were observed
        self._everywhere = Counts(depth, EVERYWHERE)
        self._segments: dict[str, Counts] = {}
        self._requests: dict[tuple[str, int], Counts] = {}

    @property
    def depth(self) -> int:
        return self._depth

    def observe(self, request: tuple[str, int], segment: str, asked: int, given: int, accepted: int) -> None:
        """Take in what became of one draft: see Counts.add."""
        self.drafts += 1
        self._everywhere.add(asked, given, accepted)
        if segment not in self._segments and len(self._segments) < MOST_SEGMENTS:
            self._segments[segment] = Counts(self._depth, SEGMENT)
        if segment in self._segments:
            self._segments[segment].add(asked, given, accepted)
        if request not in self._requests:
            self._requests[request] = Counts(self._depth, REQUEST)
        self._requests[request].add(asked, given, accepted)

    def expected(
        self, requests: Sequence[tuple[tuple[str, int], str]]
    ) -> tuple[list[list[float]], list[list[float]]]:
        """Of (request, segment): [request][depth] tokens that a level adds, and rows that it takes."""
        by_segment: dict[str, Rates] = {}
        everywhere = self._everywhere.rates(None)
        tokens, rows = [], []
        for request, segment in requests:
            if segment not in by_segment:
                known = self._segments.get(segment)
                by_segment[segment] = everywhere if known is None else known.rates(everywhere)
            counts = self._requests.get(request)
            rights, goings = by_segment[segment] if counts is None else counts.rates(by_segment[segment])
            tokens.append(_products(rights))
            rows.append(_products(goings))
        return tokens, rows

    def keep_only(self, requests: set[tuple[str, int]]) -> None:
        """Forget the other requests."""
        self._requests = {key: counts for key, counts in self._requests.items() if key in requests}


def _products(chances: Sequence[float]) -> list[float]:
    """[depth] the chance that all up to this depth happen."""
    products, product = [], 1.0
    for chance in chances:
        product *= chance
        products.append(product)
    return products
