"""The result of a soak as a table and JSON."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from benchmarks.server.gauges import Sample, memory_slope
from benchmarks.server.soak import PARTS, Part, Soak
from paceline.bench.report.result import Result, Table

PERCENTILES = (50, 99)


def soak_facts(soak: Soak) -> dict[str, Any]:
    """Everything, as JSON values. Times are in milliseconds."""
    slope = memory_slope(soak.samples)
    return {
        "model": soak.model,
        **asdict(soak.options),
        "good": soak.good,
        "requests": soak.requests,
        "distinct_requests": soak.distinct,
        "answers": sum(part.answers for part in soak.parts),
        "cut_by_clients": soak.cut,
        "refused": soak.refused,
        "turned_away": soak.turned_away,
        "lost": soak.lost,
        "wrong": soak.wrong,
        "misjudged": soak.misjudged,
        "leaked_files": soak.leaked_files,
        "examples": soak.examples,
        "kinds": dict(soak.kinds),
        "left_out": soak.left_out,
        "statuses": dict(sorted(soak.statuses.items())),
        "memory_growth_bytes_per_hour": slope,
        "before": None if soak.before is None else asdict(soak.before),
        "after": None if soak.after is None else asdict(soak.after),
        "parts": [
            _part_facts(part, _samples_of(soak, number), soak.options.seconds / PARTS)
            for number, part in enumerate(soak.parts)
        ],
        "samples": [asdict(sample) for sample in soak.samples],
    }


def _samples_of(soak: Soak, number: int) -> list[Sample]:
    seconds = soak.options.seconds / PARTS
    last = number == PARTS - 1
    return [
        sample
        for sample in soak.samples
        if number * seconds <= sample.second and (last or sample.second < (number + 1) * seconds)
    ]


def _part_facts(part: Part, samples: Sequence[Sample], seconds: float) -> dict[str, Any]:
    last = samples[-1] if samples else None
    usage = [sample.kv_usage for sample in samples if sample.kv_usage is not None]
    return {
        "answers": part.answers,
        "answers_per_second": part.answers / seconds,
        "first_text_ms": _percentiles(part.first_texts),
        "gap_ms": _percentiles(part.gaps),
        "memory_bytes": last and last.memory_bytes,
        "files": last and last.files,
        "threads": last and last.threads,
        "kv_usage_most": max(usage, default=None),
    }


def _percentiles(seconds: Sequence[float]) -> dict[str, float] | None:
    if not seconds:
        return None
    return {f"p{share}": float(np.percentile(seconds, share) * 1e3) for share in PERCENTILES}


def soak_result(soak: Soak) -> Result:
    """The table, with one column per part of the time."""
    options, facts = soak.options, soak_facts(soak)
    title = (
        f"{soak.model}: {options.clients} clients for {options.seconds:,.0f} s, {soak.distinct} "
        f"distinct requests of {len(soak.kinds)} kinds, {options.cut:.0%} cut, {options.bad:.0%} nonsense; "
        "times are p50 / p99"
    )
    size, unit = (1, "s") if options.seconds < 600 else (60, "min")
    each = options.seconds / PARTS / size
    cells: dict[str, Callable[[dict[str, Any]], str]] = {
        "right answers": lambda part: f"{part['answers']:,}",
        "answers a second": lambda part: f"{part['answers_per_second']:.1f}",
        "first text, ms": lambda part: _cell(part["first_text_ms"]),
        "between texts, ms": lambda part: _cell(part["gap_ms"]),
        "memory, MB": lambda part: _number(part["memory_bytes"], 1e-6),
        "open files": lambda part: _number(part["files"]),
        "threads": lambda part: _number(part["threads"]),
        "pages held at most": lambda part: _number(part["kv_usage_most"], 100, "%"),
    }
    spans = (f"{number * each:.3g} to {(number + 1) * each:.3g} {unit}" for number in range(PARTS))
    rows = [[heading, *map(cell, facts["parts"])] for heading, cell in cells.items()]
    return Result(title, [Table(title, ["", *spans], rows)], facts, notes=soak_notes(soak))


def _cell(percentiles: dict[str, float] | None) -> str:
    return "-" if percentiles is None else " / ".join(f"{value:,.0f}" for value in percentiles.values())


def _number(value: float | None, factor: float = 1, unit: str = "") -> str:
    return "-" if value is None else f"{value * factor:,.0f}{unit}"


def soak_notes(soak: Soak) -> list[str]:
    """Notes: outcomes, memory growth, and what is left in the server."""
    answers = sum(part.answers for part in soak.parts)
    statuses = ", ".join(f"{status}: {count:,}" for status, count in sorted(soak.statuses.items()))
    notes = [
        f"{soak.requests:,} requests: {answers:,} answers with the bytes that the request gets alone, "
        f"{soak.wrong} with others, {soak.lost} lost, {soak.misjudged} wrong statuses; {soak.cut:,} cut by "
        f"their clients, {soak.refused:,} refused as they must be, {soak.turned_away:,} sent again.",
        f"statuses: {statuses}",
    ]
    slope = memory_slope(soak.samples)
    if slope is not None:
        notes.append(f"Memory in the second half of the time: {slope / 1e6:+,.1f} MB an hour.")
    if soak.leaked_files:
        notes.append(f"{soak.leaked_files} files more are open than at the begin.")
    if soak.after is None:
        notes.append("The server does not tell what it holds.")
    elif soak.after.idle:
        notes.append("Afterwards nothing ran or waited, and no request held a page: 0 pages leaked.")
    else:
        notes.append(
            f"Something is left in the server: {soak.after.running:g} running, {soak.after.waiting:g} "
            f"waiting, {soak.after.kv_usage:.2%} of the pages held. This is a bug, please report it."
        )
    notes += [f"left out, {kind}: {why}" for kind, why in soak.left_out.items()]
    return [*notes, *(f"wrong: {example}" for example in soak.examples)]
