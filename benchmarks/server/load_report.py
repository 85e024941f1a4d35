"""What a load run found, described."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from benchmarks.server.load import Load, Round
from paceline.bench.report.result import Result, Table

PERCENTILES = (50, 90, 99)


def load_facts(load: Load) -> dict[str, Any]:
    """Everything, ready for JSON. Times are milliseconds."""
    return {
        "model": load.model,
        **asdict(load.options),
        "good": load.good,
        "before": None if load.before is None else asdict(load.before),
        "results": [_round_facts(one) for one in load.rounds],
    }


def _round_facts(one: Round) -> dict[str, Any]:
    tokens = sum(answer.completion_tokens for answer in one.kept)
    return {
        "seconds": one.seconds,
        "answers": len(one.kept),
        "lost": one.lost,
        "wrong": one.wrong,
        "misjudged": one.misjudged,
        "turned_away": one.turned_away,
        "statuses": dict(sorted(one.statuses.items())),
        "tokens_per_second": tokens / one.seconds,
        "first_byte_ms": _percentiles([answer.first_byte_seconds for answer in one.kept]),
        "first_text_ms": _percentiles([answer.first_text_seconds for answer in one.kept]),
        "gap_ms": _percentiles([gap for answer in one.kept for gap in answer.gaps]),
        "after": None if one.gauges is None else asdict(one.gauges),
    }


def _percentiles(seconds: Sequence[float | None]) -> dict[str, float] | None:
    known = [1e3 * value for value in seconds if value is not None]
    if not known:
        return None
    return {f"p{share}": float(np.percentile(known, share)) for share in PERCENTILES}


def load_result(load: Load) -> Result:
    """One column for each round."""
    options = load.options
    title = (
        f"{load.model}: {options.clients} streaming clients at once, {options.requests} requests "
        f"a round, {options.cut:.0%} cut, {options.bad:.0%} nonsense; times are p50 / p90 / p99"
    )
    rounds = [_round_facts(one) for one in load.rounds]
    cells: dict[str, Callable[[dict[str, Any]], str]] = {
        "right answers": lambda one: f"{one['answers'] - one['wrong']}",
        "lost answers": lambda one: str(one["lost"]),
        "other bytes than alone": lambda one: str(one["wrong"]),
        "wrong statuses": lambda one: str(one["misjudged"]),
        "sent again (queue full)": lambda one: str(one["turned_away"]),
        "statuses": lambda one: ", ".join(f"{status}: {count}" for status, count in one["statuses"].items()),
        "seconds": lambda one: f"{one['seconds']:.1f}",
        "tokens per second": lambda one: f"{one['tokens_per_second']:,.0f}",
        "first byte, ms": lambda one: _cell(one["first_byte_ms"]),
        "between texts, ms": lambda one: _cell(one["gap_ms"]),
    }
    columns = ["", *(f"round {number + 1}" for number in range(len(rounds)))]
    rows = [[heading, *map(cell, rounds)] for heading, cell in cells.items()]
    return Result(title, [Table(title, columns, rows)], load_facts(load), notes=load_notes(load))


def _cell(percentiles: dict[str, float] | None) -> str:
    return "-" if percentiles is None else " / ".join(f"{value:,.0f}" for value in percentiles.values())


def load_notes(load: Load) -> list[str]:
    """What is left in the server, in words."""
    states = [load.before, *(one.gauges for one in load.rounds)]
    known = [state for state in states if state is not None]
    if len(known) < len(states):
        return ["The server does not tell its memory and pages."]
    memory = ", then ".join(f"{state.memory_bytes / 1e6:,.0f} MB" for state in known)
    notes = [f"memory of the server before and after each round: {memory}"]
    left = [state for state in known[1:] if not state.idle]
    if not left:
        return [*notes, "Afterwards nothing ran or waited, and no request held a page."]
    worst = left[-1]
    return [
        *notes,
        f"Something is left in the server: {worst.running:g} running, {worst.waiting:g} waiting, "
        f"{worst.kv_usage:.2%} of the pages held. This is a bug, please report it.",
    ]
