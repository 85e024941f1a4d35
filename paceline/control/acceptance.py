"""What drafts are worth: for each request, drafter and depth, the chance that a node is accepted.

The drafter says it, a calibration corrects it, and the request's own luck corrects that: the tokens that
drafts brought it lately, over those that they promised. What drafters said lately is kept too: it is what
they can be expected to say next. A request that is new is thought to be as its segment, a segment as all.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np

from paceline.control.calibration import MOST, Calibration
from paceline.control.cost import Float64Array

OWN = 8  # drafts of a request that are kept: those behind each other are alike, but not for long
KEPT = 96  # of a segment, and of all requests
OTHERS = 8  # drafts of its own that count as much for a request as those of its segment
ENOUGH = 16  # drafts of a segment with which those of others do not count for it
MOST_SEGMENTS = 256  # that have counts of their own: a client may name as many as it likes
FIRST_GUESS = 0.6  # what a drafter is thought to say that was never asked
GOES_ON = 0.75  # how drafts go on, of which none was seen
GOES_ON_RATE = 0.02  # how far a node moves the mean of how drafts go on
GOLDEN = 0.618034
LEAST_LUCK, MOST_LUCK = 0.05, 1.3
IDLE_FADE = 0.97  # what is left of luck at another choice

Said = Sequence[float]  # by node, descending: chances of the paths down to them
Key = tuple[str, int]  # of a request


@dataclass(slots=True)
class Luck:
    """Tokens that drafts brought over those that they promised, faded."""

    fade: float  # what is left after another draft
    doubt: float  # tokens that the luck of the level above counts for
    brought: float = 0.0
    promised: float = 0.0

    def add(self, brought: float, promised: float) -> None:
        self.brought = self.fade * self.brought + brought
        self.promised = self.fade * self.promised + promised

    def fade_away(self) -> None:
        """Forget a little: bad luck must not last because nothing is drafted after it."""
        self.brought *= IDLE_FADE
        self.promised *= IDLE_FADE

    def ratio(self, above: float) -> float:
        """Of what was promised; `above` is what is thought if nothing is known."""
        return max(LEAST_LUCK, (self.brought + self.doubt * above) / (self.promised + self.doubt))


@dataclass(slots=True)
class Level:
    """What is known of a request or of a segment."""

    luck: Luck
    said: deque[list[float]]  # newest first
    idle: int = 0  # choices since the newest


class AcceptanceModel:
    """The worth of one drafter's drafts."""

    def __init__(self, depth: int) -> None:
        """Drafts have at most so many nodes."""
        self.depth = depth
        self.drafts = 0  # that were observed
        self.calibration = Calibration()
        self.said: deque[list[float]] = deque(maxlen=KEPT)  # of all requests, newest first
        self._goes_on = GOES_ON  # what is said of a node over what was said of the one before it
        self._all = Luck(fade=0.97, doubt=15.0)
        self._segments: dict[str, Level] = {}
        self._requests: dict[Key, Level] = {}

    def offer(self, key: Key, segment: str, said: Said, asked: int, least: float = 0.0) -> None:
        """Take in what the drafter said when it was asked for so many nodes of at least such a chance."""
        kept = self._prolonged(said, asked, least)
        self.said.appendleft(kept)
        for level in self._levels(key, segment):
            level.said.appendleft(kept)
            level.idle = 0

    def _prolonged(self, said: Said, asked: int, least: float) -> list[float]:
        """As long as drafts can be: behind what is known, it goes on as drafts usually go on.

        A draft that ended before it had to was not likely enough to go on; how likely, nobody said.
        """
        kept = list(said[: self.depth])
        for node, before in enumerate(kept, start=1):
            if node < min(asked, self.depth) and before > 0.0:
                after = kept[node] if node < len(kept) else 0.5 * least
                self._goes_on += GOES_ON_RATE * (after / before - self._goes_on)
        last = kept[-1] * self._goes_on if kept else 1.0
        if len(kept) < asked:
            last = min(last, 0.5 * least)
        while len(kept) < self.depth:
            kept.append(last)
            last *= self._goes_on
        return kept

    def observe(self, key: Key, segment: str, said: Said, right: Sequence[bool]) -> None:
        """Take in what became of nodes that were verified."""
        self.drafts += 1
        promised = sum(self.calibration.chances(said))
        self.calibration.add(said, right)
        self._all.add(sum(right), promised)
        for level in self._levels(key, segment):
            level.luck.add(sum(right), promised)

    def _levels(self, key: Key, segment: str) -> Iterable[Level]:
        if segment not in self._segments and len(self._segments) < MOST_SEGMENTS:
            self._segments[segment] = Level(Luck(fade=0.98, doubt=40.0), deque(maxlen=KEPT))
        if segment in self._segments:
            yield self._segments[segment]
        if key not in self._requests:
            self._requests[key] = Level(Luck(fade=0.97, doubt=15.0), deque(maxlen=OWN))
        yield self._requests[key]

    def luck(self, key: Key, segment: str) -> float:
        """How much more than others this request gets of what is promised.

        What all of them get less is the calibration's to correct, and must not count twice.
        """
        above, own, usual = self._segments.get(segment), self._requests.get(key), self._all.ratio(1.0)
        ratio = usual if above is None else above.luck.ratio(usual)
        luck = (ratio if own is None else own.luck.ratio(ratio)) / usual
        return min(max(luck, LEAST_LUCK), MOST_LUCK)

    def chances(self, key: Key, segment: str, said: Said) -> list[float]:
        """What is to be believed of the nodes of one draft."""
        luck = self.luck(key, segment)
        return [min(MOST, luck * chance) for chance in self.calibration.chances(said)]

    def scenes(self, requests: Sequence[tuple[Key, str]], count: int) -> Float64Array:
        """[count, requests, nodes] chances of the drafts that requests may get, as they were lately.

        From now on all that was observed counts.
        """
        self.calibration.fit()
        self._all.fade_away()
        for level in (*self._segments.values(), *self._requests.values()):
            level.luck.fade_away()
            level.idle += 1
        said = [self._alike(key, segment, count) for key, segment in requests]
        lucks = np.array([self.luck(key, segment) for key, segment in requests])
        values = np.array(said)  # [requests, scenes, nodes]
        believed = self.calibration.of_array(values) * (lucks[:, None, None] * (values > 0.0))
        scenes: Float64Array = np.minimum(believed, MOST).swapaxes(0, 1)
        return scenes

    def _alike(self, key: Key, segment: str, count: int) -> list[list[float]]:
        """[count] drafts that stand for a request's next: a few of its own, others of its segment or of all.

        Its own soon say nothing if no more are made: where they were poor, it would never get any again.
        """
        own, above = self._requests.get(key), self._segments.get(segment)
        alike = [] if own is None else [*islice(own.said, OWN >> (own.idle - 1))]
        others = [] if above is None else [*above.said]
        if not self.said:
            return [[FIRST_GUESS ** (node + 1) for node in range(self.depth)]] * count
        mine = count * len(alike) // (len(alike) + OTHERS)
        ours = (count - mine) * min(len(others), ENOUGH) // ENOUGH
        return _lately(alike, mine) + _lately(others, ours) + _lately([*self.said], count - mine - ours)

    def keep_only(self, requests: set[Key]) -> None:
        """Forget the other requests."""
        self._requests = {key: level for key, level in self._requests.items() if key in requests}

    def facts(self) -> dict[str, Any]:
        """What another model can begin with, as JSON has it."""
        said = [[round(chance, 4) for chance in own] for own in self.said]
        return {"drafts": self.drafts, "counts": self.calibration.counts(), "said": said}

    def begin_with(self, facts: Mapping[str, Any]) -> None:
        """Take in what was learned before; ValueError, TypeError or KeyError if that makes no sense."""
        calibration, drafts = Calibration.of_counts(facts["counts"]), int(facts["drafts"])
        said = [[min(max(float(chance), 0.0), 1.0) for chance in own[: self.depth]] for own in facts["said"]]
        self.calibration, self.drafts = calibration, drafts
        self.said.extend(own + [0.0] * (self.depth - len(own)) for own in said[:KEPT])


def _lately(drafts: Sequence[list[float]], count: int) -> list[list[float]]:
    """So many of the drafts, half of them of the newest quarter; not at even distances: they take turns."""
    moments = ((part + part * GOLDEN % 1.0) / count for part in range(count))
    return [drafts[int(len(drafts) * moment * moment)] for moment in moments]
