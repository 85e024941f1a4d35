"""What drafts are worth: for each request, drafter and depth, the chance that a node is accepted.

The drafter says it, a calibration corrects it, and the request's own luck corrects that: the tokens that
drafts brought it lately, over those that they promised. What drafters said lately is kept too: it is what
they can be expected to say next. A request that is new is thought to be as its segment, a segment as all.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
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


class Lately:
    """What was said of the last drafts."""

    def __init__(self, kept: int, depth: int) -> None:
        """Of so many drafts, of so many nodes each."""
        self._said = np.zeros((kept, depth))  # a ring
        self._newest = 0
        self.count = 0

    def add(self, said: Sequence[float]) -> None:
        """The newest draft: as many nodes as it may have."""
        self._newest = (self._newest or len(self._said)) - 1
        self._said[self._newest] = said
        self.count = min(self.count + 1, len(self._said))

    def some(self, count: int, newest: int = KEPT) -> Float64Array:
        """[count, nodes] so many of these drafts, half of them of the newest quarter of the newest ones."""
        ages = self._newest + (_moments(count) * min(self.count, newest)).astype(np.int64)
        return self._said[ages % len(self._said)]

    def listed(self) -> list[list[float]]:
        """All of them, newest first."""
        return [self._said[(self._newest + age) % len(self._said)].tolist() for age in range(self.count)]


@dataclass(slots=True)
class Level:
    """What is known of a request or of a segment."""

    luck: Luck
    said: Lately
    idle: int = 0  # choices since the newest


class AcceptanceModel:
    """The worth of one drafter's drafts."""

    def __init__(self, depth: int) -> None:
        """Drafts have at most so many nodes."""
        self.depth = depth
        self.drafts = 0  # that were observed
        self.calibration = Calibration()
        self.said = Lately(KEPT, depth)  # of all requests
        self._goes_on = GOES_ON  # what is said of a node over what was said of the one before it
        self._all = Luck(fade=0.97, doubt=15.0)
        self._segments: dict[str, Level] = {}
        self._requests: dict[Key, Level] = {}

    def offer(self, key: Key, segment: str, said: Said, asked: int, least: float = 0.0) -> None:
        """Take in what the drafter said when it was asked for so many nodes of at least such a chance."""
        kept = self._prolonged(said, asked, least)
        self.said.add(kept)
        for level in self._levels(key, segment):
            level.said.add(kept)
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
            self._segments[segment] = Level(Luck(fade=0.98, doubt=40.0), Lately(KEPT, self.depth))
        if segment in self._segments:
            yield self._segments[segment]
        if key not in self._requests:
            self._requests[key] = Level(Luck(fade=0.97, doubt=15.0), Lately(OWN, self.depth))
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

    def scenes(self, requests: Sequence[tuple[Key, str]], count: int, least: float = 0.0) -> Float64Array:
        """[count, requests, nodes] chances of the drafts that requests may get, as they were lately.

        Nodes of which less was said than `least` are not drafted.
        From now on all that was observed counts.
        """
        self.calibration.fit()
        self._all.fade_away()
        for level in (*self._segments.values(), *self._requests.values()):
            level.luck.fade_away()
            level.idle += 1
        said = [drafts for key, segment in requests for drafts in self._alike(key, segment, count)]
        lucks = np.array([self.luck(key, segment) for key, segment in requests])
        values = np.concatenate(said).reshape(len(requests), count, self.depth)
        believed = self.calibration.of_array(values) * (lucks[:, None, None] * (values > max(0.0, least)))
        scenes: Float64Array = np.minimum(believed, MOST).swapaxes(0, 1)
        return scenes

    def _alike(self, key: Key, segment: str, count: int) -> list[Float64Array]:
        """[count, nodes] drafts that stand for a request's next: a few of its own, others of its segment or
        of all.

        Its own soon say nothing if no more are made: where they were poor, it would never get any again.
        """
        if not self.said.count:
            return [np.broadcast_to(FIRST_GUESS ** np.arange(1, self.depth + 1), (count, self.depth))]
        own, above = self._requests.get(key), self._segments.get(segment)
        known = 0 if own is None else min(own.said.count, OWN >> (own.idle - 1))
        mine = count * known // (known + OTHERS)
        ours = 0 if above is None else (count - mine) * min(above.said.count, ENOUGH) // ENOUGH
        alike = [self.said.some(count - mine - ours)]
        if own is not None and mine:
            alike.append(own.said.some(mine, known))
        if above is not None and ours:
            alike.append(above.said.some(ours))
        return alike

    def keep_only(self, requests: set[Key]) -> None:
        """Forget the other requests."""
        self._requests = {key: level for key, level in self._requests.items() if key in requests}

    def facts(self) -> dict[str, Any]:
        """What another model can begin with, as JSON has it."""
        said = [[round(chance, 4) for chance in own] for own in self.said.listed()]
        return {"drafts": self.drafts, "counts": self.calibration.counts(), "said": said}

    def begin_with(self, facts: Mapping[str, Any]) -> None:
        """Take in what was learned before; ValueError, TypeError or KeyError if that makes no sense."""
        calibration, drafts = Calibration.of_counts(facts["counts"]), int(facts["drafts"])
        said = [[min(max(float(chance), 0.0), 1.0) for chance in own[: self.depth]] for own in facts["said"]]
        if not 0 <= drafts < 1e12:
            raise ValueError(f"{facts['drafts']} is no number of drafts")
        self.calibration, self.drafts = calibration, drafts
        for own in reversed(said[:KEPT]):
            self.said.add(own + [0.0] * (self.depth - len(own)))


@cache
def _moments(count: int) -> Float64Array:
    """[count] places of the drafts that are taken, 0 is the newest and 1 behind the oldest.

    Not at even distances: drafts take turns.
    """
    parts = np.arange(float(count))
    return ((parts + parts * GOLDEN % 1.0) / count) ** 2
