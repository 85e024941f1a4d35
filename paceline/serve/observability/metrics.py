"""The counters behind /metrics, updated by the engine's thread after each step.

Observing a step costs microseconds, so the counters are plain Python numbers; metrics_page.py renders
them for Prometheus on request. Names and histogram buckets are vLLM's, with additional small buckets
for small models.
"""

from __future__ import annotations

import copy
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from paceline.core.request import Request
from paceline.core.stats import ControlStats, DraftStats, StepStats
from paceline.engine.engine import Delta

OTHER = "other"  # label of all segments above the limit

_TOKENS = tuple(mantissa * 10.0**power for power in range(6) for mantissa in (1, 2, 5))
_FIRST_TOKEN = (
    *(0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_GAP = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
_WHOLE = (
    *(0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0),
    *(30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)

# name: (upper bounds of the buckets, help text)
HISTOGRAMS: dict[str, tuple[tuple[float, ...], str]] = {
    "time_to_first_token_seconds": (_FIRST_TOKEN, "From arrival to the first token of an output."),
    "inter_token_latency_seconds": (_GAP, "From a step that gave an output tokens to the next that did."),
    "request_time_per_output_token_seconds": (_GAP, "Mean time of an output's tokens after its first."),
    "e2e_request_latency_seconds": (_WHOLE, "From arrival to the last token of an output."),
    "request_queue_time_seconds": (_WHOLE, "From arrival to the first pass."),
    "request_prefill_time_seconds": (_WHOLE, "From the first pass to the first token."),
    "request_decode_time_seconds": (_WHOLE, "From the first token to the last."),
    "request_inference_time_seconds": (_WHOLE, "From the first pass to the last token."),
    "request_prompt_tokens": (_TOKENS, "Tokens of a finished request's prompt."),
    "request_generation_tokens": (_TOKENS, "Tokens of a finished output."),
}

STEP_PARTS = ("plan", "draft", "build", "forward", "verify", "commit")  # of StepStats: they add up to a step


class Histogram:
    """Counts of values per bucket."""

    __slots__ = ("counts", "edges", "total")

    def __init__(self, edges: Sequence[float]) -> None:
        self.edges = edges
        self.counts = [0] * (len(edges) + 1)  # the last one: above all upper bounds
        self.total = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.edges, value)] += 1
        self.total += value

    def buckets(self) -> list[tuple[str, float]]:
        """(upper bound, number of values up to it) of each bucket, +Inf included."""
        cumulative = 0
        buckets: list[tuple[str, float]] = []
        for edge, count in zip((*self.edges, "+Inf"), self.counts, strict=True):
            cumulative += count
            buckets.append((str(edge), cumulative))
        return buckets


@dataclass(slots=True)
class DraftCounts:
    """Draft counters of one drafter and one segment."""

    drafts: int = 0
    tokens: int = 0
    accepted: int = 0
    forced: int = 0  # of the tokens: a grammar left no other
    accepted_forced: int = 0
    depths: Counter[int] = field(default_factory=Counter)  # drafts by depth
    accepted_depths: Counter[int] = field(default_factory=Counter)  # drafts by accepted depth

    def add(self, draft: DraftStats) -> None:
        """Count one draft, or several with equal results. Drafts may have different lengths."""
        self.drafts += draft.count
        self.tokens += draft.count * draft.nodes
        self.accepted += draft.count * draft.accepted
        self.forced += draft.count * draft.forced
        self.accepted_forced += draft.count * draft.accepted_forced
        self.depths[draft.depth] += draft.count
        self.accepted_depths[draft.accepted] += draft.count

    def merge(self, other: DraftCounts) -> None:
        """Add the counts of another."""
        for name in ("drafts", "tokens", "accepted", "forced", "accepted_forced"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.depths.update(dict(other.depths))  # a copy: the engine's thread may be counting
        self.accepted_depths.update(dict(other.accepted_depths))

    def tried_at(self) -> list[int]:
        """[d] the number of drafts with at least d + 1 levels."""
        return self._reached(dict(self.depths))  # a copy: the engine's thread may be counting

    def accepted_at(self) -> list[int]:
        """[d] the number of drafts accepted at level d + 1."""
        return self._reached(dict(self.accepted_depths))

    def _reached(self, counts: dict[int, int]) -> list[int]:
        deepest = max(dict(self.depths), default=0)
        return [sum(count for depth, count in counts.items() if depth > level) for level in range(deepest)]


class SegmentCounts:
    """Counters of one segment."""

    def __init__(self) -> None:
        self.prompt_tokens = 0
        self.generation_tokens = 0
        self.ended: Counter[str] = Counter()  # finished outputs by finish reason
        self.histograms = {name: Histogram(edges) for name, (edges, _) in HISTOGRAMS.items()}
        self.drafts: dict[str, DraftCounts] = {}  # by drafter


class Metrics:
    """Counts engine steps and HTTP requests. Each counter has one writing thread."""

    def __init__(
        self,
        model_name: str,
        max_segments: int,
        info: Mapping[str, str],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`info`: constant labels that describe this server."""
        self.model_name = model_name
        self.info = info
        self.segments: dict[str, SegmentCounts] = {"": SegmentCounts()}  # "": requests without a segment
        self.steps = 0
        self.failed_steps = 0
        self.rows = 0
        self.preemptions = 0
        self.draft_failures = 0
        self.decisions: Counter[str] = Counter()  # steps by the controller's reason for their plan
        self.control: ControlStats | None = None  # of the last controlled step
        self.step_seconds = dict.fromkeys(STEP_PARTS, 0.0)
        self.http: Counter[tuple[str, int]] = Counter()  # by path and status; written by the event loop
        self._max_segments = max_segments
        self._clock = clock
        self._last_token_at: dict[Request, float] = {}  # time of each running output's last token

    # --- in the engine's thread ---

    def step(self, stats: StepStats, deltas: Sequence[Delta]) -> None:
        """Count one step."""
        self.steps += 1
        self.failed_steps += stats.failed
        self.rows += stats.rows
        self.preemptions += stats.preemptions
        self.draft_failures += stats.draft_failures
        if stats.control is not None:
            self.control = stats.control
            self.decisions[stats.control.reason] += 1
        for part in STEP_PARTS:
            self.step_seconds[part] += getattr(stats, part + "_time")
        for draft in stats.drafts:
            drafts = self._segment(draft.segment).drafts
            (drafts.get(draft.drafter) or drafts.setdefault(draft.drafter, DraftCounts())).add(draft)
        self.advanced(deltas)

    def advanced(self, deltas: Sequence[Delta]) -> None:
        """Count what requests have got. A server whose steps are elsewhere counts only this."""
        now = self._clock()
        for delta in deltas:
            if delta.token_ids:
                self._gain(delta.request, len(delta.token_ids), now)
            if delta.request.finished:
                self._end(delta.request)

    def aborted(self, requests: Sequence[Request]) -> None:
        """Count outputs aborted because their client has gone."""
        for request in requests:
            self._end(request)

    def _gain(self, request: Request, num_tokens: int, now: float) -> None:
        segment = self._segment(request.segment)
        segment.generation_tokens += num_tokens
        before = self._last_token_at.get(request)
        self._last_token_at[request] = now
        if before is not None:
            segment.histograms["inter_token_latency_seconds"].observe(now - before)
            return
        assert request.first_token_time is not None
        segment.histograms["time_to_first_token_seconds"].observe(
            request.first_token_time - request.arrival_time
        )
        if request.child == 0:  # the n outputs of a request share one prompt
            segment.prompt_tokens += len(request.prompt_token_ids)

    def _end(self, request: Request) -> None:
        segment = self._segment(request.segment)
        segment.ended[request.finish_reason or ""] += 1
        self._last_token_at.pop(request, None)
        started, first, end = request.scheduled_time, request.first_token_time, request.finished_time
        if started is None or first is None or end is None:
            return
        count = request.num_output
        observed: dict[str, float] = {
            "e2e_request_latency_seconds": end - request.arrival_time,
            "request_queue_time_seconds": started - request.arrival_time,
            "request_prefill_time_seconds": first - started,
            "request_decode_time_seconds": end - first,
            "request_inference_time_seconds": end - started,
            "request_generation_tokens": count,
        }
        if count > 1:
            observed["request_time_per_output_token_seconds"] = (end - first) / (count - 1)
        if request.child == 0:
            observed["request_prompt_tokens"] = len(request.prompt_token_ids)
        for name, value in observed.items():
            segment.histograms[name].observe(value)

    def _segment(self, name: str) -> SegmentCounts:
        """The counters of a segment; those of OTHER once there are `max_segments`."""
        counts = self.segments.get(name)
        if counts is None:
            num_named = len(self.segments) - 1 - (OTHER in self.segments)  # without "" and OTHER
            label = name if num_named < self._max_segments else OTHER
            counts = self.segments.setdefault(label, SegmentCounts())
        return counts

    # --- of several servers ---

    def snapshot(self) -> Metrics:
        """A copy that can travel. Any thread may ask."""
        while True:
            try:
                twin = copy.copy(self)
                twin._last_token_at = {}
                return copy.deepcopy(twin)
            except RuntimeError:  # the engine's thread has added a key meanwhile
                continue

    def add_steps(self, other: Metrics) -> None:
        """Add the passes and drafts of another server, but not its requests."""
        for name in ("steps", "failed_steps", "rows", "preemptions", "draft_failures"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.decisions.update(other.decisions)
        self.control = other.control or self.control
        for part, seconds in other.step_seconds.items():
            self.step_seconds[part] += seconds
        for segment, counts in other.segments.items():
            drafts = self._segment(segment).drafts
            for drafter, counted in counts.drafts.items():
                drafts.setdefault(drafter, DraftCounts()).merge(counted)

    # --- in the event loop ---

    def answered(self, path: str, status: int) -> None:
        """Count an HTTP request. `path` is a known route or empty: clients must not create labels."""
        self.http[path, status] += 1
