"""Draft counters of a server's /metrics, by the names of vLLM (also ours and llama.cpp's) or SGLang."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from paceline.bench.run.turns import Acceptance

# vllm:spec_decode_num_drafts_total{...} 12.0; llama.cpp's counters may lack _total
_COUNTER = re.compile(
    r"^(\w+):spec_decode_num_(drafts|draft_tokens|accepted_tokens|accepted_tokens_per_pos)(?:_total)?"
    r"(?:\{([^}]*)\})? (\S+)",
    re.MULTILINE,
)
_POSITION = re.compile(r'\bposition="(\d+)"')
_SEGMENT = re.compile(r'\bsegment="((?:[^"\\]|\\.)*)"')  # paceline only
_GAUGE = re.compile(r"^sglang:spec_accept_(length|rate)(?:\{[^}]*\})? (\S+)", re.MULTILINE)
NAMES = "…:spec_decode_num_drafts (vLLM, llama.cpp, paceline) nor sglang:spec_accept_length"


@dataclass(frozen=True)
class DraftCounters:
    """Cumulative counters, or gauges over the last steps."""

    sums: Mapping[str, float]  # by the end of their names, summed over labels
    per_position: Mapping[int, float]
    gauges: Mapping[str, float]  # SGLang's length and rate, averaged over its processes
    segments: Mapping[str, DraftCounters] = field(default_factory=dict)  # if the server has them

    def since_by_segment(self, before: DraftCounters) -> dict[str, Acceptance]:
        """The acceptance of each segment between two readings."""
        nothing = DraftCounters({}, {}, {})
        return {
            name: counters.since(before.segments.get(name, nothing))
            for name, counters in self.segments.items()
        }

    def since(self, before: DraftCounters) -> Acceptance:
        """The acceptance between two readings."""

        def grown(name: str) -> float:
            return self.sums.get(name, 0.0) - before.sums.get(name, 0.0)

        depth = max(self.per_position, default=-1) + 1
        places = [self.per_position.get(at, 0.0) - before.per_position.get(at, 0.0) for at in range(depth)]
        return Acceptance(
            steps=grown("drafts"),
            drafted=grown("draft_tokens"),
            accepted=grown("accepted_tokens"),
            accepted_per_position=tuple(places),
            length=self.gauges.get("length"),
            rate=self.gauges.get("rate"),
        )


def read_counters(page: str) -> DraftCounters | None:
    """The draft counters of a Prometheus page; None if it has none."""
    samples: list[tuple[str, ...]] = _COUNTER.findall(page)
    # paceline repeats its counters under vLLM's prefix: use one prefix only
    samples = [sample for sample in samples if sample[0] == samples[0][0]]
    gauge_values: dict[str, list[float]] = {}
    for name, value in _GAUGE.findall(page):
        gauge_values.setdefault(name, []).append(float(value))
    if not any(name == "drafts" for _, name, _, _ in samples) and "length" not in gauge_values:
        return None
    of_segments: dict[str, list[tuple[str, ...]]] = {}
    for sample in samples:
        if match := _SEGMENT.search(sample[2]):
            of_segments.setdefault(json.loads(f'"{match[1]}"'), []).append(sample)
    segments = {
        name: DraftCounters(*_added_up(segment_samples), {}) for name, segment_samples in of_segments.items()
    }
    gauges = {name: sum(values) / len(values) for name, values in gauge_values.items()}
    return DraftCounters(*_added_up(samples), gauges, segments)


def _added_up(samples: Sequence[tuple[str, ...]]) -> tuple[dict[str, float], dict[int, float]]:
    """The sums by name, and the sums by position."""
    sums: dict[str, float] = {}
    per_position: dict[int, float] = {}
    for _, name, labels, value in samples:
        if name != "accepted_tokens_per_pos":
            sums[name] = sums.get(name, 0.0) + float(value)
        elif match := _POSITION.search(labels):
            position = int(match[1])
            per_position[position] = per_position.get(position, 0.0) + float(value)
    return sums, per_position
