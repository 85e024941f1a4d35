"""`paceline bench run`: its result as tables."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import groupby

from paceline.bench.peers.lookup import LOOKUP_TOKENS, PeerRow
from paceline.bench.report.result import Result, Table
from paceline.bench.run.charts import contest_figures
from paceline.bench.run.contest import Contest
from paceline.bench.run.rows import Row
from paceline.bench.run.speculation import OFF
from paceline.bench.run.wording import (
    LATENCIES,
    notes,
    sameness,
    shown,
    three,
    title,
    traffic_of,
    verdict,
    with_interval,
)

MAX_POSITIONS = 8  # shown; the JSON has all


def contest_result(contest: Contest) -> Result:
    """The result of our methods and of peers."""
    tables = [
        _speed_table(contest),
        *_answer_tables(contest),
        *_latency_tables(contest),
        _draft_table(contest),
        _position_table(contest),
    ]
    if contest.peer_rows:
        tables.append(_peer_table(contest.peer_rows, contest.options.rounds))
    return Result(
        title=title(contest.options),
        tables=tables,
        facts=contest.facts(),
        findings=[verdict(contest)],
        notes=notes(contest),
        figures=contest_figures(contest),
        series=list(dict.fromkeys(row.method for row in contest.rows)),
    )


def _speed_table(contest: Contest) -> Table:
    def cells(row: Row) -> Sequence[str]:
        median = shown(row.median_decode_speedup_vs_off, ".2f")
        return (
            f"{row.tokens_per_second:,.0f}",
            with_interval(row, contest.reference),
            f"{row.decode_tokens_per_second:,.0f}",
            f"{shown(row.decode_speedup_vs_off, '.2f')} ({median})",
            sameness(row, contest.inexact, contest.reference),
        )

    headings = ("tok/s", "speedup\n(95 %)", "decode\ntok/s", "decode\nspeedup\n(median)", "tokens")
    return _table(title(contest.options), headings, contest.rows, cells)


def _answer_tables(contest: Contest) -> list[Table]:
    """Of several models: how many answers equal the reference's, and which models answered for routes."""
    if contest.reference == OFF:
        return []

    def cells(row: Row) -> Sequence[str]:
        models = ", ".join(f"{model} {share:.0%}" for model, share in row.answered_by.items())
        return shown(row.equal_share, ".0%"), models or row.method

    headings = (f"equal to\n{contest.reference}", "answered by")
    return [replace(_table("Answers, by model", headings, contest.rows, cells), text=headings[1:])]


def _latency_tables(contest: Contest) -> list[Table]:
    """Two tables, so that they fit: TTFT and TPOT, then inter-token and end-to-end latency."""
    goal = contest.options.objective is not None

    def table(names: Sequence[str], good: bool) -> Table:
        def cells(row: Row) -> Sequence[str]:
            share = [f"{shown(row.goodput, '.2f')} ({shown(row.good_share, '.0%')})"] if good else []
            return [*(three(row.percentiles[name]) for name in names), *share]

        headings = [*(LATENCIES[name] for name in names), *(["good\nper s"] if good else [])]
        return _table("Milliseconds, p50 / p90 / p99", headings, contest.rows, cells)

    first, second, *others = LATENCIES
    return [table((first, second), goal), table(others, False)]


def _draft_table(contest: Contest) -> Table:
    def cells(row: Row) -> Sequence[str]:
        drafts = (
            shown(row.mean_acceptance_length, ".2f"),
            shown(row.draft_acceptance_rate, ".0%"),
            shown(row.draft_tokens_per_step, ".1f"),
            shown(row.draft_us_per_pass, ",.0f"),
        )
        return shown(row.tokens_per_pass, ".2f"), *(() if row.method == OFF else drafts)

    headings = ("per pass", "length", "accepted", "drafted", "us")
    return _table("Tokens per pass, and what was drafted", headings, contest.rows, cells)


def _position_table(contest: Contest) -> Table:
    num_positions = max((len(row.acceptance_per_position) for row in contest.rows), default=0)
    places = min(num_positions, MAX_POSITIONS)

    def cells(row: Row) -> Sequence[str]:
        return [f"{100 * share:.0f}" for share in row.acceptance_per_position[:places]]

    headings = [str(place + 1) for place in range(places)]
    return _table("Drafted passes that accepted at least n tokens, %", headings, contest.rows, cells)


def _table(
    heading: str, columns: Sequence[str], rows: Sequence[Row], cells: Callable[[Row], Sequence[str]]
) -> Table:
    """One line per row, in sections by traffic."""
    lines: list[Sequence[str]] = []
    for traffic, same in groupby(rows, key=traffic_of):
        lines.append((traffic,))
        for row in same:
            row_cells = cells(row)
            lines.append((row.method, *row_cells, *[""] * (len(columns) - len(row_cells))))
    return Table(heading, ("workload, method", *columns), lines)


def _peer_table(rows: Sequence[PeerRow], rounds: int) -> Table:
    heading = f"Peers: lookup of {LOOKUP_TOKENS} tokens against none, greedy, best of {rounds} in turns"
    columns = ("decode\ntok/s", "with\nlookup", "decode\nspeedup\n(median)", "all\nspeedup", "own\ntokens")
    lines = [
        (
            f"{row.peer} {row.version}, {row.workload}",
            f"{row.decode_tokens_per_second:,.1f}",
            f"{row.lookup_decode_tokens_per_second:,.1f}",
            f"{row.decode_speedup:.2f} ({row.median_decode_speedup:.2f})",
            f"{row.speedup:.2f}",
            f"{len(row.changed_prompts)} of {row.prompts} differ" if row.changed_prompts else "same",
        )
        for row in rows
    ]
    return Table(heading, ("peer, workload", *columns), lines)
