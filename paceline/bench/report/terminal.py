"""Results and progress on the terminal."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import rich.table
from rich.console import Console
from rich.progress import Progress

from paceline.bench.report.result import Result, Table
from paceline.bench.timing import OnTurn

LINE_SECONDS = 10.0  # between two lines where standard error is no terminal
PIPED_WIDTH = 240  # columns: more than any table has


@contextmanager
def progress(total: int) -> Iterator[OnTurn]:
    """A progress bar on standard error; where that is no terminal, a line now and then.

    Call the returned function after each of `total` turns.
    """
    console = Console(stderr=True)
    if not console.is_terminal:
        yield _lines(console, total)
        return
    with Progress(console=console, transient=True) as bar:
        task = bar.add_task("warming up", total=total)
        yield lambda text: bar.update(task, advance=1, description=text)


def _lines(console: Console, total: int) -> OnTurn:
    done, latest = 0, time.monotonic()

    def show(text: str) -> None:
        nonlocal done, latest
        done += 1
        if (now := time.monotonic()) - latest >= LINE_SECONDS:
            latest = now
            line = f"turn {done} of about {total}: {text}"
            console.print(line, highlight=False, markup=False, soft_wrap=True)

    return show


def print_result(result: Result, more_notes: Sequence[str] = ()) -> None:
    """Print the tables, then the findings and notes, one per line."""
    console = report_console()
    for table in result.tables:
        console.print(rich_table(table))
    findings = (finding.text for finding in result.findings)
    for note in (*findings, *result.notes, *more_notes):
        console.print(note, highlight=False, markup=False, soft_wrap=True)


def rich_table(table: Table) -> rich.table.Table:
    """A rich table. Rows are indented below a row that is their heading."""
    shown = rich.table.Table(title=table.title, title_justify="left", pad_edge=False)
    for place, heading in enumerate(table.columns):
        words = heading in table.text
        left = words or place == 0
        shown.add_column(heading, justify="left" if left else "right", no_wrap=place == 0 and not words)
    indent = ""
    for row in table.rows:
        if len(row) == 1:
            indent = "  "
            shown.add_section()
            shown.add_row(*row, style="bold")
        else:
            shown.add_row(indent + row[0], *row[1:])
    return shown


def report_console() -> Console:
    """Standard output; piped output has no width, so nothing is cut there, with forced colors either."""
    has_width = sys.stdout.isatty() or "COLUMNS" in os.environ
    return Console(width=None if has_width else PIPED_WIDTH)
