"""The result of a load run as a table and JSON."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from benchmarks.server.cut_client import first_byte_seconds, first_text_seconds, gaps
from benchmarks.server.load import Load, Round
from paceline.bench.report.result import Result, Table

PERCENTILES = (50, 90, 99)


def load_facts(load: Load) -> dict[str, Any]:
    """Everything, as JSON values. Times are in milliseconds."""
    return {
        "model": load.model,
        **asdict(load.options),
        "good": load.good,
        "before": None if load.before is None else asdict(load.before),
        "results": [_round_facts(result) for result in load.rounds],
    }


def _round_facts(result: Round) -> dict[str, Any]:
    tokens = sum(answer.completion_tokens for answer in result.answers)
    return {
        "seconds": result.seconds,
        "answers": len(result.answers),
        "lost": result.lost,
        "wrong": result.wrong,
        "misjudged": result.misjudged,
        "turned_away": result.turned_away,
        "statuses": dict(sorted(result.statuses.items())),
        "tokens_per_second": tokens / result.seconds,
        "first_byte_ms": _percentiles([first_byte_seconds(answer) for answer in result.answers]),
        "first_text_ms": _percentiles([first_text_seconds(answer) for answer in result.answers]),
        "gap_ms": _percentiles([gap for answer in result.answers for gap in gaps(answer)]),
        "after": None if result.gauges is None else asdict(result.gauges),
    }


def _percentiles(seconds: Sequence[float | None]) -> dict[str, float] | None:
    milliseconds = [1e3 * value for value in seconds if value is not None]
    if not milliseconds:
        return None
    return {f"p{share}": float(np.percentile(milliseconds, share)) for share in PERCENTILES}


def load_result(load: Load) -> Result:
    """The table, with one column per round."""
    options = load.options
    title = (
        f"{load.model}: {options.clients} streaming clients at once, {options.requests} requests "
        f"a round, {options.cut:.0%} cut, {options.bad:.0%} nonsense; times are p50 / p90 / p99"
    )
    rounds = [_round_facts(result) for result in load.rounds]
    cells: dict[str, Callable[[dict[str, Any]], str]] = {
        "right answers": lambda result: f"{result['answers'] - result['wrong']}",
        "lost answers": lambda result: str(result["lost"]),
        "other bytes than alone": lambda result: str(result["wrong"]),
        "wrong statuses": lambda result: str(result["misjudged"]),
        "sent again (queue full)": lambda result: str(result["turned_away"]),
        "statuses": lambda result: ", ".join(
            f"{status}: {count}" for status, count in result["statuses"].items()
        ),
        "seconds": lambda result: f"{result['seconds']:.1f}",
        "tokens per second": lambda result: f"{result['tokens_per_second']:,.0f}",
        "first byte, ms": lambda result: _cell(result["first_byte_ms"]),
        "between texts, ms": lambda result: _cell(result["gap_ms"]),
    }
    columns = ["", *(f"round {number + 1}" for number in range(len(rounds)))]
    rows = [[heading, *map(cell, rounds)] for heading, cell in cells.items()]
    return Result(title, [Table(title, columns, rows)], load_facts(load), notes=load_notes(load))


def _cell(percentiles: dict[str, float] | None) -> str:
    return "-" if percentiles is None else " / ".join(f"{value:,.0f}" for value in percentiles.values())


def load_notes(load: Load) -> list[str]:
    """Notes about the server's memory and what is left in it."""
    states = [load.before, *(result.gauges for result in load.rounds)]
    reported = [state for state in states if state is not None]
    if len(reported) < len(states):
        return ["The server does not tell its memory and pages."]
    memory = ", then ".join(f"{state.memory_bytes / 1e6:,.0f} MB" for state in reported)
    notes = [f"memory of the server before and after each round: {memory}"]
    left = [state for state in reported[1:] if not state.idle]
    if not left:
        return [*notes, "Afterwards nothing ran or waited, and no request held a page."]
    worst = left[-1]
    return [
        *notes,
        f"Something is left in the server: {worst.running:g} running, {worst.waiting:g} waiting, "
        f"{worst.kv_usage:.2%} of the pages held. This is a bug, please report it.",
    ]
