"""What a server's /metrics say of drafting, in the names of vLLM (also ours and llama.cpp's) or SGLang."""

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
_SEGMENT = re.compile(r'\bsegment="((?:[^"\\]|\\.)*)"')  # a paceline's
_GAUGE = re.compile(r"^sglang:spec_accept_(length|rate)(?:\{[^}]*\})? (\S+)", re.MULTILINE)
NAMES = "…:spec_decode_num_drafts (vLLM, llama.cpp, paceline) nor sglang:spec_accept_length"


@dataclass(frozen=True)
class DraftCounters:
    """Counters that only grow, or gauges that tell of the last steps."""

    sums: Mapping[str, float]  # by the end of their names, added up over labels
    per_position: Mapping[int, float]
    gauges: Mapping[str, float]  # SGLang's: length and rate, the mean over its processes
    segments: Mapping[str, DraftCounters] = field(default_factory=dict)  # where a server tells them apart

    def since_by_segment(self, before: DraftCounters) -> dict[str, Acceptance]:
        """What was done for each segment between two readings."""
        nothing = DraftCounters({}, {}, {})
        return {name: own.since(before.segments.get(name, nothing)) for name, own in self.segments.items()}

    def since(self, before: DraftCounters) -> Acceptance:
        """What was done between two readings."""

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
    """The counters of a page of Prometheus metrics; None if it has none."""
    samples: list[tuple[str, ...]] = _COUNTER.findall(page)
    # a paceline tells everything once more in the names of vLLM
    samples = [sample for sample in samples if sample[0] == samples[0][0]]
    told: dict[str, list[float]] = {}
    for name, value in _GAUGE.findall(page):
        told.setdefault(name, []).append(float(value))
    if not any(name == "drafts" for _, name, _, _ in samples) and "length" not in told:
        return None
    of_segments: dict[str, list[tuple[str, ...]]] = {}
    for sample in samples:
        if found := _SEGMENT.search(sample[2]):
            of_segments.setdefault(json.loads(f'"{found[1]}"'), []).append(sample)
    segments = {name: DraftCounters(*_added_up(own), {}) for name, own in of_segments.items()}
    gauges = {name: sum(values) / len(values) for name, values in told.items()}
    return DraftCounters(*_added_up(samples), gauges, segments)


def _added_up(samples: Sequence[tuple[str, ...]]) -> tuple[dict[str, float], dict[int, float]]:
    """The sums by name, and those by position."""
    sums: dict[str, float] = {}
    per_position: dict[int, float] = {}
    for _, name, labels, value in samples:
        if name != "accepted_tokens_per_pos":
            sums[name] = sums.get(name, 0.0) + float(value)
        elif found := _POSITION.search(labels):
            place = int(found[1])
            per_position[place] = per_position.get(place, 0.0) + float(value)
    return sums, per_position
