"""Rows as text: table cells, chart labels, findings, and explanations of the figures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from paceline.bench.report.result import Finding
from paceline.bench.run.contest import Contest, SpeculationOptions
from paceline.bench.run.rows import Row
from paceline.bench.run.slices import SLICE_SECONDS
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
    """All percentiles, such as p50 / p90 / p99."""
    return "-" if values is None else _numbers(values.values())


def ends(values: Mapping[str, float] | None) -> str:
    """p50 / p99."""
    return "-" if values is None else _numbers((values["p50"], values["p99"]))


def _numbers(values: Iterable[float]) -> str:
    return " / ".join(f"{value:,.0f}" if value >= 99.5 else f"{value:.3g}" for value in values)


def speedup_of(row: Row) -> tuple[float | None, tuple[float, float] | None]:
    """Throughput relative to plain decoding; latency in an open profile."""
    if row.concurrency is None:
        return row.latency_speedup_vs_off, row.latency_speedup_interval
    return row.speedup_vs_off, row.speedup_interval


def with_interval(row: Row, reference: str = OFF) -> str:
    """A row's speedup with its confidence interval."""
    value, interval = speedup_of(row)
    if value is None or interval is None or row.method == reference:
        return shown(value, ".2f")
    return f"{value:.2f} ({interval[0]:.2f}-{interval[1]:.2f})"


def sameness(row: Row, inexact: frozenset[str], reference: str = OFF) -> str:
    """Whether a row's tokens equal those of the reference."""
    differing = len(row.differing_prompts)
    if differing:
        return f"{differing} other" if row.method in inexact else f"{differing} DIFFER"
    return "same" if row.identical and row.method != reference else f"{row.output_tokens:,}"


def verdict(contest: Contest) -> Finding:
    """Whether outputs were identical, in one sentence; of several models, how many were equal."""
    if contest.reference != OFF:
        return Finding(_equal_shares(contest))
    compared = [row for row in contest.rows if row.identical is not None and row.method != OFF]
    if not compared:
        return Finding("Outputs were not compared: off was not measured.")
    prompts = sum(row.prompts for row in compared if row.segment != "all")
    differing = sum(len(row.differing_prompts) for row in compared if row.segment != "all")
    if contest.identical and not any(row.differing_prompts for row in compared):
        return Finding(
            f"Every output was identical to that of plain decoding ({prompts:,} answers compared)."
        )
    text = f"{differing:,} of {prompts:,} outputs differ from plain decoding."
    return Finding(text, good=contest.identical)


def _equal_shares(contest: Contest) -> str:
    """The share of each model's answers that equal the reference's, over all traffic."""
    prompts: Counter[str] = Counter()
    differing: Counter[str] = Counter()
    for row in contest.rows:
        if row.method != contest.reference and row.segment != "all":
            prompts[row.method] += row.prompts
            differing[row.method] += len(row.differing_prompts)
    shares = [f"{name} {1 - differing[name] / count:.0%}" for name, count in prompts.items()]
    return f"Answers equal to those of {contest.reference}: {', '.join(shares)}."


def notes(contest: Contest) -> list[str]:
    """Remarks about all rows, one per line."""
    return [*_meaning(contest), *_warnings(contest)]


def _meaning(contest: Contest) -> list[str]:
    lines = [*contest.remarks]
    if not contest.endpoints:
        lines += [
            "Each method has its own engine around the same weights, new in every round and without prefix "
            "caching: no method sees another's answers, and every prompt is computed in full.",
            "cold: drafters start each pass over a workload empty, and learn only from their own answers to "
            "its earlier prompts.",
            f"Methods run concurrently, in slices of {1e3 * SLICE_SECONDS:.0f} ms, each with its own clock."
            if contest.sliced
            else "Methods take turns: each answers a group of prompts before the next method does.",
        ]
    if any(row.cache == WARM for row in contest.rows):
        lines.append(
            "warm: the same prompts a second time; drafters that store responses have seen the answers."
        )
    if any(row.speedup_vs_off is not None for row in contest.rows):
        lines.append(
            f"Speedups are relative to {contest.reference}: of tokens per second, or of end-to-end latency "
            "with --rate and --trace. In brackets: the 95 % confidence interval (bootstrap over prompts) and "
            "for decoding (after the first token), the median of the turns' ratios."
        )
    lines.append(
        "length: mean acceptance length, the tokens per drafted pass including the bonus token; drafted: "
        "drafted tokens per drafted pass; us: microseconds of drafting per pass."
    )
    if contest.options.objective is not None:
        bounds = vars(contest.options.objective).items()
        limits = ", ".join(f"{name} at most {most:g} ms" for name, most in bounds if most is not None)
        lines.append(f"good: requests with {limits}.")
    if any(profile.lengths for profile in contest.options.profiles):
        lines.append(
            "The trace sets arrivals and the maximum length of answers; prompts are the workload's, so the "
            "lengths of the trace's prompts are not used."
        )
    return lines


def _why_inexact(contest: Contest) -> str:
    """Why the outputs of some contestants may differ from plain decoding's."""
    names = ", ".join(sorted(contest.inexact))
    if contest.endpoints:
        return (
            f"{names}: a server of another engine. If its texts differ from off's, its drafting or its "
            "batching changed them."
        )
    return (
        f"{names}: this verification rule preserves the distribution of plain decoding, not its tokens; "
        "that is not a bug."
    )


def _warnings(contest: Contest) -> list[str]:
    lines = []
    if contest.reference == OFF and contest.inexact:
        lines.append(_why_inexact(contest))
    few = {
        f"{traffic_of(row)}: at most {row.prompts} ran concurrently, because there were no more prompts."
        for row in contest.rows
        if row.concurrency is not None and row.prompts < row.concurrency
    }
    lines += sorted(few)
    for row in contest.rows:
        where = f"{traffic_of(row)}, {row.method}"
        if row.differing_prompts and row.method not in contest.inexact:
            lines.append(
                f"{where}: tokens differ from plain decoding for "
                f"{', '.join(row.differing_prompts[:5])}. This is a bug, please report it."
            )
        if row.failed_drafters:
            lines.append(f"{where}: {', '.join(row.failed_drafters)} failed during the run.")
        if row.failed:
            requests = row.prompts * contest.options.rounds
            lines.append(f"{where}: {row.failed} of {requests} requests got no complete answer.")
        if row.structured:
            lines.append(
                f"{where}: {row.structured} answers with a schema, {row.finished} finished, "
                f"{row.valid} of these valid."
            )
    return lines + [f"no numbers of {name}: {error}" for name, error in contest.peer_errors.items()]
