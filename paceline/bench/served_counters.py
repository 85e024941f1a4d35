"""What a server's /metrics say of drafting, in the names of vLLM (also ours and llama.cpp's) or SGLang."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from paceline.bench.turns import Acceptance

# vllm:spec_decode_num_drafts_total{...} 12.0; llama.cpp's counters may lack _total
_COUNTER = re.compile(
    r"^(\w+):spec_decode_num_(drafts|draft_tokens|accepted_tokens|accepted_tokens_per_pos)(?:_total)?"
    r"(?:\{([^}]*)\})? (\S+)",
    re.MULTILINE,
)
_POSITION = re.compile(r'\bposition="(\d+)"')
_GAUGE = re.compile(r"^sglang:spec_accept_(length|rate)(?:\{[^}]*\})? (\S+)", re.MULTILINE)
NAMES = "…:spec_decode_num_drafts (vLLM, llama.cpp, paceline) nor sglang:spec_accept_length"


@dataclass(frozen=True)
class DraftCounters:
    """Counters that only grow, or gauges that tell of the last steps."""

    sums: Mapping[str, float]  # by the end of their names, added up over labels
    per_position: Mapping[int, float]
    gauges: Mapping[str, float]  # SGLang's: length and rate, the mean over its processes

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
    sums: dict[str, float] = {}
    per_position: dict[int, float] = {}
    samples = _COUNTER.findall(page)
    for prefix, name, labels, value in samples:
        if prefix != samples[0][0]:
            continue  # a paceline tells everything once more in the names of vLLM
        if name != "accepted_tokens_per_pos":
            sums[name] = sums.get(name, 0.0) + float(value)
        elif found := _POSITION.search(labels):
            place = int(found[1])
            per_position[place] = per_position.get(place, 0.0) + float(value)
    told: dict[str, list[float]] = {}
    for name, value in _GAUGE.findall(page):
        told.setdefault(name, []).append(float(value))
    if "drafts" not in sums and "length" not in told:
        return None
    gauges = {name: sum(values) / len(values) for name, values in told.items()}
    return DraftCounters(sums, per_position, gauges)
