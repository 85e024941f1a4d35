"""Rows as text: table cells, chart labels, findings, and explanations of the figures."""

from __future__ import annotations

from collections.abc import Mapping

from paceline.bench.report.result import Finding
from paceline.bench.run.contest import Contest, SpeculationOptions
from paceline.bench.run.rows import Row
from paceline.bench.run.speculation import OFF, WARM

# times with percentiles, and their headings
LATENCIES = {
    "ttft_ms": "first token",
    "tpot_ms": "per token",
    "inter_token_ms": "between pieces",
    "e2e_ms": "whole answer",
}


def title(options: SpeculationOptions) -> str:
    """What was measured, in one line."""
    if options.temperature is None:
        sampling = "each prompt's own temperature"
    else:
        sampling = "greedy" if options.temperature == 0 else f"temperature {options.temperature:g}"
    return f"{options.model}: {sampling}, {options.rounds} round{'s' * (options.rounds > 1)}"


def traffic_of(row: Row) -> str:
    """The traffic of a row."""
    segment = "" if row.segment == row.workload else f" {row.segment}"
    return f"{row.workload}{segment} {row.profile} {row.cache}"


def shown(value: float | None, form: str) -> str:
    """A number, or a dash if it is unknown."""
    return "-" if value is None else format(value, form)


def three(values: Mapping[str, float] | None) -> str:
    """p50 / p90 / p99."""
    if values is None:
        return "-"
    return " / ".join(f"{value:,.0f}" if value >= 99.5 else f"{value:.3g}" for value in values.values())


def speedup_of(row: Row) -> tuple[float | None, tuple[float, float] | None]:
    """Throughput relative to plain decoding; latency in an open profile."""
    if row.concurrency is None:
        return row.latency_speedup_vs_off, row.latency_speedup_interval
    return row.speedup_vs_off, row.speedup_interval


def with_interval(row: Row) -> str:
    """A row's speedup with its confidence interval."""
    value, interval = speedup_of(row)
    if value is None or interval is None or row.method == OFF:
        return shown(value, ".2f")
    return f"{value:.2f} ({interval[0]:.2f}-{interval[1]:.2f})"


def sameness(row: Row, inexact: frozenset[str]) -> str:
    """Whether a row's tokens equal those of plain decoding."""
    differing = len(row.differing_prompts)
    if differing:
        return f"{differing} other" if row.method in inexact else f"{differing} DIFFER"
    return "same" if row.identical and row.method != OFF else f"{row.output_tokens:,}"


def verdict(contest: Contest) -> Finding:
    """Whether outputs were identical, in one sentence."""
    compared = [row for row in contest.rows if row.identical is not None and row.method != OFF]
    if not compared:
        return Finding("Outputs were not compared: there was no off among what was measured.")
    prompts = sum(row.prompts for row in compared if row.segment != "all")
    differing = sum(len(row.differing_prompts) for row in compared if row.segment != "all")
    if contest.identical and not any(row.differing_prompts for row in compared):
        return Finding(
            f"Every output was identical to that of plain decoding ({prompts:,} answers compared)."
        )
    text = f"{differing:,} of {prompts:,} outputs were not those of plain decoding."
    return Finding(text, good=contest.identical)


def notes(contest: Contest) -> list[str]:
    """Remarks about all rows, one per line."""
    return [*_meaning(contest), *_warnings(contest)]


def _meaning(contest: Contest) -> list[str]:
    lines = [*contest.remarks]
    if not contest.endpoints:
        lines += [
            "Each method has an engine of its own around the same weights, new in every round and without "
            "prefix reuse: no method sees another's answers, and every prompt is computed in full.",
            "cold: drafters begin each pass over a workload empty; what they learn in it are their own "
            "answers to its earlier prompts.",
            "All methods run at once, in slices of 20 ms, each by a clock of its own.",
        ]
    if any(row.cache == WARM for row in contest.rows):
        lines.append("warm: the same prompts a second time; a drafter with a memory has seen the answers.")
    if any(row.speedup_vs_off is not None for row in contest.rows):
        lines.append(
            "Speedups compare with off: tokens per second, or the time of whole answers where requests come "
            "when they are due. In brackets is where they lie with 95 % confidence (bootstrap over prompts), "
            "and of decoding, which is after the first token, the median of the turns' own ratios."
        )
    lines.append(
        "length: mean acceptance length, tokens of a drafted pass with the bonus token; drafted: tokens "
        "drafted in such a pass; us: microseconds of drafting, per pass."
    )
    if contest.options.objective is not None:
        bounds = vars(contest.options.objective).items()
        limits = ", ".join(f"{name} at most {most:g} ms" for name, most in bounds if most is not None)
        lines.append(f"good: requests with {limits}.")
    if any(profile.lengths for profile in contest.options.profiles):
        lines.append(
            "The trace gives arrivals and how long answers may become; prompts are the workload's, so how "
            "long the trace's prompts were is not used."
        )
    return lines


def _warnings(contest: Contest) -> list[str]:
    lines = []
    if contest.inexact and contest.endpoints:
        lines.append(
            f"{', '.join(sorted(contest.inexact))}: another engine's server. Where its texts are others "
            "than off's, its drafting, or what else it ran, changed them."
        )
    elif contest.inexact:
        lines.append(
            f"{', '.join(sorted(contest.inexact))}: the rule of verification keeps the distribution of plain "
            "decoding, not its tokens; that is no bug."
        )
    few = {
        f"{traffic_of(row)}: there are {row.prompts} prompts, so never more than so many ran at once."
        for row in contest.rows
        if row.concurrency is not None and row.prompts < row.concurrency
    }
    lines += sorted(few)
    for row in contest.rows:
        where = f"{traffic_of(row)}, {row.method}"
        if row.differing_prompts and row.method not in contest.inexact:
            lines.append(
                f"{where}: other tokens than plain decoding for "
                f"{', '.join(row.differing_prompts[:5])}. This is a bug, please report it."
            )
        if row.failed_drafters:
            lines.append(f"{where}: {', '.join(row.failed_drafters)} failed on the way.")
        if row.failed:
            requests = row.prompts * contest.options.rounds
            lines.append(f"{where}: {row.failed} of {requests} requests got no whole answer.")
        if row.structured:
            lines.append(
                f"{where}: {row.structured} answers by a schema, {row.finished} came to "
                f"their end, {row.valid} of these fit it."
            )
    return lines + [f"no numbers of {name}: {error}" for name, error in contest.peer_errors.items()]
