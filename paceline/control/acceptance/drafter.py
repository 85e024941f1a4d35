"""DrafterAcceptance: the chance that a drafter's node is accepted, by request, segment and confidence.

The drafter's confidence is calibrated, then corrected by the request's acceptance estimate: accepted tokens
of its recent drafts over predicted ones. Recent confidences are stored too, because the next drafts are
likely to resemble them. A new request starts with the estimate of its segment, a new segment with that of all
requests.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from paceline.compiling import compiled
from paceline.control.acceptance.calibration import POINTS_ARRAY, Calibration, chance_at
from paceline.control.acceptance.recent import AcceptanceEstimate, History, RecentDrafts
from paceline.control.config import CONFIG
from paceline.control.cost import Float64Array

Confidences = Sequence[float]  # by node, descending: of the path down to it
Key = tuple[str, int]  # of a request: its id, and which of its n outputs


class DrafterAcceptance:
    """The acceptance of one drafter's drafts."""

    def __init__(self, depth: int) -> None:
        """Drafts have at most `depth` nodes."""
        config = CONFIG.acceptance
        self.depth = depth
        self.drafts = 0  # that were observed
        self.calibration = Calibration()
        self.recent = RecentDrafts(config.shared_drafts, depth)  # of all requests
        self._continuation = config.continuation  # mean ratio of a node's confidence to the one before it
        self._all = AcceptanceEstimate(config.all_fade, config.all_prior)
        self._segments: dict[str, History] = {}
        self._requests: dict[Key, History] = {}

    def add_draft(
        self, key: Key, segment: str, confidences: Confidences, asked: int, threshold: float = 0.0
    ) -> None:
        """Add a draft to the recent ones. The drafter was asked for at most `asked` nodes of at least
        `threshold` confidence."""
        extended = self._extended(confidences, asked, threshold)
        self.recent.add(extended)
        for history in self._histories(key, segment):
            history.recent.add(extended)
            history.idle = 0

    def _extended(self, confidences: Confidences, asked: int, threshold: float) -> Float64Array:
        """The draft, extended to `depth` confidences as drafts usually continue.

        If it ended before `asked` nodes, the next confidence was below the threshold: half of that is
        assumed.
        """
        kept = list(confidences[: self.depth])
        for node, before in enumerate(kept, start=1):
            if node < min(asked, self.depth) and before > 0.0:
                after = kept[node] if node < len(kept) else 0.5 * threshold
                rate = CONFIG.acceptance.continuation_rate
                self._continuation += rate * (after / before - self._continuation)
        last = kept[-1] * self._continuation if kept else 1.0
        if len(kept) < asked:
            last = min(last, 0.5 * threshold)
        while len(kept) < self.depth:
            kept.append(last)
            last *= self._continuation
        return np.array(kept)

    def observe(self, key: Key, segment: str, confidences: Confidences, accepted: Sequence[bool]) -> None:
        """Update from the verified nodes of a draft."""
        self.drafts += 1
        predicted = sum(self.calibration.chances(confidences))
        self.calibration.add(confidences, accepted)
        self._all.add(sum(accepted), predicted)
        for history in self._histories(key, segment):
            history.estimate.add(sum(accepted), predicted)

    def _histories(self, key: Key, segment: str) -> Iterable[History]:
        """The histories of a segment and of a request, created if they are new."""
        config = CONFIG.acceptance
        if segment not in self._segments and len(self._segments) < config.max_segments:
            estimate = AcceptanceEstimate(config.segment_fade, config.segment_prior)
            self._segments[segment] = History(estimate, RecentDrafts(config.shared_drafts, self.depth))
        if segment in self._segments:
            yield self._segments[segment]
        if key not in self._requests:
            estimate = AcceptanceEstimate(config.request_fade, config.request_prior)
            self._requests[key] = History(estimate, RecentDrafts(config.request_drafts, self.depth))
        yield self._requests[key]

    def ratio(self, key: Key, segment: str) -> float:
        """The acceptance estimate of a request, relative to that of all requests.

        Relative, because calibration already corrects what all requests have in common.
        """
        config, everyone = CONFIG.acceptance, self._all.ratio(1.0)
        above, own = self._segments.get(segment), self._requests.get(key)
        ratio = everyone if above is None else above.estimate.ratio(everyone)
        relative = (ratio if own is None else own.estimate.ratio(ratio)) / everyone
        return min(max(relative, config.min_ratio), config.max_ratio)

    def chances(self, key: Key, segment: str, confidences: Confidences) -> list[float]:
        """The acceptance chances of the nodes of one draft."""
        ratio, most = self.ratio(key, segment), CONFIG.acceptance.max_chance
        return [min(most, ratio * chance) for chance in self.calibration.chances(confidences)]

    def sample_scenarios(
        self, requests: Sequence[tuple[Key, str]], count: int, threshold: float = 0.0
    ) -> Float64Array:
        """[count, requests, nodes] acceptance chances of the drafts that requests may get next, sampled from
        recent ones. Nodes below the `threshold` of confidence are not drafted: 0.

        Starts a new choice: the calibration is refitted, and estimates without new drafts fade.
        """
        self.calibration.fit()
        self._all.fade_idle()
        for history in (*self._segments.values(), *self._requests.values()):
            history.estimate.fade_idle()
            history.idle += 1
        sampled = [drafts for key, segment in requests for drafts in self._similar(key, segment, count)]
        ratios = np.array([self.ratio(key, segment) for key, segment in requests])
        confidences = np.concatenate(sampled).reshape(len(requests), count, self.depth)
        line, most = np.array(self.calibration.line), CONFIG.acceptance.max_chance
        return _chances(confidences, threshold, POINTS_ARRAY, line, ratios, most)

    def _similar(self, key: Key, segment: str, count: int) -> list[Float64Array]:
        """[count, nodes] recent drafts as samples of a request's next draft: some of the request, others of
        its segment or of any request.

        A request's drafts lose weight while no new ones are made; otherwise a request with poor drafts would
        never be drafted for again.
        """
        config = CONFIG.acceptance
        if not self.recent.count:
            guess = config.first_guess ** np.arange(1, self.depth + 1)
            return [np.broadcast_to(guess, (count, self.depth))]
        own, above = self._requests.get(key), self._segments.get(segment)
        known = 0 if own is None else min(own.recent.count, config.request_drafts >> (own.idle - 1))
        num_own = count * known // (known + config.own_half)
        enough = config.segment_enough
        num_segment = 0 if above is None else (count - num_own) * min(above.recent.count, enough) // enough
        sampled = [self.recent.sample(count - num_own - num_segment, config.shared_drafts)]
        if own is not None and num_own:
            sampled.append(own.recent.sample(num_own, known))
        if above is not None and num_segment:
            sampled.append(above.recent.sample(num_segment, config.shared_drafts))
        return sampled

    def keep_only(self, requests: set[Key]) -> None:
        """Forget the other requests."""
        self._requests = {key: history for key, history in self._requests.items() if key in requests}

    def facts(self) -> dict[str, Any]:
        """The model as JSON values, to start another from."""
        recent = [[round(chance, 4) for chance in draft] for draft in self.recent.listed()]
        return {"drafts": self.drafts, "counts": self.calibration.counts(), "said": recent}

    def begin_with(self, facts: Mapping[str, Any]) -> None:
        """Start from these facts; ValueError, TypeError or KeyError if they are not valid."""
        calibration, drafts = Calibration.of_counts(facts["counts"]), int(facts["drafts"])
        recent = [
            [min(max(float(chance), 0.0), 1.0) for chance in draft[: self.depth]] for draft in facts["said"]
        ]
        if not 0 <= drafts < 1e12:
            raise ValueError(f"{facts['drafts']} is no number of drafts")
        self.calibration, self.drafts = calibration, drafts
        for draft in reversed(recent[: CONFIG.acceptance.shared_drafts]):
            self.recent.add(draft + [0.0] * (self.depth - len(draft)))


@compiled
def _chances(
    confidences: Float64Array,
    threshold: float,
    points: Float64Array,
    line: Float64Array,
    ratios: Float64Array,
    most: float,
) -> Float64Array:
    """[scenarios, requests, nodes] chances by the line of a calibration at its points, 0 up to `threshold`.

    `confidences` are [requests, scenarios, nodes], `ratios` [requests].
    """
    requests, scenarios, nodes = confidences.shape
    chances = np.zeros((scenarios, requests, nodes))
    for request in range(requests):
        for scenario in range(scenarios):
            for node in range(nodes):
                confidence = confidences[request, scenario, node]
                if confidence > max(0.0, threshold):
                    chance = ratios[request] * chance_at(confidence, points, line)
                    chances[scenario, request, node] = min(chance, most)
    return chances
