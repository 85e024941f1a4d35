"""What other engines measured on a GPU: peers.json, each figure with its date.

Measure a peer again with its own tools and put a new entry first: the first entry that has a figure counts.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path

FILE = Path(__file__).with_name("peers.json")
Case = tuple[str, str, str, int]  # shape, method, quantization, requests


@dataclass(frozen=True)
class PeerRun:
    """Figures of one engine from one day."""

    peer: str
    gpu: str
    measured: str  # date
    setting: str
    milliseconds: dict[Case, float]  # per step


@cache
def peer_runs() -> tuple[PeerRun, ...]:
    """All runs, the one that counts first before the others."""
    return tuple(
        PeerRun(
            run["peer"],
            run["gpu"],
            run["measured"],
            run["setting"],
            {
                (line["shape"], line["method"], line.get("quantization", "none"), int(requests)): time
                for line in run["milliseconds_per_step"]
                for requests, time in line["by_requests"].items()
            },
        )
        for run in json.loads(FILE.read_text())
    )


def peer_milliseconds(shape: str, method: str, quantization: str, requests: int) -> float | None:
    """Milliseconds per step of the peer in this case; None if it was not measured."""
    case = (shape, method, quantization, requests)
    return next((run.milliseconds[case] for run in peer_runs() if case in run.milliseconds), None)


def peers_note() -> str:
    """Where and when the peers' figures were measured, in one sentence per run."""
    return " ".join(f"{run.peer}: {run.gpu}, {run.measured}; {run.setting}." for run in peer_runs())
