"""`paceline bench speculation` on the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from paceline.bench.contest import Contest
from paceline.bench.peers import LOOKUP_TOKENS, PeerRow
from paceline.bench.speculation import OFF, WARM
from paceline.bench.speculation_rows import Row

MOST_POSITIONS = 8  # that are shown; the JSON has all


def show_contest(contest: Contest) -> tuple[list[Table], list[str]]:
    """The tables of our methods and of peers, and what is to be said about them."""
    tables = [_speed_table(contest), _draft_table(contest), _position_table(contest)]
    if contest.peer_rows:
        tables.append(_peer_table(contest.peer_rows, contest.options.rounds))
    return tables, _notes(contest)


def _speed_table(contest: Contest) -> Table:
    options = contest.options
    sampling = "greedy" if options.temperature == 0 else f"temperature {options.temperature}"
    title = f"{options.model}: {sampling}, best of {options.rounds} in turns"
    table = _table(title, ("decode\ntok/s", "speedup\n(median)", "all\ntok/s", "speedup\n(median)", "tokens"))
    for row in contest.rows:
        differing = len(row.differing_prompts)
        same = f"{row.output_tokens:,}" if row.method == OFF else "same"
        other = f"{differing} other" if row.method in contest.inexact else f"{differing} DIFFER"
        _add(
            table,
            row,
            f"{row.decode_tokens_per_second:,.0f}",
            f"{row.decode_speedup_vs_off:.2f} ({row.median_decode_speedup_vs_off:.2f})",
            f"{row.tokens_per_second:,.0f}",
            f"{row.speedup_vs_off:.2f} ({row.median_speedup_vs_off:.2f})",
            other if differing else same,
        )
    return table


def _draft_table(contest: Contest) -> Table:
    headings = ("per pass", "length", "accepted", "drafted", "us", "TTFT ms")
    table = _table("Tokens per pass, and what was drafted", headings)
    for row in contest.rows:
        drafts = (
            f"{row.mean_acceptance_length:.2f}",
            f"{100 * row.draft_acceptance_rate:.0f} %",
            f"{row.draft_tokens_per_step:.1f}",
            f"{row.draft_us_per_pass:,.0f}",
        )
        shown = ("",) * len(drafts) if row.method == OFF else drafts
        _add(table, row, f"{row.tokens_per_pass:.2f}", *shown, f"{row.ttft_ms:,.0f}")
    return table


def _position_table(contest: Contest) -> Table:
    most = max((len(row.acceptance_per_position) for row in contest.rows), default=0)
    shown = min(most, MOST_POSITIONS)
    table = _table(
        "Drafted passes that accepted so many tokens or more, %", [str(n + 1) for n in range(shown)]
    )
    for row in contest.rows:
        shares = row.acceptance_per_position[:shown]
        _add(table, row, *(f"{100 * share:.0f}" for share in shares))
    return table


def _table(title: str, headings: Sequence[str]) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column("workload, method", no_wrap=True)
    for heading in headings:
        table.add_column(heading, justify="right")
    return table


def _add(table: Table, row: Row, *cells: str) -> None:
    """Add a row's cells; plain decoding, the first method, begins a section with the workload's name."""
    if row.method == OFF:
        table.add_section()
        table.add_row(_name(row), style="bold")
    table.add_row(f"  {row.method}", *cells)


def _name(row: Row) -> str:
    """Which traffic a row is about, in a few words."""
    segment = "" if row.segment == row.workload else f" {row.segment}"
    at_once = "" if row.concurrency == 1 else f" x{row.concurrency}"
    return f"{row.workload}{segment}{at_once} {row.cache}"


def _peer_table(rows: Sequence[PeerRow], rounds: int) -> Table:
    title = f"Peers: lookup of {LOOKUP_TOKENS} tokens against none, greedy, best of {rounds} in turns"
    table = Table(title=title, title_justify="left")
    table.add_column("peer, workload", no_wrap=True)
    for heading in ("decode\ntok/s", "with\nlookup", "speedup\n(median)", "all\nspeedup", "own\ntokens"):
        table.add_column(heading, justify="right")
    for row in rows:
        changed = len(row.changed_prompts)
        table.add_row(
            f"{row.peer} {row.version}, {row.workload}",
            f"{row.decode_tokens_per_second:,.1f}",
            f"{row.lookup_decode_tokens_per_second:,.1f}",
            f"{row.decode_speedup:.2f} ({row.median_decode_speedup:.2f})",
            f"{row.speedup:.2f}",
            f"{changed} of {row.prompts} differ" if changed else "same",
        )
    return table


def _notes(contest: Contest) -> list[str]:
    notes = [
        "Each method has an engine of its own around the same weights, new in every round and without "
        "prefix reuse: no method sees another's answers, and every prompt is computed in full.",
        "cold: drafters begin each pass over a workload empty; what they learn in it are their own "
        "answers to its earlier prompts.",
    ]
    if contest.inexact:
        notes.append(
            f"{', '.join(sorted(contest.inexact))}: the rule of verification keeps the distribution of plain "
            "decoding, not its tokens; that is no bug."
        )
    if any(row.cache == WARM for row in contest.rows):
        notes.append("warm: the same prompts a second time; a drafter with a memory has seen the answers.")
    notes += [
        "decode: after the first token; all: from the prompt's arrival. Speedups are ratios of summed "
        "times, in brackets the median of the prompts' own ratios.",
        "length: mean acceptance length, tokens of a drafted pass with the bonus token; drafted: tokens "
        "drafted in such a pass; us: microseconds of drafting, per pass.",
    ]
    for row in contest.rows:
        if row.differing_prompts and row.method not in contest.inexact:
            notes.append(
                f"{row.workload}, {row.method}: other tokens than plain decoding for "
                f"{', '.join(row.differing_prompts[:5])}. This is a bug, please report it."
            )
        if row.failed_drafters:
            notes.append(f"{row.workload}, {row.method}: {', '.join(row.failed_drafters)} failed on the way.")
    for row in contest.rows:
        if row.structured:
            notes.append(
                f"{_name(row)}, {row.method}: {row.structured} answers by a schema, {row.finished} came to "
                f"their end, {row.valid} of these fit it."
            )
    notes += [f"no numbers of {name}: {error}" for name, error in contest.peer_errors.items()]
    return notes
